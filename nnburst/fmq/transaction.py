"""Zero-copy access to the ring of a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BadState, InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt


Elements = np.ndarray[Any, np.dtype[Any]]


class MemTransaction:
    """Part of a ring, lent by `MessageQueue.begin_write` or `begin_read` until `commit`.

    As a context manager it commits when the block ends without an exception.

    Attributes:
        first: View of the elements up to the end of the ring.
        second: View of those that continue at its beginning; empty unless the transaction wraps.

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
        """Use `MessageQueue.begin_write` or `begin_read`."""
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
        """Element `index`, as NumPy gives it (a view for structured types)."""
        region, i = self._place(index)
        return region[i]

    def __setitem__(self, index: int, value: Any) -> None:
        region, i = self._place(index)
        region[i] = value

    def copy_to(self, data: npt.ArrayLike, start: int = 0) -> None:
        """Copy elements into the transaction.

        Args:
            data: Elements; flattened, cast like an assignment of NumPy.
            start: First slot.

        Raises:
            InvalidArgument: They do not fit.
        """
        values = np.asarray(data, self.first.dtype).reshape(-1)
        first, second = self._range(start, values.size)
        first[...], second[...] = values[: first.size], values[first.size :]

    def copy_from(self, start: int = 0, count: int | None = None) -> Elements:
        """Copy elements out of the transaction.

        Args:
            start: First slot.
            count: How many; None for all from `start`.

        Returns:
            A new array of `count` elements.

        Raises:
            InvalidArgument: The range is not inside the transaction.
        """
        return np.concatenate(self._range(start, len(self) - start if count is None else count))

    def _range(self, start: int, count: int) -> tuple[Elements, Elements]:
        """Return views of `count` elements in both parts; `InvalidArgument` if they are not all there."""
        if start < 0 or count < 0 or start + count > len(self):
            raise InvalidArgument(f"{count} elements at slot {start} exceed a transaction of {len(self)}")
        split, end = len(self.first), start + count
        return self.first[start:end], self.second[max(start - split, 0) : max(end - split, 0)]

    def commit(self, count: int | None = None) -> bool:
        """Publish the written elements, or give back the read ones.

        Args:
            count: Only the first `count` elements; None for all.

        Returns:
            False if the writer of an unsynchronized queue overtook this reader meanwhile: the elements read are void.

        Raises:
            InvalidArgument: `count` is larger than the transaction.
            BadState: Committed before, or the queue is closed.
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
