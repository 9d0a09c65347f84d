"""REQ-MEM of memory domains: allocation, executions, copies, ends of buffers."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import nnburst
from nnburst import Memory, Model, ModelBuilder, OperandType
from nnburst.burst import ExecutionBurstController
from nnburst.devices import Device, PreparedModel
from nnburst.devices.fence import FenceSignal
from nnburst.devices.interfaces import Buffer
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError, ResourceExhausted
from nnburst.memory import managed
from nnburst.memory.managed import BufferSet, BufferTracker, BufferUse, ManagedBuffer, RoleKey
from nnburst.model import Request
from nnburst.model.running import ExecutionResult
from nnburst.model.types import BufferDesc, BufferId, BufferRole, DataLocation, OperandDesc, RequestArgument
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.host.host import ServiceHost
from nnburst.service.host.quotas import Quotas
from support.connections import socket_pair
from support.models import add_with_activation, relu
from support.services import in_process
from support.waiting import Background, together, until

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


@pytest.fixture
def prepared(device: Device) -> Iterator[PreparedModel]:
    prepared = device.prepare_model(relu(SHAPE))
    yield prepared
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
            return error.status, (), nnburst.model.types.NO_TIMING
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


def token(buffer: Buffer) -> BufferId:
    return BufferId(buffer.id)


@pytest.mark.representative
@pytest.mark.parametrize("number", [0, 100, 2**31 - 1])
def test_REQ_MEM_023_REQ_WIRE_011_unknown_token(prepare: Prepare, run: Run, memory: Memory, number: int) -> None:
    prepared = prepare(relu(SHAPE))
    pools = (memory, BufferId(number))
    for request in (Request((whole(1),), (shared(0),), pools), Request((shared(0),), (whole(1),), pools)):
        assert run(prepared, request) == (ErrorStatus.INVALID_ARGUMENT, (), nnburst.model.types.NO_TIMING)


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
            seen.add(buffer.id)
    assert len(seen) == 200
    with in_out(device, prepared) as live:
        live.copy_from(memory)
        for stale in list(seen)[:20]:
            request = Request((whole(1),), (shared(0),), (memory, BufferId(stale)))
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


# ---- sizes, tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dimensions", "error"),
    [
        ((0, 2**32), InvalidArgument),
        ((-1, 8), InvalidArgument),
        ((2**31, 2**31), InvalidArgument),
        ((2**31, 2**26), GeneralFailure),
    ],
)
def test_REQ_MEM_001_sizes_that_no_buffer_has(device: Device, dimensions: tuple, error: type[Exception]) -> None:
    prepared = device.prepare_model(relu((0, 0)))
    with pytest.raises(error):
        device.allocate(BufferDesc(dimensions), [prepared], [A], ())
    prepared.close()


def test_REQ_MEM_002_003_entries_that_no_role_names_are_not_looked_at(device: Device, prepared: PreparedModel) -> None:
    device.allocate(BufferDesc(), [prepared, None], [A], ()).close()  # type: ignore[list-item]


def test_REQ_MEM_108_token_of_another_device_of_the_service(memory: Memory) -> None:
    first, second = (create_device("nnburst-reference") for _ in range(2))
    mine, other = first.prepare_model(relu(SHAPE)), second.prepare_model(relu(SHAPE))
    with in_out(first, mine) as buffer, in_out(second, other) as another:
        assert buffer.id != another.id
        buffer.copy_from(memory)
        request = Request((whole(1),), (shared(0),), (memory, token(buffer)))
        assert other.execute_synchronously(request)[0] is ErrorStatus.INVALID_ARGUMENT
        assert mine.execute_synchronously(request)[0] is ErrorStatus.NONE
        with pytest.raises(InvalidArgument):
            another.copy_buffer(buffer)


# ---- copies -----------------------------------------------------------------------------------------------------


def test_REQ_MEM_103_copies_reach_memory_that_can_only_be_staged(
    device: Device, prepared: PreparedModel, tmp_path: Path
) -> None:
    path = tmp_path / "tensor"
    path.write_bytes(np.arange(32, dtype=np.float32).tobytes())
    with open(path, "r+b") as file, Memory.mmap_fd(file.fileno(), NBYTES) as plain, in_out(device, prepared) as buffer:
        buffer.copy_from(plain)
        assert (contents(buffer) == np.arange(32).reshape(SHAPE)).all()
        path.write_bytes(bytes(NBYTES))
        buffer.copy_to(plain)
    assert path.read_bytes() == np.arange(32, dtype=np.float32).tobytes()


def test_REQ_MEM_016_102_a_source_that_was_truncated_ends_the_contents(
    device: Device, prepared: PreparedModel, memory: Memory, tmp_path: Path
) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(NBYTES))
    with open(path, "r+b") as file, Memory.mmap_fd(file.fileno(), NBYTES) as plain, in_out(device, prepared) as buffer:
        buffer.copy_from(memory)
        os.truncate(path, 3)
        with pytest.raises(GeneralFailure):
            buffer.copy_to(plain)
        assert (contents(buffer) == memory.array(np.float32, SHAPE)).all()  # a failing copy out changes nothing
        with Memory.mmap_fd(file.fileno(), 2 * NBYTES) as larger, pytest.raises(GeneralFailure):
            buffer.copy_from(larger)  # that it cannot be read is found before its size
        buffer.copy_from(memory)
        with pytest.raises(GeneralFailure):
            buffer.copy_from(plain)
        with pytest.raises(GeneralFailure):
            contents(buffer)


def test_generations_count_changes(device: Device, prepared: PreparedModel, memory: Memory) -> None:
    with in_out(device, prepared) as buffer:
        seen = []
        for _ in range(2):
            buffer.copy_from(memory)
            seen.append(buffer.copy_to(memory))
        request = Request((shared(0),), (whole(1),), (memory, token(buffer)))
        assert prepared.execute_synchronously(request)[0] is ErrorStatus.NONE
        seen.append(buffer.copy_to(memory))
        assert seen[0] < seen[1] < seen[2] == buffer.copy_to(memory)


def test_state_copied_inside_the_device_after_each_run_uses_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    device = create_device("nnburst-reference")
    prepared = device.prepare_model(relu(SHAPE))
    made = []
    bind = prepared.bind  # type: ignore[attr-defined]
    monkeypatch.setattr(prepared, "bind", lambda *args: made.append(args) or bind(*args))
    with (
        in_out(device, prepared) as state,
        in_out(device, prepared) as following,
        Memory.ashmem(NBYTES) as memory,
        ExecutionBurstController.create(prepared) as burst,
    ):
        memory.array(np.float32, SHAPE)[:] = 3
        state.copy_from(memory)
        tokens = token(state), token(following)
        request = Request((whole(0),), (whole(1),), tokens)
        for _ in range(20):
            assert burst.compute(request)[0] is ErrorStatus.NONE
            state.copy_buffer(following)
        assert len(made) == 1
        assert (contents(state) == 3).all()
        memory.array(np.float32, SHAPE)[:] = 4
        state.copy_from(memory)
        assert (contents(following) == 3).all()
        assert (contents(state) == 4).all()
    prepared.close()


# ---- executions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["plain", "burst"])
def test_REQ_MEM_034_069_every_argument_in_a_buffer_and_a_failing_run(
    device: Device, memory: Memory, mode: str
) -> None:
    prepared = device.prepare_model(add_with_activation(SHAPE))
    a, b, activation = (device.allocate(BufferDesc(), [prepared], [BufferRole(0, i)], ()) for i in range(3))
    y = device.allocate(BufferDesc(), [prepared], (), [A])
    request = Request(tuple(map(whole, range(3))), (whole(3),), tuple(map(token, (a, b, activation, y))))
    with ExecutionBurstController.create(prepared) as burst, Memory.ashmem(4) as scalar:
        run = burst.compute if mode == "burst" else prepared.execute_synchronously
        for buffer in (a, b):
            buffer.copy_from(memory)
        for value, status in ((0, ErrorStatus.NONE), (999, ErrorStatus.GENERAL_FAILURE), (1, ErrorStatus.NONE)):
            scalar.array(np.int32, (1,))[0] = value
            activation.copy_from(scalar)
            assert run(request)[0] is status
            if status is ErrorStatus.NONE:
                wanted = 2 * memory.array(np.float32, SHAPE)
                assert (contents(y) == (np.maximum(wanted, 0) if value else wanted)).all()
            else:  # admitted, so its output is undefined and its inputs are what they were
                with pytest.raises(GeneralFailure):
                    contents(y)
                assert (contents(a) == memory.array(np.float32, SHAPE)).all()
    for buffer in (a, b, activation, y):
        buffer.close()
    prepared.close()


def test_REQ_MEM_111_an_omitted_output_leaves_the_buffer_of_pool_0_alone(
    device: Device, prepared: PreparedModel, memory: Memory
) -> None:
    omitted = RequestArgument(True)
    with in_out(device, prepared) as buffer:
        buffer.copy_from(memory)
        before = buffer.copy_to(memory)
        pools = (token(buffer), memory)
        assert prepared.execute_synchronously(Request((shared(1),), (omitted,), pools))[0] is not ErrorStatus.NONE
        assert prepared.execute_synchronously(Request((omitted,), (omitted,), ()))[0] is not ErrorStatus.NONE
        assert buffer.copy_to(memory) == before


def test_REQ_MEM_109_a_closed_buffer_is_not_used_by_plans_that_were_bound_before(
    device: Device, prepared: PreparedModel, memory: Memory
) -> None:
    buffer = in_out(device, prepared)
    with ExecutionBurstController.create(prepared) as burst:
        execution = burst.bind(Request((shared(0),), (whole(1),), (memory, token(buffer))))
        execution.run()
        for _ in range(2):
            buffer.close()
        with pytest.raises(NNBurstError):
            buffer.copy_to(memory)
        burst.free_memory(token(buffer))
        with pytest.raises(InvalidArgument):
            execution.run()


def test_REQ_MEM_069_a_bound_request_sees_that_its_input_lost_its_contents(
    device: Device, prepared: PreparedModel, memory: Memory
) -> None:
    with in_out(device, prepared) as buffer, ExecutionBurstController.create(prepared) as burst:
        buffer.copy_from(memory)
        execution = burst.bind(Request((whole(1),), (shared(0),), (memory, token(buffer))))
        for _ in range(2):
            execution.run()
        with Memory.ashmem(4) as wrong, pytest.raises(InvalidArgument):
            buffer.copy_from(wrong)
        with pytest.raises(GeneralFailure):
            execution.run()
        buffer.copy_from(memory)
        execution.run()


def test_REQ_MEM_029_a_bound_request_follows_the_dimensions_of_its_input(device: Device) -> None:
    prepared = device.prepare_model(relu((0, 8)))
    with (
        in_out(device, prepared) as x,
        in_out(device, prepared) as y,
        ExecutionBurstController.create(prepared) as burst,
    ):
        tokens = token(x), token(y)
        request = Request((whole(0),), (whole(1),), tokens)
        for rows in (3, 3, 2, 1, 1, 4, 2):
            with Memory.ashmem(rows * 32) as source, Memory.ashmem(rows * 32) as result:
                source.array(np.float32, (rows, 8))[:] = rows
                x.copy_from(source, (rows, 8))
                status, shapes, _ = burst.compute(request)
                assert status is ErrorStatus.NONE
                assert shapes[0].dimensions == (rows, 8)
                y.copy_to(result)
                assert (result.array(np.float32, (rows, 8)) == rows).all()
    prepared.close()


def buffer_and_use(nbytes: int = 4) -> tuple[ManagedBuffer, BufferUse]:
    role = RoleKey(1, False, 0)
    buffer = ManagedBuffer(OperandDesc(T.TENSOR_FLOAT32, (nbytes // 4,)), (nbytes // 4,), frozenset({role}))
    return buffer, BufferUse(buffer, role, ())


def test_REQ_MEM_109_closing_during_a_run_frees_the_bytes_after_it() -> None:
    buffer, use = buffer_and_use()
    running = BufferSet([use])
    assert running.admit() is None
    running.keep("made over the bytes")
    buffer.close()
    assert buffer.storage.nbytes == 4
    running.commit(())
    assert buffer.storage.nbytes == 0
    assert running.current is None
    assert running._made_for is None
    with pytest.raises(InvalidArgument):
        running.admit()


# ---- many users -------------------------------------------------------------------------------------------------


def test_REQ_MEM_112_a_busy_buffer_is_refused_after_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed, "_PATIENCE", 0.01)
    buffer, use = buffer_and_use()
    other = BufferSet([use])
    other.admit()
    other.commit(())
    with buffer.use(write=True):
        with pytest.raises(ResourceExhausted), buffer.use(write=False):
            pass
        with pytest.raises(ResourceExhausted):
            other.admit()
    with buffer.use(write=False), buffer.use(write=False), pytest.raises(ResourceExhausted):
        other.admit()
    other.admit()
    other.commit(())
    assert buffer.initialised
    assert buffer.generation == 2


@pytest.mark.parametrize("first", ["copy", "execution"])
def test_REQ_MEM_112_who_waits_goes_on_as_soon_as_the_buffer_is_free(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(managed, "_PATIENCE", 1000)
    buffer, use = buffer_and_use()
    running, later = BufferSet([use]), BufferSet([use])

    def begin() -> Background:
        waiting = Background(lambda: (later.admit(), later.commit(())) and None)
        until(lambda: "(sleeping)" in Path(f"/proc/self/task/{waiting.native_id}/status").read_text())
        return waiting

    if first == "copy":
        with buffer.use(write=False):
            waiting = begin()
            assert not buffer.initialised
    else:
        running.admit()
        waiting = begin()
        running.commit(())
    assert waiting.result() is None
    assert buffer.initialised


@pytest.mark.parametrize("mode", ["plain", "burst"])
def test_REQ_MEM_112_readers_never_see_half_of_a_write(device: Device, prepared: PreparedModel, mode: str) -> None:
    """Each writer fills the buffer with one number; whoever reads finds one number."""
    with in_out(device, prepared) as buffer, in_out(device, prepared) as copy:
        with Memory.ashmem(NBYTES) as zero:
            buffer.copy_from(zero)

        def work(number: int) -> None:
            with Memory.ashmem(NBYTES) as mine, ExecutionBurstController.create(prepared) as burst:
                run = burst.compute if mode == "burst" else prepared.execute_synchronously
                values = mine.array(np.float32, SHAPE)
                request = Request((shared(0),), (whole(1),), (mine, token(buffer)))
                for _ in range(40):
                    values[:] = number + 1
                    if number == 0:
                        buffer.copy_from(mine)
                    elif number == 1:
                        assert run(request)[0] is ErrorStatus.NONE
                    else:
                        source = buffer
                        if number == 2:
                            copy.copy_buffer(buffer)
                            source = copy
                        source.copy_to(mine)
                        assert (values == values.flat[0]).all()

        together(4, work)


# ---- whose they are ---------------------------------------------------------------------------------------------


@pytest.fixture
def hosted() -> Iterator[tuple[ServiceHost, Device]]:
    quotas = Quotas(buffers=3, buffer_bytes=4 * NBYTES)
    with in_process([create_device("nnburst-reference")], quotas=quotas) as (client, host):
        yield host, client.devices[0]


def test_quota_of_buffers(hosted: tuple[ServiceHost, Device]) -> None:
    host, device = hosted
    (connection,) = host.connections
    prepared = device.prepare_model(relu(SHAPE))
    buffers = [in_out(device, prepared) for _ in range(3)]
    with pytest.raises(ResourceExhausted, match="buffers"):
        in_out(device, prepared)
    buffers.pop().close()
    buffers.append(in_out(device, prepared))
    for buffer in buffers:
        buffer.close()
    in_out(device, prepared).close()  # by now the others were released
    assert len(connection.buffer_ids) <= 1


def test_quota_of_bytes_counts_what_buffers_grow_to(hosted: tuple[ServiceHost, Device]) -> None:
    _, device = hosted
    open_model = device.prepare_model(relu((0, 8)))
    for _ in range(3):  # what a closed buffer had can be used again
        with in_out(device, open_model) as buffer, Memory.ashmem(5 * NBYTES) as large:
            request = Request(
                (RequestArgument(False, DataLocation(0, 0, 5 * NBYTES), (20, 8)),), (whole(1),), (large, token(buffer))
            )
            with pytest.raises(ResourceExhausted, match="buffer_bytes"):
                buffer.copy_from(large, (20, 8))
            assert open_model.execute_synchronously(request)[0] is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
            with Memory.ashmem(4 * NBYTES) as fits:
                buffer.copy_from(fits, (16, 8))
            with pytest.raises(ResourceExhausted, match="buffer_bytes"), in_out(device, open_model) as other:
                other.copy_buffer(buffer)


def test_REQ_MEM_109_death_of_a_client_frees_its_buffers() -> None:
    host = ServiceHost([create_device("nnburst-reference")])
    tracker: BufferTracker = host.devices[0]._tracker  # type: ignore[attr-defined]
    ours, theirs = socket_pair()
    host.serve(theirs)
    with ours.dup() as wire, ServiceConnection(ours) as client:
        prepared = client.devices[0].prepare_model(relu(SHAPE))
        kept = [in_out(client.devices[0], prepared) for _ in range(2)]
        buffers = list(tracker._buffers.values())
        assert len(buffers) == len(kept)
        wire.shutdown(socket.SHUT_RDWR)  # as the end of its process does
        until(lambda: not any(buffer.storage.nbytes for buffer in buffers))
    assert len(tracker) == 0
    host.close()


# ---- any sequence of copies and executions, against a model --------------------------------------------------------


COLUMNS = 3
MOST_ROWS = 4
WHICH = st.integers(0, 2)
ROWS = st.integers(1, MOST_ROWS)


def model() -> Any:
    """y = x + 1 with an activation that is known at run time only, so that an admitted run can fail."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (0, COLUMNS))
    activation = b.input("activation", OperandType.INT32)
    one = b.constant(np.ones((1, COLUMNS), np.float32), OperandType.TENSOR_FLOAT32)
    b.output("y", b.add(x, one, activation=activation, dimensions=(0, COLUMNS)))
    return b.build()


class BufferStates(RuleBasedStateMachine):
    """Two buffers with open dimensions and one of 2 rows; `values` is what each holds, None for nothing."""

    service: nnburst.Service

    def __init__(self) -> None:
        super().__init__()
        self.device = self.service.devices[0]
        self.prepared = self.device.prepare_model(model())
        self.burst = ExecutionBurstController.create(self.prepared)
        self.pool = Memory.ashmem(4096)
        role = [BufferRole(0, 0)]
        self.buffers = [
            self.device.allocate(BufferDesc(dims), [self.prepared], role, role) for dims in ((), (), (2, COLUMNS))
        ]
        self.values: list[np.ndarray | None] = [None] * 3
        self.generations = [-1] * 3

    def teardown(self) -> None:
        self.burst.close()
        for buffer in self.buffers:
            buffer.close()
        self.prepared.close()
        self.pool.close()

    def takes(self, which: int, rows: int) -> bool:
        return which < 2 or rows == 2

    @rule(which=WHICH, rows=ROWS, number=st.integers(0, 9), say=st.booleans(), wrong=st.booleans())
    def copy_from(self, which: int, rows: int, number: int, say: bool, wrong: bool) -> None:
        with Memory.ashmem(rows * COLUMNS * 4 + 4 * wrong) as source:
            values = source.array(np.float32, (rows, COLUMNS))
            values[:] = number
            if self.takes(which, rows) and (say or which == 2) and not wrong:
                self.buffers[which].copy_from(source, (rows, COLUMNS) if say else ())
                self.values[which] = values.copy()
            else:
                with pytest.raises(InvalidArgument):
                    self.buffers[which].copy_from(source, (rows, COLUMNS) if say else ())
                self.values[which] = None

    @rule(to=WHICH, source=WHICH)
    def copy_buffer(self, to: int, source: int) -> None:
        values = self.values[source]
        if to == source:
            self.buffers[to].copy_buffer(self.buffers[source])
        elif values is not None and self.takes(to, len(values)):
            self.buffers[to].copy_buffer(self.buffers[source])
            self.values[to] = values
        else:
            with pytest.raises(InvalidArgument):
                self.buffers[to].copy_buffer(self.buffers[source])
            self.values[to] = None

    @rule(x=WHICH, y=WHICH, fails=st.booleans(), in_burst=st.booleans(), rows=st.integers(0, MOST_ROWS))
    def run_on_buffers(self, x: int, y: int, fails: bool, in_burst: bool, rows: int) -> None:
        self.pool.array(np.int32, (1,))[0] = 999 if fails else 0
        request = Request(
            (
                RequestArgument(False, DataLocation(1, 0, 0), (rows, COLUMNS) if rows else ()),
                RequestArgument(False, DataLocation(0, 0, 4)),
            ),
            (RequestArgument(False, DataLocation(2, 0, 0)),),
            (self.pool, BufferId(self.buffers[x].id), BufferId(self.buffers[y].id)),
        )
        status = (self.burst.compute if in_burst else self.prepared.execute_synchronously)(request)[0]
        values = self.values[x]
        if x == y:
            assert status is ErrorStatus.INVALID_ARGUMENT
        elif values is None:
            assert status is ErrorStatus.GENERAL_FAILURE
        elif rows and rows != len(values):
            assert status is ErrorStatus.INVALID_ARGUMENT
        elif fails or not self.takes(y, len(values)):
            assert status is ErrorStatus.GENERAL_FAILURE
            self.values[y] = None
        else:
            assert status is ErrorStatus.NONE
            self.values[y] = values + 1

    @invariant()
    def everybody_holds_what_the_model_says(self) -> None:
        for i, (buffer, values) in enumerate(zip(self.buffers, self.values, strict=True)):
            with Memory.ashmem(2 * COLUMNS * 4 if values is None else values.nbytes) as target:
                if values is None:
                    with pytest.raises(GeneralFailure):
                        buffer.copy_to(target)
                else:
                    with Memory.ashmem(2 * values.nbytes) as wrong, pytest.raises(InvalidArgument):
                        buffer.copy_to(wrong)  # which changes nothing
                    generation = buffer.copy_to(target)
                    assert (target.array(np.float32, values.shape) == values).all()
                    assert generation >= self.generations[i]
                    self.generations[i] = generation


def test_REQ_MEM_016_to_029_110_113_any_sequence_leaves_the_states_of_the_model(service: nnburst.Service) -> None:
    machine = type("BufferStates", (BufferStates,), {"service": service})
    checks = list(HealthCheck)
    run = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(machine, settings=run)
