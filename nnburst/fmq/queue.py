"""A FIFO of NumPy elements in shared memory."""

from __future__ import annotations

import errno
import fcntl
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .._core._nnburst import ffi, lib, queue_calls
from .._core.deadline import Deadline
from .._core.errno import check, member
from .._core.fds import FdSet
from .._core.leaving import Closing, abandon_when_forked
from .._options import FlavourName, QueueLayout
from ..errors import BadState, GeneralFailure, InvalidArgument, NNBurstError
from .descriptor import Flavour, Grantor, Layout, MQDescriptor
from .event_flag import EventFlag

if TYPE_CHECKING:
    import numpy.typing as npt


Elements = np.ndarray[Any, np.dtype[Any]]
MAX_COUNT = (1 << 64) - 1


ErrorHandler = Callable[[str], object]


def _not_here(_: object) -> Any:
    return NotImplemented


class Handle:
    """An ``nnb_mq *``, which is closed when the last reference is dropped.

    The queue, its NumPy views, and calls that wait in other threads have references to the handle, so closing the queue
    unmaps no memory in use.

    Attributes:
        read: Function that fills a given array, or a new array of a given length. It returns the array; None if there
            are too few elements; False if the writer overtook this reader; NotImplemented for an argument that it does
            not take.
        write: Function that appends an array or bytes. It returns True; False if there is no room; NotImplemented for
            an argument that it does not take.
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
        """Mark this copy of the queue as inherited, because this is a forked child."""
        if self.pointer is not None:
            lib.nnb_mq_inherit(self.pointer)

    def live(self) -> Any:
        """Return the pointer. Raises `BadState` if the queue is closed."""
        if self.pointer is None:
            raise BadState("the queue is closed")
        return self.pointer


_CLOSED = Handle(None)


class _RingMemory:
    """The base object of NumPy views of the ring."""

    __slots__ = ("__array_interface__", "_handle")

    def __init__(self, handle: Handle, address: int, size: int, read_only: bool) -> None:
        self._handle = handle
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, read_only), "version": 3}


def _ring_array(handle: Handle, start: Any, dtype: np.dtype[Any], read_only: bool) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the whole ring, which begins at a ``uint8_t *``, as an array that keeps the handle alive."""
    pointer = handle.live()
    size = lib.nnb_mq_capacity(pointer) * lib.nnb_mq_quantum(pointer)
    address = int(ffi.cast("uintptr_t", start))
    return np.asarray(_RingMemory(handle, address, size, read_only)).view(dtype)


class MessageQueue(Closing):
    """A lock-free FIFO in shared memory: one writer, and one reader (or many, if unsynchronized).

    The constructor creates the shared memory; `attach` joins an existing queue. An object's first write makes it the
    writer, and its first read makes it the reader. A second writer causes errors about corrupt counters. After a fork,
    the child's copy is neither writer nor reader. Only one thread at a time may use an object.

    Reads and writes raise `GeneralFailure` if the shared counters are corrupt, and `BadState` if the queue is closed.

    Args:
        dtype: Element type: any NumPy dtype without object fields.
        count: Capacity in elements.
        flavour: ``"synchronized"``: one writer, one reader; a write that does not fit fails. ``"unsynchronized"``: one
            writer, many readers; a write always succeeds, and a slow reader loses overwritten elements.
        event_flag: True for a queue with an event word, which blocking calls need.
        layout: ``"lines"``, ``"stamped"`` or ``"compat"``, or a `Layout`.
        ring_fd: Descriptor of a memory object whose first bytes become the ring. The queue duplicates the descriptor,
            and has its counters in other memory.
        exclusive: False to let several threads or processes take turns as writer or reader. Each call then takes
            about twice as long.

    Attributes:
        dtype: Element type.
        flavour: Flavour of the queue.
        overruns: Number of times that the writer overtook this reader of an unsynchronized queue.

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
        element = element_type(dtype)
        kind, drawing = member(Flavour, flavour, "flavour"), member(Layout, layout, "layout")
        size = element_count(count)
        if not size:
            raise InvalidArgument("count is 0; a queue holds at least one element")
        if drawing is not Layout.COMPAT and not event_flag:
            name = drawing.name.lower()
            raise InvalidArgument(f"the {name} layout always has an event word; use layout='compat' to do without")
        own = new_queue(element, size, flavour=kind, layout=drawing, event_flag=event_flag, ring_fd=ring_fd)
        self._open(own, element, reset=True, exclusive=exclusive, sealed=False)

    @classmethod
    def attach(
        cls,
        descriptor: MQDescriptor,
        dtype: npt.DTypeLike | None = None,
        *,
        reset: bool = False,
        exclusive: bool = True,
        sealed: bool = False,
    ) -> MessageQueue:
        """Return an end of a queue that another object or process created.

        Args:
            descriptor: The queue's descriptor; the caller still owns it.
            dtype: Element type; None for the descriptor's type, or for raw bytes if the descriptor has none.
            reset: True to set the counters to zero and discard the elements in the queue.
            exclusive: See `MessageQueue`.
            sealed: True to refuse memory that its creator could truncate.

        Raises:
            InvalidArgument: The descriptor is malformed, has another element size, or does not fit its memory objects.
            BadState: The descriptor is closed.
        """
        hint = descriptor.dtype if dtype is None else dtype
        element = element_type(np.dtype((np.void, max(descriptor.quantum, 1))) if hint is None else hint)
        if element.itemsize != descriptor.quantum:
            raise InvalidArgument(f"elements are {descriptor.quantum} bytes, but {element} has {element.itemsize}")
        member(Flavour, descriptor.flags, "flavour")
        queue, own = cls.__new__(cls), descriptor.duplicate()
        own.dtype = element
        queue._open(own, element, reset=reset, exclusive=exclusive, sealed=sealed)
        return queue

    def _open(self, own: MQDescriptor, dtype: np.dtype[Any], *, reset: bool, exclusive: bool, sealed: bool) -> None:
        wanted = ((reset, lib.NNB_MQ_RESET), (exclusive, lib.NNB_MQ_EXCLUSIVE), (sealed, lib.NNB_MQ_SEALED))
        options = sum(bit for is_set, bit in wanted if is_set)
        grantors, fds, out = own.grantors, own.fds, ffi.new("nnb_mq **")
        regions, numbers = ffi.new("nnb_grantor[]", [*grantors] or 1), ffi.new("int[]", [*fds, -1])
        rc = lib.nnb_mq_open(out, regions, len(grantors), numbers, len(fds), dtype.itemsize, own.flags, options)
        if rc < 0:
            own.close()
            check(rc, f"cannot attach to a queue of {len(grantors)} regions in {len(fds)} memory objects")
        self._handle = Handle(out[0], dtype)
        self._own, self._exclusive = own, exclusive
        self.dtype, self.overruns = dtype, 0
        self.flavour: FlavourName = Flavour(own.flags).name.lower()  # type: ignore[assignment]
        self._on_error: ErrorHandler | None = None
        self._region = ffi.new("nnb_mq_region *")
        self._ring: Elements | None = None
        self._ring_start: Any = None

    # -- sharing ------------------------------------------------------------------------------------------------------

    @property
    def descriptor(self) -> MQDescriptor:
        """A new descriptor for a peer, with duplicated file descriptors. The caller closes it."""
        self._handle.live()
        return self._own.duplicate()

    @property
    def event_flag(self) -> EventFlag:
        """The event flag of the queue.

        Raises:
            InvalidArgument: The queue was made without an event flag.
        """
        return EventFlag(self)

    # -- without waiting ----------------------------------------------------------------------------------------------

    def write(self, data: Any) -> bool:
        """Append elements, all or none, without waking a waiter.

        Args:
            data: An array of the element type, a bytes-like object, or values that NumPy can convert to elements.

        Returns:
            False if there is not enough room.

        Raises:
            InvalidArgument: The elements exceed the capacity or have another type, or the queue is read-only.
        """
        done: bool = self._handle.write(data)
        if done is not NotImplemented:
            return done
        array = self._source(data)
        rc = lib.nnb_mq_write(self._handle.live(), readable(array), array.size)
        return rc == 0 or self._explain(rc, f"write of {array.size} elements")

    def read(self, count: int = 1, *, out: Elements | None = None) -> Elements | None:
        """Take elements from the front, all or none, without waking a waiter.

        Args:
            count: Number of elements; ignored if `out` is given.
            out: Contiguous array of the element type to fill, instead of a new one.

        Returns:
            The array of elements; None if there are not enough, or if the writer of an unsynchronized queue has
            overtaken this reader. The overtaken reader continues with the newer half of the ring; see `overruns`.

        Raises:
            InvalidArgument: The number exceeds the capacity, or `out` has another type or layout.
        """
        wanted: Any = count if out is None else out
        if (type(wanted) is int) is not (out is None):  # An array was given for a number, or the reverse.
            wanted = None
        got: Elements | Literal[False] | None = self._handle.read(wanted)
        if got is False:
            self.overruns += 1
            return None
        if got is not NotImplemented:
            return got
        array = self._output_array(count, out)
        rc = lib.nnb_mq_read(self._handle.live(), writable(array), array.size)
        return array if rc == 0 or self._explain(rc, f"read of {array.size} elements") else None

    def begin_write(self, count: int) -> MemTransaction | None:
        """Return free elements of the ring, to be filled in place; `commit` publishes them.

        Args:
            count: Number of elements.

        Returns:
            None if there is not enough room.

        Raises:
            InvalidArgument: `count` exceeds the capacity, or the queue is read-only.
        """
        rc = lib.nnb_mq_begin_write(self._handle.live(), element_count(count), self._region)
        if rc < 0 and not self._explain(rc, f"begin_write of {count} elements"):
            return None
        return MemTransaction(*self._views(writable=True), self._commit_write)

    def begin_read(self, count: int) -> MemTransaction | None:
        """Return the next elements, to be read in place; `commit` removes them from the ring.

        Args:
            count: Number of elements.

        Returns:
            None if there are not enough, or the reader was overtaken (see `read`).

        Raises:
            InvalidArgument: `count` exceeds the capacity.
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
        read_notification: int = EventFlag.NOT_FULL,
        write_notification: int = EventFlag.NOT_EMPTY,
        event_flag: EventFlag | None = None,
    ) -> None:
        """Append elements as soon as all elements fit, and wake the reader.

        Args:
            data: See `write`.
            timeout: Seconds; None waits without end, 0 tries once.
            read_notification: Bits to wait for, which the reader sets after taking elements.
            write_notification: Bits to set afterwards; 0 sets none.
            event_flag: Use this flag instead of the queue's own. The reader must use a flag on the same word of memory.

        Raises:
            MissedDeadline: There was not enough room in time. Nothing was written.
            InvalidArgument: The elements exceed the capacity, the queue is unsynchronized or has no event flag, or the
                bits to wait for are 0.
            BadState: The queue is closed, or is closed during the wait.
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
        read_notification: int = EventFlag.NOT_FULL,
        write_notification: int = EventFlag.NOT_EMPTY,
        event_flag: EventFlag | None = None,
    ) -> Elements:
        """Take elements as soon as enough are available, and wake the writer.

        Args:
            count: Number of elements; ignored if `out` is given.
            timeout, event_flag: See `write_blocking`.
            out: See `read`.
            read_notification: Bits to set afterwards; 0 sets none.
            write_notification: Bits to wait for, which the writer sets after adding elements.

        Returns:
            The array of elements.

        Raises:
            MissedDeadline: There were not enough elements in time. Nothing was read.
            InvalidArgument, BadState: See `write_blocking`.
        """
        array = self._output_array(count, out)
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
            # C returns every 100 ms and after a signal, so that signal handlers run and close() is noticed. The local
            # reference keeps the mapping while C waits.
            handle = self._handle
            rc = transfer(handle.live(), data, count, *bits, deadline, word)
        if rc < 0:
            needs = "a blocking call needs a synchronized queue, an event flag (event_flag=True) and bits to wait for"
            self._explain(rc, f"blocking transfer of {count} elements", {errno.EINVAL: InvalidArgument(needs)})

    # -- internals ----------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        self._handle.live()
        return _attach, (self._own, self._exclusive)

    def _source(self, data: Any) -> Elements:
        if isinstance(data, np.ndarray) and data.size > self.capacity:  # This is checked before the copy.
            self._explain(-errno.EMSGSIZE, f"write of {data.size} elements")
        return as_elements(data, self.dtype)

    def _output_array(self, count: int, out: Elements | None) -> Elements:
        if out is None:
            if element_count(count) > self.capacity:
                raise InvalidArgument(f"read of {count} elements exceeds the capacity of {self.capacity}")
            return np.empty(count, self.dtype)
        is_array = isinstance(out, np.ndarray) and out.dtype == self.dtype
        if not (is_array and out.flags.c_contiguous and out.flags.writeable):
            raise InvalidArgument(f"out must be a writable, contiguous array of {self.dtype}")
        return out

    def _views(self, *, writable: bool) -> tuple[Elements, Elements]:
        """Return the region of the current transaction as two slices of the array that covers the ring."""
        region = self._region
        ring = self._ring
        if ring is None:
            # `second` is always the beginning of the ring.
            self._ring_start = region.second
            ring = self._ring = _ring_array(self._handle, region.second, self.dtype, self.read_only)
        start = (region.first - self._ring_start) // self.dtype.itemsize
        first, second = ring[start : start + region.first_count], ring[: region.second_count]
        if not writable:
            first.flags.writeable = second.flags.writeable = False
        return first, second

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The capacity in elements."""
        return int(lib.nnb_mq_capacity(self.handle))

    @property
    def quantum(self) -> int:
        """Size of an element in bytes."""
        return int(lib.nnb_mq_quantum(self.handle))

    @property
    def read_only(self) -> bool:
        """True if the memory is mapped for reading only."""
        return bool(lib.nnb_mq_is_read_only(self.handle))

    @property
    def closed(self) -> bool:
        """True if the queue can no longer be used."""
        return self._handle.pointer is None

    @property
    def handle(self) -> Any:
        """The ``nnb_mq *``, still owned by this object."""
        return self._handle.live()

    def _event_word(self) -> tuple[Any, object]:
        handle = self._handle
        word = lib.nnb_mq_event_word(handle.live())
        if word == ffi.NULL:
            raise InvalidArgument("the queue has no event word; make it with event_flag=True")
        return word, handle

    @property
    def available_to_read(self) -> int:
        """Number of elements that can be read now; 0 if the counters are corrupt. The error handler then runs."""
        return self._available(lib.nnb_mq_available_to_read(self.handle))

    @property
    def available_to_write(self) -> int:
        """Number of elements that fit now; 0 if the counters are corrupt. The error handler then runs.

        In an unsynchronized queue, ignore the number: a write up to the capacity always succeeds.
        """
        return self._available(lib.nnb_mq_available_to_write(self.handle))

    def _available(self, rc: int) -> int:
        if rc == -errno.EBADMSG:
            self._report()
            return 0
        return check(rc, "MessageQueue")

    def set_error_handler(self, handler: ErrorHandler | None) -> None:
        """Set a function to call when the shared counters are corrupt.

        Args:
            handler: Called with a message; None removes it.
        """
        self._on_error = handler

    def close(self) -> None:
        """Release the memory and end waits in other threads. NumPy views of the ring stay valid. Idempotent."""
        if self._handle is not _CLOSED:
            self._handle = _CLOSED
            self._ring = None
            self._own.close()

    def __repr__(self) -> str:
        if self.closed:
            return "MessageQueue(closed)"
        return f"MessageQueue({self.dtype}, {self.capacity}, flavour={self.flavour!r})"

    def _explain(self, rc: int, what: str, special: dict[int, NNBurstError] | None = None) -> bool:
        """Return False for an expected failure; raise an exception for any other."""
        if rc == -errno.EAGAIN:
            return False
        if rc == -errno.EOVERFLOW:
            self.overruns += 1
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
            self._on_error("a shared counter has an impossible value")


def _attach(descriptor: MQDescriptor, exclusive: bool) -> MessageQueue:
    with descriptor:
        return MessageQueue.attach(descriptor, exclusive=exclusive)


def new_queue(
    dtype: np.dtype[Any],
    count: int,
    *,
    flavour: Flavour = Flavour.SYNCHRONIZED,
    layout: Layout,
    event_flag: bool = True,
    ring_fd: int | None = None,
) -> MQDescriptor:
    """Create the memory of a new queue. The first object that attaches must reset the queue."""
    quantum = dtype.itemsize
    regions, size = ffi.new("nnb_grantor[5]"), ffi.new("uint64_t *")
    # A ring in other memory needs no room beside the counters.
    inner = 1 if ring_fd is not None else count
    n = lib.nnb_mq_layout(inner, quantum, flavour, layout, event_flag, regions, size)
    too_large = InvalidArgument(f"{count} elements of {quantum} bytes are more than a queue can hold (2 GiB)")
    check(n, f"a queue of {count} elements of {quantum} bytes", {errno.EOVERFLOW: too_large})
    if ring_fd is not None and count * quantum > MAX_COUNT:
        raise InvalidArgument(f"a queue of {count} elements of {quantum} bytes is larger than any memory")
    seals: int = lib.NNB_SEALS_FIXED_SIZE
    if flavour is Flavour.UNSYNCHRONIZED:
        seals &= ~fcntl.F_SEAL_SEAL  # `MQDescriptor.without_write_access` adds a seal.
    own = FdSet.create(lib.nnb_memfd_create, b"MessageQueue", size[0], seals)
    check(own.fds[0], f"shared memory of {size[0]} bytes for a queue")
    if ring_fd is not None:
        own = FdSet.duplicate((*own.fds, ring_fd))
    grantors = [Grantor(g.flags, g.fd_index, g.offset, g.extent) for g in list(regions)[:n]]
    if ring_fd is not None:
        grantors[lib.NNB_GRANTOR_DATA] = Grantor(0, 1, 0, count * quantum)
    return MQDescriptor(grantors, own, quantum, flavour, dtype=dtype)


# -- access without copies --------------------------------------------------------------------------------------------


class MemTransaction:
    """Part of a ring, from `MessageQueue.begin_write` or `begin_read`, usable until `commit`.

    As a context manager it commits when the block ends without an exception.

    Attributes:
        first: View of the elements up to the end of the ring.
        second: View of the elements that continue at the ring's beginning; empty unless the transaction wraps.

    Example:
        >>> from nnburst.fmq import MessageQueue
        >>> with MessageQueue(np.uint8, 4) as queue:
        ...     with queue.begin_write(2) as room:
        ...         room.first[:] = [7, 8]
        ...     queue.read(2)
        array([7, 8], dtype=uint8)
    """

    __slots__ = ("_commit", "first", "second")

    def __init__(self, first: Elements, second: Elements, commit: Callable[[int], bool]) -> None:
        """Use `MessageQueue.begin_write` or `begin_read` instead."""
        self.first = first
        self.second = second
        self._commit: Callable[[int], bool] | None = commit

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def _place(self, index: int) -> tuple[Elements, int]:
        size = len(self)
        if index < 0:
            index += size
        if not 0 <= index < size:
            raise IndexError(f"slot {index} of a transaction of {size} elements")
        split = len(self.first)
        return (self.first, index) if index < split else (self.second, index - split)

    def __getitem__(self, index: int) -> Any:
        """Return element `index` as NumPy does (a view for structured types)."""
        region, i = self._place(index)
        return region[i]

    def __setitem__(self, index: int, value: Any) -> None:
        region, i = self._place(index)
        region[i] = value

    def copy_to(self, data: npt.ArrayLike, start: int = 0) -> None:
        """Copy elements into the transaction.

        Args:
            data: Elements; flattened and cast as in a NumPy assignment.
            start: Index of the first element to write.

        Raises:
            InvalidArgument: The elements do not fit.
        """
        values = np.asarray(data, self.first.dtype).reshape(-1)
        first, second = self._range(start, values.size)
        first[...], second[...] = values[: first.size], values[first.size :]

    def copy_from(self, start: int = 0, count: int | None = None) -> Elements:
        """Copy elements out of the transaction.

        Args:
            start: Index of the first element to copy.
            count: Number of elements; None for all from `start`.

        Returns:
            A new array of `count` elements.

        Raises:
            InvalidArgument: The range is not inside the transaction.
        """
        return np.concatenate(self._range(start, len(self) - start if count is None else count))

    def _range(self, start: int, count: int) -> tuple[Elements, Elements]:
        """Return two views with `count` elements in all. Raises `InvalidArgument` if the transaction has fewer."""
        if start < 0 or count < 0 or start + count > len(self):
            raise InvalidArgument(f"{count} elements at slot {start} exceed a transaction of {len(self)}")
        split, end = len(self.first), start + count
        return self.first[start:end], self.second[max(start - split, 0) : max(end - split, 0)]

    def commit(self, count: int | None = None) -> bool:
        """Publish written elements, or free the space of read elements.

        Args:
            count: Number of elements from the first; None for all.

        Returns:
            False if the writer of an unsynchronized queue overtook this reader, so that the elements are invalid.

        Raises:
            InvalidArgument: `count` is larger than the transaction.
            BadState: The transaction was committed before, or the queue is closed.
        """
        wanted = len(self) if count is None else count
        self._range(0, wanted)
        commit, self._commit = self._commit, None
        if commit is None:
            raise BadState("the transaction is already committed; begin a new one")
        return commit(wanted)

    def __enter__(self) -> MemTransaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None and self._commit is not None:
            self.commit()


# -- elements ---------------------------------------------------------------------------------------------------------


def element_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return a NumPy dtype. Raises `InvalidArgument` if a queue cannot carry it."""
    try:
        element = np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgument(f"{dtype!r} is no NumPy dtype: {error}") from error
    if element.hasobject or not element.itemsize:
        raise InvalidArgument(f"{element} cannot live in shared memory; use a dtype of fixed size without objects")
    if element.subdtype is not None:
        raise InvalidArgument(f"{element} is an array type; wrap it in a structured dtype of one field")
    return element


def element_count(count: int) -> int:
    """Return `count` as an int. Raises `InvalidArgument` if it is negative or has more than 64 bits."""
    number = operator.index(count)
    if not 0 <= number <= MAX_COUNT:
        raise InvalidArgument(f"count is {count}; a number of elements is not negative")
    return number


def as_elements(data: Any, dtype: np.dtype[Any]) -> Elements:
    """Return `data` as a contiguous array of elements, without a copy where possible."""
    if isinstance(data, np.ndarray):
        if data.dtype != dtype:
            raise InvalidArgument(f"the queue holds {dtype}, not {data.dtype}; convert with astype()")
        return data if data.flags.c_contiguous else np.ascontiguousarray(data)
    if isinstance(data, (bytes, bytearray, memoryview)):
        if memoryview(data).nbytes % dtype.itemsize:
            raise InvalidArgument(f"the bytes are not a whole number of {dtype.itemsize}-byte elements")
        return np.frombuffer(data, np.uint8).view(dtype)
    try:
        return np.ascontiguousarray(data, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"cannot turn {type(data).__name__} into {dtype}: {error}") from error


def _exportable(array: Elements) -> Elements:
    # Arrays of dates export no buffer, so they are viewed as integers.
    return array.view(np.int64) if array.dtype.kind in "mM" else array


def readable(array: Elements) -> Any:
    """Return a C pointer to an array for C to read. The pointer keeps the array alive."""
    return ffi.from_buffer("char[]", _exportable(array))


def writable(array: Elements) -> Any:
    """Return a C pointer to an array for C to write to. The pointer keeps the array alive."""
    return ffi.from_buffer("char[]", _exportable(array), True)
