"""A FIFO of NumPy elements in shared memory."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .._core._nnburst import ffi, lib
from .._core.deadline import Deadline
from .._core.errno import member
from .._core.fds import FdSet
from ..errors import InvalidArgument
from ..options import FlavourName, QueueLayout
from .descriptor import Flavour, Layout, MQDescriptor
from .elements import Elements, as_elements, element_count, element_type, readable, writable
from .event_flag import NOT_EMPTY, NOT_FULL, EventFlag
from .handle import CLOSED, ring_array
from .layout import create_memory
from .layout import options as open_options
from .queue_end import QueueEnd
from .transaction import MemTransaction

if TYPE_CHECKING:
    import numpy.typing as npt


class MessageQueue(QueueEnd):
    """A lock-free FIFO in shared memory: one writer, and one reader (or many, if unsynchronized).

    Making one creates the shared memory; `attach` joins an existing one. With its first write (read) an object becomes
    the writer (reader), and stays it: another object that writes as well is found out as a corrupt counter. An object
    that a forked child inherits becomes one in the child anew. One thread at a time may use an end.

    Args:
        dtype: Element type: any NumPy dtype without object fields, also structured.
        count: Capacity in elements; all of it is usable.
        flavour: ``"synchronized"`` or ``"unsynchronized"``, or a `Flavour`.
        event_flag: Whether the queue has an event word; blocking calls need one.
        layout: ``"lines"``, ``"stamped"`` or ``"compat"``, or a `Layout`.
        ring_fd: Put the ring into this memory object (from its beginning); it is duplicated. The counters stay in
            memory of the queue's own.
        exclusive: False lets several objects, of several threads or processes, take turns as the writer (reader). Each
            call then reads the counters again, which takes C about twice as long.

    Raises:
        InvalidArgument: The element type, the count or the memory object cannot be used.
        ResourceExhausted: Out of memory or file descriptors.

    Example:
        >>> from nnburst.fmq import MessageQueue
        >>> with MessageQueue(np.int32, 8) as writer, MessageQueue.attach(writer.descriptor) as reader:
        ...     writer.write(np.array([1, 2, 3], np.int32))
        ...     reader.read(3)
        True
        array([1, 2, 3], dtype=int32)
    """

    __slots__ = ()

    def __init__(
        self,
        dtype: npt.DTypeLike,
        count: int,
        *,
        flavour: Flavour | FlavourName = Flavour.SYNCHRONIZED,
        event_flag: bool = True,
        layout: Layout | QueueLayout = Layout.LINES,
        ring_fd: int | None = None,
        exclusive: bool = True,
    ) -> None:
        self._handle = CLOSED
        element = element_type(dtype)
        kind, drawing = member(Flavour, flavour, "flavour"), member(Layout, layout, "layout")
        size = element_count(count)
        if not size:
            raise InvalidArgument("count is 0; a queue holds at least one element")
        if drawing is not Layout.COMPAT and not event_flag:
            name = drawing.name.lower()
            raise InvalidArgument(f"the {name} layout always has an event word; use layout='compat' to do without")
        grantors, fds = create_memory(size, element.itemsize, kind, drawing, event_flag, ring_fd)
        self._open(grantors, fds, element, kind, open_options(reset=True, exclusive=exclusive, sealed=False))

    @classmethod
    def attach(
        cls,
        descriptor: MQDescriptor,
        dtype: npt.DTypeLike | None = None,
        *,
        flavour: Flavour | FlavourName | None = None,
        reset: bool = False,
        exclusive: bool = True,
        sealed: bool = False,
    ) -> MessageQueue:
        """Return another end of a queue that another object or process made.

        Args:
            descriptor: Its descriptor; stays with the caller.
            dtype: Element type; None for the descriptor's own, or raw bytes of the quantum's size.
            flavour: The expected one; None accepts either.
            reset: Set the counters to zero, which throws away what waits in the queue.
            exclusive: See the class.
            sealed: Refuse memory that its maker could truncate.

        Raises:
            InvalidArgument: The descriptor makes no sense, is of another element size or flavour, or does not fit its
                memory objects.
            BadState: The descriptor is closed.
        """
        hint = descriptor.dtype if dtype is None else dtype
        element = element_type(np.dtype((np.void, max(descriptor.quantum, 1))) if hint is None else hint)
        if element.itemsize != descriptor.quantum:
            raise InvalidArgument(f"elements are {descriptor.quantum} bytes, but {element} has {element.itemsize}")
        if descriptor.flags not in set(Flavour):
            raise InvalidArgument(f"flags {descriptor.flags} name no flavour")
        kind = Flavour(descriptor.flags)
        if flavour is not None and member(Flavour, flavour, "flavour") is not kind:
            raise InvalidArgument(f"expected a queue of the other flavour, got {kind.name.lower()}")
        queue = cls.__new__(cls)
        queue._handle = CLOSED
        options = open_options(reset=reset, exclusive=exclusive, sealed=sealed)
        queue._open(descriptor.grantors, FdSet.duplicate(descriptor.fds), element, kind, options)
        return queue

    # -- for others ----------------------------------------------------------------------------------------------------

    @property
    def descriptor(self) -> MQDescriptor:
        """A new descriptor for a peer, with file descriptors of its own: close it, or let it be collected."""
        self._handle.live()
        fds = FdSet.duplicate(self._fds.fds)
        return MQDescriptor(self._grantors, fds, self._dtype.itemsize, self._flavour, dtype=self._dtype)

    @property
    def event_flag(self) -> EventFlag:
        """The queue's own event flag.

        Raises:
            InvalidArgument: The queue was made without one.
        """
        return EventFlag(self)

    # -- without waiting ----------------------------------------------------------------------------------------------

    def write(self, data: Any) -> bool:
        """Append elements, all or none. Wakes no waiter.

        Args:
            data: An array of the element type, a bytes-like object, or what NumPy can turn into elements.

        Returns:
            False if there is not enough room.

        Raises:
            InvalidArgument: More than the capacity, wrong element type, or the handle is read-only.
            GeneralFailure: The shared counters are corrupt.
        """
        done: bool = self._handle.write(data)
        if done is not NotImplemented:
            return done
        array = self._source(data)
        rc = lib.nnb_mq_write(self._handle.live(), readable(array), array.size)
        return rc == 0 or self._explain(rc, f"write of {array.size} elements")

    def read(self, count: int = 1, *, out: Elements | None = None) -> Elements | None:
        """Take elements from the front, all or none. Wakes no waiter.

        Args:
            count: How many; ignored if `out` is given.
            out: Fill this contiguous array of the element type instead of a new one.

        Returns:
            The array of elements; None if there are not enough, or if the writer of an unsynchronized queue has
            overtaken this reader (then the newer half of the ring can be read next, and `overruns` has grown).

        Raises:
            InvalidArgument: More than the capacity, or `out` is of the wrong kind.
            GeneralFailure: The shared counters are corrupt.
        """
        wanted: Any = count if out is None else out
        if (type(wanted) is int) is not (out is None):  # a number for an array, or an array for a number
            wanted = None
        got: Elements | Literal[False] | None = self._handle.read(wanted)
        if got is False:
            self._overruns += 1
            return None
        if got is not NotImplemented:
            return got
        array = self._target(count, out)
        rc = lib.nnb_mq_read(self._handle.live(), writable(array), array.size)
        return array if rc == 0 or self._explain(rc, f"read of {array.size} elements") else None

    def begin_write(self, count: int) -> MemTransaction | None:
        """Lend free elements of the ring, to be filled in place; nothing is published before `commit`.

        Args:
            count: Elements.

        Returns:
            None if there is not enough room.

        Raises:
            InvalidArgument: More than the capacity, or the handle is read-only.
            GeneralFailure: The shared counters are corrupt.
        """
        rc = lib.nnb_mq_begin_write(self._handle.live(), element_count(count), self._region)
        if rc < 0 and not self._explain(rc, f"begin_write of {count} elements"):
            return None
        return MemTransaction(*self._views(writable=True), self._commit_write)

    def begin_read(self, count: int) -> MemTransaction | None:
        """Lend the next elements for reading in place; they stay in the ring until `commit`.

        Args:
            count: Elements.

        Returns:
            None if there are not enough, or the reader was overtaken (see `read`).

        Raises:
            InvalidArgument: More than the capacity.
            GeneralFailure: The shared counters are corrupt.
        """
        rc = lib.nnb_mq_begin_read(self._handle.live(), element_count(count), self._region)
        if rc < 0 and not self._explain(rc, f"begin_read of {count} elements"):
            return None
        return MemTransaction(*self._views(writable=False), self._commit_read)

    def _commit_write(self, count: int) -> bool:
        rc = lib.nnb_mq_commit_write(self._handle.live(), count)
        return rc == 0 or self._explain(rc, f"commit of {count} written elements")

    def _commit_read(self, count: int) -> bool:
        rc = lib.nnb_mq_commit_read(self._handle.live(), count)
        return rc == 0 or self._explain(rc, f"commit of {count} read elements")

    # -- waiting ------------------------------------------------------------------------------------------------------

    def write_blocking(
        self,
        data: Any,
        timeout: float | None = None,
        *,
        read_notification: int = NOT_FULL,
        write_notification: int = NOT_EMPTY,
        event_flag: EventFlag | None = None,
    ) -> None:
        """Append elements as soon as all of them fit, and wake the reader.

        Args:
            data: As for `write`.
            timeout: Seconds; None waits without end, 0 tries once.
            read_notification: Bits that the reader sets when it has made room; waited for.
            write_notification: Bits to set afterwards; 0 sets none.
            event_flag: Use this flag instead of the queue's own; both ends must use the same word.

        Raises:
            MissedDeadline: No room in time; nothing was written.
            InvalidArgument: More than the capacity, no event flag, nothing to wait for, or an unsynchronized queue.
            GeneralFailure: The shared counters are corrupt.
            BadState: The queue is closed, perhaps while waiting.
        """
        array = self._source(data)
        source = readable(array)
        bits = (read_notification, write_notification)
        self._blocking(lib.nnb_mq_write_blocking, source, array.size, bits, timeout, event_flag)

    def read_blocking(
        self,
        count: int = 1,
        timeout: float | None = None,
        *,
        out: Elements | None = None,
        read_notification: int = NOT_FULL,
        write_notification: int = NOT_EMPTY,
        event_flag: EventFlag | None = None,
    ) -> Elements:
        """Take elements as soon as all of them are there, and wake the writer.

        Args:
            count: How many; ignored if `out` is given.
            timeout: Seconds; None waits without end, 0 tries once.
            out: As for `read`.
            read_notification: Bits to set afterwards; 0 sets none.
            write_notification: Bits that the writer sets when data has come; waited for.
            event_flag: Use this flag instead of the queue's own; both ends must use the same word.

        Returns:
            The array of elements.

        Raises:
            MissedDeadline: Not enough data in time; nothing was read.
            InvalidArgument: More than the capacity, no event flag, nothing to wait for, or an unsynchronized queue.
            GeneralFailure: The shared counters are corrupt.
            BadState: The queue is closed, perhaps while waiting.
        """
        array = self._target(count, out)
        bits = (read_notification, write_notification)
        self._blocking(lib.nnb_mq_read_blocking, writable(array), array.size, bits, timeout, event_flag)
        return array

    def _blocking(
        self,
        transfer: Callable[[Any, Any, int, int, int, int, Any], int],
        data: Any,
        count: int,
        bits: tuple[int, int],
        timeout: float | None,
        event_flag: EventFlag | None,
    ) -> None:
        word, _owner = (ffi.NULL, None) if event_flag is None else event_flag._event_word()
        deadline = Deadline.after(timeout).at_ns
        rc = -errno.ERESTART
        while rc == -errno.ERESTART:
            # Every 100 ms, and after a signal, C comes back so that signal handlers run and close() is noticed. The
            # local reference keeps the mapping while C waits.
            handle = self._handle
            rc = transfer(handle.live(), data, count, *bits, deadline, word)
        if rc < 0:
            needs = "a blocking call needs a synchronized queue, an event flag (event_flag=True) and bits to wait for"
            self._explain(rc, f"blocking transfer of {count} elements", {errno.EINVAL: InvalidArgument(needs)})

    # -- the rest -----------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        self._handle.live()
        parts = tuple(map(tuple, self._grantors))
        return _attach_parts, (parts, self._fds, self._dtype.itemsize, int(self._flavour), self._dtype, self._exclusive)

    def _source(self, data: Any) -> Elements:
        if isinstance(data, np.ndarray) and data.size > self.capacity:  # before it is copied
            self._explain(-errno.EMSGSIZE, f"write of {data.size} elements")
        return as_elements(data, self._dtype)

    def _target(self, count: int, out: Elements | None) -> Elements:
        if out is None:
            if element_count(count) > self.capacity:
                raise InvalidArgument(f"read of {count} elements exceeds the capacity of {self.capacity}")
            return np.empty(count, self._dtype)
        is_array = isinstance(out, np.ndarray) and out.dtype == self._dtype
        if not (is_array and out.flags.c_contiguous and out.flags.writeable):
            raise InvalidArgument(f"out must be a writable, contiguous array of {self._dtype}")
        return out

    def _views(self, *, writable: bool) -> tuple[Elements, Elements]:
        """The region that C has just filled in, as slices of one array over the ring."""
        region = self._region
        ring = self._ring
        if ring is None:
            # `second` is always the beginning of the ring.
            self._ring_start = region.second
            ring = self._ring = ring_array(self._handle, region.second, self._dtype, self.read_only)
        start = (region.first - self._ring_start) // self._dtype.itemsize
        first, second = ring[start : start + region.first_count], ring[: region.second_count]
        if not writable:
            first.flags.writeable = second.flags.writeable = False
        return first, second


def _attach_parts(
    grantors: tuple[tuple[int, ...], ...], fds: FdSet, quantum: int, flags: int, dtype: np.dtype[Any], exclusive: bool
) -> MessageQueue:
    with MQDescriptor(grantors, fds, quantum, flags, dtype=dtype) as descriptor:
        return MessageQueue.attach(descriptor, exclusive=exclusive)
