"""Tools for tests of programs that use nnburst: injected faults, a fake clock, a check for leaks, pytest fixtures."""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
