"""The function that makes memory pools for large constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import MemoryLike

PoolFactory = Callable[[int], "MemoryLike"]
"""A function that takes a size in bytes, and returns writable memory of this size for constants."""

_given: list[PoolFactory] = []


def provide_pools(factory: PoolFactory) -> None:
    """Set the function that makes pools for large constants.

    The import of `nnburst` calls `provide_pools`. So `nnburst.model` needs neither the C core nor shared memory.
    """
    _given[:] = [factory]


def make_pool(nbytes: int) -> MemoryLike:
    return _given[0](nbytes)
