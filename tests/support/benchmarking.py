"""Invented rows of `nnburst bench`, and a function that measures rows quickly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from nnburst.cli.bench import rounds
from nnburst.cli.bench.rounds import Case, Subject
from nnburst.cli.bench.sampling import Result, Round


@pytest.fixture(autouse=True)
def short_looks_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take few samples of L (the round trip of a cache line). On a busy machine, the usual number takes seconds."""
    monkeypatch.setattr(rounds, "_LINE_COUNT", 20)
    monkeypatch.setattr(rounds, "_MOST_SAMPLES", 20)


def round_of(p50: int, before: float = 100.0, after: float = 100.0) -> Round:
    """Return a round of ten samples of `p50` nanoseconds. `before` and `after` are medians of L, in nanoseconds."""
    return Round(np.full(10, p50, dtype=np.int64), before, after)


def made_up_case(sample: Callable[[int], Any], key: str = "mine") -> Case:
    """Return a row whose samples come from `sample`. Client and server share one core."""

    @contextmanager
    def opened() -> Iterator[Subject]:
        yield Subject(sample)

    return Case(key, "e", "title", "block", 32, opened, one_core=True)


def run_rows(cases: list[Case]) -> dict[str, Result]:
    """Measure rows in two short rounds."""
    return rounds.run(cases, 2, 0.01)
