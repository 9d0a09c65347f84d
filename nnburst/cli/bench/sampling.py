"""Taking samples, and statistics over them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._core._nnburst import ffi
from ..._core.errno import check

Samples = NDArray[np.int64]
"""Nanoseconds, one per round trip, in the order in which they were taken."""

PERCENTILES = {"p50_us": 50.0, "p90_us": 90.0, "p99_us": 99.0, "p999_us": 99.9, "max_us": 100.0}


def time_calls(call: Callable[[], object], count: int) -> Samples:
    """Call something repeatedly and return how long each call took.

    One clock reading per iteration, chained: sample i is the time between the readings i and i+1, so nothing that
    happens between two calls is lost, and every sample contains one clock reading. The garbage collector is off.

    Returns:
        int64[count], nanoseconds.
    """
    now = time.perf_counter_ns
    stamps = [0] * (count + 1)
    gc.collect()
    gc.disable()
    try:
        stamps[0] = now()
        for i in range(1, count + 1):
            call()
            stamps[i] = now()
    finally:
        gc.enable()
    return np.diff(stamps)


def from_c(count: int, what: str, run: Callable[[Any], int]) -> Samples:
    """Return the samples that a function of the C core writes into an array of `count` uint32."""
    samples = np.zeros(count, dtype=np.uint32)
    check(run(ffi.from_buffer("uint32_t[]", samples)), what)
    return samples.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Round:
    """One row's share of one round, with L measured right before and right after it.

    Attributes:
        samples: Nanoseconds; none if the machine was too busy for the row to be measured.
        line_before: Median of L before, nanoseconds; NaN if there is only one CPU, infinite if the machine was too busy
            for two threads to run at once.
        line_after: Median of L after the samples, in the same way.
    """

    samples: Samples
    line_before: float
    line_after: float

    @property
    def settled(self) -> bool:
        """True if the round can be compared: it has samples, and L stayed within a factor of 1.5 meanwhile.

        A host may move the CPUs of a guest. Without a second CPU there is no L, and nothing that could move.
        """
        low, high = sorted((self.line_before, self.line_after))
        return len(self.samples) > 0 and not math.isinf(high) and not high > 1.5 * low


@dataclass(slots=True)
class Result:
    """All measurements of one row.

    Attributes:
        rounds: Measurements; empty if the row did not run.
        note: Why it did not run.
    """

    rounds: list[Round] = field(default_factory=list)
    note: str = ""

    @property
    def samples(self) -> Samples:
        """The samples of all rounds, in nanoseconds."""
        return np.concatenate([np.empty(0, np.int64), *(r.samples for r in self.rounds)])

    def percentiles_us(self) -> dict[str, float]:
        """Return the `PERCENTILES` of the samples of all rounds together, microseconds; NaN without samples."""
        samples = self.samples
        if not len(samples):
            return dict.fromkeys(PERCENTILES, math.nan)
        return dict(zip(PERCENTILES, (np.percentile(samples, [*PERCENTILES.values()]) / 1e3).tolist(), strict=True))

    def ratios(self, base: Result | None = None, percent: float = 50) -> list[float]:
        """Return this row's percentile over that of another in the same round, or over L, for each settled round."""
        if base is not None:
            return [
                float(np.percentile(a.samples, percent) / np.percentile(b.samples, percent))
                for a, b in zip(self.rounds, base.rounds, strict=False)
                if a.settled and b.settled
            ]
        lines = [(r, (r.line_before + r.line_after) / 2) for r in self.rounds if r.settled]
        return [float(np.percentile(r.samples, percent)) / line for r, line in lines if not math.isnan(line)]

    def ratio(self, base: Result | None = None) -> float:
        """Return the median of the ratios; NaN if no round is settled, or L was not measured."""
        found = self.ratios(base)
        return float(np.median(found)) if found else math.nan
