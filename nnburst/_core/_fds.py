"""Owned file descriptors: closed once, duplicated when shared, carried into ``multiprocessing`` children."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from multiprocessing import reduction
from typing import Any, Protocol

from ..errors import BadState, InvalidArgument, ResourceExhausted

__all__ = ["FdSet"]


class _Detachable(Protocol):
    def detach(self) -> int: ...


class FdSet:
    """A few descriptors with one owner. Closes them when told to, or when it is collected.

    Args:
        fds: Descriptors that this object owns from now on.
    """

    __slots__ = ("_fds",)

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds: tuple[int, ...] | None = tuple(fds)

    @classmethod
    def duplicate(cls, fds: Iterable[int]) -> FdSet:
        """Own copies of descriptors that stay with the caller.

        Raises:
            InvalidArgument: One of them is not open.
            ResourceExhausted: The process has too many open files.
        """
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(_dup(fd))
        except BaseException:
            for fd in copies:
                os.close(fd)
            raise
        return cls(copies)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors, still owned by this object.

        Raises:
            BadState: They are closed.
        """
        if self._fds is None:
            raise BadState("the file descriptors are closed; duplicate them before closing their owner")
        return self._fds

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._fds is None

    def joined(self, other: FdSet) -> FdSet:
        """Move the descriptors of both into a new set."""
        both = FdSet(self.fds + other.fds)
        self._fds = other._fds = None
        return both

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        fds, self._fds = self._fds, None
        for fd in fds or ():
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        # A constructor that failed leaves no attribute; at interpreter exit the kernel closes.
        if getattr(self, "_fds", None) is not None and os is not None:
            self.close()

    def __len__(self) -> int:
        return len(self.fds)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, ([reduction.DupFd(fd) for fd in self.fds],)


def _dup(fd: int) -> int:
    if not isinstance(fd, int) or fd < 0:
        raise InvalidArgument(f"{fd!r} is not a file descriptor")
    try:
        return os.dup(fd)  # not inheritable, as every descriptor of Python
    except OSError as error:
        if error.errno == errno.EBADF:
            raise InvalidArgument(f"file descriptor {fd} is not open") from error
        raise ResourceExhausted(f"cannot duplicate file descriptor {fd}: {error.strerror}") from error


def _receive(parcels: list[_Detachable]) -> FdSet:
    return FdSet(parcel.detach() for parcel in parcels)
