"""What a cache directory may take."""

from __future__ import annotations

import logging
import math
import os
import re
from functools import cache

from msgspec import Struct

_log = logging.getLogger("nnburst.cache")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def amount(text: str) -> int | None:
    """Read a size with or without a unit, for example ``500M`` or ``2 GiB``; None if it is none."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", text.strip().lower())
    number = float(match[1]) * _UNITS[match[2]] if match is not None else math.inf
    return int(number) if math.isfinite(number) else None


class Limits(Struct, frozen=True):
    """What a cache directory may take.

    Attributes:
        max_bytes: Of all entries; 0: nothing is cached.
        max_entries: How many.
    """

    max_bytes: int = 2 << 30
    max_entries: int = 10_000

    @classmethod
    def from_environment(cls) -> Limits:
        """Return the defaults, with ``NNBURST_CACHE_MAX_BYTES``: a number, or one with a unit like 500M."""
        given = os.environ.get("NNBURST_CACHE_MAX_BYTES", "") if os.getuid() == os.geteuid() else ""
        if not given:
            return cls()
        size = amount(given)
        if size is None:
            _warn_of(given)
            return cls()
        return cls(max_bytes=size)


@cache
def _warn_of(given: str) -> None:
    """Say once that a value is not understood."""
    _log.warning("NNBURST_CACHE_MAX_BYTES=%r is not a size and is ignored; give a number, or one like 500M", given)
