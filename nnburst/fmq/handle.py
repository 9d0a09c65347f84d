"""The C handle of a queue: who keeps it mapped, and what becomes of it in a forked child."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._core._nnburst import ffi, lib, queue_calls
from .._core.leaving import abandon_when_forked
from ..errors import BadState


def _not_here(_: object) -> Any:
    return NotImplemented


class Handle:
    """An ``nnb_mq *`` that is closed when nothing refers to it any more.

    A queue, the NumPy views on its ring and a call that waits in another thread each hold one reference, so closing
    the queue never unmaps memory that a view still shows.

    Attributes:
        read: Fills an array, or a new one of so many elements. Returns it; None if there are not enough; False if this
            reader was overtaken; NotImplemented for what only a call with `pointer` can do or explain.
        write: Appends an array or bytes. Returns True; False if there is no room; NotImplemented likewise.
    """

    __slots__ = ("__weakref__", "pointer", "read", "write")

    def __init__(self, pointer: Any, dtype: np.dtype[Any] | None = None) -> None:
        self.pointer: Any = None
        self.read: Callable[[Any], Any] = _not_here
        self.write: Callable[[Any], Any] = _not_here
        if dtype is not None:
            self.pointer = ffi.gc(pointer, lib.nnb_mq_close)
            probe = np.empty(2, dtype)
            start, _read_only = probe.__array_interface__["data"]
            bound = int(ffi.cast("uintptr_t", pointer)), self.pointer, dtype, np.ndarray, np.empty
            self.read, self.write = queue_calls(bound, probe, start) or (_not_here, _not_here)
        abandon_when_forked(self)

    def abandon(self) -> None:
        """In a forked child."""
        if self.pointer is not None:
            lib.nnb_mq_inherit(self.pointer)

    def live(self) -> Any:
        """The pointer; `BadState` if the queue is closed."""
        if self.pointer is None:
            raise BadState("the queue is closed")
        return self.pointer


CLOSED = Handle(None)


class _RingMemory:
    """The owner of the ring's bytes, for NumPy."""

    __slots__ = ("__array_interface__", "_handle")

    def __init__(self, handle: Handle, address: int, size: int, read_only: bool) -> None:
        self._handle = handle
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, read_only), "version": 3}


def ring_array(handle: Handle, start: Any, dtype: np.dtype[Any], read_only: bool) -> np.ndarray[Any, np.dtype[Any]]:
    """The whole ring, from a ``uint8_t *`` on, as an array of elements that keeps the handle alive."""
    pointer = handle.live()
    size = lib.nnb_mq_capacity(pointer) * lib.nnb_mq_quantum(pointer)
    address = int(ffi.cast("uintptr_t", start))
    return np.asarray(_RingMemory(handle, address, size, read_only)).view(dtype)
