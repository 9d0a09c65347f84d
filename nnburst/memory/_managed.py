"""Driver-managed buffers: device memory that clients name by token (facts sheet `memory.md` §5).

`ManagedBuffer` is one buffer with its state, `BufferTracker` the table of tokens, `BufferSet` the buffers of one
request: the only code that admits a request and commits or fails its outputs, whatever way the request came.
"""

from __future__ import annotations

import math
import threading
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
        self.version = 0
        """Changes when arrays over the storage must be made anew."""
        self.readers = 0
        self.writing = False

    @property
    def is_fixed(self) -> bool:
        """Whether all dimensions were known from the beginning."""
        return self.is_scalar or (bool(self.initial_dimensions) and is_fully_specified(self.initial_dimensions))

    def nbytes(self, dimensions: tuple[int, ...]) -> int:
        """Bytes that contents of these dimensions take."""
        return math.prod(dimensions) * self.dtype.itemsize

    @contextmanager
    def used(self, *, write: bool) -> Iterator[None]:
        """Keep writers out, or everybody.

        Raises:
            ResourceExhausted: Somebody else kept the buffer for too long.
        """
        users = ((self, write),)
        _begin(users)
        try:
            yield
        finally:
            _end(users)

    # -- contents ---------------------------------------------------------------------------------------------

    def room(self, nbytes: int) -> Array:
        """Return storage of at least that size to be overwritten as a whole. Only while writing."""
        if self.shared or self.storage.nbytes < nbytes:
            self.storage = np.zeros(max(nbytes, 1), np.uint8)
            self.shared = False
            self.version += 1
        return self.storage

    def settle(self, dimensions: tuple[int, ...] | None) -> None:
        """End a change of the contents: they now have these dimensions, or are undefined (None)."""
        self.generation += 1
        self.initialised = dimensions is not None
        if dimensions is not None and dimensions != self.dimensions:
            self.dimensions = dimensions
            self.version += 1

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
                self.version += 1
                settled = dimensions
            finally:
                self.settle(settled)


_lock = threading.Lock()
"""One for all buffers: it is held for a few attribute accesses only, and takes all buffers of a request at once."""
_changed = threading.Condition(_lock)
_waiting = 0
_Users = Sequence[tuple[ManagedBuffer, bool]]
"""(buffer, whether it is written)."""


def _take(users: _Users) -> bool:
    """Take all or none; with the lock held."""
    for buffer, write in users:
        if buffer.writing or (write and buffer.readers):
            return False
    for buffer, write in users:
        if write:
            buffer.writing = True
        else:
            buffer.readers += 1
    return True


def _begin(users: _Users) -> None:
    global _waiting
    with _lock:
        if _take(users):
            return
        _waiting += 1
        try:
            if not _changed.wait_for(lambda: _take(users), _PATIENCE):
                raise ResourceExhausted("a buffer is in use by another execution or copy; try again")
        finally:
            _waiting -= 1


def _end(users: _Users) -> None:
    with _lock:
        for buffer, write in users:
            if write:
                buffer.writing = False
            else:
                buffer.readers -= 1
        if _waiting:
            _changed.notify_all()


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
        reading = {id(use.buffer): (use.buffer, False) for use in self.inputs}
        written = {id(use.buffer): (use.buffer, True) for use in self.outputs}
        self._users = (*reading.values(), *written.values())
        self._open_ended = any(not use.buffer.is_fixed for use in self.outputs)

    @property
    def version(self) -> int:
        """Changes when arrays over the buffers must be made anew."""
        total = 0
        for buffer, _ in self._users:
            total += buffer.version
        return total

    @property
    def is_open_ended(self) -> bool:
        """Whether `commit` needs to be told the shapes."""
        return self._open_ended

    def admit(self) -> None:
        """Keep the buffers for one execution; it must end with `commit` or `fail`.

        Raises:
            InvalidArgument: An input's contents have other dimensions than the request says.
            GeneralFailure: An input has no contents.
            ResourceExhausted: A buffer is in use.
        """
        _begin(self._users)
        try:
            for use in self.inputs:
                if not use.buffer.initialised:
                    raise GeneralFailure(f"input {use.role.position} is in a buffer without contents")
                if use.dimensions:
                    combine_dimensions(use.buffer.dimensions, use.dimensions)
            for use in self.outputs:
                if use.buffer.shared:
                    use.buffer.room(use.buffer.storage.nbytes)
        except BaseException:
            _end(self._users)
            raise

    def commit(self, shapes: Sequence[tuple[int, ...]] = ()) -> None:
        """The execution succeeded.

        Args:
            shapes: Those of the outputs in the set, in order; may be left out unless `is_open_ended`.

        Raises:
            GeneralFailure: A shape contradicts its buffer; then no output has contents.
        """
        if self._open_ended:
            try:
                settled = [
                    combine_dimensions(use.buffer.initial_dimensions, shape)
                    for use, shape in zip(self.outputs, shapes, strict=True)
                ]
            except InvalidArgument as error:
                self.fail()
                raise GeneralFailure(f"an output does not fit its buffer: {error}") from None
        else:
            settled = [use.buffer.initial_dimensions for use in self.outputs]
        for use, dimensions in zip(self.outputs, settled, strict=True):
            use.buffer.settle(dimensions)
        _end(self._users)

    def fail(self) -> None:
        """The execution failed: its outputs have no contents."""
        for use in self.outputs:
            use.buffer.settle(None)
        _end(self._users)


def _check_role(use: BufferUse) -> None:
    if use.role not in use.buffer.roles:
        kind = "input" if use.role.is_input else "output"
        raise InvalidArgument(f"the buffer was not allocated to be {kind} {use.role.position} of this prepared model")
