"""Executions that depend on each other: `start_compute_with_dependencies`, its events, and fences alone."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import Memory, Model, OperandType, OperationType, Service
from nnburst.devices.fence import Fence, FenceSignal, FenceState
from nnburst.errors import BadState, DeadObject, GeneralFailure, InvalidArgument, MissedDeadline
from nnburst.model.types import OperandDesc
from nnburst.nnapi import Compilation, Duration, Event, Execution
from support.models import built, compiled, described, ready
from support.waiting import PATIENCE

T, Op = OperandType, OperationType
ZEROS = np.zeros(4, np.float32)


def increment(dims: tuple[int, ...] = (4,)) -> Model:
    return built([OperandDesc(T.TENSOR_FLOAT32, dims)], lambda b, x: b.add(x, np.ones(4, np.float32), dimensions=dims))


@pytest.fixture(scope="module", params=["in_process", pytest.param("child", marks=pytest.mark.check)])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with (nnburst.in_process if request.param == "in_process" else nnburst.launch)() as service:
        yield service


class Gate:
    """An event of this test's own."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0)
        self.event = Event.from_fd(self.fd)

    def open(self) -> None:
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        os.close(self.fd)
        self.event.fence.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


Make = Callable[..., Execution]


@pytest.fixture
def execution(service: Service) -> Iterator[Make]:
    made: list[Any] = []

    def one(on: Service = service, model: Model | None = None, **options: Any) -> Execution:
        compilation = Compilation(model or increment(), [on.devices[0]])
        made.append(compilation)
        compilation.finish()
        made.append(Execution(compilation, **options))
        return made[-1]

    yield one
    for each in reversed(made):
        each.close()


def execution_with_arrays(execution: Make, x: Any = ZEROS, y: Any = None, **options: Any) -> Execution:
    run = execution(**options)
    run.set_input(0, x)
    run.set_output(0, np.zeros(4, np.float32) if y is None else y)
    return run


def test_arrays_are_copied_when_it_is_launched_and_when_it_is_waited_for(execution: Make, gate: Gate) -> None:
    x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    run = execution_with_arrays(execution, x, y, reusable=True)
    event = run.start_compute_with_dependencies([gate.event])
    x[:] = 99
    with pytest.raises(MissedDeadline):
        event.wait(0)
    assert not event.done
    with pytest.raises(BadState, match="running"):
        run.compute()
    with pytest.raises(BadState, match="has not ended"):
        run.get_output_dimensions(0)
    gate.open()
    event.wait(PATIENCE)
    event.wait()
    assert event.done
    assert y.tolist() == [1, 2, 3, 4]
    run.start_compute_with_dependencies().wait(PATIENCE)
    assert y.tolist() == [100] * 4


def test_execution_whose_thread_was_refused_can_be_run(execution: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BadState("gevent has patched threading")

    y = np.zeros(4, np.float32)
    run = execution_with_arrays(execution, np.ones(4, np.float32), y)
    with monkeypatch.context() as patch:
        patch.setattr("nnburst.nnapi.event.start_daemon", refuse)
        with pytest.raises(BadState, match="gevent"):
            run.start_compute()
    run.start_compute().wait(PATIENCE)
    assert y.tolist() == [2] * 4


def test_services_wait_for_each_other_without_the_client(service: Service, execution: Make, gate: Gate) -> None:
    with nnburst.launch() as other, Memory.ashmem(64 * 6) as memory:
        events = [gate.event]
        for i in range(5):
            run = execution((service, other)[i % 2])
            run.set_input_from_memory(0, memory, 64 * i, 16)
            run.set_output_from_memory(0, memory, 64 * (i + 1), 16)
            events.append(run.start_compute_with_dependencies([events[-1]]))
        gate.open()
        events[-1].fence.wait(PATIENCE)  # nothing but the last fence is looked at
        assert memory.array(np.float32, (4,), 64 * 5).tolist() == [5] * 4
        for event in events:
            event.wait(PATIENCE)


def test_buffers_of_the_device_are_handed_on(execution: Make, gate: Gate) -> None:
    first, second = execution(), execution()
    desc = described((first.compilation, "output", 0), (second.compilation, "input", 0))
    result = np.zeros(4, np.float32)
    with desc.create_memory() as between:
        first.set_input(0, np.full(4, 5, np.float32))
        first.set_output_from_memory(0, between)
        second.set_input_from_memory(0, between)
        second.set_output(0, result)
        one = first.start_compute_with_dependencies([gate.event])
        two = second.start_compute_with_dependencies([one])
        gate.open()
        two.wait(PATIENCE)
        one.wait(PATIENCE)
    assert result.tolist() == [7] * 4


def test_a_failure_goes_down_the_chain_and_says_why(execution: Make, gate: Gate) -> None:
    runs = [execution_with_arrays(execution) for _ in range(2)]
    runs[0].set_timeout(2.0)  # both begin before that
    one = runs[0].start_compute_with_dependencies([gate.event])
    two = runs[1].start_compute_with_dependencies([one])
    with pytest.raises(GeneralFailure, match=r"wait_for\[0\] went into error"):
        two.wait(PATIENCE)
    for _ in range(2):
        with pytest.raises(MissedDeadline, match=r"before wait_for\[0\] was signalled"):
            one.wait(PATIENCE)
    with pytest.raises(InvalidArgument, match="is in error"):
        execution_with_arrays(execution).start_compute_with_dependencies([one])


def test_durations_with_and_without_the_waiting(execution: Make, gate: Gate) -> None:
    run = execution_with_arrays(execution)
    run.set_measure_timing(True)
    event = run.start_compute_with_dependencies([gate.event], duration=60)
    started = time.monotonic_ns()
    with pytest.raises(MissedDeadline):
        event.wait(0.03)
    waited = time.monotonic_ns() - started
    with pytest.raises(BadState):
        run.get_duration(Duration.IN_DRIVER)
    gate.open()
    event.wait(PATIENCE)
    whole, fenced = run.get_duration(Duration.IN_DRIVER), run.get_duration(Duration.FENCED_IN_DRIVER)
    assert whole is not None
    assert fenced is not None
    assert whole - fenced >= waited - 2000  # both are whole microseconds
    hardware = run.get_duration(Duration.FENCED_ON_HARDWARE)
    assert hardware is None or hardware <= fenced


def test_REQ_MODEL_057_079_what_is_refused_at_the_launch(execution: Make, service: Service) -> None:
    run = execution()
    with pytest.raises(InvalidArgument, match="not set"):
        run.start_compute_with_dependencies()
    run = execution_with_arrays(execution)
    for bad in (None, 7, "event"):
        with pytest.raises(InvalidArgument, match=r"wait_for\[0\]"):
            run.start_compute_with_dependencies([bad])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="timeout=-1"):
        run.start_compute_with_dependencies(duration=-1)
    run.start_compute_with_dependencies().wait(PATIENCE)  # what was refused has not used it up
    with pytest.raises(BadState, match="has run"):
        run.start_compute_with_dependencies()
    open_ended = execution(model=increment((0,)))
    open_ended.set_input(0, np.zeros(4, np.float32))
    open_ended.set_output(0, np.zeros(4, np.float32), dimensions=(4,))
    with pytest.raises(InvalidArgument, match="use compute"):
        open_ended.start_compute_with_dependencies()
    with compiled(increment(), service) as compilation:
        anywhere = ready(compilation, np.zeros(4, np.float32), np.zeros(4, np.float32))
        if not compilation._has_one_device:
            with pytest.raises(InvalidArgument, match="exactly one device"):
                anywhere.start_compute_with_dependencies(duration=1.0)
        anywhere.start_compute_with_dependencies().wait(PATIENCE)
        anywhere.close()


def test_REQ_MODEL_079_events_of_descriptors() -> None:
    for fd in (-1, 0, True, None):
        with pytest.raises(InvalidArgument):
            Event.from_fd(fd)  # type: ignore[arg-type]
    reader, writer = os.pipe()
    event = Event.from_fd(reader)
    copy = event.get_sync_fence_fd()
    assert copy not in (reader, event.fileno())
    os.close(copy)
    os.close(writer)
    with pytest.raises(GeneralFailure):
        event.wait(PATIENCE)
    event.fence.close()
    os.close(reader)


def test_an_execution_that_was_started_can_be_depended_on(execution: Make) -> None:
    one, two = execution_with_arrays(execution), execution_with_arrays(execution)
    first = one.start_compute()
    two.start_compute_with_dependencies([first]).wait(PATIENCE)
    assert first.done
    first.wait()


def test_an_event_wakes_an_event_loop(execution: Make, gate: Gate) -> None:
    async def main() -> None:
        event = execution_with_arrays(execution).start_compute_with_dependencies([gate.event])
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(event, over.set)
        loop.call_soon(gate.open)
        await asyncio.wait_for(over.wait(), PATIENCE)
        loop.remove_reader(event)
        event.wait(0)

    asyncio.run(main())


def test_a_service_that_dies_ends_the_wait(gate: Gate) -> None:
    with nnburst.launch() as service, compiled(increment(), service) as compilation:
        with ready(compilation, ZEROS, np.zeros(4, np.float32)) as run:
            event = run.start_compute_with_dependencies([gate.event])
            os.kill(service.pid, 9)
            with pytest.raises(DeadObject):
                event.wait(PATIENCE)


# ---- a fence alone -------------------------------------------------------------------------------------------------


def events(fence: Fence) -> int:
    poll = select.poll()
    poll.register(fence, select.POLLIN)
    return dict(poll.poll(0)).get(fence.fileno(), 0)


def test_states_are_those_of_a_poll() -> None:
    with FenceSignal() as gate, gate.fence as fence, fence.duplicate() as copy:
        assert (fence.state, events(fence)) == (FenceState.ACTIVE, 0)
        with pytest.raises(MissedDeadline):
            fence.wait(0)
        gate.set()
        gate.fail()  # too late
        for each in (fence, copy):
            assert each.state is FenceState.SIGNALLED
            assert events(each) & (select.POLLIN | select.POLLERR) == select.POLLIN
            each.wait()


def test_an_error_is_a_state_of_its_own() -> None:
    with FenceSignal() as gate, gate.fence as fence, fence.duplicate() as copy:
        gate.fail()
        gate.set()  # too late
        for each in (fence, copy):
            assert each.state is FenceState.ERROR
            assert events(each) & select.POLLERR
            with pytest.raises(GeneralFailure):
                each.wait()


def test_a_signal_that_is_dropped_is_an_error() -> None:
    gate = FenceSignal()
    with gate.fence as fence:
        del gate
        assert fence.state is FenceState.ERROR


def test_a_process_that_ends_has_put_its_fences_in_error() -> None:
    """Also if it has forked, and the child goes on."""
    code = (
        "import os, socket, sys, time\n"
        "from nnburst.devices.fence import FenceSignal\n"
        "gate = FenceSignal()\n"
        "own = socket.socket(fileno=int(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if not child: time.sleep(60)\n"
        "socket.send_fds(own, [b'%d' % child], [gate.fence.fileno()])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        text, (fd,), _, _ = socket.recv_fds(ours, 32, 1)
        try:
            with Fence(fd) as fence, pytest.raises(GeneralFailure):
                fence.wait(PATIENCE)
        finally:
            os.close(fd)
            process.wait()
            os.kill(int(text), 9)


def test_a_waiter_that_reads_cannot_make_an_error_a_success() -> None:
    with FenceSignal() as gate, gate.fence as fence:
        gate.fail()
        with socket.socket(fileno=fence.detach_copy()) as thief:
            with pytest.raises(ConnectionResetError):
                thief.recv(1)
            assert thief.recv(1) == b""
        assert fence.state is FenceState.ERROR  # though the poll says so no more


def test_a_waiter_that_reads_turns_a_success_into_an_error() -> None:
    with FenceSignal() as gate, gate.fence as fence:
        gate.set()
        with socket.socket(fileno=fence.detach_copy()) as thief:
            assert thief.recv(1)
        assert fence.state is FenceState.ERROR


def test_a_waiter_can_neither_write_nor_keep_a_fence_from_ending() -> None:
    with FenceSignal() as gate, gate.fence as fence:
        with socket.socket(fileno=fence.detach_copy()) as thief, pytest.raises(BrokenPipeError):
            thief.send(b"x")
        gate.set()
        assert fence.state is FenceState.SIGNALLED


def test_a_pipe_whose_writer_goes_is_in_error() -> None:
    reader, writer = os.pipe()
    with Fence(reader) as fence:
        os.close(reader)
        assert fence.state is FenceState.ACTIVE
        os.close(writer)
        assert fence.state is FenceState.ERROR


def test_a_named_pipe_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDWR)
    with Fence(fd) as fence:
        assert fence.state is FenceState.ACTIVE
        os.write(fd, b"x")
        assert fence.state is FenceState.SIGNALLED
    os.close(fd)


@pytest.mark.parametrize("what", ["file", "directory", "memfd", "device", "epoll"])
def test_what_may_block_when_it_is_polled_is_no_fence(tmp_path: Path, what: str) -> None:
    (tmp_path / "anon_inode:[eventfd]").touch()
    epoll = select.epoll()
    fds = {
        "file": lambda: os.open(tmp_path / "anon_inode:[eventfd]", os.O_RDWR),
        "directory": lambda: os.open(tmp_path, os.O_RDONLY),
        "memfd": lambda: os.memfd_create("x"),
        "device": lambda: os.open("/dev/null", os.O_RDWR),
        "epoll": lambda: os.dup(epoll.fileno()),
    }
    fd = fds[what]()
    try:
        with pytest.raises(InvalidArgument, match="is not a fence"):
            Fence(fd)
    finally:
        os.close(fd)
        epoll.close()
