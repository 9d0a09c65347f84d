"""Driver-managed buffers of NNAPI. ``csrc/buffer_admission.c`` counts their users."""

from __future__ import annotations

import errno
import itertools
import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from .._core._nnburst import ffi, lib
from .._core.errno import check
from .._core.leaving import process_lock
from ..errors import GeneralFailure, InvalidArgument, ResourceExhausted
from ..model.dimensions import combine_dimensions, is_fully_specified
from ..model.operand_types import operand_info
from ..model.types import Array, OperandDesc
from .descriptor import private_bytes
from .memory import Memory

_PATIENCE = 1.0
"""Seconds to wait for a buffer that another execution or copy uses."""
_SLICE_NS = 100_000_000
"""Nanoseconds between two checks for signals."""


class Gate:
    """State of all buffers of the process. `lock` guards Python's references to the buffers' bytes."""

    def __init__(self) -> None:
        self.lock = process_lock()
        self.closed: list[ManagedBuffer] = []
        """Closed buffers that are still in use."""

    @property
    def moves(self) -> int:
        """A counter that changes when a buffer grows, is closed, or gets contents of other dimensions."""
        return int(lib.nnb_gate_moves(0))

    def note_move(self) -> None:
        lib.nnb_gate_moves(1)


gate = Gate()


class Uses:
    """The buffers of one request or copy, which are locked and released together.

    No buffer is both read and written.
    """

    __slots__ = ("handle",)

    def __init__(self, reading: Sequence[Any], writing: Sequence[Any]) -> None:
        out = ffi.new("nnb_uses **")
        first, second = ffi.new("nnb_buffer *[]", list(reading)), ffi.new("nnb_buffer *[]", list(writing))
        rc = lib.nnb_uses_create(out, first, len(reading), second, len(writing))
        check(rc, "cannot note the buffers of a request")
        self.handle = ffi.gc(out[0], lib.nnb_uses_destroy)

    def acquire(self) -> None:
        """Lock the buffers: shared for reading, exclusive for writing.

        Raises:
            InvalidArgument: A buffer is closed.
            ResourceExhausted: Another execution or copy uses a buffer.
        """
        rc = lib.nnb_uses_enter(self.handle, 0)
        if rc == -errno.EAGAIN:
            end = time.monotonic_ns() + int(_PATIENCE * 1e9)
            while rc == -errno.EAGAIN and (now := time.monotonic_ns()) < end:
                rc = lib.nnb_uses_enter(self.handle, min(end, now + _SLICE_NS))
        if rc < 0:
            closed = InvalidArgument("the buffer was closed, so its id names nothing any more")
            in_use = ResourceExhausted("the buffer is in use by another execution or copy; try again")
            check(rc, "cannot use the buffer", {errno.ESHUTDOWN: closed, errno.EAGAIN: in_use})

    def release(self, outcome: int) -> None:
        """Release the buffers. `outcome` applies to all written buffers: NNB_UNCHANGED, NNB_COMMITTED or NNB_LOST."""
        if lib.nnb_uses_leave(self.handle, outcome):
            free_closed_buffers()


def free_closed_buffers() -> None:
    with gate.lock:
        gate.closed = [buffer for buffer in gate.closed if not buffer.drop()]


class RoleKey(NamedTuple):
    """An input or output of a prepared model. `model` is a number that no other model of the process gets."""

    model: int
    is_input: bool
    position: int


class ManagedBuffer:
    """A buffer of a device. Its contents are undefined until a copy or a successful execution has written them.

    Args:
        operand: Type, quantisation and extra parameters of the contents.
        dimensions: Dimensions, combined from the `BufferDesc` and all roles; 0 where unknown.
    """

    def __init__(self, operand: OperandDesc, dimensions: tuple[int, ...], roles: frozenset[RoleKey]) -> None:
        info = operand_info(operand.type)
        if info.dtype is None:
            raise GeneralFailure("a buffer needs an operand type with defined contents")
        self.dtype = info.dtype
        self.is_scalar = info.is_scalar
        self.meaning = operand.meaning
        """Buffers with equal `meaning` can take each other's contents."""
        self.initial_dimensions = dimensions
        self.is_fixed = info.is_scalar or is_fully_specified(dimensions)
        """True if all dimensions were known from the beginning."""
        self.roles = roles
        out = ffi.new("nnb_buffer **")
        check(lib.nnb_buffer_create(out), "cannot make a buffer")
        self.handle = ffi.gc(out[0], lib.nnb_buffer_destroy)
        self._reading = Uses((self.handle,), ())
        self._writing = Uses((), (self.handle,))
        self._contents = lib.nnb_buffer_contents_of(self.handle)
        self.set_contents_dimensions(dimensions)
        self._store(private_bytes(self.nbytes(dimensions) if self.is_fixed else 0))
        self._account: Callable[[int], None] | None = None
        self._accounted = 0
        self.sets: weakref.WeakSet[BufferSet] = weakref.WeakSet()
        """Buffer sets that must drop their views when the bytes are freed. The lock of `Gate` guards this set."""

    def nbytes(self, dimensions: tuple[int, ...]) -> int:
        return math.prod(dimensions) * self.dtype.itemsize

    @contextmanager
    def use(self, *, write: bool) -> Iterator[None]:
        """Lock the buffer in a ``with`` block: exclusively if `write`, else shared. `generation` does not change.

        Raises the same errors as `Uses.acquire`.
        """
        uses = self._writing if write else self._reading
        uses.acquire()
        try:
            yield
        finally:
            uses.release(lib.NNB_UNCHANGED)

    def _look(self) -> Any:
        state = ffi.new("nnb_buffer_state *")
        lib.nnb_buffer_look(self.handle, state)
        return state

    @property
    def initialised(self) -> bool:
        return bool(self._look().is_initialised)

    @property
    def generation(self) -> int:
        """Number of changes of the contents so far."""
        return int(self._look().generation)

    @property
    def closed(self) -> bool:
        return bool(self._look().is_closed)

    @property
    def dimensions(self) -> tuple[int, ...]:
        return tuple(ffi.unpack(self._contents.dims, self._contents.rank))

    # -- storage ----------------------------------------------------------------------------------------------

    def _store(self, storage: Array) -> None:
        self.storage = storage
        """The bytes, valid while the buffer is in use. The bytes move when the buffer grows."""
        self._contents.place, self._contents.room = ffi.cast("uint8_t *", storage.ctypes.data), storage.nbytes

    def account_to(self, account: Callable[[int], None]) -> None:
        """Set the function that the buffer calls with the number of new bytes before it grows.

        If the function raises an exception, the buffer does not grow.
        """
        self._account = account
        self._reserve(self.storage.nbytes)

    def _reserve(self, nbytes: int) -> None:
        if self._account is not None and nbytes > self._accounted:
            self._account(nbytes - self._accounted)
            self._accounted = nbytes

    def room(self, nbytes: int) -> Array:
        """Return storage of at least `nbytes`. Old contents are lost. The caller has locked the buffer for writing."""
        if self.storage.nbytes < nbytes:
            size = max(nbytes, 2 * self.storage.nbytes)  # A buffer that grows in each run should move rarely.
            try:
                self._reserve(size)
            except ResourceExhausted:  # The exact size may still fit.
                size = nbytes
                self._reserve(size)
            larger = private_bytes(size)
            with gate.lock:
                self._store(larger)
                gate.note_move()
        return self.storage

    def close(self) -> None:
        """Refuse further requests, and free the storage as soon as it is unused. Idempotent."""
        with gate.lock:
            if not self.closed:
                lib.nnb_buffer_close(self.handle)
                if not self.drop():
                    gate.closed.append(self)

    def drop(self) -> bool:
        """Free the storage unless the buffer is in use; return True if freed. The caller has the lock of `Gate`."""
        if not self._look().is_idle:
            return False
        self._store(private_bytes(0))
        gate.note_move()
        for uses in self.sets:
            uses.forget()
        return True

    # -- contents ---------------------------------------------------------------------------------------------

    def set_contents_dimensions(self, dimensions: tuple[int, ...]) -> None:
        """Set the dimensions of the contents that are being written."""
        sizes = ffi.new("int64_t[]", dimensions)
        check(lib.nnb_buffer_settle(self.handle, len(sizes), sizes), "dimensions of a buffer")

    @contextmanager
    def _replace_contents(self, uses: Uses) -> Iterator[None]:
        """Lock the buffers in a ``with`` block that writes contents. If the block fails, the contents are undefined."""
        uses.acquire()
        outcome = lib.NNB_LOST
        try:
            yield
            outcome = lib.NNB_COMMITTED
        finally:
            uses.release(outcome)

    def copy_from(self, memory: Memory, dimensions: tuple[int, ...]) -> None:
        """Copy contents from a memory. After a failure the contents are undefined.

        Args:
            memory: Memory exactly as large as the contents.
            dimensions: Dimensions of the contents; may be empty if the buffer has no unknown dimension.

        Raises:
            InvalidArgument: Size or dimensions do not fit.
            GeneralFailure: The memory can be neither mapped nor copied.
            ResourceExhausted: The buffer is in use; its contents are unchanged.
        """
        with self._replace_contents(self._writing):
            memory._check_usable()
            nbytes = memory._contents_size
            combined = self._check_copy(nbytes, dimensions)
            memory._copy_out(0, self.room(nbytes)[:nbytes])
            self.set_contents_dimensions(combined)

    def _check_copy(self, nbytes: int, dimensions: tuple[int, ...]) -> tuple[int, ...]:
        if self.is_scalar:
            if dimensions:
                raise InvalidArgument(f"the buffer holds a scalar, which has no dimensions {list(dimensions)}")
            combined: tuple[int, ...] = ()
        else:
            if not dimensions and not self.is_fixed:
                raise InvalidArgument(
                    f"the buffer has open dimensions {list(self.initial_dimensions)}; say those of the contents"
                )
            if any(size <= 0 for size in dimensions):
                raise InvalidArgument(f"dimensions {list(dimensions)} are not all positive; those of contents are")
            combined = combine_dimensions(self.initial_dimensions, dimensions)
        if self.nbytes(combined) != nbytes:
            raise InvalidArgument(f"{nbytes} bytes for a buffer whose contents take {self.nbytes(combined)}")
        return combined

    def copy_to(self, memory: Memory) -> int:
        """Copy the contents to a memory and return the `generation`.

        Raises:
            InvalidArgument: The memory has another size.
            GeneralFailure: The contents are undefined, or the memory can be neither mapped nor copied.
            ResourceExhausted: The buffer is being written.
        """
        with self.use(write=False):
            memory._check_usable()
            state = self._look()
            size = self.nbytes(self.dimensions)
            if (state.is_initialised or self.is_fixed) and memory._contents_size != size:
                raise InvalidArgument(f"a memory of {memory._contents_size} bytes for contents of {size}")
            if not state.is_initialised:
                raise GeneralFailure("the buffer has no contents yet; copy to it or run an execution that writes it")
            memory._copy_in(0, self.storage[:size])
            return int(state.generation)

    def copy_buffer(self, source: ManagedBuffer) -> None:
        """Copy the contents of another buffer.

        Raises:
            InvalidArgument: The source has no contents, or does not fit. This buffer's contents are then undefined.
            ResourceExhausted: A buffer is in use; both are unchanged.
        """
        if source is self:
            return
        with self._replace_contents(Uses((source.handle,), (self.handle,))):
            if not source.initialised:
                raise InvalidArgument("the source has no contents")
            if source.meaning != self.meaning:
                raise InvalidArgument("the buffers hold operands of different types or quantisations")
            combine_dimensions(self.initial_dimensions, source.dimensions)
            size = self.nbytes(source.dimensions)
            self.room(size)[:size] = source.storage[:size]
            self.set_contents_dimensions(source.dimensions)


_HIGHEST_ID = (1 << 31) - 1
_numbers = itertools.count()


class BufferTracker:
    """The buffers of one device, by the id that clients use."""

    def __init__(self) -> None:
        self._buffers: dict[int, ManagedBuffer] = {}

    def add(self, buffer: ManagedBuffer) -> int:
        """Register a buffer and return its id, 1 to 2**31 - 1. An id is reused only after all other ids were used."""
        while (id := next(_numbers) % _HIGHEST_ID + 1) in self._buffers:
            pass
        self._buffers[id] = buffer
        return id

    def remove(self, id: int) -> None:
        """Remove an id and close its buffer. Executions that use the buffer can finish. Idempotent."""
        buffer = self._buffers.pop(id, None)
        if buffer is not None:
            buffer.close()

    def resolve(self, id: int) -> ManagedBuffer:
        """Return the buffer of an id. Raises `InvalidArgument` if there is none."""
        buffer = self._buffers.get(id)
        if buffer is None:
            raise InvalidArgument(f"no buffer has id {id}; it was never given out here, or its buffer is closed")
        return buffer

    def __len__(self) -> int:
        return len(self._buffers)


# ---- the buffers of one request -----------------------------------------------------------------------------


def _nothing() -> None:
    pass


class BufferUse(Struct, frozen=True):
    """The use of a buffer as one argument of a request."""

    buffer: ManagedBuffer
    role: RoleKey
    dimensions: tuple[int, ...]


class BufferView:
    """A pool over a buffer's bytes, which kernels may use while their execution has locked the buffer.

    Args:
        origin: See `Region`.
        dimensions: Dimensions in the request.
    """

    kind = "buffer"
    is_private = True

    def __init__(
        self, buffer: ManagedBuffer, origin: tuple[int, int], dimensions: tuple[int, ...], *, writing: bool
    ) -> None:
        self.buffer = buffer
        self.origin, self.dimensions = origin, dimensions
        self._writing = writing

    @property
    def size(self) -> int:
        """Size in bytes; 2**62 for an output, whose buffer grows as needed."""
        return (1 << 62) if self._writing else self.buffer.storage.nbytes

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """A key that no other buffer or memory has."""
        return -1, id(self.buffer), 0, self.size

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> Array:
        element = np.dtype(dtype)
        nbytes = math.prod(shape) * element.itemsize
        storage = self.buffer.room(offset + nbytes) if self._writing else self.buffer.storage
        view: Array = storage[offset : offset + nbytes].view(element).reshape(shape)
        if not self._writing:
            view.flags.writeable = False
        return view


class BufferSet:
    """The buffers of one request. Every execution calls `admit`, then either `commit` or `fail`.

    Args:
        uses: Arguments that are buffers, in the order of the request, inputs first.

    Raises:
        InvalidArgument: A buffer was not allocated for the argument that uses it, or an output shares its buffer with
            another argument.
    """

    def __init__(self, uses: Sequence[BufferUse]) -> None:
        self.inputs = [use for use in uses if use.role.is_input]
        self.outputs = [use for use in uses if not use.role.is_input]
        for use in self.inputs:
            _check_role(use)
        seen = {id(use.buffer) for use in self.inputs}
        for use in self.outputs:
            if id(use.buffer) in seen:
                raise InvalidArgument(f"output {use.role.position} shares its buffer with another argument")
            seen.add(id(use.buffer))
            _check_role(use)
            combine_dimensions(use.buffer.initial_dimensions, use.dimensions)
        self._reading = tuple({id(use.buffer): use.buffer for use in self.inputs}.values())
        self._writing = tuple(use.buffer for use in self.outputs)
        self._all = self._reading + self._writing
        self._open = tuple(buffer for buffer in self._reading if not buffer.is_fixed)
        self._dimensioned = tuple(use for use in self.inputs if use.dimensions)
        self.fixed = all(buffer.is_fixed for buffer in self._writing)
        """True if the outputs always have the shapes that their buffers were allocated for."""
        self._uses = Uses([buffer.handle for buffer in self._reading], [buffer.handle for buffer in self._writing])
        self.handle = self._uses.handle
        """C's handle of this set, with which a burst locks the buffers."""
        self._moves = 0
        self._also_forget: Callable[[], None] = _nothing
        self.forget()
        with gate.lock:
            for buffer in self._all:
                buffer.sets.add(self)

    def forget(self) -> None:
        """Drop the views of the buffers' bytes, so that a closed buffer's bytes can be freed."""
        self.found_in_c = False
        """True if the kernel in `current` looks up the buffers' addresses in each run; see `Kernel`."""
        self.current: Any = None
        """The object that `keep` stored; None if there is none, or if a buffer has moved since."""
        self._made_for: Hashable = None
        self._also_forget()

    def admit(self) -> Any:
        """Lock the buffers for one execution, which must end with `commit` or `fail`.

        Returns:
            The object that was passed to `keep`. None if a buffer has moved since.

        Raises:
            InvalidArgument: An input's contents contradict the request's dimensions, or a buffer is closed.
            GeneralFailure: An input has no contents.
            ResourceExhausted: A buffer is in use.
        """
        if lib.nnb_uses_admit(self.handle):  # Usually all buffers are free and have not moved.
            return self.current
        return self._admit_with_care()

    def _admit_with_care(self) -> Any:
        """Lock the buffers: wait for other users, and check contents and dimensions."""
        self._uses.acquire()
        try:
            if not all(buffer.initialised for buffer in self._reading):
                raise GeneralFailure("an input is in a buffer without contents; copy to it or write it first")
            for use in self._dimensioned:
                combine_dimensions(use.buffer.dimensions, use.dimensions)
            self._moves = gate.moves
            if self._made_for != self._layout() and not self.found_in_c:
                self.current = None
            if self.current is not None and not self.found_in_c:
                lib.nnb_uses_settle(self.handle, self._moves)
            return self.current
        except BaseException:
            self._uses.release(lib.NNB_UNCHANGED)
            raise

    def keep(self, made: Any) -> None:
        """Store a kernel that uses the buffers' bytes. Call it only between `admit` and `commit` or `fail`."""
        self._made_for, self.current = self._layout(), made
        self.found_in_c = getattr(made, "finds_buffers", False)
        lib.nnb_uses_settle(self.handle, lib.NNB_ANYWHERE if self.found_in_c else self._moves)

    def set_free_listener(self, forget: Callable[[], None]) -> None:
        """Set a function that drops views of a freed buffer. Any thread may call the function."""
        self._also_forget = forget

    def _layout(self) -> Hashable:
        return *[buffer.storage.nbytes for buffer in self._all], *[buffer.dimensions for buffer in self._open]

    def commit(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Commit the outputs of a successful execution.

        Args:
            shapes: Shapes of the outputs that are buffers, in order; not needed if all outputs are `fixed`.

        Raises:
            GeneralFailure: A shape contradicts its buffer. The contents of all outputs are then undefined.
        """
        if not self.fixed:
            try:
                for buffer, shape in zip(self._writing, shapes, strict=True):
                    combine_dimensions(buffer.initial_dimensions, shape)
            except InvalidArgument as error:
                self.fail()
                raise GeneralFailure(f"an output does not fit its buffer: {error}") from None
            for buffer, shape in zip(self._writing, shapes, strict=True):
                buffer.set_contents_dimensions(shape)
        self._uses.release(lib.NNB_COMMITTED)

    def fail(self) -> None:
        """Unlock the buffers after a failed execution. The contents of the output buffers are then undefined."""
        self._uses.release(lib.NNB_LOST)


def _check_role(use: BufferUse) -> None:
    if use.role not in use.buffer.roles:
        kind = "input" if use.role.is_input else "output"
        raise InvalidArgument(f"the buffer was not allocated to be {kind} {use.role.position} of this prepared model")
