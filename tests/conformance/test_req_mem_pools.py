"""REQ-MEM-030 … 046: requests on pools, as the vendor test suite sends them, on every device and both ways to execute.

Fenced executions are in `test_req_model_fenced.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst.burst import ExecutionBurstController
from nnburst.devices import Device, PreparedModel
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError
from nnburst.memory import PROT_READ, Memory
from nnburst.model import (
    NO_TIMING,
    DataLocation,
    ModelBuilder,
    Request,
    RequestArgument,
    operand_info,
    operand_nbytes,
)
from support.memory_kinds import NBYTES, argument, sum_model, sum_request
from support.models import add_model
from support.mutations import MUTATIONS
from support.raw_burst import AddRequest, RawBurst, pool_identifier, sealed_size
from support.samples import SAMPLES, WAYS, Outcome, T, execute, with_unspecified_outputs

both_ways = pytest.mark.parametrize("way", WAYS)


def is_bare(outcome: Outcome, status: ErrorStatus) -> bool:
    return (outcome.status, outcome.shapes, outcome.timing) == (status, (), NO_TIMING)


def placed(sizes: list[int], step: int) -> tuple[list[int], int]:
    """Return offsets with a gap before each size, and the end."""
    offsets, end = [], step
    for size in sizes:
        offsets.append(end)
        end += -(-size // step) * step
    return offsets, end


def run_on(prepared: PreparedModel, sample, model, way, make, *, step: int = 4, short: int = 0):  # type: ignore[no-untyped-def]
    """Inputs in pool 0, outputs in pool 1. Returns the outcome and the outputs as they lie in the pool."""
    starts, end = placed([a.nbytes for a in sample.inputs], step)
    codes = [model.main.operands[index].type for index in model.main.output_indexes]
    sizes = [max(1, operand_nbytes(code, a.shape)) for code, a in zip(codes, sample.outputs, strict=True)]
    result_starts, result_end = placed(sizes, step)
    sizes[0] -= short
    with make(max(end, 1)) as source, make(result_end + 64) as target:
        arguments = []
        for array, at, index in zip(sample.inputs, starts, model.main.input_indexes, strict=True):
            source.write(array, at)
            dims = model.main.operands[index].dimensions
            given = array.shape if 0 in dims or not dims else ()
            arguments.append(RequestArgument(location=DataLocation(0, at, array.nbytes), dimensions=given))
        results = [argument(at, size, 1) for at, size in zip(result_starts, sizes, strict=True)]
        outcome = execute(prepared, Request(tuple(arguments), tuple(results), (source, target)), way)
        found = []
        if outcome.status is ErrorStatus.NONE:
            for wanted, at, code in zip(sample.outputs, result_starts, codes, strict=True):
                found.append(target.read(operand_info(code).dtype, wanted.shape, at))
        return outcome, found


def check(sample, outcome: Outcome, found) -> None:  # type: ignore[no-untyped-def]
    assert outcome.status is ErrorStatus.NONE
    for got, wanted in zip(found, sample.outputs, strict=True):
        np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), atol=sample.atol, rtol=1e-5)


@both_ways
@pytest.mark.parametrize(
    "make", [Memory.ashmem, Memory.hardware_buffer_blob], ids=["REQ_MEM_030_ashmem", "REQ_MEM_033_blob"]
)
@pytest.mark.parametrize("name", SAMPLES)
def test_generated_models_on_shared_memory(device: Device, way: str, name: str, make: object) -> None:
    sample = SAMPLES[name]()
    outcome, found = run_on(device.prepare_model(sample.model), sample, sample.model, way, make)
    check(sample, outcome, found)


@both_ways
@pytest.mark.parametrize("name", ["conv_float", "two_outputs", "unknown_batch"])
def test_REQ_MEM_031_unspecified_outputs_are_reported_in_full(device: Device, way: str, name: str) -> None:
    sample = SAMPLES[name]()
    model = with_unspecified_outputs(sample.model)
    outcome, found = run_on(device.prepare_model(model), sample, model, way, Memory.ashmem)
    check(sample, outcome, found)
    assert [(s.dimensions, s.is_sufficient) for s in outcome.shapes] == [(a.shape, True) for a in sample.outputs]


@both_ways
@pytest.mark.parametrize("make", [Memory.ashmem, Memory.hardware_buffer_blob], ids=["ashmem", "blob"])
@pytest.mark.parametrize("step", [4, 64])
def test_REQ_MEM_032_038_one_byte_short_is_insufficient_though_the_pool_goes_on(
    device: Device, way: str, make: object, step: int
) -> None:
    sample = SAMPLES["two_outputs"]()
    model = with_unspecified_outputs(sample.model)
    outcome, _ = run_on(device.prepare_model(model), sample, model, way, make, step=step, short=1)
    assert outcome.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    assert [s.is_sufficient for s in outcome.shapes] == [False, True]
    assert [s.dimensions for s in outcome.shapes] == [a.shape for a in sample.outputs]
    full, found = run_on(device.prepare_model(model), sample, model, way, make, step=step)
    check(sample, full, found)


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


@both_ways
@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("what", ["input", "output"])
def test_REQ_MEM_039_040_REQ_WIRE_010_a_missing_argument(device: Device, way: str, what: str, gone: int) -> None:
    b = ModelBuilder()
    x, y = (b.input(name, T.TENSOR_FLOAT32, (4,)) for name in "xy")
    b.output("sum", b.add(x, y))
    b.output("product", b.mul(x, y))
    prepared = device.prepare_model(b.build())
    with Memory.ashmem(256) as memory:
        inputs, outputs = [argument(0, 16), argument(64, 16)], [argument(128, 16), argument(192, 16)]
        assert execute(prepared, Request(tuple(inputs), tuple(outputs), (memory,)), way).status is ErrorStatus.NONE
        (inputs if what == "input" else outputs).pop(gone)
        outcome = execute(prepared, Request(tuple(inputs), tuple(outputs), (memory,)), way)
        assert is_bare(outcome, ErrorStatus.INVALID_ARGUMENT)


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
def test_REQ_MEM_042_a_request_that_fails_at_run_time_reports_nothing_else(device: Device, way: str) -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (4,))
    b.output("y", b.reshape(x, b.input("shape", T.TENSOR_INT32, (1,)), dimensions=(0,)))
    prepared = device.prepare_model(b.build())
    with Memory.ashmem(256) as memory:
        memory.array(np.int32, (1,), 64)[0] = 5
        request = Request((argument(0, 16), argument(64, 4)), (argument(128, 64),), (memory,))
        outcome = execute(prepared, request, way, measure=True)
        assert outcome.status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)
        assert is_bare(outcome, outcome.status)


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
