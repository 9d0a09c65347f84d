"""The source of pools for constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import MemoryLike

PoolFactory = Callable[[int], "MemoryLike"]
"""Makes a writable memory of so many bytes for the large constants of a model."""

_given: list[PoolFactory] = []


def provide_pools(factory: PoolFactory) -> None:
    """Set the function that makes pools of large constants.

    The package calls this when it is imported: describing and checking models needs neither the C core nor
    shared memory.
    """
    _given[:] = [factory]


def make_pool(nbytes: int) -> MemoryLike:
    """Return a memory for constants of so many bytes."""
    return _given[0](nbytes)
