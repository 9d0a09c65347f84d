"""`nnburst bench`: figures, missing and failing rows, and that nothing is left running."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from nnburst.cli import main
from nnburst.cli.bench import clients, schedule
from nnburst.cli.bench import server as _server
from nnburst.cli.bench.case import Bench, Subject
from nnburst.cli.bench.command import bench
from nnburst.cli.bench.peers import PEER_CASES
from nnburst.cli.bench.placement import allowed_cpus, conditions
from nnburst.cli.bench.report import Report
from nnburst.cli.bench.sampling import Result, Round, time_calls
from nnburst.cli.bench.server import server_process
from nnburst.errors import MissedDeadline
from support.benchmarking import made_up_case, round_of, run_rows, short_looks_at_the_machine
from support.waiting import until

ROW_KEYS = ("name", "wait", "payload_bytes", "count", "p50_us", "p90_us", "p99_us", "p999_us", "max_us", "ratio_to_L")

__all__ = ["short_looks_at_the_machine"]

two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 CPUs")


def test_time_calls_counts_every_call_and_loses_no_time() -> None:
    calls: list[int] = []
    samples = time_calls(lambda: calls.append(1), 50)
    assert len(calls) == len(samples) == 50
    assert (samples > 0).all()


def test_ratio_leaves_out_rounds_in_which_the_machine_changed() -> None:
    moved = round_of(500, before=100, after=400)
    result = Result([moved, round_of(500), moved])
    assert [r.settled for r in result.rounds] == [False, True, False]
    assert result.ratio_to_line() == 5.0


def test_without_a_second_cpu_rounds_are_settled_and_have_no_ratio() -> None:
    result = Result([round_of(500, before=math.nan, after=math.nan)])
    assert result.rounds[0].settled
    assert math.isnan(result.ratio_to_line())


def test_rows_are_compared_within_a_round() -> None:
    fast, slow = Result([round_of(100), round_of(400)]), Result([round_of(300), round_of(1200)])
    assert slow.ratio_to(fast) == 3.0


def test_percentiles_are_in_order_whatever_the_rounds_are_like() -> None:
    many, few = Round(np.full(100, 200, np.int64), 100.0, 100.0), Round(np.full(1, 5000, np.int64), 100.0, 100.0)
    figures = list(Result([many, few, few]).percentiles_us().values())
    assert figures == sorted(figures)
    assert figures[0] == 0.2


def test_missing_peer_is_said_with_the_remedy(tmp_path: Path) -> None:
    case = made_up_case(lambda bench: pytest.fail("opened"), module="no_such_module_here", distribution="no-such-thing")
    result = run_rows([case], tmp_path)["mine"]
    assert not result.rounds
    assert "not installed" in result.note
    assert "pip install no-such-thing" in result.note
    assert not result.failed


def test_failing_row_leaves_the_others_alone(tmp_path: Path) -> None:
    @contextmanager
    def open_fine(bench: Bench) -> Iterator[Subject]:
        yield Subject(lambda count: time_calls(lambda: None, count))

    @contextmanager
    def open_broken(bench: Bench) -> Iterator[Subject]:
        yield Subject(lambda count: [][1])

    results = run_rows([made_up_case(open_broken, "broken"), made_up_case(open_fine, "fine")], tmp_path)
    assert results["broken"].note.startswith("failed: ")
    assert not results["broken"].rounds
    assert len(results["fine"].rounds) == 2
    assert (results["broken"].failed, results["fine"].failed) == (True, False)


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
    result = run_rows([made_up_case(lambda bench: _opens(lambda count: time_calls(lambda: None, count)))], tmp_path)[
        "mine"
    ]
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

    case = made_up_case(lambda bench: _opens(sample))
    results = run_rows([case], tmp_path)
    assert results["mine"].note == "1 of 2 turns without samples: the machine was too busy"
    assert [len(r.samples) > 0 for r in results["mine"].rounds] == [False, True]
    row = Report({}, [case], results).row(case)
    assert row["rounds"][0]["p50_us"] is None
    assert row["p50_us"] > 0


@pytest.mark.check
@two_cpus
@pytest.mark.parametrize("key", ["mmap-word", "seqpacket-poll", "simple-queue"])
def test_peer_answers_with_what_it_was_sent(key: str, tmp_path: Path) -> None:
    result = run_rows([case for case in PEER_CASES if case.key == key], tmp_path)[key]
    assert (result.note, len(result.rounds)) == ("", 2)


@pytest.mark.check
@two_cpus
def test_peer_with_another_answer_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnburst.cli.bench.peers._asking", lambda send, receive: lambda: b"")
    result = run_rows([case for case in PEER_CASES if case.key == "pipe"], tmp_path)["pipe"]
    assert (result.note, result.rounds) == ("failed: its answer is b'', not what it was sent", [])


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


@pytest.mark.check
@pytest.mark.parametrize("parked", [False, True])
def test_server_that_polls_for_ever_ends_with_its_context(parked: bool) -> None:
    with pytest.raises(ZeroDivisionError), server_process(_spin, None) as server:
        pid = server.pid
        if parked:
            server.park()
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.check
def test_server_that_ignores_the_request_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_STOP_SECONDS", 0.1)
    with server_process(_deaf, None) as server:
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.check
def test_server_that_cannot_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="ended while it started"), server_process(_die, None):
        pytest.fail("the server started")
    assert "cannot serve" in capfd.readouterr().err


def test_bursts_without_clients_are_refused() -> None:
    done = CliRunner().invoke(bench, ["--bursts", "4", "--list"])
    assert done.exit_code == 2
    assert "--bursts goes with --clients" in done.output


@pytest.mark.check
def test_clients_of_a_shared_service_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "clients.json"
    done = CliRunner().invoke(bench, ["--clients", "3", "--bursts", "2", "--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["clients"]
    assert [row["clients"] for row in rows] == [1, 2, 3]
    assert all(row["bursts"] == 2 for row in rows)
    assert all(len(row["runs"]) == row["clients"] and min(row["runs"]) > 0 for row in rows)


@pytest.mark.check
def test_rows_of_clients_are_measured_with_batches_and_without(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from support.onnx_models import mlp, save

    path, model = tmp_path / "rows.json", save(mlp(8, 1, "N"), tmp_path / "m.onnx")
    done = CliRunner().invoke(bench, ["--clients", "3", "--model", model, "--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    pairs = json.loads(path.read_text())["rows"]
    assert [(pair["alone"]["clients"], pair["batched"]["clients"]) for pair in pairs] == [(n, n) for n in (1, 2, 3)]
    assert all(0 < rows["p50"] <= rows["p99"] and rows["rate"] > 0 for pair in pairs for rows in pair.values())
    said = [line.split() for line in done.output.splitlines() if re.match(" *[123] ", line)]
    for line, pair in zip(said, pairs, strict=True):
        assert float(line[-1]) == pytest.approx(pair["batched"]["rate"] / pair["alone"]["rate"], abs=0.006)


@pytest.mark.check
def test_model_that_has_no_rows_is_not_measured_with_batches(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    from support.onnx_models import mlp, save

    model = save(mlp(8, 1), tmp_path / "m.onnx")
    done = CliRunner().invoke(main, ["bench", "--clients", "2", "--model", model, "--quick"])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert "has no open first dimension" in capfd.readouterr().err


def test_each_number_of_clients_has_the_turn_of_its_median_rate() -> None:
    turns = [[clients.Share(k, 1, 1.0, (runs + k,) * k) for k in (1, 2)] for runs in (30, 10, 20)]
    turns[0][1] = clients.Share(2, 1, 1.0, (1, 1))  # one that the machine had disturbed
    assert [share.runs for share in clients.medians(turns, lambda share: share.rate)] == [(21,), (12, 12)]


def test_unknown_row_is_refused() -> None:
    result = CliRunner().invoke(bench, ["--only", "nothing-like-that"])
    assert result.exit_code == 2
    assert "--list" in result.output


@pytest.mark.check
@two_cpus
def test_bench_writes_rows_and_conditions(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    affinity = os.sched_getaffinity(0)
    arguments = ["--only", "line", "--only", "seqpacket*", "--count", "40", "--rounds", "2"]
    result = CliRunner().invoke(bench, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [row["name"] for row in document["rows"]] == [
        "line",
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
    assert "Unix SOCK_SEQPACKET" in result.output
    assert os.sched_getaffinity(0) == affinity


@pytest.mark.check
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_bench_that_is_told_to_end_leaves_no_files(told: int, tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from nnburst.cli import main; main()"
    command = [sys.executable, "-c", program, "bench", "--only", "seqpacket-1core"]  # not ignored, as under nohup
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*command, "--count", "10000000", "--rounds", "100000"], env=env) as process:
        try:
            until(lambda: process.poll() is not None or list(tmp_path.glob("nnburst-bench-*")))
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
