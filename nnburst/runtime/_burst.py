"""A burst on a compilation (facts sheet `burst.md` §7)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..burst import BurstStats, ExecutionBurstController
from ..errors import InvalidArgument
from ..memory import Memory
from ._compilation import Compilation

if TYPE_CHECKING:
    from types import TracebackType

    from ..model import BufferToken
    from ._memory_desc import DeviceMemory

__all__ = ["Burst"]


class Burst:
    """Announces that executions will come in rapid succession. One runs at a time. Context manager.

    Args:
        compilation: Finished; must outlive the burst.
        polling_window: Seconds to poll before sleeping; None for the default, 0 to never poll.

    Raises:
        InvalidArgument: `compilation` is no `Compilation`.
        BadState: It is not finished or has failed.
    """

    def __init__(self, compilation: Compilation, *, polling_window: float | None = None) -> None:
        if not isinstance(compilation, Compilation):
            raise InvalidArgument("a burst needs a Compilation")
        self.compilation = compilation
        self._controller = ExecutionBurstController.create(compilation.prepared_model, polling_window=polling_window)
        self._in_use = threading.Lock()

    @property
    def controller(self) -> ExecutionBurstController:
        """The client's end."""
        return self._controller

    @property
    def in_use(self) -> threading.Lock:
        """Held by the execution that runs now."""
        return self._in_use

    @property
    def stats(self) -> BurstStats:
        """Counters of the client's end."""
        return self._controller.stats

    def free_memory(self, memory: Memory | DeviceMemory) -> bool:
        """Forget a memory on both sides. Returns whether the burst knew it."""
        pool = memory if isinstance(memory, Memory) else getattr(memory, "pool", None)
        if pool is None:
            raise InvalidArgument(f"{memory!r} is no memory")
        return self.forget(pool)

    def forget(self, pool: Memory | BufferToken) -> bool:
        """As `free_memory`, for what stands in requests; after `close` there is nothing to forget."""
        return not self._controller.closed and self._controller.free_memory(pool)

    def close(self) -> None:
        """End the burst; in any order relative to memories. Idempotent."""
        self._controller.close()

    def __enter__(self) -> Burst:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
