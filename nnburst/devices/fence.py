"""Fences: file descriptors that report the end of an execution to any number of processes.

A fence is one of two connected stream sockets. The process that will signal the fence keeps the second socket in a
`FenceSignal`. From the beginning, the second socket has one unread byte. A socket that closes with unread data makes
the connected socket report an error. So when a process ends for any reason, the kernel puts its active fences in error.

====================  ==================================================  =========================================
state                 how it comes about                                  ``poll(fd, POLLIN)`` says
====================  ==================================================  =========================================
active                                                                    nothing
signalled             the `FenceSignal` reads its byte, writes another    ``POLLIN``, soon with ``POLLHUP``
error                 the `FenceSignal` closes with its byte unread       ``POLLIN | POLLERR | POLLHUP``
====================  ==================================================  =========================================

An eventfd cannot report errors, a reader of a pipe can open its writing end and so prevent a hang-up, and shared memory
cannot be polled.

A waiter must not read from a fence: after the last byte is read, other waiters see an error. Only the `FenceSignal` can
make a fence report success.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import math
import os
import select
import struct
import termios
from typing import TYPE_CHECKING

from .._core.deadline import Deadline
from .._core.fds import FdSet
from .._core.leaving import Closing, abandon_when_forked
from ..errors import GeneralFailure, InvalidArgument, MissedDeadline, ResourceExhausted

if TYPE_CHECKING:
    import socket

LONGEST_MS = 2**31 - 1
"""Largest timeout of ``poll`` in milliseconds."""
_ANONYMOUS = ("anon_inode:[eventfd]", "anon_inode:[timerfd]", "anon_inode:[pidfd]", "anon_inode:sync_file")


class FenceState(enum.Enum):
    """The state of a fence. Only ``ACTIVE`` can still change."""

    ACTIVE = "active"
    SIGNALLED = "signalled"
    ERROR = "error"


class Fence(Closing):
    """A descriptor that becomes readable when an event has happened. Context manager; picklable for `multiprocessing`.

    Args:
        fd: A socket, a pipe, an eventfd, a timerfd, a pidfd or a ``sync_file``, which the caller keeps and closes.
            Files, devices and epoll sets are refused, because polling them may block without limit.

    Raises:
        InvalidArgument: The descriptor is of another kind, or is not open.
        ResourceExhausted: The process has too many open files.

    Example:
        >>> import socket
        >>> a, b = socket.socketpair()
        >>> with a, b, nnburst.nnapi.Fence(a.fileno()) as fence:
        ...     _ = b.send(b".")
        ...     fence.state.name
        'SIGNALLED'
    """

    def __init__(self, fd: int) -> None:
        self._own = FdSet.duplicate((fd,))
        try:
            _check_kind(self._own.fds[0])
        except BaseException:
            self._own.close()
            raise

    def fileno(self) -> int:
        """The descriptor, which still belongs to this object. Poll it, but do not read from it.

        Raises:
            BadState: The fence is closed.
        """
        return self._own.fds[0]

    def detach_copy(self) -> int:
        """Return a duplicate of the descriptor, which the caller owns.

        Raises:
            BadState: The fence is closed.
            ResourceExhausted: The process has too many open files.
        """
        try:
            return os.dup(self.fileno())
        except OSError as error:
            raise ResourceExhausted(f"a fence cannot be duplicated: {error.strerror}") from error

    def duplicate(self) -> Fence:
        """Return a second `Fence` for the same event. Raises the errors of `detach_copy`."""
        return Fence(self.fileno())

    @property
    def state(self) -> FenceState:
        """The current state of the fence."""
        return self._state_within(0)

    def _state_within(self, milliseconds: int | None) -> FenceState:
        """Wait while the fence is active, at most `milliseconds` (None: without limit); return the state."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        found = poll.poll(milliseconds)
        return state_of_events(self.fileno(), found[0][1]) if found else FenceState.ACTIVE

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the fence is signalled.

        Args:
            timeout: Seconds; None for no limit, 0 to check without waiting.

        Raises:
            GeneralFailure: The fence is in error: its event failed, or the signalling process ended.
            MissedDeadline: The fence is still active at the timeout.
        """
        limit = Deadline.after(timeout).left()
        state = self._state_within(None if limit is None else min(math.ceil(limit * 1000), LONGEST_MS))
        if state is FenceState.ACTIVE:
            raise MissedDeadline("the fence was not signalled in time; wait longer for it")
        if state is FenceState.ERROR:
            raise GeneralFailure("the fence is in error: what it stands for has failed, or its process has ended")

    def close(self) -> None:
        self._own.close()


def state_of_events(fd: int, events: int) -> FenceState:
    """Return the state of a fence, given the events from a poll for ``POLLIN``."""
    if events & (select.POLLERR | select.POLLNVAL):
        return FenceState.ERROR
    if events & select.POLLHUP and not (events & select.POLLIN and _has_data(fd)):
        return FenceState.ERROR
    return FenceState.SIGNALLED if events & select.POLLIN else FenceState.ACTIVE


def _has_data(fd: int) -> bool:
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    except OSError:  # This is no stream, so POLLIN alone means signalled.
        return True
    return bool(count)


def _check_kind(fd: int) -> None:
    """Raise `InvalidArgument` for a kind of descriptor whose poll can block."""
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")  # This does not call the descriptor's file system.
    except OSError as error:
        raise InvalidArgument(f"file descriptor {fd} cannot be looked at: {error.strerror}") from error
    if name in _ANONYMOUS or name.startswith(("socket:", "pipe:", "pidfd:")):
        return
    with contextlib.suppress(OSError):  # This succeeds for a named FIFO.
        fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
        return
    raise InvalidArgument(
        f"{name} is not a fence: give a socket, a pipe, an eventfd, a timerfd, a pidfd or a sync file"
    )


class FenceSignal:
    """The object that signals a fence. If it is deleted or its process ends before `set`, the fence is in error.

    As a context manager, this object calls `fail` at the end of the block. `fail` does nothing after `set`.

    Attributes:
        fence: The fence, for waiters.

    Raises:
        ResourceExhausted: The process has too many open files.
    """

    def __init__(self) -> None:
        import socket

        self._own: list[socket.socket] = []
        self._no_signal = int(socket.MSG_NOSIGNAL)
        try:
            waiters, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise ResourceExhausted(f"no descriptors for a fence: {error.strerror}") from error
        self._own.append(own)
        with waiters:
            own.setblocking(False)
            waiters.send(b"\0")  # `own` must read this byte to close without an error.
            waiters.shutdown(socket.SHUT_WR)  # No other byte can follow.
            self.fence = Fence(waiters.fileno())
        abandon_when_forked(self)

    def set(self) -> None:
        """Signal the fence, unless `set` or `fail` was called before."""
        if own := self._take_socket():
            with own, contextlib.suppress(OSError):  # All waiters may have closed.
                own.recv(1)
                own.send(b"\0", self._no_signal)

    def fail(self) -> None:
        """Put the fence in error, unless `set` or `fail` was called before."""
        if own := self._take_socket():
            own.close()

    def __enter__(self) -> FenceSignal:
        return self

    def __exit__(self, *error: object) -> None:
        self.fail()

    def abandon(self) -> None:
        """Close this object's socket in a forked child. Only the parent process may signal the fence."""
        self.fail()

    def __del__(self) -> None:
        self.fail()

    def _take_socket(self) -> socket.socket | None:
        try:
            return self._own.pop()  # Only one thread gets the socket.
        except IndexError:
            return None
