"""The benchmark of record (`make bench`): its budget, its rows, its files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks.record import budget, others, peers, server
from benchmarks.record.__main__ import record
from benchmarks.record.peers import installed_peers
from benchmarks.record.rows import all_cases
from nnburst.cli.bench.command import bench
from nnburst.cli.bench.rounds import Case
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
    keys += [case.key for case in peers.PEER_CASES]  # also those that are not installed
    assert {name for promise in budget.BUDGET for name in (promise.row, promise.base)} <= set(keys)


def _failing() -> Any:
    raise RuntimeError("it does not compile")


@pytest.mark.parametrize(
    ("command", "rows"),
    [(bench, "nnburst.cli.bench.rows.all_cases"), (record, "benchmarks.record.__main__.all_cases")],
    ids=["bench", "record"],
)
def test_a_row_that_cannot_be_measured_ends_the_command_with_its_reason(
    command: click.Command, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = made_up_case(partial(time_calls, lambda: None), "fine")
    cases = [fine, *(Case(key, "e", "title", "block", 32, _failing) for key in "ab")]
    monkeypatch.setattr(rows, lambda: tuple(cases))
    out = tmp_path / "bench.json"
    done = CliRunner().invoke(command, ["--rounds", "1", "--json", str(out)])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-2:] == ["a: failed: it does not compile", "b: failed: it does not compile"]
    assert {row["key"]: row["count"] for row in json.loads(out.read_text())["rows"]} == {"fine": 20, "a": 0, "b": 0}


def test_unknown_row_is_refused() -> None:
    result = CliRunner().invoke(record, ["--only", "nothing-like-that"])
    assert result.exit_code == 2
    assert "burst-poll" in result.output


@pytest.mark.check
@pytest.mark.leaks("libraries of peers keep descriptors until their process ends")
@pytest.mark.parametrize("group", sorted({case.group for case in all_cases()}))
def test_every_row_is_measured(group: str) -> None:
    results = run_rows([case for case in all_cases() if case.group == group])
    assert {key: result.note for key, result in results.items() if result.note} == {}


@pytest.mark.check
@two_cpus
def test_peer_with_another_answer_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_asking", lambda send, receive: lambda: b"")
    result = run_rows([case for case in installed_peers() if case.key == "pipe"])["pipe"]
    assert (result.note, result.rounds) == ("failed: its answer is b'', not what it was sent", [])


def _spin(end: Any) -> Generator[None, None, None]:
    yield
    while True:
        pass


@pytest.mark.check
@pytest.mark.parametrize("parked", [False, True])
def test_server_that_polls_for_ever_ends_with_its_context(parked: bool) -> None:
    with pytest.raises(ZeroDivisionError), server.server_process(_spin, None) as process:
        pid = process.pid
        if parked:
            process.park()
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_busy_seconds_are_those_of_the_named_cpus_without_their_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    #                user nice system idle iowait irq softirq steal guest
    text = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 4 900 900 8 16 32 900 0\ncpu1 100 0 0 900 0 0 0 0 0 0\n"
    monkeypatch.setattr(others.Path, "read_text", lambda path, **how: text)
    monkeypatch.setattr(others.os, "sysconf", lambda name: 1)
    assert others._busy_seconds({0}) == 63
    assert others._busy_seconds({0, 1}) == 163


@pytest.mark.check
@pytest.mark.parametrize(
    "command",
    [["clients.py", "--most", "3", "--bursts", "2"], ["clients.py", "--most", "2", "--own"], ["batching.py"]],
    ids=["shared", "own", "batches"],
)
def test_programs_are_counted(command: list[str], tmp_path: Path) -> None:
    name, *options = command
    if name == "batching.py":
        pytest.importorskip("onnxruntime")
        from support.onnx_models import mlp, save

        options = ["--most", "2", "--model", save(mlp(8, 1, "N"), tmp_path / "m.onnx")]
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--quick", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=True)
    rows = [[float(cell.replace(",", "")) for cell in line.split()] for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ([1, 2, 3] if "3" in options else [1, 2])
    assert all(cell > 0 for row in rows for cell in row)


@pytest.mark.check
def test_clients_that_sleep_between_their_calls_are_timed(tmp_path: Path) -> None:
    options = ["--think", "1", "--hogs", "1", "--rounds", "1", "--clients", "2", "--work", "0.1", "--json", "rows.json"]
    command = [sys.executable, str(ROOT / "benchmarks/waiting.py"), *options]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, timeout=110, check=True)
    (row,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert all(0 < row[kind][0] for kind in ("burst", "asleep", "shared", "socket", "pipe"))


@pytest.mark.check
def test_the_regression_set_runs() -> None:
    pytest.importorskip("pytest_benchmark")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--benchmark-disable", "benchmarks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout


@pytest.mark.check
@two_cpus
def test_record_writes_rows_conditions_and_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.record.__main__.watch_others", lambda cpus: lambda: 2 * budget.MOST_OTHERS)
    out, table = tmp_path / "bench.json", tmp_path / "bench.md"
    arguments = ["--only", "line", "--only", "queue", "--only", "seqpacket*", "--quick", "--rounds", "1"]
    result = CliRunner().invoke(record, [*arguments, "--json", str(out), "--markdown", str(table)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    keys = [row["key"] for row in document["rows"]]
    assert keys == ["line", "queue", "seqpacket-poll", "seqpacket", "seqpacket-1core"]
    assert document["others"] == 2 * budget.MOST_OTHERS
    assert {v["outcome"] for v in document["budget"]} == {"not settled", "not measured"}
    assert "| Unix SOCK_SEQPACKET | block | one core | 32 B |" in table.read_text()
    assert "Budget" in result.output
