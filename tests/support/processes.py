"""Functions that stop, watch and start other processes, and list descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nnburst
from nnburst.service.wire import protocol
from support import ROOT
from support.waiting import PATIENCE, until

_FUTEX_WAIT_BITSET = 9  # without FUTEX_PRIVATE_FLAG, which the waits of the interpreter's own locks have


def stop(pid: int) -> None:
    """Stop a process with SIGSTOP, and wait until all its threads are stopped."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all_stand_still(pid), "the process goes on")


def all_stand_still(pid: int) -> bool:
    """Return True if all threads of a process are stopped by a signal."""
    return stands(pid, "T")


def stands(pid: int, how: str) -> bool:
    """Return True if all threads of a process are in the state `how`, a letter of proc_pid_stat(5)."""
    return all(stat.rpartition(")")[2].split()[0] == how for stat in of_threads(pid, "stat"))


def rests(pid: int, looks: int = 20) -> bool:
    """Return True if all threads of a process sleep, and none has run during `looks` milliseconds."""

    def switches() -> list[list[str]]:
        return [status.splitlines()[-2:] for status in of_threads(pid, "status")]

    before = switches()
    for _ in range(looks):
        if not stands(pid, "S"):
            return False
        time.sleep(0.001)
    return switches() == before


def of_threads(pid: int, file: str) -> list[str]:
    """Return the content of a file in /proc for each thread of a process. Threads that end meanwhile are left out."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append((task / file).read_text())
    return found


@contextlib.contextmanager
def no_more_files(pid: int) -> Iterator[None]:
    """Let a process open no further descriptor in the ``with`` block."""
    limit, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    unused = next(n for n in range(limit) if not os.path.lexists(f"/proc/{pid}/fd/{n}"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (unused, most))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, most))


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a child process during the ``with`` block."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_gone(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended, and close the pidfd."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    gone = poll.poll(PATIENCE * 1000)
    if not gone:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert gone, "the process is still there"


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    assert poll.poll(PATIENCE * 1000), "the process said nothing"
    return process.stdout.readline()


def sleeps_on_an_event_word(pid: int) -> bool:
    """Return True if a thread of a process waits for an event flag in the kernel.

    Raises:
        OSError: The kernel does not show the threads' system calls.
    """
    for task in os.listdir(f"/proc/{pid}/task"):
        call = Path(f"/proc/{pid}/task/{task}/syscall").read_text().split()
        if len(call) > 2 and call[0] != "-1" and int(call[2], 16) == _FUTEX_WAIT_BITSET:
            return True
    return False


def wait_until_asleep(pid: int) -> None:
    """Wait until a thread of a process sleeps on an event flag."""
    until(lambda: sleeps_on_an_event_word(pid), "the reader never slept")


def run_python(*arguments: str, **process: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, by default in the source tree. The result contains its output."""
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 2 * PATIENCE, **process}
    return subprocess.run([sys.executable, *arguments], **options)


def start_python(program: str, *arguments: str, **process: Any) -> subprocess.Popen[str]:
    """Start a Python program with pipes for its standard input and output, which carry lines of text."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT, text=True, **pipes, **process)


class Client:
    """A client program in its own process. It prints one line of process ids when it is ready."""

    def __init__(self, program: str) -> None:
        path = os.pathsep.join((str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")))
        env = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.kill()
            self.finish()
            raise AssertionError("the client failed")
        self.pids = [int(word) for word in line.split()]
        self.pidfds = [os.pidfd_open(pid) for pid in self.pids]

    def say(self) -> None:
        """Send an empty line to the client."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> int:
        """Close the client's standard input, and wait for its end. Return its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(PATIENCE)
        self.process.stdout.close()
        return status


def mappings(name: str) -> int:
    """Count the mappings of this process whose line in /proc/self/maps contains `name`."""
    return sum(name in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())


def open_fds() -> set[int]:
    """Return the open descriptors of this process."""
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.readlink(f"/proc/self/fd/{name}")
            fds.add(int(name))
    return fds


def descriptors(pid: int) -> list[str]:
    """Return the target of each descriptor's link in /proc. Descriptors that are closed meanwhile are left out."""
    files = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            files.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return files


def open_files(pid: int) -> set[str]:
    """Return the open files of a process: paths, and sockets with their unique numbers."""
    return set(descriptors(pid))


def children(pid: int) -> set[int]:
    """Return the children of a process."""
    return {int(child) for listed in of_threads(pid, "children") for child in listed.split()}


def descendants(pid: int) -> set[int]:
    """Return all descendants of a process that are alive."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, below = set[int](), {pid}
    while below := {child for child, parent in parents.items() if parent in below}:
        found |= below
    return found


def worker_of(session: nnburst.Session) -> int:
    """Return the id of the process that runs a session's model."""
    device = session.compilation.device
    hello, _ = device.place().connection.call(protocol.Hello(version=protocol.VERSION, pid=0))  # type: ignore[attr-defined]
    return int(hello.pid)


def workers_of(broker: int) -> set[int]:
    """Return the processes that run models for a shared service."""
    found = set()
    for pid in descendants(broker):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # the process has closed the descriptor
                    found |= {pid} if "nnburst-watch" in os.readlink(entry) else set()
    return found


def beside(broker: int) -> set[int]:
    """Return the processes of a shared service other than its workers: gateways and metrics servers."""
    neither = command_of(broker), b""  # children that have not started their program, or have ended
    commands = {pid: command_of(pid) for pid in children(broker)}
    return {pid for pid, said in commands.items() if said not in neither and b"nnburst.service." not in said}


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
