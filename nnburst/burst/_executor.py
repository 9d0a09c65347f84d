"""Executors that remember the memory of each slot and bind requests with somebody else's help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from ..model import BufferToken, ExecutionResult, MeasureTiming, Request, RunOptions
from ._interfaces import BoundPlan, BurstExecutorWithCache, SupportsExecute

if TYPE_CHECKING:
    from ..memory import Memory

__all__ = ["DefaultBurstExecutor", "PlanBurstExecutor"]


class PlanBurstExecutor(BurstExecutorWithCache):
    """Puts the memories of its slots into a request and has it bound.

    Args:
        bind: Checks a request that carries its pools and returns what runs it; raises as `BurstExecutorWithCache.bind`.
    """

    def __init__(self, bind: Callable[[Request, MeasureTiming], BoundPlan]) -> None:
        self._bind = bind
        self._entries: dict[int, Memory | BufferToken] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        return slot in self._entries

    def add_cache_entry(self, memory: Memory | BufferToken, slot: int) -> None:
        self._entries[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        self._entries.pop(slot, None)

    def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> BoundPlan:
        try:
            pools = tuple(self._entries[slot] for slot in slots)
        except KeyError as error:
            raise InvalidArgument(f"slot {error.args[0]} names no memory; it was freed") from error
        return self._bind(replace(request, pools=pools), measure)

    def close(self) -> None:
        self._entries.clear()


class DefaultBurstExecutor(PlanBurstExecutor):
    """Runs each request through `execute_synchronously`; keeps the memories, but nothing that is derived from them.

    Args:
        prepared_model: Kept alive by this object.
    """

    def __init__(self, prepared_model: SupportsExecute) -> None:
        def bind(request: Request, measure: MeasureTiming) -> BoundPlan:
            def run() -> ExecutionResult:
                return prepared_model.execute_synchronously(request, RunOptions(measure))

            return run

        super().__init__(bind)
