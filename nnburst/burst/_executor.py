"""The executor of a prepared model that brings none of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from ..model import BufferToken, MeasureTiming, Request
from ._interfaces import BoundPlan, BurstExecutorWithCache, ExecutionResult, SupportsExecute

if TYPE_CHECKING:
    from ..memory import Memory

__all__ = ["DefaultBurstExecutor"]


class DefaultBurstExecutor(BurstExecutorWithCache):
    """Runs each request through `execute_synchronously`; keeps the memories, but nothing that is derived from them.

    Args:
        prepared_model: Kept alive by this object.
    """

    def __init__(self, prepared_model: SupportsExecute) -> None:
        self._prepared_model = prepared_model
        self._memories: dict[int, Memory | BufferToken] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        return slot in self._memories

    def add_cache_entry(self, memory: Memory | BufferToken, slot: int) -> None:
        self._memories[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        self._memories.pop(slot, None)

    def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> BoundPlan:
        try:
            pools = tuple(self._memories[slot] for slot in slots)
        except KeyError as error:
            raise InvalidArgument(f"slot {error.args[0]} names no memory; it was freed") from error
        whole = replace(request, pools=pools)
        prepared_model = self._prepared_model

        def run() -> ExecutionResult:
            return prepared_model.execute_synchronously(whole, measure)

        return run

    def close(self) -> None:
        self._memories.clear()
