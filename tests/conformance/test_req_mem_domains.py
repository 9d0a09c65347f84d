"""REQ-MEM of memory domains: allocation, copies, executions; in process and not, with a burst and without."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

import nnburst
from nnburst.burst import ExecutionBurstController, ExecutionResult
from nnburst.devices import Buffer, Device, FenceSignal, PreparedModel
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError
from nnburst.memory import BufferTracker, ManagedBuffer, Memory, RoleKey
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
from support.models import add_with_activation, relu

T = OperandType
SHAPE = (1, 4, 4, 2)
NBYTES = math.prod(SHAPE) * 4


@pytest.fixture(scope="module", params=["in_process", pytest.param("child", marks=pytest.mark.check)])
def service(request: pytest.FixtureRequest) -> Iterator[nnburst.Service]:
    with (nnburst.in_process if request.param == "in_process" else nnburst.launch)() as service:
        yield service


@pytest.fixture
def device(service: nnburst.Service) -> Device:
    return service.devices[0]


Prepare = Callable[[Model], PreparedModel]


@pytest.fixture
def prepare(device: Device) -> Iterator[Prepare]:
    made: list[PreparedModel] = []

    def one(model: Model) -> PreparedModel:
        made.append(device.prepare_model(model))
        return made[-1]

    yield one
    for prepared in made:
        prepared.close()


def refused(
    device: Device,
    models: Sequence[PreparedModel],
    inputs: Sequence[BufferRole] = (),
    outputs: Sequence[BufferRole] = (),
    dims: Sequence[int] = (),
) -> None:
    with pytest.raises(InvalidArgument):
        device.allocate(BufferDesc(tuple(dims)), models, inputs, outputs)


def both_sides(device: Device, models: Sequence[PreparedModel], role: BufferRole, dims: Sequence[int] = ()) -> None:
    refused(device, models, [role], [], dims)
    refused(device, models, [], [role], dims)


def pairings(device: Device, models: Sequence[PreparedModel]) -> None:
    """Roles of two models that contradict each other, as in+in, in+out and out+out."""
    a, b = BufferRole(0, 0), BufferRole(1, 0)
    refused(device, models, [a, b])
    refused(device, models, [a], [b])
    refused(device, models, [], [a, b])


# ---- allocation -------------------------------------------------------------------------------------------------


def test_REQ_MEM_001_empty_roles(device: Device, prepare: Prepare) -> None:
    refused(device, [])
    refused(device, [prepare(relu(SHAPE))])


def test_REQ_MEM_002_null_prepared_model(device: Device) -> None:
    both_sides(device, [None], BufferRole(0, 0))  # type: ignore[list-item]


def test_REQ_MEM_003_foreign_prepared_model(device: Device) -> None:
    with nnburst.in_process() as other:
        foreign = other.devices[0].prepare_model(relu(SHAPE))
        both_sides(device, [foreign], BufferRole(0, 0))
        foreign.close()


def test_REQ_MEM_004_model_index_out_of_range(device: Device, prepare: Prepare) -> None:
    both_sides(device, [prepare(relu(SHAPE))], BufferRole(1, 0))


def test_REQ_MEM_005_argument_index_out_of_range(device: Device, prepare: Prepare) -> None:
    both_sides(device, [prepare(relu(SHAPE))], BufferRole(0, 1))


@pytest.mark.parametrize("frequency", [10.0, 0.0, -0.5, math.nan])
def test_REQ_MEM_006_113_frequency_out_of_range(device: Device, prepare: Prepare, frequency: float) -> None:
    both_sides(device, [prepare(relu(SHAPE))], BufferRole(0, 0, frequency))


def test_REQ_MEM_007_same_role_twice(device: Device, prepare: Prepare) -> None:
    prepared = prepare(relu(SHAPE))
    a, again = BufferRole(0, 0), BufferRole(1, 0)
    refused(device, [prepared], [a, a])
    refused(device, [prepared], [], [a, a])
    refused(device, [prepared, prepared], [a, again])


def test_REQ_MEM_008_conflicting_types(device: Device, prepare: Prepare) -> None:
    pairings(device, [prepare(relu(SHAPE)), prepare(relu(SHAPE, type=T.TENSOR_FLOAT16))])


@pytest.mark.parametrize(("id_", "other"), [("009", {"scale": 1.0}), ("010", {"zero_point": 10})])
def test_REQ_MEM_009_010_conflicting_quantisation(device: Device, prepare: Prepare, id_: str, other: dict) -> None:
    quant = {"scale": 0.5, "zero_point": 0}
    q8 = T.TENSOR_QUANT8_ASYMM
    pairings(device, [prepare(relu(SHAPE, type=q8, **quant)), prepare(relu(SHAPE, type=q8, **{**quant, **other}))])


@pytest.mark.parametrize(("id_", "shape"), [("011", (1, 4, 4)), ("012", (4, 4, 4, 2))])
def test_REQ_MEM_011_012_conflicting_dimensions(device: Device, prepare: Prepare, id_: str, shape: tuple) -> None:
    pairings(device, [prepare(relu(SHAPE)), prepare(relu(shape))])


@pytest.mark.parametrize(("id_", "dims"), [("013", (1, 4, 4)), ("014", (4, 4, 4, 2))])
def test_REQ_MEM_013_014_descriptor_conflicts(device: Device, prepare: Prepare, id_: str, dims: tuple) -> None:
    both_sides(device, [prepare(relu(SHAPE))], BufferRole(0, 0), dims)


def test_REQ_MEM_015_dimensions_for_a_scalar(device: Device, prepare: Prepare) -> None:
    refused(device, [prepare(add_with_activation(SHAPE))], [BufferRole(0, 2)], [], (1,))
    device.allocate(BufferDesc(), [prepare(add_with_activation(SHAPE))], [BufferRole(0, 2)], []).close()


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


def test_REQ_MEM_016_copy_from_wrong_size(device: Device, prepare: Prepare) -> None:
    with in_out(device, prepare(relu(SHAPE))) as buffer:
        for size in (NBYTES // 2, NBYTES * 2):
            with Memory.ashmem(size) as wrong, pytest.raises(InvalidArgument):
                buffer.copy_from(wrong)


def test_REQ_MEM_017_019_copy_from_with_open_dimensions(device: Device, prepare: Prepare, memory: Memory) -> None:
    with in_out(device, prepare(relu((0, 4, 4, 2)))) as buffer:
        for size in (NBYTES // 2, NBYTES * 2):
            with Memory.ashmem(size) as wrong, pytest.raises(InvalidArgument):
                buffer.copy_from(wrong, SHAPE)
        for dims in ((), (1, 4, 4), (1, 4, 4, 3), (1, 4, 4, 0), (2, 4, 4, 2)):
            with pytest.raises(InvalidArgument):
                buffer.copy_from(memory, dims)
        buffer.copy_from(memory, SHAPE)
        assert (contents(buffer) == memory.array(np.float32, SHAPE)).all()


def test_REQ_MEM_018_copy_from_wrong_dimensions(device: Device, prepare: Prepare, memory: Memory) -> None:
    with in_out(device, prepare(relu(SHAPE))) as buffer:
        for dims in ((1, 4, 4), (2, 4, 4, 2), (0, 4, 4, 2)):
            with pytest.raises(InvalidArgument):
                buffer.copy_from(memory, dims)
        buffer.copy_from(memory)
        buffer.copy_from(memory, SHAPE)


def test_REQ_MEM_020_copy_to_without_contents(device: Device, prepare: Prepare, memory: Memory) -> None:
    with in_out(device, prepare(relu(SHAPE))) as buffer, pytest.raises(GeneralFailure):
        buffer.copy_to(memory)


@pytest.mark.parametrize("shape", [SHAPE, (0, 4, 4, 2)])
def test_REQ_MEM_021_022_copy_to_wrong_size_keeps_the_contents(
    device: Device, prepare: Prepare, memory: Memory, shape: tuple
) -> None:
    with in_out(device, prepare(relu(shape))) as buffer:
        buffer.copy_from(memory, SHAPE)
        for size in (NBYTES // 2, NBYTES * 2):
            with Memory.ashmem(size) as wrong, pytest.raises(InvalidArgument):
                buffer.copy_to(wrong)
        assert (contents(buffer) == memory.array(np.float32, SHAPE)).all()


def test_REQ_MEM_113_failed_copy_from_ends_the_contents(device: Device, prepare: Prepare, memory: Memory) -> None:
    with in_out(device, prepare(relu(SHAPE))) as buffer:
        buffer.copy_from(memory)
        with Memory.ashmem(4) as wrong, pytest.raises(InvalidArgument):
            buffer.copy_from(wrong)
        with pytest.raises(GeneralFailure):
            buffer.copy_to(memory)
        with pytest.raises(NNBurstError):
            buffer.copy_buffer(buffer)  # nothing happens, above all no contents
            buffer.copy_to(memory)


def test_buffer_to_buffer_copy_has_bytes_of_its_own(device: Device, prepare: Prepare, memory: Memory) -> None:
    prepared = prepare(relu(SHAPE))
    with in_out(device, prepared) as a, in_out(device, prepared) as b:
        with pytest.raises(InvalidArgument):
            b.copy_buffer(a)
        a.copy_from(memory)
        b.copy_buffer(a)
        memory.array(np.float32, SHAPE)[:] = 5
        a.copy_from(memory)
        assert (contents(a) == 5).all()
        assert (contents(b) == np.arange(math.prod(SHAPE)).reshape(SHAPE) - 8).all()


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


def test_REQ_MEM_024_REQ_WIRE_011_other_prepared_model(
    device: Device, prepare: Prepare, run: Run, memory: Memory
) -> None:
    mine, other = prepare(relu(SHAPE)), prepare(relu(SHAPE))
    with in_out(device, mine) as buffer:
        buffer.copy_from(memory)
        pools = (memory, token(buffer))
        assert run(other, Request((whole(1),), (shared(0),), pools))[0] is ErrorStatus.INVALID_ARGUMENT
        assert run(other, Request((shared(0),), (whole(1),), pools))[0] is ErrorStatus.INVALID_ARGUMENT
        assert run(mine, Request((whole(1),), (shared(0),), pools))[0] is ErrorStatus.NONE
        assert (memory.array(np.float32, SHAPE) == np.maximum(np.arange(32).reshape(SHAPE) - 8, 0)).all()


def test_REQ_MEM_025_REQ_WIRE_011_other_argument(device: Device, prepare: Prepare, run: Run) -> None:
    prepared = prepare(relu(SHAPE, count=2))
    with in_out(device, prepared) as buffer, Memory.ashmem(4 * NBYTES) as pool:
        with Memory.ashmem(NBYTES) as zero:
            buffer.copy_from(zero)
        places = [shared(0, i * NBYTES) for i in range(4)]
        pools = (pool, token(buffer))
        wrong_input = Request((places[0], whole(1)), (places[2], places[3]), pools)
        wrong_output = Request((places[0], places[1]), (places[2], whole(1)), pools)
        assert run(prepared, wrong_input)[0] is ErrorStatus.INVALID_ARGUMENT
        assert run(prepared, wrong_output)[0] is ErrorStatus.INVALID_ARGUMENT


def test_REQ_MEM_026_REQ_WIRE_011_other_direction(device: Device, prepare: Prepare, run: Run, memory: Memory) -> None:
    prepared = prepare(relu(SHAPE))
    role = [BufferRole(0, 0)]
    with (
        device.allocate(BufferDesc(), [prepared], role, []) as reader,
        device.allocate(BufferDesc(), [prepared], [], role) as writer,
    ):
        writer.copy_from(memory)  # copies ignore roles
        as_output = Request((shared(0),), (whole(1),), (memory, token(reader)))
        as_input = Request((whole(1),), (shared(0),), (memory, token(writer)))
        assert run(prepared, as_output)[0] is ErrorStatus.INVALID_ARGUMENT
        assert run(prepared, as_input)[0] is ErrorStatus.INVALID_ARGUMENT


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


def test_REQ_MEM_028_REQ_WIRE_011_several_roles_in_one_request(device: Device, prepare: Prepare, run: Run) -> None:
    prepared = prepare(relu(SHAPE, count=2))
    roles = [BufferRole(0, 0), BufferRole(0, 1)]
    with (
        device.allocate(BufferDesc(), [prepared], roles, roles) as buffer,
        Memory.ashmem(4 * NBYTES) as pool,
        Memory.ashmem(NBYTES) as ones,
    ):
        ones.array(np.float32, (32,))[:] = 1
        buffer.copy_from(ones)
        p = [shared(0, i * NBYTES) for i in range(4)]
        pools = (pool, token(buffer))
        invalid = ErrorStatus.INVALID_ARGUMENT
        assert run(prepared, Request((whole(1), p[1]), (whole(1), p[3]), pools))[0] is invalid
        assert run(prepared, Request((p[0], p[1]), (whole(1), whole(1)), pools))[0] is invalid
        assert run(prepared, Request((whole(1), whole(1)), (p[2], p[3]), pools))[0] is ErrorStatus.NONE
        assert (pool.array(np.float32, (64,), 2 * NBYTES) == 1).all()


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


@not_fenced
def test_REQ_MEM_029_buffer_with_open_dimensions_takes_those_of_its_contents(
    device: Device, prepare: Prepare, run: Run, memory: Memory
) -> None:
    prepared = prepare(relu((0, 4, 4, 2)))
    with in_out(device, prepared) as buffer, Memory.ashmem(3 * NBYTES) as pool:
        pool.array(np.float32, (96,))[:] = 2
        for n in (1, 3, 2):
            dims = (n, 4, 4, 2)
            request = Request((shared(0, 0, dims, n * NBYTES),), (whole(1),), (pool, token(buffer)))
            status, shapes, _ = run(prepared, request)
            assert status is ErrorStatus.NONE
            assert shapes[0].dimensions == dims
            assert (contents(buffer, dims) == 2).all()


@pytest.mark.parametrize(("offset", "length"), [(1, 0), (0, 4), (4, NBYTES)])
def test_REQ_MEM_069_070_a_buffer_is_used_whole(
    device: Device, prepare: Prepare, run: Run, memory: Memory, offset: int, length: int
) -> None:
    prepared = prepare(relu(SHAPE))
    with in_out(device, prepared) as buffer:
        buffer.copy_from(memory)
        part = RequestArgument(False, DataLocation(1, offset, length))
        pools = (memory, token(buffer))
        assert run(prepared, Request((part,), (shared(0),), pools))[0] is ErrorStatus.INVALID_ARGUMENT
        assert run(prepared, Request((shared(0),), (part,), pools))[0] is ErrorStatus.INVALID_ARGUMENT


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
    import socket

    from nnburst.devices import create_device
    from nnburst.service import ServiceConnection, ServiceHost

    host = ServiceHost([create_device("nnburst-reference")])
    clients = []
    for _ in range(2):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host.serve(theirs)
        clients.append(ServiceConnection(ours))
    try:
        prepared = [client.devices[0].prepare_model(relu(SHAPE)) for client in clients]
        buffer = in_out(clients[0].devices[0], prepared[0])
        buffer.copy_from(memory)
        request = Request((whole(1),), (shared(0),), (memory, token(buffer)))
        assert prepared[0].execute_synchronously(request)[0] is ErrorStatus.NONE
        assert prepared[1].execute_synchronously(request)[0] is ErrorStatus.INVALID_ARGUMENT
        with ExecutionBurstController.create(prepared[1]) as burst:
            assert burst.compute(request)[0] is ErrorStatus.INVALID_ARGUMENT
    finally:
        for client in clients:
            client.close()
        host.close()
    assert all(len(device._tracker) == 0 for device in host.devices)  # type: ignore[attr-defined]


def test_REQ_MEM_109_released_buffer_lives_as_long_as_its_plan(
    device: Device, prepare: Prepare, memory: Memory
) -> None:
    prepared = prepare(relu(SHAPE))
    buffer = in_out(device, prepared)
    buffer.copy_from(memory)
    with ExecutionBurstController.create(prepared) as burst:
        execution = burst.bind(Request((whole(1),), (shared(0),), (memory, token(buffer))))
        execution.run()
        buffer.close()
        buffer.close()
        with pytest.raises(NNBurstError):
            buffer.copy_to(memory)
        burst.free_memory(BufferToken(buffer.token))
        with pytest.raises(InvalidArgument):
            execution.run()


def test_REQ_MEM_112_concurrent_use_ends_in_bounded_time(device: Device, prepare: Prepare) -> None:
    prepared = prepare(relu(SHAPE))
    with in_out(device, prepared) as buffer, Memory.ashmem(NBYTES) as one:
        buffer.copy_from(one)
        failures: list[BaseException] = []

        def work(i: int) -> None:
            with Memory.ashmem(NBYTES) as mine:
                pools = (mine, token(buffer))
                for _ in range(30):
                    try:
                        if i == 0:
                            buffer.copy_from(mine)
                        elif i == 1:
                            buffer.copy_to(mine)
                        else:
                            request = Request((shared(0),), (whole(1),), pools)
                            prepared.execute_synchronously(request)
                    except nnburst.ResourceExhausted:
                        continue
                    except BaseException as error:
                        failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not failures


# ---- the table of tokens ----------------------------------------------------------------------------------------


def test_tokens_are_not_reused_for_many_generations() -> None:
    tracker = BufferTracker()
    operand = OperandDesc(T.TENSOR_FLOAT32, (1,))
    seen: set[int] = set()
    for _ in range(3000):
        buffer = ManagedBuffer(operand, (1,), frozenset({RoleKey(1, True, 0)}))
        token = tracker.add(buffer)
        assert 0 < token < 2**31
        assert token not in seen
        assert tracker.resolve(token) is buffer
        seen.add(token)
        tracker.remove(token)
        with pytest.raises(InvalidArgument):
            tracker.resolve(token)
    assert len(tracker) == 0
