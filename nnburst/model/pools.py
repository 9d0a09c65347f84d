"""The source of memory pools for large constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import MemoryLike

PoolFactory = Callable[[int], "MemoryLike"]
"""A function that returns writable memory of a size in bytes, for large constants of a model."""

_given: list[PoolFactory] = []


def provide_pools(factory: PoolFactory) -> None:
    """Set the function that makes pools for large constants.

    The package calls this when it is imported. Without it, models can be described and checked without the C core
    and shared memory.
    """
    _given[:] = [factory]


def make_pool(nbytes: int) -> MemoryLike:
    """Return memory for constants, of a size in bytes."""
    return _given[0](nbytes)
