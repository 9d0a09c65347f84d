"""Arithmetic on dimensions that another process may have chosen. A size of 0 is unknown."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from ..errors import InvalidArgument

HIGHEST_RANK = 64
"""Largest rank of a tensor, as in NumPy."""
_LARGEST_SIZE = 2**32 - 1
_MOST_ELEMENTS = sys.maxsize // 16
"""Largest number of elements of a tensor. A size of 0 counts as 1, since NumPy limits empty arrays, too."""


def check_dimensions(dimensions: Sequence[int]) -> None:
    """Check the rank and each size before a computation.

    The product of a hundred thousand sizes would block the interpreter for minutes.

    Raises:
        InvalidArgument: There are more than 64 dimensions, a size exceeds 32 bits, or the tensor is too large.
    """
    if len(dimensions) > HIGHEST_RANK:
        raise InvalidArgument(f"a rank of {len(dimensions)} is too high; a tensor has at most {HIGHEST_RANK} axes")
    if any(not 0 <= size <= _LARGEST_SIZE for size in dimensions):
        raise InvalidArgument(f"dimensions {list(dimensions)} must be 0 (not known) … 2^32-1")
    if math.prod(size or 1 for size in dimensions) > _MOST_ELEMENTS:
        raise InvalidArgument(f"dimensions {list(dimensions)} are larger than a tensor can be")


def element_count(dimensions: Sequence[int]) -> int:
    """Return the product of all sizes. Raises the errors of `check_dimensions`."""
    check_dimensions(dimensions)
    return math.prod(dimensions)


def combine_dimensions(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Merge two descriptions of a tensor's dimensions.

    Args:
        a: Dimensions; ``()`` is an unknown rank, 0 an unknown dimension.
        b: Dimensions, like `a`.

    Returns:
        The dimensions, with each size that is known in `a` or `b`. The order of `a` and `b` does not matter.

    Raises:
        InvalidArgument: The ranks or two known sizes differ, or a rank is too high.
    """
    check_dimensions(a)
    check_dimensions(b)
    if not a or not b:
        return tuple(a or b)
    if len(a) != len(b):
        raise InvalidArgument(f"rank {len(a)} of {list(a)} is not rank {len(b)} of {list(b)}")
    for axis, (m, n) in enumerate(zip(a, b, strict=True)):
        if m and n and m != n:
            raise InvalidArgument(f"dimension {axis} is {m} in {list(a)} but {n} in {list(b)}")
    return tuple(m or n for m, n in zip(a, b, strict=True))


def is_fully_specified(dimensions: tuple[int, ...]) -> bool:
    return bool(dimensions) and all(dimensions)
