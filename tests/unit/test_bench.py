"""`nnburst bench`: figures, budget, missing and failing rows, and that nothing is left running."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from nnburst.cli.bench import bench, budget, clients, schedule
from nnburst.cli.bench import rows as _rows
from nnburst.cli.bench import server as _server
from nnburst.cli.bench.case import Bench, Case, Subject
from nnburst.cli.bench.peers import MESSAGE, PEERS
from nnburst.cli.bench.placement import ONE_CORE, allowed_cpus, conditions, keep_affinity
from nnburst.cli.bench.report import Report
from nnburst.cli.bench.sampling import Result, Round, time_calls
from nnburst.cli.bench.server import server_process
from nnburst.errors import MissedDeadline

ROW_KEYS = ("name", "wait", "payload_bytes", "count", "p50_us", "p90_us", "p99_us", "p999_us", "max_us", "ratio_to_L")


@pytest.fixture(autouse=True)
def short_looks_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """L only has to be there: a busy machine takes seconds for as many round trips as a benchmark wants."""
    monkeypatch.setattr(schedule, "_LINE_COUNT", 20)


two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 CPUs")


def _round(p50: int, before: float = 100.0, after: float = 100.0) -> Round:
    return Round(np.full(10, p50, dtype=np.int64), before, after)


def _case(open_row: Any, key: str = "mine", **more: Any) -> Case:
    return Case(key, "e", "title", "block", 32, open_row, ONE_CORE, **more)


def _run(cases: list[Case], tmp_path: Path) -> dict[str, Result]:
    plan = schedule.Plan(rounds=2, count=40, turn_seconds=0.01)
    with keep_affinity(), ExitStack() as stack:
        shared = Bench(allowed_cpus(), str(tmp_path), 50e-6, stack)
        return schedule.run(cases, shared, plan, stack, lambda what: None)


def test_time_calls_counts_every_call_and_loses_no_time() -> None:
    calls: list[int] = []
    samples = time_calls(lambda: calls.append(1), 50)
    assert len(calls) == len(samples) == 50
    assert (samples > 0).all()


def test_ratio_leaves_out_rounds_in_which_the_machine_changed() -> None:
    moved = _round(500, before=100, after=400)
    result = Result([moved, _round(500), moved])
    assert [r.settled for r in result.rounds] == [False, True, False]
    assert result.ratio_to_line() == 5.0


def test_without_a_second_cpu_rounds_are_settled_and_have_no_ratio() -> None:
    result = Result([_round(500, before=math.nan, after=math.nan)])
    assert result.rounds[0].settled
    assert math.isnan(result.ratio_to_line())


def test_rows_are_compared_within_a_round() -> None:
    fast, slow = Result([_round(100), _round(400)]), Result([_round(300), _round(1200)])
    assert slow.ratio_to(fast) == 3.0


def test_percentiles_are_in_order_whatever_the_rounds_are_like() -> None:
    many, few = Round(np.full(100, 200, np.int64), 100.0, 100.0), Round(np.full(1, 5000, np.int64), 100.0, 100.0)
    figures = list(Result([many, few, few]).percentiles_us().values())
    assert figures == sorted(figures)
    assert figures[0] == 0.2


@pytest.mark.parametrize(
    ("rounds", "others"),
    [
        ([_round(100)] * 4, 0.2),
        ([_round(100), _round(100, before=100, after=400), _round(100, before=100, after=400)], 0.0),
        ([_round(100, before=math.inf, after=math.inf)], 0.0),
        ([_round(149), _round(151)] * 4, 0.0),
    ],
    ids=["others have the CPUs", "L moves", "there is no L", "the rounds disagree"],
)
def test_busy_machine_gets_no_verdict(rounds: list[Round], others: float) -> None:
    verdict = budget.verdicts({"queue": Result(rounds)}, others)[0]
    assert verdict.outcome == "not settled"


def test_few_rounds_that_disagree_leave_the_verdict_to_the_others() -> None:
    kept, broken = _round(100), _round(200)
    assert budget.verdicts({"queue": Result([kept] * 3 + [broken])})[0].outcome == "pass"
    assert budget.verdicts({"queue": Result([kept] + [broken] * 3)})[0].outcome == "miss"


@pytest.mark.parametrize(("p50", "outcome"), [(150, "pass"), (151, "miss")])
def test_budget_says_pass_up_to_the_limit_and_miss_beyond(p50: int, outcome: str) -> None:
    assert budget.verdicts({"queue": Result([_round(p50)])})[0].outcome == outcome


@pytest.mark.parametrize(("p50", "outcome"), [(250, "pass"), (249, "miss")])
def test_budget_of_being_faster_is_a_lower_limit(p50: int, outcome: str) -> None:
    results = {"burst-poll": Result([_round(100)]), "iceoryx2": Result([_round(p50)])}
    verdict = next(v for v in budget.verdicts(results) if "iceoryx2" in v.text)
    assert verdict.outcome == outcome


def test_budget_without_its_rows_is_not_measured() -> None:
    assert {v.outcome for v in budget.verdicts({})} == {"not measured"}


def test_every_row_has_a_name_of_its_own_and_the_budget_names_only_rows() -> None:
    keys = [case.key for case in _rows.all_cases()]
    assert len(set(keys)) == len(keys)
    assert {name for promise in budget.BUDGET for name in (promise.row, promise.base)} <= set(keys)


def test_missing_peer_is_said_with_the_remedy(tmp_path: Path) -> None:
    case = _case(lambda bench: pytest.fail("opened"), module="no_such_module_here", distribution="no-such-thing")
    result = _run([case], tmp_path)["mine"]
    assert not result.rounds
    assert "not installed" in result.note
    assert "pip install no-such-thing" in result.note


def test_failing_row_leaves_the_others_alone(tmp_path: Path) -> None:
    @contextmanager
    def open_fine(bench: Bench) -> Iterator[Subject]:
        yield Subject(lambda count: time_calls(lambda: None, count))

    @contextmanager
    def open_broken(bench: Bench) -> Iterator[Subject]:
        yield Subject(lambda count: [][1])

    results = _run([_case(open_broken, "broken"), _case(open_fine, "fine")], tmp_path)
    assert results["broken"].note.startswith("failed: ")
    assert not results["broken"].rounds
    assert len(results["fine"].rounds) == 2


@contextmanager
def _opens(sample: Any) -> Iterator[Subject]:
    yield Subject(sample)


@two_cpus
def test_row_keeps_its_samples_where_the_machine_is_too_busy_for_the_cache_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_busy(*args: object) -> Any:
        raise MissedDeadline("cache line ping-pong: the deadline has passed")

    monkeypatch.setattr(schedule, "line_samples", too_busy)
    result = _run([_case(lambda bench: _opens(lambda count: time_calls(lambda: None, count)))], tmp_path)["mine"]
    assert result.note == ""
    assert [len(r.samples) > 0 for r in result.rounds] == [True, True]
    assert not any(r.settled for r in result.rounds)
    assert math.isnan(result.ratio_to_line())


def test_turn_that_a_busy_machine_takes_is_said_and_the_next_ones_follow(tmp_path: Path) -> None:
    turns = itertools.count()

    def sample(count: int) -> Any:
        if next(turns) == 0:
            raise MissedDeadline("message queue ping-pong: the deadline has passed")
        return time_calls(lambda: None, count)

    case = _case(lambda bench: _opens(sample))
    results = _run([case], tmp_path)
    assert results["mine"].note == "1 of 2 turns without samples: the machine was too busy"
    assert [len(r.samples) > 0 for r in results["mine"].rounds] == [False, True]
    row = Report({}, [case], results, []).row(case)
    assert row["rounds"][0]["p50_us"] is None
    assert row["p50_us"] > 0


@pytest.mark.parametrize("key", ["mmap-word", "seqpacket-poll", "simple-queue"])
def test_peer_answers_with_what_it_was_sent(key: str, tmp_path: Path) -> None:
    peer = next(peer for peer in PEERS if peer.key == key)
    ours, theirs = peer.link(str(tmp_path))
    with server_process(peer.server, theirs), peer.client(ours) as call:
        if key == "seqpacket-poll":
            theirs.close()
        assert [call() for _ in range(3)] == [MESSAGE] * 3


def _spin(end: Any) -> Generator[None, None, None]:
    yield
    while True:
        pass


def _deaf(end: Any) -> Generator[None, None, None]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.pause()


def _die(end: Any) -> Generator[None, None, None]:
    raise RuntimeError("cannot serve")
    yield


@pytest.mark.parametrize("parked", [False, True])
def test_server_that_polls_for_ever_ends_with_its_context(parked: bool) -> None:
    with pytest.raises(ZeroDivisionError), server_process(_spin, None) as server:
        pid = server.pid
        if parked:
            server.park()
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_server_that_ignores_the_request_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_STOP_SECONDS", 0.1)
    with server_process(_deaf, None) as server:
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_server_that_cannot_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="ended while it started"), server_process(_die, None):
        pytest.fail("the server started")
    assert "cannot serve" in capfd.readouterr().err


def test_saving_of_the_slot_table_is_said_in_microseconds() -> None:
    results = {"slot-first": Result([_round(381_000)]), "slot-later": Result([_round(9_500)])}
    (line,) = Report({}, [], results, []).savings()
    assert "371.5 µs" in line
    assert Report({}, [], {"slot-first": Result([_round(1)])}, []).savings() == []


def test_rows_of_memory_run_with_real_services(tmp_path: Path) -> None:
    keys = [
        "input-shm-copied",
        "input-pickled",
        *(f"state-{way}-1KiB" for way in ("domain", "copied", "pingpong")),
        "slot-first",
    ]
    cases = [case for case in _rows.all_cases() if case.key in keys]
    results = _run(cases, tmp_path)
    assert {key: result.note for key, result in results.items()} == dict.fromkeys(keys, "")
    assert all(len(result.rounds) == 2 for result in results.values())


def test_bursts_without_clients_are_refused() -> None:
    done = CliRunner().invoke(bench, ["--bursts", "4", "--list"])
    assert done.exit_code == 2
    assert "--bursts goes with --clients" in done.output


def test_clients_of_a_shared_service_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "clients.json"
    done = CliRunner().invoke(bench, ["--clients", "3", "--bursts", "2", "--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["clients"]
    assert [row["clients"] for row in rows] == [1, 2, 3]
    assert all(row["bursts"] == 2 for row in rows)
    assert all(len(row["runs"]) == row["clients"] and min(row["runs"]) > 0 for row in rows)


def test_each_number_of_clients_has_the_turn_of_its_median_rate() -> None:
    turns = [[clients.Share(k, 1, 1.0, (runs + k,) * k) for k in (1, 2)] for runs in (30, 10, 20)]
    turns[0][1] = clients.Share(2, 1, 1.0, (1, 1))  # one that the machine had disturbed
    assert [share.runs for share in clients.medians(turns)] == [(21,), (12, 12)]


@pytest.mark.parametrize("stolen", [0.0, 1e6])
def test_time_that_the_host_took_is_told(stolen: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "measure_shares", lambda *args: [clients.Share(1, 1, 1.0, (7,))])
    monkeypatch.setattr(clients, "stolen_seconds", itertools.count(0.0, stolen).__next__)
    done = CliRunner().invoke(bench, ["--clients", "1"])
    assert done.exit_code == 0, done.output
    assert ("the host took" in done.output) is (stolen > 0)


def test_unknown_row_is_refused() -> None:
    result = CliRunner().invoke(bench, ["--only", "nothing-like-that"])
    assert result.exit_code == 2
    assert "--list" in result.output


@two_cpus
def test_bench_writes_rows_conditions_and_budget(tmp_path: Path) -> None:
    out, table = tmp_path / "bench.json", tmp_path / "bench.md"
    affinity = os.sched_getaffinity(0)
    arguments = ["--only", "line", "--only", "queue", "--only", "seqpacket*", "--count", "40", "--rounds", "2"]
    result = CliRunner().invoke(bench, [*arguments, "--json", str(out), "--markdown", str(table)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [row["name"] for row in document["rows"]] == [
        "line",
        "queue",
        "seqpacket-poll",
        "seqpacket",
        "seqpacket-1core",
    ]
    for row in document["rows"]:
        assert set(ROW_KEYS) <= set(row)
        assert row["count"] > 0
        assert 0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"] <= row["p999_us"] <= row["max_us"]
        assert row["ratio_to_L"] is None or row["ratio_to_L"] > 0
    assert {"cpu", "cores", "kernel", "python", "polling_window_us", "client_cpu", "bytecode", "others"} <= set(
        document["conditions"]
    )
    assert {v["outcome"] for v in document["budget"]} >= {"not measured"}
    assert "Unix SOCK_SEQPACKET" in table.read_text()
    assert "Budget" in result.output
    assert os.sched_getaffinity(0) == affinity


@two_cpus
def test_machine_that_another_program_uses_gets_no_verdict(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            os.sched_setaffinity(other.pid, {allowed_cpus().server})
            arguments = ["--only", "seqpacket*", "--only", "burst-block*", "--count", "40", "--rounds", "2"]
            result = CliRunner().invoke(bench, [*arguments, "--json", str(out)])
        finally:
            other.kill()
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["conditions"]["others"] > budget.MOST_OTHERS
    assert {v["outcome"] for v in document["budget"]} == {"not settled", "not measured"}


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_bench_that_is_told_to_end_leaves_no_files(told: int, tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from nnburst.cli import main; main()"
    command = [sys.executable, "-c", program, "bench", "--only", "seqpacket-1core"]  # not ignored, as under nohup
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*command, "--count", "10000000", "--rounds", "100000"], env=env) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob("nnburst-bench-*")):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(told)
            assert process.wait(60) == 128 + told
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept_from_it", [True, False])
def test_conditions_say_whether_the_bytecode_is_kept(kept_from_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", kept_from_it)
    said = str(conditions(allowed_cpus(), 0.0)["bytecode"])
    assert re.match(r"\d+ of \d+ modules lie in __pycache__ compiled", said)
    assert ("PYTHONDONTWRITEBYTECODE" in said) is kept_from_it
