"""A fence alone: its three states, who can change them, and which descriptors are none."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nnburst.devices.fence import Fence, FenceSignal, FenceState
from nnburst.errors import GeneralFailure, InvalidArgument, MissedDeadline
from support.waiting import PATIENCE


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
