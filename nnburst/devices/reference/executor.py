"""Burst executor of the reference device: memories stay mapped, a bound request is a list of ready calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...burst import BoundPlan, BurstExecutorWithCache
from ...errors import InvalidArgument
from ...model import BufferToken, MeasureTiming, Request

if TYPE_CHECKING:
    from ...memory import Memory
    from .prepared import ReferencePreparedModel

__all__ = ["ReferenceBurstExecutor"]


class ReferenceBurstExecutor(BurstExecutorWithCache):
    """Remembers the memory of each slot; arrays of a plan keep its mapping alive on their own."""

    def __init__(self, prepared: ReferencePreparedModel) -> None:
        self._prepared = prepared
        self._entries: dict[int, Memory | BufferToken] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        """See `BurstExecutorWithCache`."""
        return slot in self._entries

    def add_cache_entry(self, memory: Memory | BufferToken, slot: int) -> None:
        """See `BurstExecutorWithCache`."""
        self._entries[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        """See `BurstExecutorWithCache`."""
        self._entries.pop(slot, None)

    def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> BoundPlan:
        """See `BurstExecutorWithCache`."""
        try:
            pools = tuple(self._entries[slot] for slot in slots)
        except KeyError as error:
            raise InvalidArgument(f"slot {error.args[0]} names no memory; it was freed") from error
        return self._prepared.bind(replace(request, pools=pools), measure)

    def close(self) -> None:
        """Forget every memory."""
        self._entries.clear()
