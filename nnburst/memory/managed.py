"""A driver-managed buffer: its state, its storage, and its users at the moment."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .._core._nnburst import ffi, lib
from ..errors import GeneralFailure, InvalidArgument, ResourceExhausted
from ..model import Array, OperandDesc, combine_dimensions, is_fully_specified, operand_info
from .managed_gate import Outcome, Uses, gate
from .mapping import private_bytes
from .memory import Memory


class Made:
    """Views over the bytes of the buffers of one request, and where these were then."""

    def __init__(self) -> None:
        self.also_forget: Callable[[], None] = _nothing
        self.forget()

    def forget(self) -> None:
        """Let go of them, because a buffer was closed and its bytes are to be freed."""
        self.current: Any = None
        self.layout: Hashable = None
        self.also_forget()


def _nothing() -> None:
    pass


class RoleKey(NamedTuple):
    """The roles in which a buffer may be used. Prepared models are numbered and numbers are never used again."""

    model: int
    is_input: bool
    position: int


class ManagedBuffer:
    """One buffer. Its contents are undefined until it was copied to or written by an execution that succeeded.

    Args:
        operand: Type, quantisation and extra parameters of the operands it may stand for.
        dimensions: Combined dimensions of all roles and the descriptor; 0 where open. They never change.
    """

    def __init__(self, operand: OperandDesc, dimensions: tuple[int, ...], roles: frozenset[RoleKey]) -> None:
        info = operand_info(operand.type)
        if info.dtype is None:
            raise GeneralFailure("a buffer needs an operand type with defined contents")
        self.dtype = info.dtype
        self.is_scalar = info.is_scalar
        self.meaning = operand.meaning
        """What two buffers must have in common for one to take the other's contents."""
        self.initial_dimensions = dimensions
        self.dimensions = dimensions
        self.is_fixed = info.is_scalar or is_fully_specified(dimensions)
        """Whether all dimensions were known from the beginning."""
        self.roles = roles
        self.handle = gate.new_buffer()
        self._reading = Uses((self.handle,), ())
        self._writing = Uses((), (self.handle,))
        self.storage = private_bytes(self.nbytes(dimensions) if self.is_fixed else 0)
        """The bytes; valid while the buffer is in use. They move only when open dimensions make the buffer grow."""
        self._account: Callable[[int], None] | None = None
        self._accounted = 0
        self._made: weakref.WeakSet[Made] = weakref.WeakSet()

    def nbytes(self, dimensions: tuple[int, ...]) -> int:
        return math.prod(dimensions) * self.dtype.itemsize

    @contextmanager
    def used(self, *, write: bool) -> Iterator[None]:
        """Keep writers out, or everybody, inside a with block that changes nothing. Raises as `Uses.enter`."""
        uses = self._writing if write else self._reading
        uses.enter()
        try:
            yield
        finally:
            uses.leave(Outcome.UNCHANGED)

    def _look(self) -> Any:
        state = ffi.new("nnb_buffer_state *")
        lib.nnb_buffer_look(self.handle, state)
        return state

    @property
    def initialised(self) -> bool:
        """Whether the contents are defined."""
        return bool(self._look().is_initialised)

    @property
    def generation(self) -> int:
        """Counts changes of the contents."""
        return int(self._look().generation)

    @property
    def closed(self) -> bool:
        return bool(self._look().is_closed)

    # -- storage ----------------------------------------------------------------------------------------------

    def account_to(self, account: Callable[[int], None]) -> None:
        """Have a function told of bytes that the buffer is going to take more; what it raises keeps it from growing."""
        self._account = account
        self._reserve(self.storage.nbytes)

    def _reserve(self, nbytes: int) -> None:
        if self._account is not None and nbytes > self._accounted:
            self._account(nbytes - self._accounted)
            self._accounted = nbytes

    def room(self, nbytes: int) -> Array:
        """Return storage of at least that size to be overwritten as a whole. Only while writing."""
        if self.storage.nbytes < nbytes:
            size = max(nbytes, 2 * self.storage.nbytes)  # what grows in each run is to move rarely
            try:
                self._reserve(size)
            except ResourceExhausted:  # so much is not to be had
                size = nbytes
                self._reserve(size)
            larger = private_bytes(size)
            with gate.lock:
                self.storage = larger
                gate.moved()
        return self.storage

    def close(self) -> None:
        """Admit no more requests, and give the storage back as soon as it is no longer used. Idempotent."""
        with gate.lock:
            if not self.closed:
                lib.nnb_buffer_close(self.handle)
                if not self.drop():
                    gate.closed.append(self)

    def drop(self) -> bool:
        """Give the storage of a closed buffer back, unless it is in use. Under the gate's lock."""
        if not self._look().is_idle:
            return False
        self.storage = private_bytes(0)
        gate.moved()
        for made in self._made:
            made.forget()
        return True

    def register(self, made: Made) -> None:
        """Forget the views over the bytes when they are given back."""
        with gate.lock:
            self._made.add(made)

    # -- contents ---------------------------------------------------------------------------------------------

    def settle(self, dimensions: tuple[int, ...]) -> None:
        """The contents that are being written have these dimensions."""
        if dimensions != self.dimensions:
            self.dimensions = dimensions
            gate.moved()

    @contextmanager
    def _replacing(self, uses: Uses) -> Iterator[None]:
        """Whatever fails in the with block leaves the contents undefined."""
        uses.enter()
        outcome = Outcome.LOST
        try:
            yield
            outcome = Outcome.COMMITTED
        finally:
            uses.leave(outcome)

    def copy_from(self, memory: Memory, dimensions: tuple[int, ...]) -> None:
        """Take new contents. Whatever fails leaves the buffer undefined.

        Args:
            memory: Exactly as large as the contents.
            dimensions: Of the contents; may be empty if the buffer's own are complete.

        Raises:
            InvalidArgument: Size or dimensions do not fit.
            GeneralFailure: The memory can be neither mapped nor copied.
            ResourceExhausted: The buffer is in use; it stays as it is.
        """
        with self._replacing(self._writing):
            memory._check_usable()
            nbytes = memory._contents_size
            combined = self._checked(nbytes, dimensions)
            memory._copy_out(0, self.room(nbytes)[:nbytes])
            self.settle(combined)

    def _checked(self, nbytes: int, dimensions: tuple[int, ...]) -> tuple[int, ...]:
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
        """Copy the contents out and return their generation.

        Raises:
            InvalidArgument: The memory has another size.
            GeneralFailure: The contents are undefined, or the memory can be neither mapped nor copied.
            ResourceExhausted: The buffer is being written.
        """
        with self.used(write=False):
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
        """Take the contents of another buffer.

        Raises:
            InvalidArgument: The source has no contents, or other ones than this buffer takes. As after every copy that
                fails, this buffer's contents are undefined then; only a copy onto itself changes nothing.
            ResourceExhausted: A buffer is in use; both stay as they are.
        """
        if source is self:
            return
        with self._replacing(Uses((source.handle,), (self.handle,))):
            if not source.initialised:
                raise InvalidArgument("the source has no contents")
            if source.meaning != self.meaning:
                raise InvalidArgument("the buffers hold operands of different types or quantisations")
            combine_dimensions(self.initial_dimensions, source.dimensions)
            size = self.nbytes(source.dimensions)
            self.room(size)[:size] = source.storage[:size]
            self.settle(source.dimensions)


_MOST_TOKENS = (1 << 31) - 1
_numbers = itertools.count()


class BufferTracker:
    """The buffers of one device by token, which is how clients name them."""

    def __init__(self) -> None:
        self._buffers: dict[int, ManagedBuffer] = {}

    def add(self, buffer: ManagedBuffer) -> int:
        """Register a buffer and return its token: a number of 31 bits, never 0, that comes again after all others."""
        while (token := next(_numbers) % _MOST_TOKENS + 1) in self._buffers:
            pass
        self._buffers[token] = buffer
        return token

    def remove(self, token: int) -> None:
        """Forget a token and close its buffer; an execution that uses it finishes first. Idempotent."""
        buffer = self._buffers.pop(token, None)
        if buffer is not None:
            buffer.close()

    def resolve(self, token: int) -> ManagedBuffer:
        """Return the buffer of a token; `InvalidArgument` if there is none."""
        buffer = self._buffers.get(token)
        if buffer is None:
            raise InvalidArgument(f"no buffer has token {token}; it was never given out here, or its buffer is closed")
        return buffer

    def __len__(self) -> int:
        return len(self._buffers)
