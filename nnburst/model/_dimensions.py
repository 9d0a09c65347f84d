"""Arithmetic on dimensions in which 0 means "not known yet" (facts sheet `memory.md` §4.3)."""

from __future__ import annotations

from ..errors import InvalidArgument

__all__ = ["combine_dimensions", "is_fully_specified"]


def combine_dimensions(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Merge what two sources know about a tensor's dimensions.

    Args:
        a: Dimensions; ``()`` is an unknown rank, 0 an unknown dimension.
        b: Likewise.

    Returns:
        The dimensions that both allow, as specific as the two together are. Commutative.

    Raises:
        InvalidArgument: The ranks differ, or a dimension that both know differs.
    """
    if not a or not b:
        return tuple(a or b)
    if len(a) != len(b):
        raise InvalidArgument(f"rank {len(a)} of {list(a)} is not rank {len(b)} of {list(b)}")
    for axis, (m, n) in enumerate(zip(a, b, strict=True)):
        if m and n and m != n:
            raise InvalidArgument(f"dimension {axis} is {m} in {list(a)} but {n} in {list(b)}")
    return tuple(m or n for m, n in zip(a, b, strict=True))


def is_fully_specified(dimensions: tuple[int, ...]) -> bool:
    """Whether the dimensions of a tensor are all known."""
    return bool(dimensions) and all(dimensions)
