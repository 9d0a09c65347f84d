"""The C handle of a queue: who keeps it mapped, and what becomes of it in a forked child."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._core._nnburst import ffi, lib
from .._core.leaving import abandon_when_forked
from ..errors import BadState


class Handle:
    """An ``nnb_mq *`` that is closed when nothing refers to it any more.

    A queue, the NumPy views on its ring and a call that waits in another thread each hold one reference, so closing
    the queue never unmaps memory that a view still shows.
    """

    __slots__ = ("__weakref__", "pointer")

    def __init__(self, pointer: Any) -> None:
        self.pointer = None if pointer is None else ffi.gc(pointer, lib.nnb_mq_close)
        abandon_when_forked(self)

    def abandon(self) -> None:
        """In a forked child."""
        if self.pointer is not None:
            lib.nnb_mq_inherit(self.pointer)

    def live(self) -> Any:
        """The pointer.

        Raises:
            BadState: The queue is closed.
        """
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
    """The whole ring as an array of elements that keeps the handle alive.

    Args:
        handle: The handle.
        start: ``uint8_t *`` to the first byte of the ring.
        dtype: Element type.
        read_only: Whether the mapping is.
    """
    pointer = handle.live()
    size = lib.nnb_mq_capacity(pointer) * lib.nnb_mq_quantum(pointer)
    address = int(ffi.cast("uintptr_t", start))
    return np.asarray(_RingMemory(handle, address, size, read_only)).view(dtype)
