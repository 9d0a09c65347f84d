"""Counters of the two ends of a burst."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict, astuple

from .._core._nnburst import ffi, lib
from ..watch.html import table

if TYPE_CHECKING:
    from .._core._nnburst import CData


class BurstStats(Struct, frozen=True):
    """What the client's end of a burst has done since it was created. All are counts.

    Attributes:
        sent: Requests sent.
        received: Results received.
        sleeps: Futex waits; none while results arrive within the polling window.
        wakes: Futex wakes; none while the service polls.
        malformed: Results that were refused.
        dropped: Results that came after their request had been given up, or that were not asked for.
        fallbacks: Executions that took the path without a burst because the channel had no room.
    """

    sent: int
    received: int
    sleeps: int
    wakes: int
    malformed: int
    dropped: int
    fallbacks: int

    def __add__(self, other: BurstStats) -> BurstStats:
        return BurstStats(*map(operator.add, astuple(self), astuple(other)))

    def _repr_html_(self) -> str:
        return table("this end of the burst", asdict(self).items())


class ServerStats(Struct, frozen=True):
    """What the server's end of a burst has done since it was created. All are counts.

    Attributes:
        sent: Results sent.
        received: Requests received.
        sleeps: Futex waits; none while requests arrive within the polling window.
        wakes: Futex wakes; none while the client polls.
        malformed: Requests that were refused.
        plan_hits: Requests that were already bound.
        plan_misses: Requests that had to be decoded and bound.
    """

    sent: int
    received: int
    sleeps: int
    wakes: int
    malformed: int
    plan_hits: int
    plan_misses: int

    def _repr_html_(self) -> str:
        return table("the server's end of a burst", asdict(self).items())


def client_stats(endpoint: CData, fallbacks: int) -> BurstStats:
    """Read the counters of a client's endpoint."""
    raw = ffi.new("nnb_stats *")
    lib.nnb_client_stats(endpoint, raw)
    return BurstStats(raw.sent, raw.received, raw.sleeps, raw.wakes, raw.malformed, raw.dropped, fallbacks)


def server_stats(endpoint: CData) -> ServerStats:
    """Read the counters of a server's endpoint."""
    raw = ffi.new("nnb_stats *")
    lib.nnb_server_stats(endpoint, raw)
    return ServerStats(raw.sent, raw.received, raw.sleeps, raw.wakes, raw.malformed, raw.plan_hits, raw.plan_misses)
