"""REQ-MEM of memory domains, continued: whose buffers they are, how they end, what they cost, who else uses them."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import nnburst
from nnburst.burst import ExecutionBurstController
from nnburst.devices import Buffer, Device, PreparedModel, create_device
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError, ResourceExhausted
from nnburst.memory import (
    BufferSet,
    BufferTracker,
    BufferUse,
    ManagedBuffer,
    Memory,
    RoleKey,
)
from nnburst.memory import managed as buffers
from nnburst.model import (
    BufferDesc,
    BufferRole,
    BufferToken,
    DataLocation,
    OperandDesc,
    OperandType,
    Request,
    RequestArgument,
)
from nnburst.service import Quotas, ServiceConnection, ServiceHost
from support.connections import socket_pair
from support.models import add_with_activation, relu
from support.services import in_process
from support.waiting import together, until

T = OperandType
SHAPE = (2, 8)
NBYTES = math.prod(SHAPE) * 4
ROLE = [BufferRole(0, 0)]
WHOLE = RequestArgument(False, DataLocation(1, 0, 0))
SHARED = RequestArgument(False, DataLocation(0, 0, NBYTES))


@pytest.fixture(scope="module", params=["in_process", pytest.param("child", marks=pytest.mark.check)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with (nnburst.in_process if request.param == "in_process" else nnburst.launch)() as service:
        yield service.devices[0]


@pytest.fixture
def prepared(device: Device) -> Iterator[PreparedModel]:
    prepared = device.prepare_model(relu(SHAPE))
    yield prepared
    prepared.close()


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory.ashmem(NBYTES) as memory:
        memory.array(np.float32, SHAPE)[:] = np.arange(16).reshape(SHAPE) + 1
        yield memory


def in_out(device: Device, prepared: PreparedModel) -> Buffer:
    return device.allocate(BufferDesc(), [prepared], ROLE, ROLE)


def contents(buffer: Buffer) -> np.ndarray:
    with Memory.ashmem(NBYTES) as memory:
        buffer.copy_to(memory)
        return memory.array(np.float32, SHAPE).copy()


# ---- allocation -------------------------------------------------------------------------------------------------


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
        device.allocate(BufferDesc(dimensions), [prepared], ROLE, ())
    prepared.close()


def test_REQ_MEM_002_003_entries_that_no_role_names_are_not_looked_at(device: Device, prepared: PreparedModel) -> None:
    device.allocate(BufferDesc(), [prepared, None], ROLE, ()).close()  # type: ignore[list-item]


def test_REQ_MEM_108_token_of_another_device_of_the_service(memory: Memory) -> None:
    first, second = (create_device("nnburst-reference") for _ in range(2))
    mine, other = first.prepare_model(relu(SHAPE)), second.prepare_model(relu(SHAPE))
    with in_out(first, mine) as buffer, in_out(second, other) as another:
        assert buffer.token != another.token
        buffer.copy_from(memory)
        request = Request((WHOLE,), (SHARED,), (memory, BufferToken(buffer.token)))
        assert other.execute_synchronously(request)[0] is ErrorStatus.INVALID_ARGUMENT
        assert mine.execute_synchronously(request)[0] is ErrorStatus.NONE
        with pytest.raises(InvalidArgument):
            another.copy_buffer(buffer)


# ---- copies -----------------------------------------------------------------------------------------------------


def test_REQ_MEM_103_copies_reach_memory_that_can_only_be_staged(
    device: Device, prepared: PreparedModel, tmp_path: Path
) -> None:
    path = tmp_path / "tensor"
    path.write_bytes(np.arange(16, dtype=np.float32).tobytes())
    with open(path, "r+b") as file, Memory.mmap_fd(file.fileno(), NBYTES) as plain, in_out(device, prepared) as buffer:
        buffer.copy_from(plain)
        assert (contents(buffer) == np.arange(16).reshape(SHAPE)).all()
        path.write_bytes(bytes(NBYTES))
        buffer.copy_to(plain)
    assert path.read_bytes() == np.arange(16, dtype=np.float32).tobytes()


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
        request = Request((SHARED,), (WHOLE,), (memory, BufferToken(buffer.token)))
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
        tokens = BufferToken(state.token), BufferToken(following.token)
        request = Request((RequestArgument(False, DataLocation(0, 0, 0)),), (WHOLE,), tokens)
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
    y = device.allocate(BufferDesc(), [prepared], (), ROLE)
    whole = [RequestArgument(False, DataLocation(i, 0, 0)) for i in range(4)]
    request = Request(tuple(whole[:3]), (whole[3],), tuple(BufferToken(x.token) for x in (a, b, activation, y)))
    with ExecutionBurstController.create(prepared) as burst, Memory.ashmem(4) as scalar:
        run = burst.compute if mode == "burst" else prepared.execute_synchronously
        for buffer in (a, b):
            buffer.copy_from(memory)
        for value, status in ((0, ErrorStatus.NONE), (999, ErrorStatus.GENERAL_FAILURE), (1, ErrorStatus.NONE)):
            scalar.array(np.int32, (1,))[0] = value
            activation.copy_from(scalar)
            assert run(request)[0] is status
            if status is ErrorStatus.NONE:
                assert (contents(y) == 2 * memory.array(np.float32, SHAPE)).all()
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
        pools = (BufferToken(buffer.token), memory)
        shared = RequestArgument(False, DataLocation(1, 0, NBYTES))
        assert prepared.execute_synchronously(Request((shared,), (omitted,), pools))[0] is not ErrorStatus.NONE
        assert prepared.execute_synchronously(Request((omitted,), (omitted,), ()))[0] is not ErrorStatus.NONE
        assert buffer.copy_to(memory) == before


def test_REQ_MEM_109_a_closed_buffer_is_not_used_by_plans_that_were_bound_before(
    device: Device, prepared: PreparedModel, memory: Memory
) -> None:
    buffer = in_out(device, prepared)
    with ExecutionBurstController.create(prepared) as burst:
        execution = burst.bind(Request((SHARED,), (WHOLE,), (memory, BufferToken(buffer.token))))
        execution.run()
        for _ in range(2):
            buffer.close()
        with pytest.raises(NNBurstError):
            buffer.copy_to(memory)
        burst.free_memory(BufferToken(buffer.token))
        with pytest.raises(InvalidArgument):
            execution.run()


def test_REQ_MEM_069_a_bound_request_sees_that_its_input_lost_its_contents(
    device: Device, prepared: PreparedModel, memory: Memory
) -> None:
    with in_out(device, prepared) as buffer, ExecutionBurstController.create(prepared) as burst:
        buffer.copy_from(memory)
        execution = burst.bind(Request((WHOLE,), (SHARED,), (memory, BufferToken(buffer.token))))
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
        tokens = BufferToken(x.token), BufferToken(y.token)
        request = Request((RequestArgument(False, DataLocation(0, 0, 0)),), (WHOLE,), tokens)
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


def managed(nbytes: int = 4) -> tuple[ManagedBuffer, BufferUse]:
    role = RoleKey(1, False, 0)
    buffer = ManagedBuffer(OperandDesc(T.TENSOR_FLOAT32, (nbytes // 4,)), (nbytes // 4,), frozenset({role}))
    return buffer, BufferUse(buffer, role, ())


def test_REQ_MEM_109_closing_during_a_run_frees_the_bytes_after_it() -> None:
    buffer, use = managed()
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
    monkeypatch.setattr(buffers, "_PATIENCE", 0.01)
    buffer, use = managed()
    other = BufferSet([use])
    other.admit()
    other.commit(())
    with buffer.used(write=True):
        with pytest.raises(ResourceExhausted), buffer.used(write=False):
            pass
        with pytest.raises(ResourceExhausted):
            other.admit()
    with buffer.used(write=False), buffer.used(write=False), pytest.raises(ResourceExhausted):
        other.admit()
    other.admit()
    other.commit(())
    assert buffer.initialised
    assert buffer.generation == 2


@pytest.mark.parametrize("first", ["copy", "execution"])
def test_REQ_MEM_112_who_waits_goes_on_as_soon_as_the_buffer_is_free(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(buffers, "_PATIENCE", 1000)
    buffer, use = managed()
    running, later = BufferSet([use]), BufferSet([use])
    waiting = threading.Thread(target=lambda: (later.admit(), later.commit(())), daemon=True)

    def until_it_waits() -> None:
        waiting.start()
        until(lambda: "(sleeping)" in Path(f"/proc/self/task/{waiting.native_id}/status").read_text())

    if first == "copy":
        with buffer.used(write=False):
            until_it_waits()
            assert not buffer.initialised
    else:
        running.admit()
        until_it_waits()
        running.commit(())
    waiting.join(30)
    assert not waiting.is_alive()
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
                request = Request((SHARED,), (WHOLE,), (mine, BufferToken(buffer.token)))
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
                        assert (values == values[0, 0]).all()

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
    assert len(connection.tokens) <= 1


def test_quota_of_bytes_counts_what_buffers_grow_to(hosted: tuple[ServiceHost, Device]) -> None:
    _, device = hosted
    open_model = device.prepare_model(relu((0, 8)))
    for _ in range(3):  # what a closed buffer had can be used again
        with in_out(device, open_model) as buffer, Memory.ashmem(5 * NBYTES) as large:
            request = Request(
                (RequestArgument(False, DataLocation(0, 0, 5 * NBYTES), (10, 8)),),
                (WHOLE,),
                (large, BufferToken(buffer.token)),
            )
            with pytest.raises(ResourceExhausted, match="buffer_bytes"):
                buffer.copy_from(large, (10, 8))
            assert open_model.execute_synchronously(request)[0] is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
            with Memory.ashmem(4 * NBYTES) as fits:
                buffer.copy_from(fits, (8, 8))
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
        until(lambda: len(tracker) == 0)
    assert all(buffer.storage.nbytes == 0 for buffer in buffers)
    host.close()
