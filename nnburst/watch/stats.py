"""Snapshots of a service's statistics."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from .._core import ffi, lib

if TYPE_CHECKING:
    from .._core._nnburst import CData

COUNTERS: Mapping[str, int] = {
    name: getattr(lib, f"NNB_{name.upper()}")
    for name in (
        "requests", "results", "failures", "sleeps", "wakes", "malformed", "dropped", "plan_hits", "plan_misses",
        "slot_misses", "fallbacks", "compiled", "restored", "saved", "rejected", "models", "bursts",
        "batched", "batches",
    )
}  # fmt: skip
"""The index of each counter in a row of statistics."""

ACCOUNT: Mapping[str, int] = {
    name: place
    for place, name in enumerate(
        ("bytes", "fds", "threads", "log_lines", "most_bytes", "most_fds", "most_threads", "most_log_lines",
         "most_processors")
    )
}  # fmt: skip
"""The index of each number in the row of a process or client. Such a row has resources and limits, no counters."""

HISTOGRAMS: Mapping[str, int] = {
    name: getattr(lib, f"NNB_{name.upper()}") for name in ("queue_wait", "execution", "spin", "round_trip")
}


class RowKind(enum.IntEnum):
    """The subject of a row of statistics. When it ends, its numbers are added to its parent, so sums stay complete."""

    SERVICE = 1
    """The service itself, including the sums of closed models."""
    MODEL = 2
    """A model, including the sums of its ended bursts."""
    BURST = 3
    PROCESS = 4
    """A worker process, with the numbers in `ACCOUNT`. The row is on the broker's statistics page."""
    CLIENT = 5
    """A connection, with the numbers in `ACCOUNT`; ``threads`` counts executions without a burst."""


@cache
def _starts() -> tuple[int, ...]:
    return tuple(lib.nnb_bucket_start(i) for i in range(lib.NNB_BUCKETS + 1))


class Histogram(Struct, frozen=True):
    """Histogram of durations in nanoseconds, with a relative resolution of 1/16.

    Attributes:
        count: Number of events. In a fast loop, only some events are timed: the duration of a timed event then stands
            for all events since the previous timed event.
        sum_ns: Sum of the durations of all events.
        max_ns: The longest timed duration.
        buckets: (start in ns, number of events) of each bucket with events, ascending.

    Example:
        >>> with nnburst.Session(model) as session:
        ...     _ = session.run(None, {"x": np.ones((1, 4), np.float32)})
        ...     session.latency().round_trip.count
        1
    """

    count: int = 0
    sum_ns: int = 0
    max_ns: int = 0
    buckets: tuple[tuple[int, int], ...] = ()

    def percentile_ns(self, percent: float) -> float:
        """Return a percentile of the durations; 0 without events.

        Args:
            percent: 0 to 100; 50 for the median.
        """
        total = sum(n for _, n in self.buckets)
        below, left = 0, total * percent / 100
        for start, n in self.buckets:
            below += n
            if below >= left:
                width = max(start // 16, 1) if start >= 16 else 1
                inside = 1 - (below - left) / n
                return float(min(start + width * inside, self.max_ns))
        return 0.0

    def since(self, before: Histogram) -> Histogram:
        """Return the events since an earlier snapshot. `max_ns` still covers all events.

        Args:
            before: The earlier snapshot.
        """
        old = dict(before.buckets)
        grown = ((start, n - old.get(start, 0)) for start, n in self.buckets)
        return Histogram(
            self.count - before.count,
            self.sum_ns - before.sum_ns,
            self.max_ns,
            tuple((start, n) for start, n in grown if n > 0),
        )

    def __add__(self, other: Histogram) -> Histogram:
        sums = dict(self.buckets)
        for start, n in other.buckets:
            sums[start] = sums.get(start, 0) + n
        return Histogram(
            self.count + other.count,
            self.sum_ns + other.sum_ns,
            max(self.max_ns, other.max_ns),
            tuple(sorted(sums.items())),
        )

    def summary(self) -> dict[str, float]:
        """Return count, and mean, p50, p99 and max in microseconds."""
        return {
            "count": self.count,
            "mean_us": round(self.sum_ns / max(1, self.count) / 1e3, 3),
            "p50_us": round(self.percentile_ns(50) / 1e3, 3),
            "p99_us": round(self.percentile_ns(99) / 1e3, 3),
            "max_us": round(self.max_ns / 1e3, 3),
        }


class Latency(Struct, frozen=True):
    """Durations of a session's runs. In a fast loop, only some runs are timed.

    Attributes:
        round_trip: Time from sending a request to receiving its answer.
        queue_wait: Time from sending a request until a thread of the service took the request.
        execution: Time in which the service ran the request.

    Example:
        >>> with nnburst.Session(model) as session:
        ...     _ = session.run(None, {"x": np.ones((1, 4), np.float32)})
        ...     latency = session.latency()
        >>> 0 < latency.p50 <= latency.p99 <= latency.max
        True
    """

    round_trip: Histogram
    queue_wait: Histogram
    execution: Histogram

    @property
    def count(self) -> int:
        """Number of runs."""
        return self.round_trip.count

    @property
    def p50(self) -> float:
        """Median duration of a run in seconds; 0 without runs."""
        return self.round_trip.percentile_ns(50) / 1e9

    @property
    def p99(self) -> float:
        """99th percentile of a run's duration in seconds; 0 without runs."""
        return self.round_trip.percentile_ns(99) / 1e9

    @property
    def max(self) -> float:
        """Longest duration of a run in seconds."""
        return self.round_trip.max_ns / 1e9

    def __add__(self, other: Latency) -> Latency:
        return Latency(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def __repr__(self) -> str:
        if not self.count:
            return "<Latency: no runs>"
        times = ", ".join(f"{name} {duration(getattr(self, name))}" for name in ("p50", "p99", "max"))
        return f"<Latency of {self.count:,} runs: {times}>"

    def _repr_html_(self) -> str:
        """Return the round trips as an HTML chart, for notebooks. The durations are on a logarithmic scale."""
        bars: Counter[int] = Counter()
        for start, count in self.round_trip.buckets:
            bars[int(4 * math.log2(max(start, 1)))] += count
        text = f"<p>{escape(repr(self))}</p>"
        if not bars:
            return text
        first, last, highest = min(bars), max(bars), max(bars.values())
        width = 8 * (last - first + 1)
        drawn = [f'<text y="116">{duration(2 ** (first / 4) / 1e9)}</text>']
        drawn.append(f'<text x="{width}" y="116">{duration(2 ** ((last + 1) / 4) / 1e9)}</text>')
        for bar, count in bars.items():
            height = max(1, 100 * count // highest)  # a single run among a million is visible
            title = f"<title>from {duration(2 ** (bar / 4) / 1e9)}: {count:,} timed</title>"
            place = f'x="{8 * (bar - first)}" y="{100 - height}" width="7" height="{height}"'
            drawn.append(f'<rect {place} fill="steelblue">{title}</rect>')
        return f'{text}<svg width="{width + 80}" height="120" fill="currentColor">{"".join(drawn)}</svg>'


def duration(seconds: float) -> str:
    """Return a duration as text, in a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


class RowStats(Struct, frozen=True):
    """A snapshot of a row of statistics.

    Attributes:
        number: The row's number, which the service never reuses.
        parent: Number of the parent row; 0 if the row has no parent.
        kind: The subject of the row.
        label: Name of the model, or another distinguishing text.
        client_pid: Process of the client; 0 if there is none or it is unknown.
        client_uid: User of the client.
        has_left: True if the client awaits no more answers, because it has disconnected or closed the row's subject.
        since_ns: Time of the row's start, on CLOCK_MONOTONIC.
        counters: The numbers by name in `COUNTERS` or `ACCOUNT`.
        queue_wait: Time from the client's send until a thread of the service took the request.
        execution: Time from the end of `queue_wait` until the answer.
        spin: Time that the thread polled until the next request or until it slept.
        round_trip: Time from send to answer, measured by the client; only in a client's own rows.

    Example:
        >>> with nnburst.launch() as service:
        ...     (found,) = nnburst.watch.find_services(service.pid)
        ...     nnburst.watch.look(found).rows[0].kind.name
        'SERVICE'
    """

    number: int
    parent: int
    kind: RowKind
    label: str
    client_pid: int
    client_uid: int
    has_left: bool
    since_ns: int
    counters: Mapping[str, int]
    queue_wait: Histogram = Histogram()
    execution: Histogram = Histogram()
    spin: Histogram = Histogram()
    round_trip: Histogram = Histogram()


class ServiceStats(Struct, frozen=True):
    """A snapshot of a service's statistics.

    Attributes:
        name: Name of a shared service; empty for a child service.
        pid: Process id of the service.
        uid: Id of the service's user.
        since_ns: Time of the service's start, on CLOCK_MONOTONIC.
        taken_ns: Time of this snapshot, on CLOCK_MONOTONIC.
        unwatched: Number of bursts and models without a row, whose runs are not counted.
        rows: Rows of the service (first), its models and its bursts.
        accounts: Rows of processes and clients.

    Example:
        >>> with nnburst.launch() as service, service.session(model):
        ...     (found,) = nnburst.watch.find_services(service.pid)
        ...     len(nnburst.watch.look(found).of(nnburst.watch.RowKind.MODEL))
        1
    """

    name: str
    pid: int
    uid: int
    since_ns: int
    taken_ns: int
    unwatched: int
    rows: tuple[RowStats, ...]
    accounts: tuple[RowStats, ...] = ()

    def of(self, kind: RowKind) -> list[RowStats]:
        """Return the rows of one kind.

        Args:
            kind: For example ``RowKind.BURST``.
        """
        return [row for row in (*self.rows, *self.accounts) if row.kind is kind]


def row_stats(row: CData) -> RowStats | None:
    """Return a snapshot of a row; None if the row is free or is just being reused."""
    copy = ffi.new("nnb_row *")
    if not lib.nnb_row_look(copy, row):
        return None
    try:
        kind = RowKind(copy.kind)
    except ValueError:  # the kind comes from another version
        return None
    values: Any = ffi.unpack(copy.counters, lib.NNB_COUNTERS)
    histograms = {name: _histogram(copy.histograms[i]) for name, i in HISTOGRAMS.items()}
    return RowStats(
        copy.number,
        copy.parent,
        kind,
        text_of(copy.label),
        copy.client_pid,
        copy.client_uid,
        bool(copy.has_left),
        copy.since_ns,
        {name: values[i] for name, i in (COUNTERS if kind < RowKind.PROCESS else ACCOUNT).items()},
        **histograms,
    )


def text_of(field: CData) -> str:
    """Return text from another process, without terminal control characters."""
    text = ffi.string(field, len(field)).decode(errors="replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _histogram(raw: CData) -> Histogram:
    if not raw.count:
        return Histogram()
    counts: Any = ffi.unpack(raw.buckets, lib.NNB_BUCKETS)
    starts = _starts()
    return Histogram(raw.count, raw.sum, raw.max, tuple((starts[i], n) for i, n in enumerate(counts) if n))
