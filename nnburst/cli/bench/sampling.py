"""Samples: how one is taken, and statistics of many."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._core._nnburst import ffi, lib
from ..._core.errno import check
from .placement import Cpus

Samples = NDArray[np.int64]
"""Nanoseconds, one per round trip, in the order in which they were taken."""

PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)


def time_calls(call: Callable[[], object], count: int) -> Samples:
    """Call something repeatedly and return how long each call took.

    One clock reading per iteration, chained: sample i is the time between the readings i and i+1, so nothing that
    happens between two calls is lost, and every sample contains one clock reading. The garbage collector is off.

    Returns:
        int64[count], nanoseconds.
    """
    now = time.perf_counter_ns
    stamps = [0] * (count + 1)
    with no_collector():
        stamps[0] = now()
        for i in range(1, count + 1):
            call()
            stamps[i] = now()
    return np.diff(stamps)


@contextmanager
def no_collector() -> Iterator[None]:
    """Collect garbage, and then none until the end."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def from_c(count: int, what: str, run: Callable[[Any], int]) -> Samples:
    """Return what a function of the C core writes into an array of so many uint32."""
    samples = np.zeros(count, dtype=np.uint32)
    check(run(ffi.from_buffer("uint32_t[]", samples)), what)
    return samples.astype(np.int64)


def line_samples(cpus: Cpus, count: int, warmup: int = 100) -> Samples:
    """Bounce one cache line between two C threads; int64[count] nanoseconds per round trip."""
    return from_c(
        count, "cache line ping-pong", lambda out: lib.nnb_bench_line(cpus.client, cpus.server, warmup, count, out)
    )


def c_clock_overhead(count: int = 2000) -> float:
    """Return the median cost of one clock reading in C, nanoseconds (mean of the middle half: the clock is coarse)."""
    samples = np.sort(from_c(count, "clock", lambda out: lib.nnb_bench_runs(ffi.NULL, count, out)))
    return float(samples[count // 4 : -count // 4].mean())


@dataclass(frozen=True, slots=True)
class Round:
    """One row's share of one round, with L measured right before and right after it.

    Attributes:
        samples: Nanoseconds; none if the machine was too busy for the row to be measured.
        line_before: Median of L before, nanoseconds; NaN if there is only one CPU, infinite if the machine was too busy
            for two threads to run at once.
        line_after: Likewise after.
    """

    samples: Samples
    line_before: float
    line_after: float

    def percentile(self, percent: float) -> float:
        """Return that of the round, nanoseconds; NaN without samples."""
        return float(np.percentile(self.samples, percent)) if len(self.samples) else math.nan

    @property
    def p50(self) -> float:
        """Median of the round, nanoseconds; NaN without samples."""
        return self.percentile(50)

    @property
    def line(self) -> float:
        """L of this round, nanoseconds."""
        return (self.line_before + self.line_after) / 2

    @property
    def settled(self) -> bool:
        """Whether it can be compared: there are samples, and L stayed within a factor of 1.5 while they were taken.

        A host may move the CPUs of a guest. Without a second CPU there is no L, and nothing that could move.
        """
        low, high = sorted((self.line_before, self.line_after))
        return len(self.samples) > 0 and not math.isinf(high) and not high > 1.5 * low


@dataclass(slots=True)
class Result:
    """Everything that is known about one row.

    Attributes:
        rounds: Measurements; empty if the row did not run.
        note: Why it did not run, or what the reader must know.
        failed: It can run here, and has no figures.
    """

    rounds: list[Round] = field(default_factory=list)
    note: str = ""
    failed: bool = False

    @property
    def samples(self) -> Samples:
        """All rounds together, nanoseconds."""
        return np.concatenate([r.samples for r in self.rounds])

    def percentiles_us(self) -> dict[str, float]:
        """All over the samples of all rounds together. Microseconds."""
        names = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us")
        return dict(zip(names, map(float, np.percentile(self.samples, PERCENTILES) / 1e3), strict=True))

    def ratios(self, other: Result | None = None, percent: float = 50) -> list[float]:
        """Return this row's percentile over that of another in the same round, or its median over L, for each settled
        round.
        """
        if other is None:
            return [r.p50 / r.line for r in self.rounds if r.settled and not math.isnan(r.line)]
        return [
            a.percentile(percent) / b.percentile(percent)
            for a, b in zip(self.rounds, other.rounds, strict=False)
            if a.settled and b.settled
        ]

    def ratio_to_line(self) -> float:
        """Return the median of the ratios to L; NaN without a second CPU, or if no round is settled."""
        return _median(self.ratios())

    def ratio_to(self, other: Result) -> float:
        """Return the median of the ratios to another row; NaN if no round is settled."""
        return _median(self.ratios(other))


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else math.nan
