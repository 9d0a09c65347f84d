"""The budget: the promises of the design, as ratios of rows of the same run.

Three quarters of the rounds have to agree for a verdict. On a busy machine there is no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nnburst.cli.bench.sampling import Result

MOST_OTHERS = 0.05
"""Maximum share of CPU time of other programs. More would disturb too many turns. An idle machine has about 0.01."""
_LINE = "line"
_STATES = ("1KiB", "64KiB", "1MiB", "16MiB")


@dataclass(frozen=True, slots=True)
class _Promise:
    """A promise: a percentile of `row`, divided by the percentile of `base`, is at most (or at least) `limit`."""

    text: str
    row: str
    base: str
    limit: float
    at_least: bool = False
    percentile: float = 50.0


BUDGET: tuple[_Promise, ...] = (
    _Promise("(b) queue round trip, one element: at most 1.5 L", "queue", _LINE, 1.5),
    _Promise("(b) queue round trip, burst packets: at most 1.5 L", "queue-packet", _LINE, 1.5),
    _Promise("(c) MessageQueue polling: at most 5 L", "mq-poll", _LINE, 5.0),
    _Promise("(d) run() polling: at most 3.5 L", "burst-poll", _LINE, 3.5),
    _Promise("(d) run() polling, a loop in C: at most 2.5 L", "burst-c", _LINE, 2.5),
    _Promise("(d) run() polling: at least 2.5 times faster than iceoryx2", "iceoryx2", "burst-poll", 2.5, True),
    _Promise("(d) run() polling, shared service: at most 1.1 child", "burst-shared", "burst-poll", 1.1),
    _Promise(
        "(d) run() not polling, one core: at most 1.25 Unix socket echo", "burst-block-1core", "seqpacket-1core", 1.25
    ),
    _Promise("(d) run() not polling, apart: at most 1.25 Unix socket echo", "burst-block", "seqpacket", 1.25),
    _Promise("(f) 16 MiB against 1 KiB: at most 1.25, so flat", "pool-16MiB", "pool-1KiB", 1.25),
    _Promise("(g) 16 MiB written in place: faster than pickled", "input-pickled", "input-pool", 1.0, True),
    _Promise("(g) 16 MiB copied: faster than pickled", "input-pickled", "input-pool-copied", 1.0, True),
    _Promise("(g) 16 MiB copied: at most 1.25 of shared_memory + Pipe", "input-pool-copied", "input-shm-copied", 1.25),
    *(_Promise(f"(h) {n}: state in the device faster than copied", f"state-copied-{n}", f"state-domain-{n}", 1.0, True)
      for n in _STATES[1:]),
    *(_Promise(f"(h) {n}: state in the device at most 1.05 of a pool", f"state-domain-{n}", f"state-pingpong-{n}", 1.05)
      for n in _STATES),
    _Promise("(h) 1KiB: 64 steps at once: at least 2 times faster", "state-domain-1KiB", "state-steps-1KiB", 2.0, True),
    _Promise("(k) arun() polling: at most 0.25 asyncio echo", "arun-poll", "asyncio-echo", 0.25),
    _Promise("(k) arun() not polling: at most 1.2 asyncio echo", "arun-block", "asyncio-echo", 1.2),
    _Promise("(j) a hit: at most 2.5 times reading its bytes", "cache-hit", "cache-floor", 2.5),
    _Promise("(l) p99 while a thread holds the lock: at most 2 of p99", "lock-held", "lock-free", 2.0, percentile=99.0),
    _Promise("(i) a first run with a memory costs more than a second", "slot-first", "slot-later", 1.0, True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one promise.

    Attributes:
        text: The promise in words.
        ratio: Median of the settled rounds' ratios; NaN if there is none.
        limit: The promised value.
        outcome: ``pass``, ``miss``, ``not settled`` (the machine does not allow a verdict) or ``not measured``.
    """

    text: str
    ratio: float
    limit: float
    outcome: str


def verdicts(results: Mapping[str, Result], others: float = 0.0) -> list[Verdict]:
    """Compare a run with the budget. Ratios are medians of the ratios within each round.

    Args:
        results: The rows.
        others: Share of CPU time that other programs and the host took during the run.
    """
    out = []
    for promise in BUDGET:
        row, base = results.get(promise.row, Result()), results.get(promise.base, Result())
        turns = len(row.rounds) if promise.base == _LINE else min(len(row.rounds), len(base.rounds))
        ratios = row.ratios() if promise.base == _LINE else row.ratios(base, promise.percentile)
        kept = sum(r >= promise.limit if promise.at_least else r <= promise.limit for r in ratios)
        if not turns or (promise.base == _LINE and all(math.isnan(r.line_before) for r in row.rounds)):
            outcome = "not measured"
        elif others > MOST_OTHERS or len(ratios) < turns / 2 or len(ratios) / 4 < kept < len(ratios) * 3 / 4:
            outcome = "not settled"
        else:
            outcome = "pass" if kept >= len(ratios) * 3 / 4 else "miss"
        out.append(Verdict(promise.text, float(np.median(ratios)) if ratios else math.nan, promise.limit, outcome))
    return out
