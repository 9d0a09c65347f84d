"""Memory pools: shared memory that client and service both map (facts sheet `memory.md` §2, §3)."""

from __future__ import annotations

from ._arena import Arena
from ._memory import PROT_READ, PROT_WRITE, Memory, MemoryHandle

__all__ = ["PROT_READ", "PROT_WRITE", "Arena", "Memory", "MemoryHandle"]
