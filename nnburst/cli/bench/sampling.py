"""Functions that take samples, and statistics of samples."""

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
"""The nanoseconds of each round trip, in order."""

PERCENTILES = {"p50_us": 50.0, "p90_us": 90.0, "p99_us": 99.0, "p999_us": 99.9, "max_us": 100.0}


def time_calls(call: Callable[[], object], count: int) -> Samples:
    """Call a function repeatedly. Return the nanoseconds of each call, int64[count].

    The clock is read once per call, so every sample includes the time of one clock reading and of one step of the
    loop. The garbage collector is off.
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
    """Return the samples that a C function writes into an array uint32[count]."""
    samples = np.zeros(count, dtype=np.uint32)
    check(run(ffi.from_buffer("uint32_t[]", samples)), what)
    return samples.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Round:
    """The measurements of one row of the benchmark in one round. L is the round trip of a cache line between two CPUs.

    Attributes:
        samples: Nanoseconds of each round trip; empty if the machine was too busy.
        line_before, line_after: Median of L before and after the samples, in nanoseconds; NaN with one CPU, infinite
            if the machine was too busy.
    """

    samples: Samples
    line_before: float
    line_after: float

    @property
    def settled(self) -> bool:
        """True if there are samples, and the round trip of a cache line has stayed the same, up to a factor of 1.5.

        It changes if the host of a virtual machine moves its CPUs. With one CPU, it is not measured, and a round only
        needs samples.
        """
        low, high = sorted((self.line_before, self.line_after))
        return len(self.samples) > 0 and not math.isinf(high) and not high > 1.5 * low


@dataclass(slots=True)
class Result:
    """All measurements of one row.

    Attributes:
        rounds: Measurements of each round; empty if the row did not run.
        note: The reason why the row did not run.
    """

    rounds: list[Round] = field(default_factory=list)
    note: str = ""

    @property
    def samples(self) -> Samples:
        """The samples of all rounds, in nanoseconds."""
        return np.concatenate([np.empty(0, np.int64), *(r.samples for r in self.rounds)])

    def percentiles_us(self) -> dict[str, float]:
        """Return the `PERCENTILES` of all samples in microseconds; NaN without samples."""
        samples = self.samples
        if not len(samples):
            return dict.fromkeys(PERCENTILES, math.nan)
        return dict(zip(PERCENTILES, (np.percentile(samples, [*PERCENTILES.values()]) / 1e3).tolist(), strict=True))

    def ratios(self, base: Result | None = None, percent: float = 50) -> list[float]:
        """Return this row's percentile divided by the percentile of `base`, for each round that is `settled`.

        Without `base`, the divisor is the round trip of a cache line in the same round."""
        if base is not None:
            return [
                float(np.percentile(a.samples, percent) / np.percentile(b.samples, percent))
                for a, b in zip(self.rounds, base.rounds, strict=False)
                if a.settled and b.settled
            ]
        lines = [(r, (r.line_before + r.line_after) / 2) for r in self.rounds if r.settled]
        return [float(np.percentile(r.samples, percent)) / line for r, line in lines if not math.isnan(line)]

    def ratio(self, base: Result | None = None) -> float:
        """Return the median of `ratios`; NaN if there are none."""
        found = self.ratios(base)
        return float(np.median(found)) if found else math.nan
