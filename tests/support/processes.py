"""Other processes: to stop, to wait for, to listen to; and the descriptors of this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support import ROOT
from support.waiting import PATIENCE, until

_FUTEX_WAIT_BITSET = 9  # without FUTEX_PRIVATE_FLAG, which the waits of the interpreter's own locks have


def stop(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all_stand_still(pid), "the process goes on")


def all_stand_still(pid: int) -> bool:
    """Whether no thread of a process runs."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


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

    def finish(self) -> int:
        """Reap the client; returns its status."""
        status = self.process.wait(PATIENCE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return status


def open_fds() -> set[int]:
    """Descriptors of this process, without the one that lists them."""
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.readlink(f"/proc/self/fd/{name}")
            fds.add(int(name))
    return fds


def children(pid: int) -> set[int]:
    """Return the processes that a process has started and that are its children."""
    return {
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    }


def children_of_keeper(pid: int) -> set[int]:
    """Return the processes that run beside a shared service: its keeper has started them."""
    (keeper,) = children(pid)
    return children(keeper)
