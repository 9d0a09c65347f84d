"""The client's slot table: which memory a slot names (facts sheet `burst.md` §6.1)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ErrorStatus, ResourceExhausted
from ._interfaces import BurstCallback

if TYPE_CHECKING:
    from ..memory import Memory
    from ..model import BufferToken

__all__ = ["SlotTable"]

_LAST_SLOT = 2**31 - 1


class SlotTable(BurstCallback):
    """Memory ↔ slot, one namespace per burst. Thread-safe.

    A slot is never used twice: a server that missed a `free_memory` cannot confuse the old memory with a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memories: dict[int, Memory | BufferToken] = {}
        self._slots: dict[Memory | BufferToken, int] = {}
        self._next = 0

    def slots_for(self, memories: Sequence[Memory | BufferToken]) -> list[int]:
        """Return the slot of each memory, in order; a memory seen for the first time gets a new one."""
        with self._lock:
            return [self._slot(memory) for memory in memories]

    def _slot(self, memory: Memory | BufferToken) -> int:
        slot = self._slots.get(memory)
        if slot is None:
            slot = self._next
            if slot > _LAST_SLOT:
                raise ResourceExhausted("this burst has used every slot number; close it and open another")
            self._next += 1
            self._slots[memory] = slot
            self._memories[slot] = memory
        return slot

    def free(self, memory: Memory | BufferToken) -> int | None:
        """Forget a memory and return the slot it had, or None."""
        with self._lock:
            slot = self._slots.pop(memory, None)
            if slot is not None:
                del self._memories[slot]
            return slot

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._slots.clear()
            self._memories.clear()

    def __len__(self) -> int:
        return len(self._slots)

    def get_memories(self, slots: Sequence[int]) -> tuple[ErrorStatus, tuple[Memory | BufferToken, ...]]:
        with self._lock:
            found = [self._memories.get(slot) for slot in slots]
        known = tuple(memory for memory in found if memory is not None)
        if len(known) != len(found):
            return ErrorStatus.INVALID_ARGUMENT, ()
        return ErrorStatus.NONE, known
