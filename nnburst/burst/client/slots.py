"""The client's slot table, with the memory of each slot."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...errors import ErrorStatus, ResourceExhausted
from ..interfaces import BurstCallback

if TYPE_CHECKING:
    from ...memory.memory import Memory
    from ...model.types import Named

_LAST_SLOT = 2**31 - 1


class SlotTable(BurstCallback):
    """Table of a burst's memories and slots. Thread-safe without a lock, so that a signal handler cannot deadlock.

    A slot is never reused, so that a server that missed a call of `free_memory` cannot mistake one memory for another.

    Attributes:
        end_reason: The server's reason for ending the burst; an empty string if the burst has not ended.
    """

    def __init__(self, bell: int | None = None, loop_timeout_ns: int = 0) -> None:
        """Keep `bell`, the socket of `BurstCallback`. The caller must not close it until the burst is configured."""
        self.bell = bell
        self.loop_timeout_ns = loop_timeout_ns
        self._memories: dict[int, Memory | Named] = {}
        self._slots: dict[Memory | Named, int] = {}
        self._numbers = itertools.count()
        self.end_reason = ""
        self._on_end: Callable[[], None] = lambda: None

    def slots_for(self, memories: Sequence[Memory | Named]) -> list[int]:
        """Return the slot of each memory, in order. A new memory gets a new slot."""
        return [self._slot(memory) for memory in memories]

    def _slot(self, memory: Memory | Named) -> int:
        slot = self._slots.get(memory)
        if slot is None:
            mine = next(self._numbers)
            if mine > _LAST_SLOT:
                raise ResourceExhausted("this burst has used every slot number; close it and open another")
            self._memories[mine] = memory  # the memory is stored before another thread can find the slot
            slot = self._slots.setdefault(memory, mine)
            if slot != mine:
                del self._memories[mine]
        return slot

    def free(self, memory: Memory | Named) -> int | None:
        """Drop a memory, and return its slot. Return None if the memory has no slot."""
        slot = self._slots.pop(memory, None)
        if slot is not None:
            self._memories.pop(slot, None)
        return slot

    def clear(self) -> None:
        self._slots.clear()
        self._memories.clear()

    def __len__(self) -> int:
        return len(self._slots)

    def report_end(self, reason: str) -> None:
        self.end_reason = self.end_reason or reason or "it does not say why"  # it is set first: new listeners read it
        self._on_end()

    def set_end_listener(self, listener: Callable[[], None]) -> None:
        """Register a function to call, possibly twice, when the server has ended the burst."""
        self._on_end = listener
        if self.end_reason:
            listener()

    def get_memories(self, slots: Sequence[int]) -> tuple[ErrorStatus, tuple[Memory | Named, ...]]:
        found = [self._memories.get(slot) for slot in slots]
        known = tuple(memory for memory in found if memory is not None)
        if len(known) != len(found):
            return ErrorStatus.INVALID_ARGUMENT, ()
        return ErrorStatus.NONE, known
