"""An open queue: its memory, what it says of itself, and what a code of the C core means to its user."""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable
from typing import Any

import numpy as np

from .._core._nnburst import ffi, lib
from .._core.errno import check
from .._core.fds import FdSet
from .._core.leaving import Closing
from ..errors import GeneralFailure, InvalidArgument, NNBurstError
from .descriptor import Flavour, Grantor
from .elements import Elements
from .handle import CLOSED, Handle


class QueueError(enum.IntEnum):
    """Why an error handler is called."""

    NONE = 0
    POINTER_CORRUPTION = 1
    """A shared counter has a value that no well-behaved peer can give it."""


ErrorHandler = Callable[[QueueError, str], object]


class QueueEnd(Closing):
    """What `MessageQueue` does with its queue as a whole."""

    __slots__ = (
        "__weakref__",
        "_dtype",
        "_exclusive",
        "_fds",
        "_flavour",
        "_grantors",
        "_handle",
        "_on_error",
        "_overruns",
        "_region",
        "_ring",
        "_ring_start",
    )

    def _open(
        self, grantors: tuple[Grantor, ...], fds: FdSet, dtype: np.dtype[Any], flavour: Flavour, options: int
    ) -> None:
        out = ffi.new("nnb_mq **")
        regions, numbers = ffi.new("nnb_grantor[]", [*grantors] or 1), ffi.new("int[]", [*fds.fds, -1])
        rc = lib.nnb_mq_open(out, regions, len(grantors), numbers, len(fds), dtype.itemsize, flavour, options)
        if rc < 0:
            fds.close()
            check(rc, f"cannot attach to a queue of {len(grantors)} regions in {len(numbers) - 1} memory objects")
        self._handle = Handle(out[0], dtype)
        self._fds = fds
        self._grantors = grantors
        self._dtype = dtype
        self._flavour = flavour
        self._exclusive = bool(options & lib.NNB_MQ_EXCLUSIVE)
        self._on_error: ErrorHandler | None = None
        self._overruns = 0
        self._region = ffi.new("nnb_mq_region *")
        self._ring: Elements | None = None
        self._ring_start: Any = None

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self._dtype

    @property
    def flavour(self) -> Flavour:
        """Synchronized or not."""
        return self._flavour

    @property
    def capacity(self) -> int:
        """Elements."""
        return int(lib.nnb_mq_capacity(self.handle))

    @property
    def quantum(self) -> int:
        """Size of an element in bytes."""
        return int(lib.nnb_mq_quantum(self.handle))

    @property
    def read_only(self) -> bool:
        """Whether the memory could only be mapped for reading (unsynchronized readers)."""
        return bool(lib.nnb_mq_is_read_only(self.handle))

    @property
    def closed(self) -> bool:
        """Whether the queue can no longer be used."""
        return self._handle.pointer is None

    @property
    def overruns(self) -> int:
        """How often this reader of an unsynchronized queue was overtaken by the writer."""
        return self._overruns

    @property
    def handle(self) -> Any:
        """The ``nnb_mq *``, still owned by this object.

        Raises:
            BadState: The queue is closed.
        """
        return self._handle.live()

    def _event_word(self) -> tuple[Any, object]:
        handle = self._handle
        word = lib.nnb_mq_event_word(handle.live())
        if word == ffi.NULL:
            raise InvalidArgument("the queue has no event word; make it with event_flag=True")
        return word, handle

    @property
    def available_to_read(self) -> int:
        """Elements that can be read now; 0 if the counters are corrupt (the error handler is told)."""
        return self._available(lib.nnb_mq_available_to_read(self.handle))

    @property
    def available_to_write(self) -> int:
        """Elements that fit now; 0 if the counters are corrupt (the error handler is told).

        Means nothing on the writer of an unsynchronized queue: a write that is not larger than the capacity succeeds.
        """
        return self._available(lib.nnb_mq_available_to_write(self.handle))

    def _available(self, rc: int) -> int:
        if rc == -errno.EBADMSG:
            self._report()
            return 0
        return check(rc, "MessageQueue")

    def set_error_handler(self, handler: ErrorHandler | None) -> None:
        """Have a function called whenever the shared counters are found corrupt.

        Args:
            handler: Called with the `QueueError` and a message; None removes it.
        """
        self._on_error = handler

    def close(self) -> None:
        """Let go of the memory; NumPy views on the ring stay valid. Ends waits in other threads. Idempotent."""
        if self._handle is not CLOSED:
            self._handle = CLOSED
            self._ring = None
            self._fds.close()

    def __repr__(self) -> str:
        if self.closed:
            return "MessageQueue(closed)"
        return f"MessageQueue({self._dtype}, {self.capacity}, flavour={self._flavour.name.lower()!r})"

    def _explain(self, rc: int, what: str, special: dict[int, NNBurstError] | None = None) -> bool:
        """Return False for failures that a caller must expect, raise for the others."""
        if rc == -errno.EAGAIN:
            return False
        if rc == -errno.EOVERFLOW:
            self._overruns += 1
            return False
        if rc == -errno.EBADMSG:
            self._report()
        corrupt = (
            f"{what}: the shared counters are corrupt, or pages of the memory are gone; make a new queue, with "
            "exclusive=False if several objects take turns as its writer or reader"
        )
        too_long = f"{what} exceeds the capacity of {self.capacity}; make a longer queue"
        own = {errno.EBADMSG: GeneralFailure(corrupt), errno.EMSGSIZE: InvalidArgument(too_long)}
        check(rc, what, own | (special or {}))
        return True

    def _report(self) -> None:
        if self._on_error is not None:
            self._on_error(QueueError.POINTER_CORRUPTION, "a shared counter has an impossible value")
