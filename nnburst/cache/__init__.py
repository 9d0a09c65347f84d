"""Compilation caching that a service can trust although the client owns the files."""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
