"""Owned file descriptors: closed once, duplicated when shared, carried into ``multiprocessing`` children.

Each descriptor has a destructor in C. A Python finaliser could be interrupted half-way, and the interpreter drops its
exceptions: the descriptor would be lost.

Closing a file on FUSE or NFS asks its server, and the server of another user's files may not answer. Closing a socket
may take as long as its maker likes. Such a descriptor is always closed by a thread of its own, also when a worker, the
owner of a connection or a finaliser drops it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import operator
import os
import select
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat, starmap
from typing import Any, Self

from ..errors import BadState, InvalidArgument, ResourceExhausted
from ._nnburst import ffi, lib
from .errno import failed, meaning
from .file_system import may_block

_LONGEST_POLL = 1e6
_cast = partial(ffi.cast, ffi.typeof("void *"))


def _owned(flags: Iterable[int], fds: Iterable[int]) -> Iterator[Any]:
    """Yield each descriptor as an object that C closes when it is dropped, without a step in Python."""
    return map(ffi.gc, map(_cast, map(operator.or_, flags, fds)), repeat(lib.nnb_fd_drop))


def _flags(fds: Iterable[int]) -> list[int]:
    return [lib.NNB_FD_MAY_BLOCK if may_block(fd) else 0 for fd in fds]


def _number(owned: Any) -> int:
    number = int(ffi.cast("intptr_t", owned))
    return number if number < lib.NNB_FD_MAY_BLOCK else number - lib.NNB_FD_MAY_BLOCK


def close_fds(fds: list[int]) -> None:
    """Close descriptors in any state, and empty the list.

    All are taken from the list in one step, so that an interrupt neither loses a descriptor nor closes one twice. A
    thread closes a descriptor that may block.
    """
    with contextlib.suppress(IndexError):  # Another thread has taken the last one.
        list(_owned(_flags(fds), iter(partial(fds.pop, 0), None)))


class FdSet:
    """A few descriptors with one owner, which closes them by `close` or when it is collected.

    Args:
        fds: Descriptors that this object owns from now on.
    """

    __slots__ = ("_owned", "closed")

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self.closed = False
        given = list(fds)
        self._owned: list[Any] = list(_owned(_flags(given), given))

    @classmethod
    def made(cls, call: Callable[..., int], *args: Any) -> Self:
        """Return an owner of the descriptor that a function in C returns. Raises like `system` for a negative errno.

        An interrupt cannot come between the descriptor and its owner.
        """
        fds = cls()
        try:
            fds._owned.extend(_owned((0,), starmap(call, (args,))))
        except OSError as error:
            raise failed(call, error) from error
        return fds

    @classmethod
    def duplicate(cls, fds: Iterable[int]) -> Self:
        """Return a set of copies; the descriptors stay with the caller."""
        copies, given = cls(), tuple(fds)
        for fd in given:  # All are checked before the first copy, which could get the number of a closed descriptor.
            if not isinstance(fd, int) or fd < 0:
                raise InvalidArgument(f"{fd!r} is not a file descriptor")
            try:
                fcntl.fcntl(fd, fcntl.F_GETFD)
            except (OSError, OverflowError) as error:
                raise InvalidArgument(f"file descriptor {fd} is not open") from error
        try:
            copies._owned.extend(_owned(_flags(given), map(os.dup, given)))  # An interrupt cannot divide this step.
        except OSError as error:
            copies.close()
            raise ResourceExhausted(
                f"cannot duplicate {len(given)} file descriptors: {meaning(error.errno or 0)}"
            ) from error
        return copies

    def _open(self) -> tuple[Any, ...]:
        """Return an object that keeps the descriptors open if another thread closes the set. Raises `BadState`."""
        owned = tuple(self._owned)
        if self.closed:
            raise BadState("the file descriptors are closed; duplicate them before closing their owner")
        return owned

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors, still owned by this object. Raises `BadState` if the set is closed."""
        return tuple(map(_number, self._open()))

    def copy(self) -> Self:
        """Return a set of copies. Raises `BadState` if this set is closed. Another thread may close it meanwhile."""
        owned = self._open()  # `owned` keeps them open until this method returns.
        return self.duplicate(map(_number, owned))

    def add(self, fd: int) -> int:
        """Take ownership of one more descriptor and return it."""
        self._owned.extend(_owned(_flags((fd,)), (fd,)))
        return fd

    def disown(self, which: slice) -> tuple[int, ...]:
        """Return the descriptors and leave them to the caller."""
        taken = self._owned[which]
        del self._owned[which]
        for owned in taken:
            ffi.gc(owned, None)
        return tuple(map(_number, taken))

    def close(self) -> None:
        self.closed = True
        self._owned.clear()

    def __len__(self) -> int:
        return len(self.fds)

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import reduction  # Processes that pickle objects have imported it already.

        return _receive, ([reduction.DupFd(fd) for fd in self.fds],)


def _receive(parcels: list[Any]) -> FdSet:
    return FdSet(parcel.detach() for parcel in parcels)


def ready(fds: Iterable[int], seconds: float | None = None, events: int = select.POLLIN) -> set[int]:
    """Wait until a descriptor is readable, its other side has closed, or the process that it stands for has ended.

    Args:
        fds: Descriptors.
        seconds: Time limit; None for no limit.
        events: Events of poll; 0 waits for an end only.

    Returns:
        The ready descriptors; empty after the time limit.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, events)
    return {fd for fd, _ in poll.poll(None if seconds is None else math.ceil(min(seconds, _LONGEST_POLL) * 1000))}
