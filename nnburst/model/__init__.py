"""Models and requests: their types, the operation table, the builder, and validation."""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
