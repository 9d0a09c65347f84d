"""Many small buffers in one memory pool, so that a burst needs few slots."""

from __future__ import annotations

from .._core.leaving import Closing
from ..errors import InvalidArgument, ResourceExhausted
from .memory import Memory

ALIGNMENT = 64


class Arena(Closing):
    """A sealed pool that hands out pieces, each on a 64-byte boundary. Pieces are given back all at once.

    Args:
        size: Bytes.
        name: For debugging.
    """

    __slots__ = ("_memory", "_used")

    def __init__(self, size: int, name: str = "nnburst-arena") -> None:
        self._memory = Memory.ashmem(size, name)
        self._used = 0

    @property
    def memory(self) -> Memory:
        """The pool that the offsets refer to."""
        return self._memory

    @property
    def used(self) -> int:
        """Bytes handed out, with padding."""
        return self._used

    def allocate(self, nbytes: int) -> int:
        """Reserve `nbytes` bytes and return their offset in the pool. Their content is whatever was there.

        Raises:
            InvalidArgument: `nbytes` is negative.
            ResourceExhausted: The pool is full; make a larger arena.
        """
        if nbytes < 0:
            raise InvalidArgument(f"cannot allocate {nbytes} bytes")
        offset = self._used
        if nbytes > self._memory.size - offset:
            raise ResourceExhausted(
                f"the arena of {self._memory.size} bytes has {self._memory.size - offset} left, {nbytes} are needed"
            )
        self._used = min(-(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT, self._memory.size)
        return offset

    def reset(self) -> None:
        """Take every piece back; the next ones overlap them."""
        self._used = 0

    def close(self) -> None:
        """Close the pool; views stay valid. Idempotent."""
        self._memory.close()
