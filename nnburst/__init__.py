"""Run a neural network in another process as if it were a function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _core, errors  # noqa: F401 (the core comes first: its error says that the tree is not built)
from ._core import leaving as _leaving  # noqa: F401 (imported here, before other threads import parts)
from ._lazy import attach
from ._version import VERSION as __version__
from .model.pools import provide_pools

if TYPE_CHECKING:
    from .memory.memory import Memory

__getattr__, __dir__, __all__ = attach(__name__)
__all__ += ["__version__", "errors"]


def _pool_of_constants(nbytes: int) -> Memory:
    from .memory.memory import Memory

    return Memory.ashmem(nbytes, "nnburst-constants")


provide_pools(_pool_of_constants)
