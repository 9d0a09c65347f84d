"""The benchmark of record (`make bench`): its budget, its rows, its files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks.record import budget, queues
from benchmarks.record.__main__ import record
from benchmarks.record.report import Record
from benchmarks.record.rows import all_cases
from nnburst.cli.bench.case import Bench, Subject
from nnburst.cli.bench.command import bench
from nnburst.cli.bench.report import MOST_OTHERS
from nnburst.cli.bench.sampling import Result, Round, time_calls
from support import ROOT
from support.benchmarking import made_up_case, round_of, run_rows, short_looks_at_the_machine

__all__ = ["short_looks_at_the_machine"]

two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 CPUs")


@pytest.mark.parametrize(
    ("rounds", "others"),
    [
        ([round_of(100)] * 4, 0.2),
        ([round_of(100), round_of(100, before=100, after=400), round_of(100, before=100, after=400)], 0.0),
        ([round_of(100, before=math.inf, after=math.inf)], 0.0),
        ([round_of(149), round_of(151)] * 4, 0.0),
    ],
    ids=["others have the CPUs", "L moves", "there is no L", "the rounds disagree"],
)
def test_busy_machine_gets_no_verdict(rounds: list[Round], others: float) -> None:
    verdict = budget.verdicts({"queue": Result(rounds)}, others)[0]
    assert verdict.outcome == "not settled"


def test_few_rounds_that_disagree_leave_the_verdict_to_the_others() -> None:
    kept, broken = round_of(100), round_of(200)
    assert budget.verdicts({"queue": Result([kept] * 3 + [broken])})[0].outcome == "pass"
    assert budget.verdicts({"queue": Result([kept] + [broken] * 3)})[0].outcome == "miss"


@pytest.mark.parametrize(("p50", "outcome"), [(150, "pass"), (151, "miss")])
def test_budget_says_pass_up_to_the_limit_and_miss_beyond(p50: int, outcome: str) -> None:
    assert budget.verdicts({"queue": Result([round_of(p50)])})[0].outcome == outcome


@pytest.mark.parametrize(("p50", "outcome"), [(250, "pass"), (249, "miss")])
def test_budget_of_being_faster_is_a_lower_limit(p50: int, outcome: str) -> None:
    results = {"burst-poll": Result([round_of(100)]), "iceoryx2": Result([round_of(p50)])}
    verdict = next(v for v in budget.verdicts(results) if "iceoryx2" in v.text)
    assert verdict.outcome == outcome


def test_budget_without_its_rows_is_not_measured() -> None:
    assert {v.outcome for v in budget.verdicts({})} == {"not measured"}


def test_every_row_has_a_name_of_its_own_and_the_budget_names_only_rows() -> None:
    keys = [case.key for case in all_cases()]
    assert len(set(keys)) == len(keys)
    assert {name for promise in budget.BUDGET for name in (promise.row, promise.base)} <= set(keys)


def test_saving_of_the_slot_table_is_said_in_microseconds() -> None:
    results = {"slot-first": Result([round_of(381_000)]), "slot-later": Result([round_of(9_500)])}
    (line,) = Record({}, [], results).savings()
    assert "371.5 µs" in line
    assert Record({}, [], {"slot-first": Result([round_of(1)])}).savings() == []


def _failing(bench: Bench) -> Any:
    raise RuntimeError("it does not compile")


@pytest.mark.parametrize(
    ("command", "rows"),
    [(bench, "nnburst.cli.bench.rows.all_cases"), (record, "benchmarks.record.__main__.all_cases")],
    ids=["bench", "record"],
)
def test_a_row_that_cannot_be_measured_ends_the_command_with_its_reason(
    command: click.Command, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def fine(bench: Bench) -> Iterator[Subject]:
        yield Subject(partial(time_calls, lambda: None))

    out, cases = tmp_path / "bench.json", [made_up_case(fine, "fine"), *(made_up_case(_failing, n) for n in "ab")]
    monkeypatch.setattr(rows, lambda: tuple(cases))
    done = CliRunner().invoke(command, ["--count", "10", "--rounds", "1", "--json", str(out)])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "a, b: failed: it does not compile"
    assert {row["name"]: row["count"] for row in json.loads(out.read_text())["rows"]} == {"fine": 10, "a": 0, "b": 0}


def test_a_queue_that_does_not_compile_is_an_error_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "queue.c"
    source.write_text("int bench_queue(void) { return missing; }\n")
    monkeypatch.setattr(queues, "_SOURCES", [source])
    with pytest.raises(RuntimeError, match=r"(?s)queue.c does not compile: .*missing"):
        queues._library.__wrapped__()


@pytest.mark.check
@pytest.mark.leaks("libraries of peers keep descriptors until their process ends")
@pytest.mark.parametrize("group", sorted({case.group for case in all_cases()}))
def test_every_row_is_measured(group: str, tmp_path: Path) -> None:
    cases = [case for case in all_cases() if case.group == group]
    results = run_rows(cases, tmp_path)
    assert {key: result.note for key, result in results.items() if result.failed} == {}


@pytest.mark.check
def test_the_regression_set_runs() -> None:
    pytest.importorskip("pytest_benchmark")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--benchmark-disable", "benchmarks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout


@pytest.mark.check
@two_cpus
def test_machine_that_another_program_uses_gets_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnburst.cli.bench.command.watch_others", lambda cpus: lambda: 2 * MOST_OTHERS)
    out = tmp_path / "bench.json"
    arguments = ["--only", "seqpacket", "--only", "burst-block", "--count", "40", "--rounds", "2"]
    result = CliRunner().invoke(record, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["conditions"]["others"] == 2 * MOST_OTHERS
    assert {v["outcome"] for v in document["budget"]} == {"not settled", "not measured"}


@pytest.mark.check
@two_cpus
def test_record_writes_rows_conditions_and_budget(tmp_path: Path) -> None:
    out, table = tmp_path / "bench.json", tmp_path / "bench.md"
    arguments = ["--only", "line", "--only", "queue", "--only", "seqpacket*", "--count", "40", "--rounds", "2"]
    result = CliRunner().invoke(record, [*arguments, "--json", str(out), "--markdown", str(table)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [row["name"] for row in document["rows"]] == [
        "line",
        "queue",
        "seqpacket-poll",
        "seqpacket",
        "seqpacket-1core",
    ]
    assert document["conditions"]["others"] >= 0
    assert {v["outcome"] for v in document["budget"]} >= {"not measured"}
    assert "Unix SOCK_SEQPACKET" in table.read_text()
    assert "Budget" in result.output
