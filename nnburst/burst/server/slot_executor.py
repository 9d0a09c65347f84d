"""The executor that remembers the memory of each slot; its maker binds the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...errors import InvalidArgument
from ...model import MeasureTiming, Named, Request, RunOptions
from ..interfaces import BurstExecutorWithCache
from ..kernel import Kernel

if TYPE_CHECKING:
    from ...memory import Memory


class SlotExecutor(BurstExecutorWithCache):
    """Puts the memories of its slots into a request and has it bound.

    Args:
        bind: Checks a request that carries its pools and returns what runs it; raises as `BurstExecutorWithCache.bind`.
    """

    def __init__(self, bind: Callable[[Request, RunOptions], Kernel]) -> None:
        self._bind = bind
        self._entries: dict[int, Memory | Named] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        return slot in self._entries

    def add_cache_entry(self, memory: Memory | Named, slot: int) -> None:
        self._entries[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        self._entries.pop(slot, None)

    def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> Kernel:
        try:
            pools = tuple(self._entries[slot] for slot in slots)
        except KeyError as error:
            raise InvalidArgument(f"slot {error.args[0]} names no memory; it was freed") from error
        return self._bind(replace(request, pools=pools), RunOptions(measure, loop_timeout_ns=self.loop_timeout_ns))

    def close(self) -> None:
        self._entries.clear()
