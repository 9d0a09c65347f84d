"""Owned file descriptors: closed once, duplicated when shared, carried into ``multiprocessing`` children.

To close a file on FUSE or NFS is to ask its server, and the server of another user's files may not answer. Such a
descriptor is closed by a thread of its own, whoever lets go of it: a worker, the owner of a connection, a finaliser.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import fcntl
import os
import sys
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from ..errors import BadState, InvalidArgument, ResourceExhausted
from ._file_system import may_block

_MOST_CLOSERS = 32
_closers: list[int] = []
"""Threads that close what may block. If so many are stuck, closing is done in place: whoever goes on to send files of
such a server waits for it himself."""


def close_fds(fds: list[int]) -> None:
    """Close descriptors, whatever state they are in, and empty the list.

    Each is taken from the list and closed in one step, so that an interrupt loses none and none is closed twice. If one
    of them may block, a thread does it.
    """
    if any(map(may_block, fds)) and len(_closers) < _MOST_CLOSERS:
        with contextlib.suppress(RuntimeError):  # the system has no thread
            _thread.start_new_thread(_close_apart, (fds,))
            return
    _close(fds)


def _close(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError, IndexError):  # not open; another thread was faster
            collections.deque(map(os.close, iter(fds.pop, None)), maxlen=0)


def _close_apart(fds: list[int]) -> None:
    _closers.append(_thread.get_ident())
    try:
        _close(fds)
    finally:
        _closers.remove(_thread.get_ident())


os.register_at_fork(after_in_child=_closers.clear)


T = TypeVar("T", bound="FdSet")


class _Detachable(Protocol):
    def detach(self) -> int: ...


class FdSet:
    """A few descriptors with one owner. Closes them when told to, or when it is collected.

    Args:
        fds: Descriptors that this object owns from now on.
    """

    __slots__ = ("_closed", "_fds")

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._closed = False
        self._fds = list(fds)

    @classmethod
    def duplicate(cls: type[T], fds: Iterable[int]) -> T:
        """Own copies of descriptors that stay with the caller.

        Raises:
            InvalidArgument: One of them is not open.
            ResourceExhausted: The process has too many open files.
        """
        copies, given = cls(), tuple(fds)
        for fd in given:  # all of them first: a copy could get the number of one that is closed
            if not isinstance(fd, int) or fd < 0:
                raise InvalidArgument(f"{fd!r} is not a file descriptor")
            try:
                fcntl.fcntl(fd, fcntl.F_GETFD)
            except OSError as error:
                raise InvalidArgument(f"file descriptor {fd} is not open") from error
        try:
            copies._fds.extend(map(os.dup, given))  # one step for an interrupt; not inheritable, as all of Python's
        except OSError as error:
            copies.close()
            raise ResourceExhausted(f"cannot duplicate {len(given)} file descriptors: {error.strerror}") from error
        return copies

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors, still owned by this object.

        Raises:
            BadState: They are closed.
        """
        if self._closed:
            raise BadState("the file descriptors are closed; duplicate them before closing their owner")
        return tuple(self._fds)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def add(self, fd: int) -> int:
        """Own one more; returns it."""
        self._fds.append(fd)
        return fd

    def joined(self, other: FdSet) -> FdSet:
        """Move the descriptors of both into a new set."""
        both = FdSet(self.fds + other.fds)
        for moved in (self, other):
            moved._closed, moved._fds = True, []
        return both

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        self._closed = True
        close_fds(self._fds)

    def __del__(self) -> None:
        # A constructor that failed leaves no attribute; at interpreter exit, when modules are gone, the kernel closes.
        if getattr(self, "_fds", None) and not sys.is_finalizing():
            self.close()

    def __len__(self) -> int:
        return len(self.fds)

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import reduction  # whoever pickles this has it

        return _receive, ([reduction.DupFd(fd) for fd in self.fds],)


def _receive(parcels: list[_Detachable]) -> FdSet:
    return FdSet(parcel.detach() for parcel in parcels)
