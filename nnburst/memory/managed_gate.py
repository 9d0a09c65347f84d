"""The users of each driver-managed buffer at the moment: the Python face of ``csrc/buffer_admission.c``."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._core._nnburst import ffi, lib
from .._core.errno import check
from .._core.leaving import process_lock
from ..errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from .managed import ManagedBuffer

_PATIENCE = 1.0
"""Seconds that a copy or an execution waits for another that uses the buffer in a way that excludes it."""
_SLICE_NS = 100_000_000
"""Between two looks for signals."""


class Outcome:
    """What becomes of the contents of buffers that were written."""

    UNCHANGED: int = lib.NNB_UNCHANGED
    COMMITTED: int = lib.NNB_COMMITTED
    LOST: int = lib.NNB_LOST


class Gate:
    """The state of all buffers of the process, and a lock for what Python knows of their bytes."""

    def __init__(self) -> None:
        self.lock = process_lock()
        self.closed: list[ManagedBuffer] = []
        """Buffers to free once they are no longer used."""

    @property
    def moves(self) -> int:
        """Changes when any buffer grows, is closed, or gets contents of other dimensions."""
        return int(lib.nnb_gate_moves(0))

    def moved(self) -> None:
        """Views of buffers that exist are to be looked at again."""
        lib.nnb_gate_moves(1)

    @property
    def waiting(self) -> int:
        """How many threads wait for buffers that others use."""
        return int(lib.nnb_gate_waiting())

    def new_buffer(self) -> Any:
        """Return the handle of a buffer without contents."""
        out = ffi.new("nnb_buffer **")
        check(lib.nnb_buffer_create(out), "cannot make a buffer")
        return ffi.gc(out[0], lib.nnb_buffer_destroy)


gate = Gate()


class Uses:
    """The buffers of one request or copy, which are taken and given back together; none is both read and written."""

    __slots__ = ("handle",)

    def __init__(self, reading: Sequence[Any], writing: Sequence[Any]) -> None:
        out = ffi.new("nnb_uses **")
        first, second = ffi.new("nnb_buffer *[]", list(reading)), ffi.new("nnb_buffer *[]", list(writing))
        rc = lib.nnb_uses_create(out, first, len(reading), second, len(writing))
        check(rc, "cannot note the buffers of a request")
        self.handle = ffi.gc(out[0], lib.nnb_uses_destroy)

    def enter(self) -> None:
        """Keep writers out of those that are read and everybody out of those that are written."""
        rc = lib.nnb_uses_enter(self.handle, 0)
        if rc == -errno.EAGAIN:
            end = time.monotonic_ns() + int(_PATIENCE * 1e9)
            while rc == -errno.EAGAIN and (now := time.monotonic_ns()) < end:
                rc = lib.nnb_uses_enter(self.handle, min(end, now + _SLICE_NS))
        if rc < 0:
            closed = InvalidArgument("the buffer was closed, so its token names nothing any more")
            in_use = ResourceExhausted("the buffer is in use by another execution or copy; try again")
            check(rc, "cannot use the buffer", {errno.ESHUTDOWN: closed, errno.EAGAIN: in_use})

    def leave(self, outcome: int) -> None:
        if lib.nnb_uses_leave(self.handle, outcome):
            free_closed_buffers()


def free_closed_buffers() -> None:
    """Free the buffers that were closed while in use and are not used any more."""
    with gate.lock:
        gate.closed = [buffer for buffer in gate.closed if not buffer.drop()]
