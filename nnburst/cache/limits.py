"""What a cache directory may take."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from functools import cache

from msgspec import Struct

_log = logging.getLogger("nnburst.cache")
SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
"""Units of sizes."""


def amount(text: str, units: Mapping[str, int]) -> float | None:
    """Read a number with a unit, for example ``500M`` or ``2 GiB``; None if it is none."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]?)(?:i?b)?", text.strip().lower())
    number = float(match[1]) * units[match[2]] if match is not None and match[2] in units else math.inf
    return number if math.isfinite(number) else None


class Limits(Struct, frozen=True):
    """What a cache directory may take; 0 means no limit, but for `max_bytes`, where it means no caching.

    Attributes:
        max_bytes: Of all entries.
        max_entry_bytes: Of one.
        max_entries: How many.
        max_age: Seconds since an entry was last used.
        min_free: Bytes that the file system keeps free.
    """

    max_bytes: int = 2 << 30
    max_entry_bytes: int = 1 << 30
    max_entries: int = 10_000
    max_age: float = 90 * 86400.0
    min_free: int = 256 << 20

    @classmethod
    def from_environment(cls) -> Limits:
        """Return the defaults, with ``NNBURST_CACHE_MAX_BYTES``: a number, or one with a unit like 500M."""
        given = os.environ.get("NNBURST_CACHE_MAX_BYTES", "") if os.getuid() == os.geteuid() else ""
        if not given:
            return cls()
        size = amount(given, SIZES)
        if size is None:
            _warn_of(given)
            return cls()
        return cls(max_bytes=int(size))


@cache
def _warn_of(given: str) -> None:
    """Say once that a value is not understood."""
    _log.warning("NNBURST_CACHE_MAX_BYTES=%r is not a size and is ignored; give a number, or one like 500M", given)
