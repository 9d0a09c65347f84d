"""REQ-MEM-030 … 046: requests on pools, as the vendor test suite sends them, on every device and both ways to execute.

Fenced executions are in `test_req_model_fenced.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst import Memory, ModelBuilder
from nnburst.burst import ExecutionBurstController
from nnburst.devices import Device
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError
from nnburst.memory.kinds import PROT_READ
from nnburst.model import Request
from nnburst.model.types import NO_TIMING
from support.memory_kinds import NBYTES, argument, sum_model, sum_request
from support.models import add_model
from support.mutations import MUTATIONS
from support.raw_burst import AddRequest, RawBurst, pool_identifier, sealed_size
from support.samples import SAMPLES, WAYS, Outcome, T, check_outputs, execute, ran, with_unspecified_outputs

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
