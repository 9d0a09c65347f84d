"""Blobs by key, bounded and kept in one file: for devices that cache on their own."""

from __future__ import annotations

from .file import BlobFileError
from .nncache import NNCache
from .table import BlobCache, Capacity, Policy, Select

__all__ = ["BlobCache", "BlobFileError", "Capacity", "NNCache", "Policy", "Select"]
