"""The driver-managed buffers of one request: the only code that admits a request and commits or fails its outputs.

Every way to execute goes through it, so the states of buffers are kept in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from .._core._nnburst import lib
from ..errors import GeneralFailure, InvalidArgument
from ..model import Array, combine_dimensions
from .managed import Made, ManagedBuffer, RoleKey
from .managed_gate import Outcome, Uses, gate


class BufferUse(Struct, frozen=True):
    """A buffer as one argument of a request."""

    buffer: ManagedBuffer
    role: RoleKey
    dimensions: tuple[int, ...]
    """As the request gives them."""


class BufferView:
    """A buffer as the pool that kernels see, while its execution is admitted."""

    kind = "buffer"
    is_private = True

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
        self._reading = tuple({id(use.buffer): use.buffer for use in self.inputs}.values())
        self._writing = tuple(use.buffer for use in self.outputs)
        self._all = self._reading + self._writing
        self._open = tuple(buffer for buffer in self._reading if not buffer.is_fixed)
        self._dimensioned = tuple(use for use in self.inputs if use.dimensions)
        self.fixed = all(buffer.is_fixed for buffer in self._writing)
        """Whether the outputs always have the shapes that their buffers were allocated for."""
        self._uses = Uses([buffer.handle for buffer in self._reading], [buffer.handle for buffer in self._writing])
        self.handle = self._uses.handle
        """For the code that admits the request in C, if the set is `fixed`."""
        self._moves = 0
        self._made = Made()
        for buffer in self._all:
            buffer.register(self._made)

    def admit(self) -> Any:
        """Keep the buffers for one execution; it must end with `commit` or `fail`.

        Returns:
            The object given to `keep` while the buffers' bytes were where they are now, or None.

        Raises:
            InvalidArgument: An input's contents have other dimensions than the request says, or a buffer was closed.
            GeneralFailure: An input has no contents.
            ResourceExhausted: A buffer is in use.
        """
        if lib.nnb_uses_admit(self.handle):  # the usual case: all is free and where it was
            return self._made.current
        return self._admit_with_care()

    def _admit_with_care(self) -> Any:
        """All checks, all waiting, and whatever moved."""
        self._uses.enter()
        try:
            if not all(buffer.initialised for buffer in self._reading):
                raise GeneralFailure("an input is in a buffer without contents; copy to it or write it first")
            for use in self._dimensioned:
                combine_dimensions(use.buffer.dimensions, use.dimensions)
            self._moves = gate.moves
            made = self._made
            if made.layout != self._layout():
                made.current = None
            if made.current is not None:
                lib.nnb_uses_settle(self.handle, self._moves)
            return made.current
        except BaseException:
            self._uses.leave(Outcome.UNCHANGED)
            raise

    def keep(self, made: Any) -> None:
        """Remember views made over the buffers' bytes. Only while admitted."""
        self._made.layout, self._made.current = self._layout(), made
        lib.nnb_uses_settle(self.handle, self._moves)

    @property
    def current(self) -> Any:
        """What the next execution will use if nothing moves until then, or None."""
        return self._made.current

    def when_freed(self, forget: Callable[[], None]) -> None:
        """Have a function called, from any thread, when a buffer is freed: then views over it must not be held."""
        self._made.also_forget = forget

    def _layout(self) -> Hashable:
        return *[buffer.storage.nbytes for buffer in self._all], *[buffer.dimensions for buffer in self._open]

    def commit(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """The execution succeeded.

        Args:
            shapes: Of the outputs in the set, in order; not needed if the set is `fixed`.

        Raises:
            GeneralFailure: A shape contradicts its buffer; then no output has contents.
        """
        if not self.fixed:
            try:
                for buffer, shape in zip(self._writing, shapes, strict=True):
                    combine_dimensions(buffer.initial_dimensions, shape)
            except InvalidArgument as error:
                self.fail()
                raise GeneralFailure(f"an output does not fit its buffer: {error}") from None
            for buffer, shape in zip(self._writing, shapes, strict=True):
                buffer.settle(shape)
        self._uses.leave(Outcome.COMMITTED)

    def fail(self) -> None:
        """The execution failed: its outputs have no contents."""
        self._uses.leave(Outcome.LOST)


def _check_role(use: BufferUse) -> None:
    if use.role not in use.buffer.roles:
        kind = "input" if use.role.is_input else "output"
        raise InvalidArgument(f"the buffer was not allocated to be {kind} {use.role.position} of this prepared model")
