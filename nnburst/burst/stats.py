"""Counters of the client's end of a burst."""

from __future__ import annotations

import operator

from msgspec import Struct
from msgspec.structs import astuple


class BurstStats(Struct, frozen=True):
    """Counts of events at the client's end of a burst since its creation.

    Attributes:
        sent: Requests sent.
        received: Results received.
        sleeps: Futex waits; none if polling finds the results.
        wakes: Futex wakes; none while the service polls.
        malformed: Malformed results, which were refused.
        dropped: Results of abandoned requests, and results that were not requested.
        fallbacks: Executions that ran without the burst because the channel had no room.

    Example:
        >>> with nnburst.Session(model) as session:
        ...     _ = session.run(None, {"x": np.ones((1, 4), np.float32)})
        ...     session.stats.sent
        1
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
