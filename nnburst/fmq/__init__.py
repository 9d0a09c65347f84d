"""Fast message queues: lock-free FIFOs in shared memory, with a futex event flag."""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
