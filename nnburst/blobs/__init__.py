"""A bounded cache of blobs by key, kept in one file, for devices that cache on their own."""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
