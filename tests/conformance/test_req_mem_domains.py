"""REQ-MEM of memory domains: allocation and executions; `test_req_mem_domains_model.py` has the copies."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst.burst import ExecutionBurstController, ExecutionResult
from nnburst.devices import Buffer, Device, FenceSignal, PreparedModel, create_device
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError
from nnburst.memory import BufferTracker, ManagedBuffer, Memory, RoleKey, managed
from nnburst.model import (
    BufferDesc,
    BufferRole,
    BufferToken,
    DataLocation,
    Model,
    OperandDesc,
    OperandType,
    Request,
    RequestArgument,
)
from nnburst.service import ServiceConnection
from support.connections import socket_pair
from support.models import add_with_activation, relu
from support.services import in_process

T = OperandType
SHAPE = (1, 4, 4, 2)
NBYTES = math.prod(SHAPE) * 4


@pytest.fixture
def device(service: nnburst.Service) -> Device:
    return service.devices[0]


Prepare = Callable[[Model], PreparedModel]
Roles = tuple[list[BufferRole], list[BufferRole]]


@pytest.fixture
def prepare(device: Device) -> Iterator[Prepare]:
    made: list[PreparedModel] = []

    def one(model: Model) -> PreparedModel:
        made.append(device.prepare_model(model))
        return made[-1]

    yield one
    for prepared in made:
        prepared.close()


# ---- allocation -------------------------------------------------------------------------------------------------


def as_either(role: BufferRole) -> list[Roles]:
    return [([role], []), ([], [role])]


A, B = BufferRole(0, 0), BufferRole(1, 0)
PAIRS: list[Roles] = [([A, B], []), ([A], [B]), ([], [A, B])]
"""Roles of two models that contradict each other."""
Q8 = {"type": T.TENSOR_QUANT8_ASYMM, "scale": 0.5, "zero_point": 0}
REFUSED: dict[str, tuple[list[Any], list[Roles], tuple[int, ...]]] = {
    "REQ_MEM_001_no_models": ([], [([], [])], ()),
    "REQ_MEM_001_no_roles": ([{}], [([], [])], ()),
    "REQ_MEM_002_null": ([None], as_either(A), ()),
    "REQ_MEM_004_no_such_model": ([{}], as_either(B), ()),
    "REQ_MEM_005_no_such_argument": ([{}], as_either(BufferRole(0, 1)), ()),
    **{f"REQ_MEM_006_113_frequency_{f}": ([{}], as_either(BufferRole(0, 0, f)), ()) for f in (10, 0, -0.5, math.nan)},
    "REQ_MEM_007_same_role_twice": ([{}], [([A, A], []), ([], [A, A])], ()),
    "REQ_MEM_007_same_model_twice": ([{}, "again"], [([A, B], [])], ()),
    "REQ_MEM_008_types": ([{}, {"type": T.TENSOR_FLOAT16}], PAIRS, ()),
    "REQ_MEM_009_scales": ([Q8, {**Q8, "scale": 1.0}], PAIRS, ()),
    "REQ_MEM_010_zero_points": ([Q8, {**Q8, "zero_point": 10}], PAIRS, ()),
    "REQ_MEM_011_ranks": ([{}, {"shape": (1, 4, 4)}], PAIRS, ()),
    "REQ_MEM_012_dimensions": ([{}, {"shape": (4, 4, 4, 2)}], PAIRS, ()),
    "REQ_MEM_013_rank_of_the_descriptor": ([{}], as_either(A), (1, 4, 4)),
    "REQ_MEM_014_dimensions_of_the_descriptor": ([{}], as_either(A), (4, 4, 4, 2)),
}
"""Models, lists of roles of inputs and of outputs, dimensions of the descriptor."""


@pytest.mark.parametrize("what", REFUSED)
def test_allocation_that_is_refused(device: Device, prepare: Prepare, what: str) -> None:
    wanted, roles, dims = REFUSED[what]
    models: list[Any] = []
    for one in wanted:
        shared = {None: None, "again": models[0] if models else None}
        models.append(prepare(relu(**{"shape": SHAPE, **one})) if isinstance(one, dict) else shared[one])
    for inputs, outputs in roles:
        with pytest.raises(InvalidArgument):
            device.allocate(BufferDesc(dims), models, inputs, outputs)


def test_REQ_MEM_003_foreign_prepared_model(device: Device) -> None:
    with nnburst.in_process() as other:
        foreign = other.devices[0].prepare_model(relu(SHAPE))
        for inputs, outputs in as_either(A):
            with pytest.raises(InvalidArgument):
                device.allocate(BufferDesc(), [foreign], inputs, outputs)
        foreign.close()


def test_REQ_MEM_015_dimensions_for_a_scalar(device: Device, prepare: Prepare) -> None:
    models, scalar = [prepare(add_with_activation(SHAPE))], [BufferRole(0, 2)]
    with pytest.raises(InvalidArgument):
        device.allocate(BufferDesc((1,)), models, scalar, [])
    device.allocate(BufferDesc(), models, scalar, []).close()


# ---- copies -----------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory.ashmem(NBYTES) as memory:
        memory.array(np.float32, SHAPE)[:] = np.arange(math.prod(SHAPE)).reshape(SHAPE) - 8
        yield memory


def in_out(device: Device, prepared: PreparedModel, dims: Sequence[int] = ()) -> Buffer:
    return device.allocate(BufferDesc(tuple(dims)), [prepared], [BufferRole(0, 0)], [BufferRole(0, 0)])


def contents(buffer: Buffer, shape: Sequence[int] = SHAPE) -> np.ndarray:
    with Memory.ashmem(math.prod(shape) * 4) as memory:
        buffer.copy_to(memory)
        return memory.array(np.float32, tuple(shape)).copy()


# ---- executions -------------------------------------------------------------------------------------------------

Run = Callable[[PreparedModel, Request], ExecutionResult]
not_fenced = pytest.mark.parametrize("run", ["plain", "burst"], indirect=True)
"""For models with open outputs."""


def execute_fenced(prepared: PreparedModel, request: Request) -> ExecutionResult:
    """As a fenced execution that has to wait: contents of buffers count when it begins."""
    with FenceSignal() as gate, gate.fence:
        try:
            execution = prepared.execute_fenced(request, [gate.fence])
        except NNBurstError as error:
            return error.status, (), nnburst.model.NO_TIMING
        gate.set()
        with execution.fence as fence, contextlib.suppress(GeneralFailure):
            fence.wait(60)
    info = execution.info()
    return info.status, (), info.launched


@pytest.fixture(params=["plain", "burst", "fenced"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    bursts: dict[int, ExecutionBurstController] = {}

    def execute(prepared: PreparedModel, what: Request) -> ExecutionResult:
        if request.param == "plain":
            return prepared.execute_synchronously(what)
        if request.param == "fenced":
            return execute_fenced(prepared, what)
        if id(prepared) not in bursts:
            bursts[id(prepared)] = ExecutionBurstController.create(prepared)
        return bursts[id(prepared)].compute(what)

    yield execute
    for burst in bursts.values():
        burst.close()


def shared(pool: int, offset: int = 0, dims: Sequence[int] = (), length: int = NBYTES) -> RequestArgument:
    return RequestArgument(False, DataLocation(pool, offset, length), tuple(dims))


def whole(pool: int, dims: Sequence[int] = ()) -> RequestArgument:
    return RequestArgument(False, DataLocation(pool, 0, 0), tuple(dims))


def token(buffer: Buffer) -> BufferToken:
    return BufferToken(buffer.token)


@pytest.mark.representative
@pytest.mark.parametrize("number", [0, 100, 2**31 - 1])
def test_REQ_MEM_023_REQ_WIRE_011_unknown_token(prepare: Prepare, run: Run, memory: Memory, number: int) -> None:
    prepared = prepare(relu(SHAPE))
    pools = (memory, BufferToken(number))
    for request in (Request((whole(1),), (shared(0),), pools), Request((shared(0),), (whole(1),), pools)):
        assert run(prepared, request) == (ErrorStatus.INVALID_ARGUMENT, (), nnburst.model.NO_TIMING)


MISUSES: dict[str, tuple[int, Roles, list[tuple[str, str]]]] = {
    "REQ_MEM_024_another_model": (1, ([A], [A]), [("b", "m"), ("m", "b")]),
    "REQ_MEM_025_another_argument": (2, ([A], [A]), [("mb", "mm"), ("mm", "mb")]),
    "REQ_MEM_026_an_input_as_output": (1, ([A], []), [("m", "b")]),
    "REQ_MEM_026_an_output_as_input": (1, ([], [A]), [("b", "m")]),
    "REQ_MEM_028_input_and_output": (2, ([A, BufferRole(0, 1)], [A, BufferRole(0, 1)]), [("bm", "bm")]),
    "REQ_MEM_028_two_outputs": (2, ([A, BufferRole(0, 1)], [A, BufferRole(0, 1)]), [("mm", "bb")]),
    "REQ_MEM_069_070_part": (1, ([A], [A]), [(part, "m") for part in "123"] + [("m", part) for part in "123"]),
}
"""Arguments of the model; roles; uses of memory (m), of the buffer (b), of its parts 1, 2, 3 as inputs and outputs."""
PARTS = {"1": (1, 0), "2": (0, 4), "3": (4, NBYTES)}


@pytest.mark.parametrize("what", MISUSES)
def test_REQ_WIRE_011_use_of_a_buffer_that_is_refused(device: Device, prepare: Prepare, run: Run, what: str) -> None:
    count, roles, uses = MISUSES[what]
    mine = prepare(relu(SHAPE, count=count))
    runs = prepare(relu(SHAPE)) if "another_model" in what else mine
    with device.allocate(BufferDesc(), [mine], *roles) as buffer, Memory.ashmem(4 * NBYTES) as pool:
        with Memory.ashmem(NBYTES) as zero:
            buffer.copy_from(zero)  # copies ignore roles

        def arguments(which: str, base: int) -> tuple[RequestArgument, ...]:
            places = {"b": whole(1), **{n: shared(1, at, length=length) for n, (at, length) in PARTS.items()}}
            return tuple(places.get(c, shared(0, (base + i) * NBYTES)) for i, c in enumerate(which))

        for inputs, outputs in uses:
            request = Request(arguments(inputs, 0), arguments(outputs, count), (pool, token(buffer)))
            assert run(runs, request)[0] is ErrorStatus.INVALID_ARGUMENT, (inputs, outputs)
        if roles[0]:
            request = Request(
                arguments("b" + "m" * (count - 1), 0), arguments("m" * count, count), (pool, token(buffer))
            )
            assert run(mine, request)[0] is ErrorStatus.NONE


@pytest.mark.representative
def test_REQ_MEM_027_110_contents_come_with_success(device: Device, prepare: Prepare, run: Run, memory: Memory) -> None:
    prepared = prepare(relu(SHAPE))
    with in_out(device, prepared) as buffer:
        as_input = Request((whole(1),), (shared(0),), (memory, token(buffer)))
        as_output = Request((shared(0),), (whole(1),), (memory, token(buffer)))
        assert run(prepared, as_input)[0] is ErrorStatus.GENERAL_FAILURE
        assert run(prepared, as_output)[0] is ErrorStatus.NONE
        assert (contents(buffer) == np.maximum(np.arange(32).reshape(SHAPE) - 8, 0)).all()
        assert run(prepared, as_input)[0] is ErrorStatus.NONE


def test_REQ_MEM_028_one_buffer_as_several_inputs(device: Device, prepare: Prepare, run: Run) -> None:
    prepared = prepare(relu(SHAPE, count=2))
    with (
        device.allocate(BufferDesc(), [prepared], [A, BufferRole(0, 1)], []) as buffer,
        Memory.ashmem(2 * NBYTES) as pool,
    ):
        pool.array(np.float32, (64,))[:] = 1
        with Memory.mmap_fd(pool.fds[0], NBYTES) as ones:
            buffer.copy_from(ones)
        pool.array(np.float32, (64,))[:] = 0
        request = Request((whole(1), whole(1)), (shared(0), shared(0, NBYTES)), (pool, token(buffer)))
        assert run(prepared, request)[0] is ErrorStatus.NONE
        assert (pool.array(np.float32, (64,)) == 1).all()


@not_fenced
def test_REQ_MEM_029_REQ_WIRE_011_dimensions_that_do_not_fit(
    device: Device, prepare: Prepare, run: Run, memory: Memory
) -> None:
    prepared = prepare(relu((0, 4, 4, 2)))
    two = (2, 4, 4, 2)
    with in_out(device, prepared, SHAPE) as buffer, Memory.ashmem(2 * NBYTES) as pool:
        buffer.copy_from(memory)
        pools = (pool, token(buffer))
        big = shared(0, 0, two, 2 * NBYTES)
        invalid = ErrorStatus.INVALID_ARGUMENT
        assert run(prepared, Request((whole(1, two),), (big,), pools))[0] is invalid
        assert run(prepared, Request((big,), (whole(1, two),), pools))[0] is invalid
        assert (contents(buffer) == memory.array(np.float32, SHAPE)).all()  # rejected before anything began
        assert run(prepared, Request((big,), (whole(1),), pools))[0] is ErrorStatus.GENERAL_FAILURE
        with pytest.raises(GeneralFailure):
            contents(buffer)


def test_REQ_MEM_108_stale_and_foreign_tokens(
    service: nnburst.Service, device: Device, prepare: Prepare, run: Run, memory: Memory
) -> None:
    prepared = prepare(relu(SHAPE))
    seen = set()
    for _ in range(200):
        with in_out(device, prepared) as buffer:
            seen.add(buffer.token)
    assert len(seen) == 200
    with in_out(device, prepared) as live:
        live.copy_from(memory)
        for stale in list(seen)[:20]:
            request = Request((whole(1),), (shared(0),), (memory, BufferToken(stale)))
            assert run(prepared, request)[0] is ErrorStatus.INVALID_ARGUMENT


def test_REQ_MEM_108_token_of_another_connection(memory: Memory) -> None:
    """Two clients of one host: the token of one means nothing on the connection of the other."""
    ours, theirs = socket_pair()
    with in_process([create_device("nnburst-reference")]) as (first, host):
        host.serve(theirs)
        with ServiceConnection(ours) as second:
            mine, other = (client.devices[0].prepare_model(relu(SHAPE)) for client in (first, second))
            buffer = in_out(first.devices[0], mine)
            buffer.copy_from(memory)
            request = Request((whole(1),), (shared(0),), (memory, token(buffer)))
            assert mine.execute_synchronously(request)[0] is ErrorStatus.NONE
            assert other.execute_synchronously(request)[0] is ErrorStatus.INVALID_ARGUMENT
            with ExecutionBurstController.create(other) as burst:
                assert burst.compute(request)[0] is ErrorStatus.INVALID_ARGUMENT
    assert all(len(device._tracker) == 0 for device in host.devices)  # type: ignore[attr-defined]


# ---- the table of tokens ----------------------------------------------------------------------------------------


def test_REQ_MEM_108_token_comes_again_after_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = BufferTracker()
    operand = OperandDesc(T.TENSOR_FLOAT32, (1,))
    buffers = [ManagedBuffer(operand, (1,), frozenset({RoleKey(1, True, 0)})) for _ in range(6)]
    monkeypatch.setattr(managed, "_numbers", itertools.count(2**31 - 3))
    tokens = [tracker.add(buffer) for buffer in buffers[:3]]
    assert tokens == [2**31 - 2, 2**31 - 1, 1]
    tracker.remove(tokens[1])
    with pytest.raises(InvalidArgument):
        tracker.resolve(tokens[1])
    monkeypatch.setattr(managed, "_numbers", itertools.count(2**31 - 3))
    assert [tracker.add(buffer) for buffer in buffers[3:]] == [2**31 - 1, 2, 3]  # those in use are left out
    assert tracker.resolve(1) is buffers[2]
    assert len(tracker) == 5
