"""A client's side of the zygote: the processes that are forked from it.

A request is one message over the zygote's control socket. Descriptors go with it: the end of a socketpair for answers,
the working directory, stderr and those that the process takes by name. The process answers with its id and a pidfd, and
at its end the zygote with its exit status. What else a child inherits is the zygote's, so a zygote is used as long as
the client stands as it did when it was started, and then replaced.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ..._core.deadline import Deadline
from ..._core.errno import system
from ..._core.fds import FdSet
from ..._core.leaving import LEAVING, ProcessLock, abandon_when_forked
from ...errors import MissedDeadline

_STATUS = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "Cap", "NoNewPrivs", "Seccomp", "Mems_allowed:")
"""Beginnings of lines."""
_FILES = ("limits", "cgroup", "oom_score_adj", "attr/current")
_INT = array("i").itemsize
_SEQPACKET = socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC


class Forked:
    """A process that the zygote has forked, to be used as a `subprocess.Popen`.

    Args:
        pid: Of the process.
        fds: A pidfd of it, and where the zygote tells how it ended.
    """

    def __init__(self, pid: int, fds: FdSet) -> None:
        self.pid = pid
        self._fds: FdSet | None = fds  # closed with the last reference: another thread may be using them
        self._status: int | None = None
        abandon_when_forked(self)

    def abandon(self) -> None:
        """In a forked child."""
        self._fds = None

    def pidfd(self) -> int:
        """Return a pidfd, once it has been forked."""
        assert self._fds is not None
        return system(os.dup, self._fds.fds[0])

    def kill(self) -> None:
        fds = self._fds
        if fds is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fds.fds[0], signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit status when it has ended, or minus a signal; None if the zygote does not tell.

        Raises:
            TimeoutExpired: It has not.
        """
        fds = self._fds
        if fds is not None:
            pidfd, told = fds.fds
            if not _readable(pidfd, timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            if _readable(told, LEAVING) and (text := os.read(told, 16)):
                self._status = int(text)
            self._fds = None
        return self._status


class _Zygote:
    """The process, from its client's side.

    Attributes:
        is_refusing: Whether it cannot be forked: a library has started threads, as it would in the next one.
    """

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.is_refusing = False
        ours, theirs = system(socket.socketpair, *_SEQPACKET)
        self.control = FdSet((ours.detach(),))
        with theirs:
            process = subprocess.Popen(
                [*kind.command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=kind.env,
            )
        _processes.append(process)
        abandon_when_forked(self)

    def abandon(self) -> None:
        """In a forked child, which has one of its own."""
        global _current
        _current = None
        self.control.close()

    def dismiss(self) -> None:
        """Have it end with its last child."""
        with contextlib.suppress(OSError), self._socket() as control:
            control.shutdown(socket.SHUT_RDWR)

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self.control.fds[0]))

    def send(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        with self._socket() as control:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            control.sendmsg([json.dumps(request).encode()], rights, socket.MSG_DONTWAIT)

    def fork(self, request: Mapping[str, object], fds: Sequence[int], deadline: Deadline) -> Forked | None:
        """Have a process forked; None if it cannot be, or the zygote has gone."""
        ours, theirs = system(socket.socketpair, *_SEQPACKET)
        with ours:
            with theirs:
                self.send(request, [theirs.fileno(), *fds])
            if not _readable(ours.fileno(), deadline.left()):
                raise MissedDeadline("the zygote has not answered")
            text, received, flags, _ = ours.recvmsg(16, socket.CMSG_LEN(_INT), socket.MSG_CMSG_CLOEXEC)
            self.is_refusing = text == b"threads"
            if self.is_refusing:
                return None
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "the pidfd is lost")
            if not received:  # no process, or one that had not answered when it ended
                raise EOFError
            return Forked(int(text), FdSet((int.from_bytes(received[0][2], sys.byteorder), ours.detach())))


_lock = ProcessLock()
_current: _Zygote | None = None
_processes: list[subprocess.Popen[bytes]] = []
"""Zygotes that were not waited for."""


def fork(
    command: Sequence[str],
    env: dict[str, str],
    request: Mapping[str, object],
    fds: Sequence[int],
    deadline: Deadline,
) -> Forked | None:
    """Have the zygote fork a process; None if it cannot, so that the process is to be started afresh.

    Args:
        command: Which starts a zygote.
        env: Its environment, and that of its children.
        request: The names of some descriptors, the devices and other options, for the process's command line, and
            variables of the process alone.
        fds: What becomes stdout and stderr, and those that are named.
        deadline: Until when.

    Raises:
        MissedDeadline: It has not answered.
        ResourceExhausted: There are no descriptors for it.
        OSError: Likewise, or no processes.
    """
    try:
        kind = _Kind(command, env, _standing())
        directory = FdSet((os.open(".", os.O_PATH | os.O_CLOEXEC),))
        blocked, cpus = signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.sched_getaffinity(0)
    except OSError:  # there is something odd about this process
        return None
    zygote = _zygote(kind)
    if zygote.is_refusing:
        return None
    request = {**request, "blocked": [*map(str, blocked)], "cpus": [*map(str, cpus)]}
    try:
        return zygote.fork(request, (*directory.fds, *fds), deadline)
    except (BlockingIOError, ConnectionError, EOFError):
        _forget(zygote)
        return None
    except MissedDeadline:  # perhaps it stands still
        _forget(zygote)
        raise


def _zygote(kind: _Kind) -> _Zygote:
    """Return one of that kind."""
    global _current
    with _lock.lock:
        if _current is None or _current.kind != kind:
            if _current is not None:
                _current.dismiss()
            zygotes()
            _current = _Zygote(kind)
        return _current


def _forget(zygote: _Zygote) -> None:
    global _current
    zygote.dismiss()
    with _lock.lock:
        if _current is zygote:
            _current = None


def zygotes() -> list[int]:
    """Return the process ids of those that are there."""
    with _lock.lock:
        _processes[:] = [process for process in _processes if process.poll() is None]
        return [process.pid for process in _processes]


def descriptors() -> tuple[int, ...]:
    """Return the descriptors that the zygote takes in this process."""
    zygote = _current
    return () if zygote is None else zygote.control.fds


def end() -> None:
    """End the zygotes, and wait for them: their children have ended."""
    if _current is not None:
        _forget(_current)
    for process in _processes:
        try:
            process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _processes.clear()


class _Kind(Struct, frozen=True):
    """What a process inherits and is not sent with each request."""

    command: Sequence[str]
    env: dict[str, str]
    standing: tuple[object, ...]


def _standing() -> tuple[object, ...]:
    """Return rights, limits and namespaces of this thread."""
    own = "/proc/thread-self/"
    status = [line for line in _read(own + "status").splitlines() if line.startswith(_STATUS)]
    namespaces = [os.readlink(f"{own}ns/{name}") for name in os.listdir(f"{own}ns")]
    root = os.stat("/")
    return (
        *(_read(own + name) for name in _FILES),
        *status,
        *namespaces,
        (root.st_dev, root.st_ino),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        os.sched_getparam(0).sched_priority,
    )


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def _readable(fd: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else math.ceil(seconds * 1000)))
