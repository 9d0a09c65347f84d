"""Counters of the two ends of a burst."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._core import ffi

if TYPE_CHECKING:
    from .._core._nnburst import CData

__all__ = ["BurstStats", "read_stats"]


@dataclass(frozen=True, slots=True)
class BurstStats:
    """What one end of a burst has done since it was created. All are counts.

    Attributes:
        sent: Packets sent.
        received: Packets received.
        sleeps: Futex waits; none while packets arrive within the polling window.
        wakes: Futex wakes; none while the peer polls.
        malformed: Packets that were refused.
        dropped: Results that came after their request had been given up, or that nobody asked for.
        plan_hits: Server: requests that were already bound.
        plan_misses: Server: requests that had to be decoded and bound.
        fallbacks: Client: executions that took the path without a burst because the channel had no room.
    """

    sent: int = 0
    received: int = 0
    sleeps: int = 0
    wakes: int = 0
    malformed: int = 0
    dropped: int = 0
    plan_hits: int = 0
    plan_misses: int = 0
    fallbacks: int = 0


def read_stats(function: Callable[[CData, CData], None], endpoint: CData, fallbacks: int = 0) -> BurstStats:
    """Read the counters of a C endpoint."""
    raw = ffi.new("nnb_stats *")
    function(endpoint, raw)
    return BurstStats(
        raw.sent,
        raw.received,
        raw.sleeps,
        raw.wakes,
        raw.malformed,
        raw.dropped,
        raw.plan_hits,
        raw.plan_misses,
        fallbacks,
    )
