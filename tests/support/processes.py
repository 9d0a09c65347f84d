"""Other processes: to stop, to wait for, to listen to; and the descriptors of this one."""

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
    """Stop a process, and wait until none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all_stand_still(pid), "the process goes on")


def all_stand_still(pid: int) -> bool:
    """Whether no thread of a process runs."""
    return stands(pid, "T")


def stands(pid: int, how: str) -> bool:
    """Whether all threads of a process are in a state."""
    return all(stat.rpartition(")")[2].split()[0] == how for stat in of_threads(pid, "stat"))


def rests(pid: int, looks: int = 20) -> bool:
    """Whether no thread of a process runs, or has run between so many looks."""

    def switches() -> list[list[str]]:
        return [status.splitlines()[-2:] for status in of_threads(pid, "status")]

    before = switches()
    for _ in range(looks):
        if not stands(pid, "S"):
            return False
        time.sleep(0.001)
    return switches() == before


def of_threads(pid: int, file: str) -> list[str]:
    """What the kernel says of each thread of a process in a file, without those that end meanwhile."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append((task / file).read_text())
    return found


@contextlib.contextmanager
def no_more_files(pid: int) -> Iterator[None]:
    """Have a process be refused any further descriptor."""
    limit, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    unused = next(n for n in range(limit) if not os.path.lexists(f"/proc/{pid}/fd/{n}"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (unused, most))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, most))


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a child process stand still in the block."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_gone(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended; closes it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    gone = poll.poll(PATIENCE * 1000)
    if not gone:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert gone, "the process is still there"


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process says."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    assert poll.poll(PATIENCE * 1000), "the process said nothing"
    return process.stdout.readline()


def sleeps_on_an_event_word(pid: int) -> bool:
    """Whether a thread of a process is inside the kernel, waiting for an event flag.

    Raises:
        OSError: The kernel does not tell.
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
    """Run Python to its end, in the source tree unless another directory is given; what it prints is in the result."""
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 2 * PATIENCE, **process}
    return subprocess.run([sys.executable, *arguments], **options)


def start_python(program: str, *arguments: str, **process: Any) -> subprocess.Popen[str]:
    """Start a program that one talks with by lines."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT, text=True, **pipes, **process)


class Client:
    """A client program in a process of its own. It prints one line of process ids when it is where it should be."""

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
        """Say a line to the client."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> int:
        """Close its standard input, and reap the client; returns its status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(PATIENCE)
        self.process.stdout.close()
        return status


def mappings(name: str) -> int:
    """Count the mappings of this process whose file has a name."""
    return sum(name in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())


def open_fds() -> set[int]:
    """Descriptors of this process, without the one that lists them."""
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.readlink(f"/proc/self/fd/{name}")
            fds.add(int(name))
    return fds


def descriptors(pid: int) -> list[str]:
    """What each descriptor of a process is, without those that are closed meanwhile."""
    files = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            files.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return files


def open_files(pid: int) -> set[str]:
    """What a process has open: paths, and sockets by number, which none gets twice."""
    return set(descriptors(pid))


def children(pid: int) -> set[int]:
    """Return the processes that a process has started and that are its children."""
    return {int(child) for listed in of_threads(pid, "children") for child in listed.split()}


def descendants(pid: int) -> set[int]:
    """Return the processes below a process, of those that are there."""
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
    """The process that runs a session's model."""
    device = session.compilation.device
    hello, _ = device.place().connection.call(protocol.Hello(version=protocol.VERSION, pid=0))  # type: ignore[attr-defined]
    return int(hello.pid)


def workers_of(broker: int) -> set[int]:
    """Return the processes that run models for a shared service."""
    found = set()
    for pid in descendants(broker):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it has just closed that one
                    found |= {pid} if "nnburst-watch" in os.readlink(entry) else set()
    return found


def beside(broker: int) -> set[int]:
    """Return the processes that a shared service has beside its workers: gateways, and what serves metrics."""
    neither = command_of(broker), b""  # one that has not come to run its own program, or has ended
    commands = {pid: command_of(pid) for pid in children(broker)}
    return {pid for pid, said in commands.items() if said not in neither and b"nnburst.service." not in said}


def command_of(pid: int) -> bytes:
    """The command line of a process; nothing if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
