"""A driver-managed buffer: its state, its storage, and who uses it at the moment (facts sheet `memory.md` §5)."""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import GeneralFailure, InvalidArgument, ResourceExhausted
from ..model import Operand, combine_dimensions, is_fully_specified, operand_info

if TYPE_CHECKING:
    from ._memory import Memory

__all__ = ["WRITTEN", "Made", "ManagedBuffer", "Role", "gate"]

Array = np.ndarray[Any, np.dtype[Any]]

WRITTEN, _CLOSED = -1, -(1 << 40)
_PATIENCE = 1.0
"""Seconds that a copy or an execution waits for another that uses the buffer in a way that excludes it."""


class Made:
    """What somebody made over the bytes of the buffers of one request, by where these are."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of all of it, because a buffer was closed and its storage is to be freed."""
        self.current: Any = None
        self.moves = -1
        self.by_layout: dict[Hashable, Any] = {}


class Role(NamedTuple):
    """Who may use a buffer as what. Prepared models are numbered and numbers are never used again."""

    model: int
    is_input: bool
    position: int


class _Storage:
    """Bytes that one buffer owns, or several share until one of them is written."""

    __slots__ = ("bytes", "number", "owners")

    _numbers = itertools.count(1)

    def __init__(self, nbytes: int) -> None:
        try:
            self.bytes: Array = np.zeros(nbytes, np.uint8)
        except (MemoryError, ValueError, OverflowError):
            raise ResourceExhausted(
                f"no memory for a buffer of {nbytes} bytes; close buffers or make it smaller"
            ) from None
        self.number = next(self._numbers)
        """Never used again, as `id` would be."""
        self.owners = 1


class _Gate:
    """Who uses which buffer at the moment.

    One lock for all: a request takes all its buffers or none, so no two requests wait for each other in a circle. It
    guards dictionary work only; bytes are copied and kernels run outside.
    """

    def __init__(self) -> None:
        self.moves = 0
        """Changes when any buffer gets other storage, shares it, or gets contents of other dimensions."""
        self.renew()

    def renew(self) -> None:
        """In a forked child: a thread that is not there any more may hold the lock. Requests bound before keep it."""
        # Reentrant, because an object that the garbage collector finds meanwhile may close its buffer.
        self.lock = threading.RLock()
        self.left = threading.Condition(self.lock)
        self.waiting = 0

    def enter(self, reading: Sequence[ManagedBuffer], writing: Sequence[ManagedBuffer]) -> None:
        """Keep writers out of some buffers and everybody out of others.

        Raises:
            InvalidArgument: One of them was closed.
            ResourceExhausted: One of them was in use for too long.
        """
        with self.lock:
            for buffer in reading:
                if buffer.use < 0:
                    self._wait(reading, writing)
                    break
            for buffer in writing:
                if buffer.use:
                    self._wait(reading, writing)
                    break
            for buffer in reading:
                buffer.use += 1
            for buffer in writing:
                buffer.use = WRITTEN

    def _wait(self, reading: Sequence[ManagedBuffer], writing: Sequence[ManagedBuffer]) -> None:
        def settled() -> bool:
            if any(buffer.closed for buffer in (*reading, *writing)):
                raise InvalidArgument("the buffer was closed, so its token names nothing any more")
            return all(buffer.use >= 0 for buffer in reading) and not any(buffer.use for buffer in writing)

        self.waiting += 1
        try:
            if not self.left.wait_for(settled, _PATIENCE):
                raise ResourceExhausted("the buffer is in use by another execution or copy; try again")
        finally:
            self.waiting -= 1

    def leave(self, reading: Sequence[ManagedBuffer], writing: Sequence[ManagedBuffer]) -> None:
        """End what `enter` began."""
        with self.lock:
            for buffer in reading:
                buffer.use -= 1
                if buffer.use < 0:
                    buffer.drop()
            for buffer in writing:
                buffer.use -= WRITTEN
                if buffer.use:
                    buffer.drop()
            if self.waiting:
                self.left.notify_all()


gate = _Gate()
os.register_at_fork(after_in_child=gate.renew)


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
        self.meaning = operand.type, operand.scale, operand.zero_point, operand.extra_params
        """What two buffers must have in common for one to take the other's contents."""
        self.initial_dimensions = dimensions
        self.dimensions = dimensions
        self.is_fixed = info.is_scalar or (bool(dimensions) and is_fully_specified(dimensions))
        """Whether all dimensions were known from the beginning."""
        self.roles = roles
        self.initialised = False
        self.generation = 0
        """Counts changes of the contents."""
        self.use = 0
        """How many read it, or `WRITTEN`; and `_CLOSED` on top if nobody is admitted any more."""
        self._storage = _Storage(self.nbytes(dimensions) if self.is_fixed else 0)
        self._spare: _Storage | None = None
        self._account: Callable[[int], None] | None = None
        self._accounted = 0
        self._made: weakref.WeakSet[Made] = weakref.WeakSet()

    def nbytes(self, dimensions: tuple[int, ...]) -> int:
        """Bytes that contents of these dimensions take."""
        return math.prod(dimensions) * self.dtype.itemsize

    @contextmanager
    def used(self, *, write: bool) -> Iterator[None]:
        """Keep writers out, or everybody, inside a with block. Raises as executions do when they are admitted."""
        reading, writing = ((), (self,)) if write else ((self,), ())
        gate.enter(reading, writing)
        try:
            yield
        finally:
            gate.leave(reading, writing)

    # -- storage ----------------------------------------------------------------------------------------------

    @property
    def storage(self) -> Array:
        """The bytes; valid while the buffer is in use."""
        return self._storage.bytes

    @property
    def place(self) -> int:
        """Changes when the bytes have moved, so that views of them are those of another buffer."""
        return self._storage.number

    @property
    def closed(self) -> bool:
        """Whether nobody is admitted any more."""
        return self.use <= _CLOSED // 2

    @property
    def shared(self) -> bool:
        """Whether another buffer has the same storage; then whoever writes takes another one first."""
        return self._storage.owners > 1

    def account_to(self, account: Callable[[int], None]) -> None:
        """Have somebody told of the bytes that the buffer takes, now and each time that it grows.

        Args:
            account: Gets the number of bytes that come on top; what it raises keeps the buffer from growing.
        """
        self._account = account
        self._reserve(self._storage.bytes.nbytes)

    def _reserve(self, nbytes: int) -> None:
        if self._account is not None and nbytes > self._accounted:
            self._account(nbytes - self._accounted)
            self._accounted = nbytes

    def room(self, nbytes: int) -> Array:
        """Return storage of at least that size to be overwritten as a whole. Only while writing.

        Raises:
            ResourceExhausted: There is none, or not for this client.
        """
        if self._storage.owners > 1 or self._storage.bytes.nbytes < nbytes:
            self._reserve(nbytes)
            with gate.lock:
                spare, self._spare = self._spare, None
            if spare is None or spare.bytes.nbytes < nbytes:
                spare = _Storage(nbytes)
            self._move(spare)
        return self._storage.bytes

    def _move(self, storage: _Storage) -> _Storage:
        """Take another storage and return the old one, which somebody else may still own."""
        with gate.lock:
            old, self._storage = self._storage, storage
            old.owners -= 1
            gate.moves += 1
        return old

    def close(self) -> None:
        """Admit nobody any more, and give the storage back as soon as nobody uses it. Idempotent."""
        with gate.lock:
            if not self.closed:
                self.use += _CLOSED
                self.drop()
            if gate.waiting:
                gate.left.notify_all()

    def drop(self) -> None:
        """Give the storage of a closed buffer back, if nobody uses it. Under the gate's lock."""
        if self.use == _CLOSED:
            self._storage.owners -= 1
            self._storage, self._spare, self.initialised = _NOTHING, None, False
            gate.moves += 1
            for made in self._made:
                made.forget()

    def register(self, made: Made) -> None:
        """Have what was made over the bytes forgotten when they are given back."""
        with gate.lock:
            self._made.add(made)

    # -- contents ---------------------------------------------------------------------------------------------

    def settle(self, dimensions: tuple[int, ...] | None) -> None:
        """End a change of the contents: they now have these dimensions, or are undefined (None)."""
        self.generation += 1
        self.initialised = dimensions is not None
        if dimensions is not None and dimensions != self.dimensions:
            self.dimensions = dimensions
            with gate.lock:
                gate.moves += 1

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
        with self.used(write=True):
            settled: tuple[int, ...] | None = None
            try:
                memory.check_usable()
                nbytes = _contents(memory)
                combined = self._checked(nbytes, dimensions)
                memory.copy_out(0, self.room(nbytes)[:nbytes])
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
            memory.check_usable()
            size = self.nbytes(self.dimensions)
            if (self.initialised or self.is_fixed) and _contents(memory) != size:
                raise InvalidArgument(f"a memory of {_contents(memory)} bytes for contents of {size}")
            if not self.initialised:
                raise GeneralFailure("the buffer has no contents yet; copy to it or run an execution that writes it")
            memory.copy_in(0, self.storage[:size])
            return self.generation

    def copy_buffer(self, source: ManagedBuffer) -> None:
        """Take the contents of another buffer, by sharing its storage until one of the two is written.

        The storage that this buffer had goes to the source, which moves there when it is written next: two buffers that
        are copied and written in turn use the same two storages for ever.

        Raises:
            InvalidArgument: The source has no contents, or other ones than this buffer takes. As after every copy that
                fails, this buffer's contents are undefined then; only a copy onto itself changes nothing.
            ResourceExhausted: A buffer is in use; both stay as they are.
        """
        if source is self:
            return
        reading, writing = (source,), (self,)
        gate.enter(reading, writing)
        try:
            settled: tuple[int, ...] | None = None
            try:
                if not source.initialised:
                    raise InvalidArgument("the source has no contents")
                if source.meaning != self.meaning:
                    raise InvalidArgument("the buffers hold operands of different types or quantisations")
                combine_dimensions(self.initial_dimensions, source.dimensions)
                if source._storage is not self._storage:
                    self._reserve(source._storage.bytes.nbytes)
                    with gate.lock:
                        source._storage.owners += 1
                    old = self._move(source._storage)
                    if not old.owners and source._spare is None and old.bytes.nbytes == source._storage.bytes.nbytes:
                        with gate.lock:
                            source._spare, old.owners = old, 1
                settled = source.dimensions
            finally:
                self.settle(settled)
        finally:
            gate.leave(reading, writing)


_NOTHING = _Storage(0)
"""What a closed buffer has."""


def _contents(memory: Memory) -> int:
    """Bytes of a memory's contents; of an image, without what lies between its rows."""
    return memory.size if memory.image is None else memory.image.tight_size
