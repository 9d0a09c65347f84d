"""Bursts: executions over fast message queues, with memory named by slot."""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
