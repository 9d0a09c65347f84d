"""Compilation caching that a service can trust although the client owns the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .device_cache import DeviceCache, VerifiedEntry, check_entry
    from .directory import Cache, OpenedEntry, StagedEntry
    from .eviction import Pruned, prune
    from .index import EntryInfo
    from .limits import SIZES, Limits, amount
    from .places import default_cache_directory, default_state_directory
    from .reasons import SPOILT, CacheReason, CacheRejected, SaveResult
    from .sealed_copy import check_fd, place_of, seconds_per_byte
    from .token import (
        PRIORITY_CODE,
        TOKEN_SIZE,
        checked_token,
        device_token_v1,
        device_token_v2,
        entry_name,
        file_names,
        model_fingerprint,
    )
    from .trust_store import TrustStore
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            ".device_cache": "DeviceCache VerifiedEntry check_entry",
            ".directory": "Cache OpenedEntry StagedEntry",
            ".eviction": "Pruned prune",
            ".index": "EntryInfo",
            ".limits": "SIZES Limits amount",
            ".places": "default_cache_directory default_state_directory",
            ".reasons": "SPOILT CacheReason CacheRejected SaveResult",
            ".sealed_copy": "check_fd place_of seconds_per_byte",
            ".token": (
                "PRIORITY_CODE TOKEN_SIZE checked_token device_token_v1 device_token_v2 entry_name file_names "
                "model_fingerprint"
            ),
            ".trust_store": "TrustStore",
        },
    )

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
    "seconds_per_byte",
]
