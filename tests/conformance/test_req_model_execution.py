"""REQ-MODEL-046 … 056 and 064 … 069, REQ-MEM-030 … 046: requests and executions, in every way to execute.

Fenced executions are in `test_req_model_fenced.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst import Memory, Model, ModelBuilder
from nnburst.burst import ExecutionBurstController
from nnburst.devices import Device
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError
from nnburst.memory.kinds import PROT_READ
from nnburst.model import Request
from nnburst.model.types import NO_TIMING, DataLocation, Lifetime, RequestArgument
from support.memory_kinds import NBYTES, argument, sum_model, sum_request
from support.models import add_model
from support.mutations import MUTATIONS
from support.operations import with_constants_as_inputs
from support.raw_burst import AddRequest, RawBurst, pool_identifier, sealed_size
from support.samples import (
    ALL_WAYS,
    SAMPLES,
    WAYS,
    O,
    Outcome,
    Sample,
    T,
    check_outputs,
    execute,
    make_request,
    placed,
    quant_chain,
    ran,
    run,
    with_unspecified_outputs,
)

every_sample = pytest.mark.parametrize("name", SAMPLES)
every_way = pytest.mark.parametrize("way", WAYS)
all_ways = pytest.mark.parametrize("way", ALL_WAYS)


def dims_of(sample: Sample) -> list[tuple[int, ...]]:
    return [array.shape for array in sample.outputs]


# -- requests ---------------------------------------------------------------------------------------------------------


def bad_requests(request: Request) -> dict[str, Request]:
    """Mutations of a valid request to a model with two float inputs [2, 3] and one output."""
    x, y = request.inputs
    (out,) = request.outputs
    nothing = RequestArgument(has_no_value=True)

    def first(argument: RequestArgument) -> Request:
        return replace(request, inputs=(argument, y))

    def output(argument: RequestArgument) -> Request:
        return replace(request, outputs=(argument,))

    return {
        "046 input removed": replace(request, inputs=(x,)),
        "046 first input removed": replace(request, inputs=(y,)),
        "046 input added": replace(request, inputs=(x, y, y)),
        "047 output removed": replace(request, outputs=()),
        "047 output added": replace(request, outputs=(out, replace(out, location=replace(x.location)))),
        "049 pool index": first(replace(x, location=replace(x.location, pool_index=1))),
        "049 pool index of output": output(replace(out, location=replace(out.location, pool_index=7))),
        "049 beyond the pool": first(replace(x, location=replace(x.location, offset=2**31))),
        "049 wraps in 32 bits": first(replace(x, location=DataLocation(0, 2**32 - 24, 24))),
        "049 rank": first(replace(x, dimensions=(6,))),
        "049 dimensions": first(replace(x, dimensions=(3, 2))),
        "049 dimensions of output": output(replace(out, dimensions=(2, 4))),
        "049 no value with location": first(replace(nothing, location=x.location)),
        "049 no value with dimensions": first(replace(nothing, dimensions=(2, 3))),
        "049 length too short": first(replace(x, location=replace(x.location, length=20))),
        "049 length too long": first(replace(x, location=replace(x.location, length=28))),
        "049 length of output": output(replace(out, location=replace(out.location, length=20))),
        "049 output over input": output(replace(out, location=x.location)),
        "049 output partly over input": output(replace(out, location=replace(x.location, offset=4))),
        "050 no value": replace(request, inputs=(x, nothing)),
    }


@all_ways
@pytest.mark.parametrize("name", list(bad_requests(Request((RequestArgument(),) * 2, (RequestArgument(),)))))
def test_REQ_MODEL_046_047_049_050_REQ_MEM_039_040_042_REQ_WIRE_010_bad_request_fails_and_the_model_stays_usable(
    device: Device, way: str, name: str
) -> None:
    status = ErrorStatus.GENERAL_FAILURE if name.startswith("050") else ErrorStatus.INVALID_ARGUMENT
    sample = SAMPLES["three_adds"]()
    with placed(device, sample.model, sample.inputs, dims_of(sample)) as (prepared, request, _):
        outcome = execute(prepared, bad_requests(request)[name], way, measure=True)
        assert outcome.status is status
        assert outcome.shapes == ()
        assert outcome.timing.time_on_device is outcome.timing.time_in_driver is None
        assert execute(prepared, request, way).status is ErrorStatus.NONE


# -- executions -------------------------------------------------------------------------------------------------------


@pytest.mark.representative
@every_sample
@every_way
@pytest.mark.parametrize("measure", [False, True], ids=["untimed", "timed"])
def test_REQ_MODEL_052_053_054_fully_specified(device: Device, name: str, way: str, measure: bool) -> None:
    sample = SAMPLES[name]()
    outcome = ran(device, sample.model, sample.inputs, dims_of(sample), way, measure=measure)
    check_outputs(sample, outcome)
    if outcome.shapes:
        assert [shape.dimensions for shape in outcome.shapes] == dims_of(sample)
        assert all(shape.is_sufficient for shape in outcome.shapes)
    timing = outcome.timing
    if not measure:
        assert timing.time_on_device is timing.time_in_driver is None
    elif timing.time_on_device is not None:
        assert timing.time_in_driver is None or timing.time_on_device <= timing.time_in_driver


@pytest.mark.representative
@every_sample
@every_way
def test_REQ_MODEL_055_REQ_MEM_031_unspecified_outputs(device: Device, name: str, way: str) -> None:
    sample = SAMPLES[name]()
    model = with_unspecified_outputs(sample.model)
    outcome = ran(device, model, sample.inputs, dims_of(sample), way)
    check_outputs(sample, outcome)
    assert [shape.dimensions for shape in outcome.shapes] == dims_of(sample)
    assert all(shape.is_sufficient for shape in outcome.shapes)


@pytest.mark.representative
@every_sample
@every_way
@pytest.mark.parametrize("step", [4, 64], ids=["REQ_MEM_032", "REQ_MEM_038_padded"])
def test_REQ_MODEL_056_first_output_one_byte_short(device: Device, name: str, way: str, step: int) -> None:
    sample = SAMPLES[name]()
    model = with_unspecified_outputs(sample.model)
    with placed(device, model, sample.inputs, dims_of(sample), short=1, step=step) as (prepared, request, _):
        outcome = execute(prepared, request, way, measure=True)
        assert outcome.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert [shape.is_sufficient for shape in outcome.shapes] == [False] + [True] * (len(sample.outputs) - 1)
        assert [shape.dimensions for shape in outcome.shapes] == dims_of(sample)
        assert outcome.timing.time_on_device is None
        check_outputs(sample, run(prepared, model, sample.inputs, dims_of(sample), way))


@every_way
def test_REQ_MODEL_055_unknown_rank(device: Device, way: str) -> None:
    sample = SAMPLES["conv_float"]()
    main = sample.model.main
    (out,) = main.output_indexes
    operands = tuple(
        replace(operand, dimensions=()) if operand.lifetime == Lifetime.TEMPORARY_VARIABLE or index == out else operand
        for index, operand in enumerate(main.operands)
    )
    model = replace(sample.model, main=replace(main, operands=operands))
    outcome = ran(device, model, sample.inputs, dims_of(sample), way)
    check_outputs(sample, outcome)


@every_way
def test_REQ_MODEL_064_omitted_in_model_and_in_request(device: Device, way: str) -> None:
    """TRANSPOSE without a permutation reverses the axes; `optional_input` omits it in the model."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = ModelBuilder()
    perm = b.input("perm", T.TENSOR_INT32, (2,))
    y = b.transpose(b.input("x", T.TENSOR_FLOAT32, x.shape), perm=perm, dimensions=(0, 0))
    b.output("y", y)
    model = b.build()
    with placed(device, model, (np.array([0, 1], np.int32), x), [(2, 3)]) as (prepared, request, memory):
        given = execute(prepared, request, way)
        assert given.shapes[0].dimensions == (2, 3)
        omitted = replace(request, inputs=(RequestArgument(has_no_value=True), request.inputs[1]))
        reversed_ = execute(prepared, omitted, way)
        assert reversed_.status is ErrorStatus.NONE
        assert reversed_.shapes[0].dimensions == (3, 2)
        np.testing.assert_array_equal(memory.array(np.float32, (3, 2), request.outputs[0].location.offset), x.T)


@every_sample
@every_way
def test_REQ_MODEL_065_inputs_and_constants_are_not_modified(device: Device, name: str, way: str) -> None:
    sample = SAMPLES[name]()
    pools = [pool.array(np.uint8, (pool.size,)).copy() for pool in sample.model.pools]
    with placed(device, sample.model, sample.inputs, dims_of(sample)) as (prepared, request, memory):
        before = memory.array(np.uint8, (memory.size,)).copy()
        assert execute(prepared, request, way).status is ErrorStatus.NONE
        after = memory.array(np.uint8, (memory.size,)).copy()
        for output in request.outputs:
            region = slice(output.location.offset, output.location.offset + output.location.length)
            before[region] = after[region] = 0
        np.testing.assert_array_equal(after, before)
        for pool, contents in zip(sample.model.pools, pools, strict=True):
            np.testing.assert_array_equal(pool.array(np.uint8, (pool.size,)), contents)


@every_way
def test_REQ_MODEL_066_concurrent_executions_with_different_shapes(device: Device, way: str) -> None:
    sample = SAMPLES["unknown_batch"]()
    prepared = device.prepare_model(sample.model)
    index = next(i for i, operand in enumerate(sample.model.main.operands) if operand.dimensions == (2, 4))
    where = sample.model.main.operands[index].location
    raw = sample.model.operand_values[where.offset : where.offset + where.length]
    weights = np.frombuffer(raw, np.float32).reshape(2, 4)
    batches = (1, 2, 3, 17)
    together = threading.Barrier(len(batches), timeout=60)

    def work(batch: int) -> None:
        rng = np.random.default_rng(batch)
        x = rng.normal(size=(batch, 4)).astype(np.float32)
        request, memory = make_request(sample.model, (x,), [(batch, 2)])
        given = memory.array(np.float32, (batch, 4), request.inputs[0].location.offset)
        result = memory.array(np.float32, (batch, 2), request.outputs[0].location.offset)
        with memory, contextlib.ExitStack() as stack:
            run = prepared.execute_synchronously
            if way == "burst":
                run = stack.enter_context(ExecutionBurstController.create(prepared, channel_length=256)).compute
            for _ in range(20):
                given[:] = rng.normal(size=(batch, 4))
                result[:] = np.nan
                together.wait()
                status, shapes, _ = run(request)
                assert status is ErrorStatus.NONE
                assert [shape.dimensions for shape in shapes] == [(batch, 2)]
                np.testing.assert_allclose(result, given @ weights.T, atol=1e-5)

    with ThreadPoolExecutor(len(batches)) as pool:
        for outcome in [pool.submit(work, batch) for batch in batches]:
            outcome.result()  # raises what the thread raised
    prepared.close()


def as_inputs(sample: Sample) -> Sample:
    """Turn every constant that has a value into an input of the model."""
    model, inputs = with_constants_as_inputs(sample.model, sample.inputs)
    return dataclasses.replace(sample, model=model, inputs=tuple(inputs))


def as_references(sample: Sample) -> Sample:
    """Move every constant into a pool."""
    model = sample.model
    values = model.operand_values
    if not values:
        return sample
    pool = Memory.ashmem(len(values))
    pool.array(np.uint8, (len(values),))[:] = np.frombuffer(values, np.uint8)
    place = len(model.pools)
    operands = tuple(
        replace(operand, lifetime=Lifetime.CONSTANT_REFERENCE, location=replace(operand.location, pool_index=place))
        if operand.lifetime == Lifetime.CONSTANT_COPY
        else operand
        for operand in model.main.operands
    )
    changed = replace(model.main, operands=operands)
    moved: Model = replace(model, main=changed, operand_values=b"", pools=(*model.pools, pool))
    return dataclasses.replace(sample, model=moved)


@every_sample
@every_way
@pytest.mark.parametrize("change", [as_inputs, as_references])
def test_REQ_MODEL_067_where_a_tensor_lives_does_not_matter(device: Device, name: str, way: str, change) -> None:  # type: ignore[no-untyped-def]
    plain = SAMPLES[name]()
    sample = change(plain)
    outcome = ran(device, sample.model, sample.inputs, dims_of(sample), way)
    check_outputs(sample, outcome)


def test_REQ_MODEL_068_twins_agree(device: Device) -> None:
    results = []
    for signed in (False, True):
        sample = quant_chain(signed)
        outcome = ran(device, sample.model, sample.inputs, dims_of(sample))
        results.append(outcome.outputs[0].astype(int))
    assert np.abs(results[0] - 128 - results[1]).max() <= 1


@every_way
@pytest.mark.parametrize("operation", [O.RELU, O.LOGISTIC, O.TANH, O.CONV_2D, O.FULLY_CONNECTED, O.MAX_POOL_2D, O.ADD])
def test_REQ_MODEL_069_zero_sized(device: Device, way: str, operation: int) -> None:
    """A SLICE of size 0 feeds an operation that accepts zero-sized inputs."""
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (2, 2, 2, 3))
    size = b.constant(np.array([0, 2, 2, 3], np.int32))
    empty = b.slice(x, b.constant(np.zeros(4, np.int32)), size, dimensions=(0, 2, 2, 3))
    channels, dims = 3, (0, 2, 2, 3)
    if operation == O.CONV_2D:
        y = b.conv_2d(empty, np.ones((5, 1, 1, 3), np.float32))
        dims = (0, 2, 2, 5)
    elif operation == O.FULLY_CONNECTED:
        y = b.fully_connected(empty, np.ones((4, channels), np.float32))
        dims = (0, 4)
    elif operation == O.MAX_POOL_2D:
        y = b.max_pool_2d(empty, 2)
        dims = (0, 1, 1, 3)
    elif operation == O.ADD:
        y = b.add(empty, np.ones((1, 2, 2, 1), np.float32))
    else:
        y = b.operation(operation, empty)[0]
    b.output("y", y)
    model = with_unspecified_outputs(b.build())
    outcome = ran(device, model, (np.ones((2, 2, 2, 3), np.float32),), [dims], way)
    assert outcome.status is ErrorStatus.NONE
    assert outcome.shapes[0].dimensions == dims
    assert outcome.shapes[0].is_sufficient


@every_way
def test_REQ_MODEL_069_others_fail_cleanly(device: Device, way: str) -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (2, 3))
    size = b.constant(np.array([0, 3], np.int32))
    empty = b.slice(x, b.constant(np.zeros(2, np.int32)), size, dimensions=(0, 3))
    b.output("y", b.reshape(empty, (3, 0)))
    model = b.build()
    outcome = ran(device, model, (np.ones((2, 3), np.float32),), [(3, 0)], way)
    assert outcome.status is ErrorStatus.GENERAL_FAILURE
    assert outcome.shapes == ()


# ---- requests on pools ---------------------------------------------------------------------------------------------


both_ways = pytest.mark.parametrize("way", WAYS)


def is_bare(outcome: Outcome, status: ErrorStatus) -> bool:
    return (outcome.status, outcome.shapes, outcome.timing) == (status, (), NO_TIMING)


@both_ways
@pytest.mark.parametrize(
    "make", [Memory.ashmem, Memory.hardware_buffer_blob], ids=["REQ_MEM_030_ashmem", "REQ_MEM_033_blob"]
)
@pytest.mark.parametrize("name", SAMPLES)
def test_generated_models_on_shared_memory(device: Device, way: str, name: str, make: Callable[[int], Memory]) -> None:
    sample = SAMPLES[name]()
    dims = [array.shape for array in sample.outputs]
    check_outputs(sample, ran(device, sample.model, sample.inputs, dims, way, make=make))


@both_ways
def test_REQ_MEM_036_zero_sized_output_needs_one_byte_and_reports_zero(device: Device, way: str) -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (2, 2))
    empty = b.slice(x, b.constant(np.zeros(2, np.int32)), b.constant(np.array([0, 2], np.int32)), dimensions=(0, 2))
    b.output("y", b.relu(empty))
    model = with_unspecified_outputs(b.build())
    prepared = device.prepare_model(model)
    with Memory.ashmem(128) as memory:
        request = Request((argument(0, 16),), (argument(64, 1),), (memory,))
        outcome = execute(prepared, request, way)
        assert outcome.status is ErrorStatus.NONE
        assert [(s.dimensions, s.is_sufficient) for s in outcome.shapes] == [((0, 2), True)]
        nothing = Request((argument(0, 16),), (argument(64, 0),), (memory,))
        assert is_bare(execute(prepared, nothing, way), ErrorStatus.INVALID_ARGUMENT)


@both_ways
def test_REQ_MEM_037_input_in_a_read_only_file_mapping(device: Device, way: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "input"
    path.write_bytes(np.full(64, 2, np.float32).tobytes())
    prepared = device.prepare_model(sum_model())
    with open(path, "rb") as file, Memory.mmap_fd(file.fileno(), NBYTES, prot=PROT_READ) as source:
        with Memory.ashmem(NBYTES) as target:
            outcome = execute(prepared, Request((argument(),), (argument(pool=1),), (source, target)), way)
            assert outcome.status is ErrorStatus.NONE
            assert target.read(np.float32, (64,)).tolist() == [2 + i for i in range(64)]


def test_REQ_MEM_041_044_REQ_MODEL_051_REQ_WIRE_007_008_slots_that_do_not_exist(device: Device) -> None:
    with RawBurst(device.prepare_model(add_model())) as burst:
        request = AddRequest(burst)
        assert request.works(burst)
        for slot in (request.slot, request.slot, 0, 7):  # known, freed before, unknown
            burst.context.free_memory(slot)
        assert request.works(burst), "a freed slot is asked for again"
        assert burst.ask(request.packet(slot=-2)).is_bare_error
        good = request.packet()
        fewer = [*good[:-2], good[-1]]
        fewer[0] = fewer[0][:16] + (0).to_bytes(4, "little") + fewer[0][20:]
        assert burst.ask(sealed_size(fewer)).status == ErrorStatus.INVALID_ARGUMENT
        more = [*good[:-1], pool_identifier(-2), good[-1]]
        more[0] = more[0][:16] + (2).to_bytes(4, "little") + more[0][20:]
        assert burst.ask(sealed_size(more)).is_bare_error
        assert request.works(burst)
        request.close()


@both_ways
def test_REQ_MEM_043_a_reusable_execution_stays_invalid(device: Device, way: str) -> None:
    prepared = device.prepare_model(sum_model())
    with Memory.ashmem(2 * NBYTES) as memory:
        bad = Request((argument(0, NBYTES - 4),), (argument(NBYTES),), (memory,))
        if way == "sync":
            assert [execute(prepared, bad, way).status for _ in range(2)] == [ErrorStatus.INVALID_ARGUMENT] * 2
            return
        with ExecutionBurstController.create(prepared) as burst:
            assert [burst.compute(bad)[0] for _ in range(2)] == [ErrorStatus.INVALID_ARGUMENT] * 2
            assert burst.compute(sum_request(memory))[0] is ErrorStatus.NONE


@pytest.mark.parametrize("number", [20, 21, 22])
def test_REQ_MEM_045_046_lifetimes_that_contradict_the_lists(device: Device, number: int) -> None:
    """The generators of REQ-MODEL-020 (written operands), 021 (unwritten ones) and 022 (lists not fixed)."""
    count = 0
    for name in ("conv_float", "three_adds"):
        for _, mutant in MUTATIONS[f"{number:03}"](SAMPLES[name]().model):
            count += 1
            for call in (device.get_supported_operations, device.prepare_model):
                with pytest.raises(InvalidArgument):
                    call(mutant)
    assert count


@both_ways
def test_undecodable_pools_fail_where_they_are_used(device: Device, way: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """False for the operations, GENERAL_FAILURE for preparation and execution."""
    model = sum_model()
    (whole,) = model.pools
    with open(tmp_path / "short", "w+b") as file, Memory.mmap_fd(file.fileno(), whole.size) as lost:
        file.write(b"x")
        file.flush()
        broken = replace(model, pools=(lost,))
        assert device.get_supported_operations(model) == (True,)
        assert device.get_supported_operations(broken) == (False,)
        with pytest.raises(GeneralFailure):
            device.prepare_model(broken)
        unused = replace(model, pools=(whole, lost))
        assert device.get_supported_operations(unused) == (True,)
        prepared = device.prepare_model(model)
        with Memory.ashmem(2 * NBYTES) as memory:
            request = sum_request(memory)
            outcome = execute(prepared, replace(request, pools=(memory, lost)), way)
            assert is_bare(outcome, ErrorStatus.GENERAL_FAILURE), "every listed pool counts"
            assert execute(prepared, request, way).status is ErrorStatus.NONE


def test_constants_in_memory_without_read_access(device: Device) -> None:
    model = sum_model()
    with Memory.mmap_fd(model.pools[0].fds[0], NBYTES, prot=2) as blind:  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgument, match="read"):
            device.prepare_model(replace(model, pools=(blind,)))
    with pytest.raises(NNBurstError):
        device.prepare_model(replace(model, pools=()))
