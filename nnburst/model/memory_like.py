"""The part of a memory pool that models and requests rely on."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@runtime_checkable
class MemoryLike(Protocol):
    """A shared memory pool. `nnburst.memory.Memory` is the implementation; size and offsets are in bytes."""

    @property
    def kind(self) -> str: ...

    @property
    def size(self) -> int: ...

    def array(
        self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> np.ndarray[Any, np.dtype[Any]]: ...
