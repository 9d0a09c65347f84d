"""Blobs by key, bounded and kept in one file: for devices that cache on their own."""

from __future__ import annotations

from ._file import BlobFileError
from ._nncache import NNCache
from ._table import BlobCache, Capacity, Policy, Select

__all__ = ["BlobCache", "BlobFileError", "Capacity", "NNCache", "Policy", "Select"]
