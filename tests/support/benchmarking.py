"""Rows of `nnburst bench` that are made up, and running some of them quickly."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnburst.cli.bench import schedule
from nnburst.cli.bench.case import Bench, Case
from nnburst.cli.bench.placement import ONE_CORE, allowed_cpus, keep_affinity
from nnburst.cli.bench.sampling import Result, Round


@pytest.fixture(autouse=True)
def short_looks_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """L only has to be there: a busy machine takes seconds for as many round trips as a benchmark wants."""
    monkeypatch.setattr(schedule, "_LINE_COUNT", 20)


def round_of(p50: int, before: float = 100.0, after: float = 100.0) -> Round:
    """A round of ten equal samples; nanoseconds."""
    return Round(np.full(10, p50, dtype=np.int64), before, after)


def made_up_case(open_row: Any, key: str = "mine", **more: Any) -> Case:
    """A row that blocks on one core."""
    return Case(key, "e", "title", "block", 32, open_row, ONE_CORE, **more)


def run_rows(cases: list[Case], tmp_path: Path) -> dict[str, Result]:
    """Measure rows in two short turns each."""
    plan = schedule.Plan(rounds=2, count=40, turn_seconds=0.01)
    with keep_affinity(), ExitStack() as stack:
        shared = Bench(allowed_cpus(), str(tmp_path), 50e-6, stack)
        return schedule.run(cases, shared, plan, stack, lambda what: None)
