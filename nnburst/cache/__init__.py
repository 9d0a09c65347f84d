"""Compilation caching that a service can trust although the client owns the files."""

from __future__ import annotations

from ._device_cache import DeviceCache, SaveResult, VerifiedEntry, check_entry
from ._directory import Cache, OpenedEntry, StagedEntry
from ._eviction import Pruned, prune
from ._index import EntryInfo
from ._limits import SIZES, Limits, amount
from ._places import default_cache_directory, default_state_directory
from ._reasons import SPOILT, CacheReason, CacheRejected
from ._sealed_copy import check_fd, place_of
from ._token import (
    PRIORITY_CODE,
    TOKEN_SIZE,
    checked_token,
    device_token_v1,
    device_token_v2,
    entry_name,
    file_names,
    model_fingerprint,
)
from ._trust_store import TrustStore

__all__ = [
    "PRIORITY_CODE",
    "SIZES",
    "SPOILT",
    "TOKEN_SIZE",
    "Cache",
    "CacheReason",
    "CacheRejected",
    "DeviceCache",
    "EntryInfo",
    "Limits",
    "OpenedEntry",
    "Pruned",
    "SaveResult",
    "StagedEntry",
    "TrustStore",
    "VerifiedEntry",
    "amount",
    "check_entry",
    "check_fd",
    "checked_token",
    "default_cache_directory",
    "default_state_directory",
    "device_token_v1",
    "device_token_v2",
    "entry_name",
    "file_names",
    "model_fingerprint",
    "place_of",
    "prune",
]
