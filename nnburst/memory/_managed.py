"""Driver-managed buffers: device memory that clients name by token (facts sheet `memory.md` §5).

`ManagedBuffer` is one buffer with its state, `BufferTracker` the table of tokens, `BufferSet` the buffers of one
request: the only code that admits a request and commits or fails its outputs, whatever way the request came.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import GeneralFailure, InvalidArgument, ResourceExhausted
from ..model import Operand, combine_dimensions, is_fully_specified, operand_info

__all__ = ["BufferSet", "BufferTracker", "BufferUse", "BufferView", "ManagedBuffer", "Role"]

Array = np.ndarray[Any, np.dtype[Any]]

_SLOT_BITS = 20
_GENERATION_BITS = 11  # together 31: a token is a positive int32
_PATIENCE = 1.0
"""Seconds that a copy or an execution waits for another that uses the buffer in a way that excludes it."""


class Role(NamedTuple):
    """Who may use a buffer as what. Prepared models are numbered and numbers are never used again."""

    model: int
    is_input: bool
    position: int


class ManagedBuffer:
    """One buffer. Its contents are undefined until it was copied to or written by an execution that succeeded.

    Args:
        operand: Type, quantisation and extra parameters of the operands it may stand for.
        dimensions: Combined dimensions of all roles and the descriptor; 0 where open. They never change.
        roles: Uses that are allowed.
    """

    def __init__(self, operand: Operand, dimensions: tuple[int, ...], roles: frozenset[Role]) -> None:
        info = operand_info(operand.type)
        if info.dtype is None:
            raise GeneralFailure("a buffer needs an operand type with defined contents")
        self.dtype = info.dtype
        self.is_scalar = info.is_scalar
        self.initial_dimensions = dimensions
        self.dimensions = dimensions
        self.roles = roles
        self.initialised = False
        self.generation = 0
        """Counts changes of the contents."""
        self.storage: Array = np.zeros(self.nbytes(dimensions) if self.is_fixed else 0, np.uint8)
        self.shared = False
        """Whether another buffer may look at the same storage; then whoever writes takes a new one first."""
        self._monitor = threading.Condition(threading.Lock())
        self._readers = 0
        self._writing = False

    @property
    def is_fixed(self) -> bool:
        """Whether all dimensions were known from the beginning."""
        return self.is_scalar or (bool(self.initial_dimensions) and is_fully_specified(self.initial_dimensions))

    def nbytes(self, dimensions: tuple[int, ...]) -> int:
        """Bytes that contents of these dimensions take."""
        return math.prod(dimensions) * self.dtype.itemsize

    # -- exclusion --------------------------------------------------------------------------------------------

    def begin(self, write: bool) -> None:
        """Keep writers out, or everybody.

        Raises:
            ResourceExhausted: Somebody else kept the buffer for too long.
        """
        with self._monitor:
            if self._writing or (write and self._readers):
                deadline = time.monotonic() + _PATIENCE
                while self._writing or (write and self._readers):
                    if not self._monitor.wait(max(deadline - time.monotonic(), 0)) and time.monotonic() >= deadline:
                        raise ResourceExhausted("the buffer is in use by another execution or copy; try again")
            if write:
                self._writing = True
            else:
                self._readers += 1

    def end(self, write: bool) -> None:
        """End what `begin` began."""
        with self._monitor:
            if write:
                self._writing = False
            else:
                self._readers -= 1
            self._monitor.notify_all()

    @contextmanager
    def used(self, *, write: bool) -> Iterator[None]:
        """`begin` and `end` around a block."""
        self.begin(write)
        try:
            yield
        finally:
            self.end(write)

    # -- contents ---------------------------------------------------------------------------------------------

    def room(self, nbytes: int) -> Array:
        """Return storage of at least that size to be overwritten as a whole. Only while writing."""
        if self.shared or self.storage.nbytes < nbytes:
            self.storage = np.zeros(max(nbytes, 1), np.uint8)
            self.shared = False
        return self.storage

    def settle(self, dimensions: tuple[int, ...] | None) -> None:
        """End a change of the contents: they now have these dimensions, or are undefined (None)."""
        self.generation += 1
        self.initialised = dimensions is not None
        if dimensions is not None:
            self.dimensions = dimensions

    def copy_from(self, source: Array, dimensions: tuple[int, ...]) -> None:
        """Take new contents. Whatever fails leaves the buffer undefined.

        Args:
            source: Flat bytes.
            dimensions: Of the contents; may be empty if the buffer's own are complete.

        Raises:
            InvalidArgument: Size or dimensions do not fit.
        """
        with self.used(write=True):
            settled: tuple[int, ...] | None = None
            try:
                combined = self._checked(source.nbytes, dimensions)
                self.room(source.nbytes)[: source.nbytes] = source
                settled = combined
            finally:
                self.settle(settled)

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
            if 0 in dimensions:
                raise InvalidArgument(f"dimensions {list(dimensions)} have a 0; contents have none")
            combined = combine_dimensions(self.initial_dimensions, dimensions)
        if self.nbytes(combined) != nbytes:
            raise InvalidArgument(f"{nbytes} bytes for a buffer whose contents take {self.nbytes(combined)}")
        return combined

    def copy_to(self, target: Array) -> int:
        """Copy the contents out and return their generation.

        Raises:
            InvalidArgument: The target has another size.
            GeneralFailure: The contents are undefined.
        """
        with self.used(write=False):
            size = self.nbytes(self.dimensions) if self.is_scalar or 0 not in self.dimensions else None
            if size is not None and target.nbytes != size and (self.initialised or self.is_fixed):
                raise InvalidArgument(f"a memory of {target.nbytes} bytes for contents of {size}")
            if not self.initialised or size is None:
                raise GeneralFailure("the buffer has no contents yet; copy to it or run an execution that writes it")
            target[:] = self.storage[:size]
            return self.generation

    def copy_buffer(self, source: ManagedBuffer) -> None:
        """Take the contents of another buffer, by sharing its storage until one of the two is written.

        Raises:
            InvalidArgument: Types or dimensions do not fit. A source without contents leaves this one undefined.
        """
        if source is self:
            return
        with source.used(write=False):
            if not source.initialised:
                raise InvalidArgument("the source has no contents")
            storage, dimensions = source.storage, source.dimensions
            source.shared = True
        with self.used(write=True):
            settled: tuple[int, ...] | None = None
            try:
                if source.dtype != self.dtype or source.is_scalar != self.is_scalar:
                    raise InvalidArgument("the buffers hold different types")
                combine_dimensions(self.initial_dimensions, dimensions)
                self.storage, self.shared = storage, True
                settled = dimensions
            finally:
                self.settle(settled)


class BufferTracker:
    """Tokens of the buffers of one device. A token is a slot number and how often the slot was used before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[int, ManagedBuffer] = {}
        self._generations: list[int] = []
        self._free: list[int] = []

    def add(self, buffer: ManagedBuffer) -> int:
        """Register a buffer and return its token, in 1..2**31 - 1.

        Raises:
            ResourceExhausted: Too many buffers are alive.
        """
        with self._lock:
            if self._free and len(self._free) > 64:  # let freed slots rest, so that tokens repeat as late as possible
                slot = self._free.pop(0)
            elif len(self._generations) < 1 << _SLOT_BITS:
                slot = len(self._generations)
                self._generations.append(0)
            else:
                raise ResourceExhausted("the device has no room for another buffer")
            self._generations[slot] = self._generations[slot] % ((1 << _GENERATION_BITS) - 1) + 1
            token = self._generations[slot] << _SLOT_BITS | slot
            self._buffers[token] = buffer
            return token

    def remove(self, token: int) -> None:
        """Forget a token; executions that already use its buffer keep it."""
        with self._lock:
            if self._buffers.pop(token, None) is not None:
                self._free.append(token & ((1 << _SLOT_BITS) - 1))

    def resolve(self, token: int) -> ManagedBuffer:
        """Return the buffer of a token.

        Raises:
            InvalidArgument: There is none.
        """
        buffer = self._buffers.get(token)
        if buffer is None:
            raise InvalidArgument(f"no buffer has token {token}; it was never given out here, or its buffer is closed")
        return buffer

    def __len__(self) -> int:
        return len(self._buffers)


@dataclass(frozen=True, slots=True)
class BufferUse:
    """A buffer as one argument of a request."""

    buffer: ManagedBuffer
    role: Role
    dimensions: tuple[int, ...]
    """As the request gives them."""


class BufferView:
    """A buffer as the pool that kernels see, while its execution is admitted."""

    kind = "buffer"

    def __init__(self, buffer: ManagedBuffer, *, writing: bool) -> None:
        self._buffer = buffer
        self._writing = writing

    @property
    def size(self) -> int:
        """Bytes; a buffer that is written grows as needed."""
        return (1 << 62) if self._writing else self._buffer.storage.nbytes

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Unlike any other pool."""
        return -1, id(self._buffer), 0, self.size

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> Array:
        """View the contents, as `Memory.array`."""
        element = np.dtype(dtype)
        nbytes = math.prod(shape) * element.itemsize
        storage = self._buffer.room(offset + nbytes) if self._writing else self._buffer.storage
        view: Array = storage[offset : offset + nbytes].view(element).reshape(shape)
        if not self._writing:
            view.flags.writeable = False
        return view


class BufferSet:
    """The buffers of one request: one admit, then one commit or fail, for every way to execute.

    Args:
        uses: In the order of the arguments, inputs first; omitted arguments have none.

    Raises:
        InvalidArgument: A use is not among the buffer's roles, or an output shares its buffer.
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
        # One order for everybody, so that two executions never wait for each other.
        reading = {id(use.buffer): use.buffer for use in self.inputs}
        written = {id(use.buffer): use.buffer for use in self.outputs}
        self._order = sorted(
            [(key, buffer, False) for key, buffer in reading.items()]
            + [(key, buffer, True) for key, buffer in written.items()],
            key=lambda row: row[0],
        )

    @property
    def layout(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Changes when arrays over the buffers must be made anew."""
        return tuple(
            (id(buffer.storage), () if write or buffer.is_fixed else buffer.dimensions)
            for _, buffer, write in self._order
        )

    def admit(self) -> None:
        """Keep the buffers for one execution; it must end with `commit` or `fail`.

        Raises:
            InvalidArgument: An input's contents have other dimensions than the request says.
            GeneralFailure: An input has no contents.
            ResourceExhausted: A buffer is in use.
        """
        begun = 0
        try:
            for _, buffer, write in self._order:
                buffer.begin(write)
                begun += 1
            for use in self.inputs:
                if not use.buffer.initialised:
                    raise GeneralFailure(f"input {use.role.position} is in a buffer without contents")
                if use.dimensions:
                    combine_dimensions(use.buffer.dimensions, use.dimensions)
            for use in self.outputs:
                if use.buffer.shared:
                    use.buffer.room(use.buffer.storage.nbytes)
        except BaseException:
            self._end(begun)
            raise

    def commit(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """The execution succeeded; `shapes` are those of the outputs in the set, in order.

        Raises:
            GeneralFailure: A shape contradicts its buffer; then no output has contents.
        """
        try:
            for use, shape in zip(self.outputs, shapes, strict=True):
                if not use.buffer.is_fixed:
                    combine_dimensions(use.buffer.initial_dimensions, shape)
        except InvalidArgument as error:
            self.fail()
            raise GeneralFailure(f"an output does not fit its buffer: {error}") from None
        for use, shape in zip(self.outputs, shapes, strict=True):
            use.buffer.settle(shape)
        self._end(len(self._order))

    def fail(self) -> None:
        """The execution failed: its outputs have no contents."""
        for use in self.outputs:
            use.buffer.settle(None)
        self._end(len(self._order))

    def _end(self, count: int) -> None:
        for _, buffer, write in self._order[:count]:
            buffer.end(write)


def _check_role(use: BufferUse) -> None:
    if use.role not in use.buffer.roles:
        kind = "input" if use.role.is_input else "output"
        raise InvalidArgument(f"the buffer was not allocated to be {kind} {use.role.position} of this prepared model")
