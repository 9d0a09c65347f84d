"""Owners of file descriptors, which close each descriptor once and can be pickled for ``multiprocessing`` children.

A destructor in C closes each descriptor: a signal could interrupt a Python finaliser, and the descriptor would stay
open.

Closing a file on FUSE or NFS waits for the file's server, which may not answer. Closing a socket may wait, too, if the
socket's creator has set SO_LINGER. So a separate thread closes such files and sockets.
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
from .errno import as_error, meaning
from .file_system import may_block

_LONGEST_POLL = 1e6
_cast = partial(ffi.cast, ffi.typeof("void *"))


def _own(flags: Iterable[int], fds: Iterable[int]) -> Iterator[Any]:
    """Yield an object for each descriptor. When the object is dropped, C closes the descriptor. `flags` of `_flags`."""
    return map(ffi.gc, map(_cast, map(operator.or_, flags, fds)), repeat(lib.nnb_fd_drop))


def _flags(fds: Iterable[int]) -> list[int]:
    return [lib.NNB_FD_MAY_BLOCK if may_block(fd) else 0 for fd in fds]


def _number(owned: Any) -> int:
    number = int(ffi.cast("intptr_t", owned))
    return number if number < lib.NNB_FD_MAY_BLOCK else number - lib.NNB_FD_MAY_BLOCK


def close_fds(fds: list[int]) -> None:
    """Close all descriptors of a list, and empty the list.

    An interrupt neither loses a descriptor nor closes one twice. A separate thread closes descriptors that may block.
    """
    with contextlib.suppress(IndexError):  # Another thread has taken the last one.
        list(_own(_flags(fds), iter(partial(fds.pop, 0), None)))


class FdSet:
    """File descriptors that are closed by `close`, or when this object is collected.

    Args:
        fds: Descriptors that this object owns from now on.
    """

    __slots__ = ("_owned", "closed")

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self.closed = False
        numbers = list(fds)
        self._owned: list[Any] = list(_own(_flags(numbers), numbers))

    @classmethod
    def create(cls, call: Callable[..., int], *args: Any) -> Self:
        """Call a function that returns a descriptor, and return a set that owns the descriptor.

        An interrupt cannot lose the descriptor. Raises the same errors as `system`.
        """
        fds = cls()
        try:
            fds._owned.extend(_own((0,), starmap(call, (args,))))
        except OSError as error:
            raise as_error(call, error) from error
        return fds

    @classmethod
    def duplicate(cls, fds: Iterable[int]) -> Self:
        """Return a set of duplicates; the caller still owns the originals."""
        copies, numbers = cls(), tuple(fds)
        for fd in numbers:  # Check all before the first copy: a copy could get the number of a closed descriptor.
            if not isinstance(fd, int) or fd < 0:
                raise InvalidArgument(f"{fd!r} is not a file descriptor")
            try:
                fcntl.fcntl(fd, fcntl.F_GETFD)
            except (OSError, OverflowError) as error:
                raise InvalidArgument(f"file descriptor {fd} is not open") from error
        try:
            copies._owned.extend(_own(_flags(numbers), map(os.dup, numbers)))  # An interrupt cannot divide this step.
        except OSError as error:
            copies.close()
            raise ResourceExhausted(
                f"cannot duplicate {len(numbers)} file descriptors: {meaning(error.errno or 0)}"
            ) from error
        return copies

    def _open(self) -> tuple[Any, ...]:
        """Return objects that keep the descriptors open. Raises `BadState` if the set is closed."""
        owned = tuple(self._owned)
        if self.closed:
            raise BadState("the file descriptors are closed; duplicate them before closing their owner")
        return owned

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors, still owned by this object. Raises `BadState` if the set is closed."""
        return tuple(map(_number, self._open()))

    def copy(self) -> Self:
        """Return a set of duplicates. Raises `BadState` if this set is closed."""
        owned = self._open()  # `owned` keeps them open until this method returns.
        return self.duplicate(map(_number, owned))

    def add(self, fd: int) -> int:
        """Take ownership of one more descriptor and return it."""
        self._owned.extend(_own(_flags((fd,)), (fd,)))
        return fd

    def disown(self, which: slice) -> tuple[int, ...]:
        """Return the selected descriptors, which the caller then owns."""
        selected = self._owned[which]
        del self._owned[which]
        for owned in selected:
            ffi.gc(owned, None)
        return tuple(map(_number, selected))

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


def wait_readable(fds: Iterable[int], seconds: float | None = None, events: int = select.POLLIN) -> set[int]:
    """Wait until a descriptor is readable or its peer has closed. A pidfd is readable when its process has ended.

    Args:
        fds: Descriptors.
        seconds: Time limit; None for no limit.
        events: Events to poll for; 0 to wait only until a peer closes.

    Returns:
        The ready descriptors; empty after the time limit.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, events)
    return {fd for fd, _ in poll.poll(None if seconds is None else math.ceil(min(seconds, _LONGEST_POLL) * 1000))}
