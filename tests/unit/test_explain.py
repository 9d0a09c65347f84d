"""`nnburst explain`: the parts of slow runs, and whom they waited for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nnburst.cli import main

SERVICE = 900
Event = dict[str, Any]


def explain(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)])


def run(
    client: int, model: str, number: int, start: float, parts: tuple[float, ...], service: int = SERVICE, **more: int
) -> Iterator[Event]:
    """Yield the slices of a run whose waiting, running and returning take so many µs."""
    about = {"run": number, "model": model, "status": "NONE", "thread": "MainThread", **more}

    def event(pid: int, name: str, ts: float, dur: float) -> Event:
        return {"ph": "X", "cat": "nnburst", "name": name, "pid": pid, "tid": 1, "ts": ts, "dur": dur, "args": about}

    yield {"ph": "M", "name": "process_name", "pid": client, "tid": 0, "ts": 0, "args": {"name": "client"}}
    yield event(client, "run", start, sum(parts) or 7.0)
    if not parts:
        return
    waiting, running, returning = parts
    yield event(service, "queue", start, waiting)
    yield event(service, "execute", start + waiting, running)
    yield event(client, "return", start + waiting + running, returning)


def write(path: Path, *runs: Iterator[Event]) -> Path:
    path.write_text(json.dumps({"traceEvents": [event for each in runs for event in each]}))
    return path


def usual(model: str = "tracker", client: int = 193) -> list[Iterator[Event]]:
    return [run(client, model, number, 1e6 + number * 1000, (1.0, 3.0, 1.0)) for number in range(10)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A tracker that once waited for a detector of another process, while a third service worked, too."""
    return write(
        tmp_path / "trace.json",
        *usual(),
        run(193, "tracker", 77, 1000.0, (75_000.0, 3.0, 1.0)),
        run(812, "detector", 5, 900.0, (1.0, 70_000.0, 1.0)),
        run(813, "classifier", 5, 900.0, (1.0, 70_000.0, 1.0), service=901),
    )


def test_slow_run_names_whom_it_waited_for(trace: Path) -> None:
    said = explain(trace, "--model", "tracker", "--runs", 1).output.splitlines()
    assert said == [
        "tracker: 11 runs, half within 5 µs, 99 % within 75 ms",
        "  run 77 of process 193, 75 ms: 75 ms waiting behind detector of process 812 (69.9 ms) (usually 1 µs)",
    ]


def test_all_models_are_told_with_their_slowest_runs(trace: Path) -> None:
    lines = explain(trace, "--runs", 2).output.splitlines()
    assert [line.split(":")[0] for line in lines if line[0] != " "] == ["classifier", "detector", "tracker"]
    assert len(lines) == 3 + 1 + 1 + 2
    assert "run 5 of process 812, 70 ms: 70 ms running (as usual)" in lines[3]


def test_parts_are_told_longest_first_and_those_of_no_matter_are_not(tmp_path: Path) -> None:
    file = write(tmp_path / "t", *usual(), run(193, "tracker", 50, 1.0, (100.0, 9000.0, 2000.0)))
    words = explain(file, "--runs", 1).output.splitlines()[1]
    assert words.endswith(": 9 ms running (usually 3 µs); 2 ms until the program had the answer (usually 1 µs)")


def test_waiting_for_what_was_not_traced_says_so(tmp_path: Path) -> None:
    file = write(tmp_path / "t", *usual(), run(193, "tracker", 50, 1.0, (5e6, 3.0, 1.0)))
    assert "5 s waiting for nothing that was traced" in explain(file).output


def test_run_in_a_batch_says_how_many_ran_and_what_it_waited_for(tmp_path: Path) -> None:
    file = write(tmp_path / "t", *usual(), run(193, "tracker", 50, 1.0, (1000.0, 800.0, 1.0), together=7))
    said = explain(file, "--runs", 1).output
    assert "1 ms waiting for others to run with (usually 1 µs); 800 µs running in a batch of 7 (usually 3 µs)" in said


def test_run_without_times_of_the_service_says_so(tmp_path: Path) -> None:
    assert "7 µs: the service told no times" in explain(write(tmp_path / "t", run(1, "m", 1, 0.0, ()))).output


def test_json_has_every_figure(trace: Path) -> None:
    found = json.loads(explain(trace, "--json", "--runs", 1).output)
    assert found["tracker"][0]["run"]["waiting"] == 75_000
    assert found["tracker"][0]["behind"] == {"detector of process 812": pytest.approx(69_901)}


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "t"
    assert "cannot be read: No such file" in explain(file).output
    for text in (
        "",
        "[]",
        "{}",
        '{"traceEvents":[{"ph":"X"}]}',
        '{"traceEvents":[{"ph":"X","name":"queue"}]}',
        "[" * 100_000,
    ):
        file.write_text(text)
        done = explain(file)
        assert (done.exit_code, "is no trace" in done.output) == (1, True), text[:50]
    assert "has no runs" in explain(write(file)).output
    assert "has runs of tracker" in explain(write(file, *usual()), "--model", "none").output


def test_trace_of_a_program_is_explained(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, nnburst\n"
        "b = nnburst.ModelBuilder()\n"
        "b.output('y', b.relu(b.input('x', nnburst.OperandType.TENSOR_FLOAT32, (1, 4))))\n"
        "with nnburst.launch(devices=['nnburst-reference']) as service, service.session(b.build()) as session:\n"
        "    for _ in range(20): session.run(None, {'x': np.ones((1, 4), np.float32)})\n"
    )
    trace = tmp_path / "trace.json"
    traced = CliRunner().invoke(main, ["trace", "-o", str(trace), sys.executable, str(program)], env=dict(os.environ))
    assert traced.exit_code == 0, traced.output
    lines = explain(trace).output.splitlines()
    assert "20 runs" in lines[0]
    assert len(lines) == 4
