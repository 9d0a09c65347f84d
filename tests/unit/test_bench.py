"""`nnburst bench`: figures, failing rows, and that nothing is left running."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from nnburst.cli.bench import rounds
from nnburst.cli.bench.command import bench
from nnburst.cli.bench.report import Report
from nnburst.cli.bench.sampling import PERCENTILES, Result, time_calls
from nnburst.cli.child import caller_of
from nnburst.errors import GeneralFailure, MissedDeadline
from support.benchmarking import made_up_case, round_of, run_rows, short_looks_at_the_machine

__all__ = ["short_looks_at_the_machine"]

two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 CPUs")


def nothing(count: int) -> Any:
    return time_calls(lambda: None, count)


def test_time_calls_counts_every_call_and_loses_no_time() -> None:
    calls: list[int] = []
    samples = time_calls(lambda: calls.append(1), 50)
    assert len(calls) == len(samples) == 50
    assert (samples > 0).all()


def test_ratio_leaves_out_rounds_in_which_the_machine_changed() -> None:
    moved = round_of(500, before=100, after=400)
    result = Result([moved, round_of(500), moved])
    assert [r.settled for r in result.rounds] == [False, True, False]
    assert result.ratio() == 5.0


def test_without_a_second_cpu_rounds_are_settled_and_have_no_ratio() -> None:
    result = Result([round_of(500, before=math.nan, after=math.nan)])
    assert result.rounds[0].settled
    assert math.isnan(result.ratio())


def test_rows_are_compared_within_a_round() -> None:
    fast, slow = Result([round_of(100), round_of(400)]), Result([round_of(300), round_of(1200)])
    assert slow.ratio(fast) == 3.0


def test_failing_row_leaves_the_others_alone() -> None:
    results = run_rows([made_up_case(lambda count: [][1], "broken"), made_up_case(nothing, "fine")])
    assert results["broken"].note.startswith("failed: ")
    assert not results["broken"].rounds
    assert (results["fine"].note, len(results["fine"].rounds)) == ("", 2)


@two_cpus
def test_l_is_measured_on_both_cpus_though_the_caller_is_pinned_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(rounds, "line_samples", lambda cpus, count: seen.append(cpus) or np.ones(1))

    def pinned(count: int) -> Any:
        rounds.pin_process(os.getpid(), {rounds.allowed_cpus().client})
        return nothing(count)

    before = os.sched_getaffinity(0)
    run_rows([made_up_case(pinned)])
    assert len(seen) == 4
    assert all(cpus.two for cpus in seen)
    assert os.sched_getaffinity(0) == before


@two_cpus
def test_row_keeps_its_samples_where_the_machine_is_too_busy_for_the_cache_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_busy(*args: object) -> Any:
        raise MissedDeadline("cache line ping-pong: the deadline has passed")

    monkeypatch.setattr(rounds, "line_samples", too_busy)
    result = run_rows([made_up_case(nothing)])["mine"]
    assert result.note == ""
    assert [len(r.samples) > 0 for r in result.rounds] == [True, True]
    assert not any(r.settled for r in result.rounds)
    assert math.isnan(result.ratio())


def test_turn_that_a_busy_machine_takes_has_no_samples_and_the_next_ones_follow() -> None:
    turns = itertools.count()

    def sample(count: int) -> Any:
        if next(turns) == 0:
            raise MissedDeadline("message queue ping-pong: the deadline has passed")
        return nothing(count)

    case = made_up_case(sample)
    results = run_rows([case])
    assert [len(r.samples) > 0 for r in results["mine"].rounds] == [False, True]
    assert not results["mine"].rounds[0].settled
    assert Report([], [case], results).row(case)["p50_us"] > 0


@pytest.mark.check
def test_function_in_a_child_answers_until_the_child_has_ended(capfd: pytest.CaptureFixture[str]) -> None:
    with caller_of(_doubling) as (ask, pid):
        assert [ask(2), ask("ab")] == [4, "abab"]
        with pytest.raises(GeneralFailure, match="child has ended; its message is above"):
            ask(None)
    assert "TypeError" in capfd.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _doubling() -> Any:
    return lambda question: question * 2


@pytest.mark.check
@two_cpus
def test_bench_writes_rows_and_conditions(tmp_path: Path) -> None:
    out, affinity = tmp_path / "bench.json", os.sched_getaffinity(0)
    result = CliRunner().invoke(bench, ["--quick", "--rounds", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [row["key"] for row in document["rows"]][:3] == ["line", "burst-poll", "burst-block"]
    assert len(document["rows"]) == 10
    for row in document["rows"]:
        assert row["count"] > 0
        figures = [row[name] for name in PERCENTILES]
        assert 0 < figures[0]
        assert figures == sorted(figures)
        assert row["ratio"] is None or row["ratio"] > 0
    assert document["ratios_to"] == "L"
    assert any("load average at the start" in line for line in document["conditions"])
    assert "burst, pool, 16 MiB" in result.output
    assert os.sched_getaffinity(0) == affinity
