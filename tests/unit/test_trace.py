"""Traces: slices nest, arrows have both ends, processes share a file; what goes wrong costs the trace alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import nnburst
from nnburst.errors import InvalidArgument
from nnburst.watch import trace
from support.models import relu

Event = dict[str, Any]


def ns(micros: float) -> int:
    return int(micros * 1000)  # as the readers of such files do it


def read(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_bytes())["traceEvents"]
    return events


def check_slices_nest(events: list[Event]) -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = ns(event["ts"])
            tracks[event["pid"], event["tid"]].append((start, start + ns(event["dur"])))
    for slices in tracks.values():
        open_ends: list[int] = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            assert start < end
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "a slice ends after the one that it is in"
            open_ends.append(end)


def check_arrows(events: list[Event]) -> int:
    """Each arrow goes through four slices of a run: client, queue, service, client."""
    starts = {(e["pid"], e["tid"], ns(e["ts"]), e["name"]) for e in events if e["ph"] == "X"}
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    for steps in arrows.values():
        assert [step["ph"] for step in steps] == ["s", "t", "t", "f"]
        times = [ns(step["ts"]) for step in steps]
        assert times == sorted(times)
        for step, name in zip(steps, ("run", "queue", "execute", "return"), strict=True):
            assert (step["pid"], step["tid"], ns(step["ts"]), name) in starts
        assert steps[0]["tid"] == steps[3]["tid"]
    return len(arrows)


@contextmanager
def traced(path: Path) -> Iterator[tuple[nnburst.Execution, int]]:
    """A bound execution whose runs are recorded in a file, which is complete at the end, and its service's process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNBURST_TRACE", str(path))
        patch.setenv("_NNBURST_TRACE_BEGUN", "")
        with nnburst.launch(devices=["nnburst-noop"]) as service, service.session(relu((1, 4))) as session:
            with session.bind() as execution:
                yield execution, service.pid


@pytest.mark.check
def test_trace_of_ten_thousand_runs_nests_and_has_every_arrow(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with traced(path) as (execution, pid):
        for _ in range(10_000):
            execution.run()
    events = read(path)
    runs = [event for event in events if event["ph"] == "X" and event["name"] == "run"]
    assert [run["args"]["run"] for run in runs] == list(range(1, 10_001))
    assert {run["pid"] for run in runs} == {os.getpid()}
    assert {e["pid"] for e in events if e["name"] in ("queue", "execute")} == {pid}
    check_slices_nest(events)
    assert check_arrows(events) == 10_000


PROGRAM = """
import subprocess, sys
import numpy as np
import nnburst
b = nnburst.ModelBuilder()
b.output("y", b.softmax(b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))))
model = b.build()
again = [sys.executable, sys.argv[0], "child"]
children = [subprocess.Popen(again) for _ in range(2)] if len(sys.argv) == 1 else []
with nnburst.in_process(devices=["nnburst-noop"]) as service:
    session = service.session(model)
    execution = session.bind()  # nothing of these is closed
    for _ in range(50):
        execution.run()
    with service.session(model) as other:
        other.run(None, {"x": np.zeros((1, 4), np.float32)})
sys.exit(sum(child.wait() for child in children) + 3)
"""


@pytest.mark.check
def test_processes_share_a_file_and_the_status_is_that_of_the_command(tmp_path: Path) -> None:
    path, program = tmp_path / "trace.json", tmp_path / "program.py"
    path.write_text("what was there before")
    program.write_text(PROGRAM)
    command = "from nnburst.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "trace", "-o", str(path), "--", sys.executable, str(program)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    events = read(path)
    runs = [event for event in events if event["ph"] == "X" and event["name"] == "run"]
    check_slices_nest(events)
    assert check_arrows(events) == len(runs)
    assert "open it at https://ui.perfetto.dev" in done.stderr
    assert (done.returncode, len(runs)) == (9, 3 * 51), done.stderr


def test_overlapping_runs_have_tracks_of_their_own() -> None:
    numbers = iter(range(100))
    lanes = trace._Lanes(lambda: next(numbers))
    assert [lanes.place(*times) for times in ((0, 10), (5, 20), (10, 30), (12, 13), (20, 25))] == [0, 1, 0, 2, 1]
    assert lanes.tracks == [0, 1, 2]


def test_only_the_last_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_KEPT", 8)
    with traced(tmp_path / "trace.json") as (execution, _):
        for _ in range(20):
            execution.run()
    runs = [event for event in read(tmp_path / "trace.json") if event["name"] == "run" and event["ph"] == "X"]
    assert [run["args"]["run"] for run in runs] == [*range(13, 21)]


SPANS = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import asyncio, threading, time
import numpy as np, nnburst

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
b = nnburst.ModelBuilder()
b.output("y", b.softmax(b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))))
array = {"x": np.zeros((1, 4), np.float32)}
with nnburst.in_process(devices=["nnburst-noop"]) as service, service.session(b.build(), concurrency=1) as session:
    with provider.get_tracer("program").start_as_current_span("frame") as frame:
        session.run(None, array)
    try:
        session.run(None, {})
    except nnburst.InvalidArgument:
        pass
    with trace.use_span(trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT.__class__(1, 1, is_remote=False))):
        session.run(None, array)  # the parent is not sampled
    with provider.get_tracer("program").start_as_current_span("frame"):
        asyncio.run(session.arun(None, array))
        assert len([trace.get_current_span().name for _ in session.run_many([array] * 3)]) == 3
    permit = session._idle.pop()
    def give():
        while not session._waiting:
            time.sleep(0.001)
        session._runs.permits.put_back(permit)
    threading.Thread(target=give, daemon=True).start()
    session.run(None, array)  # waits, although its span is around it
    pid = service.pid
run, outer, failed, awaited, many, frame, waited = exporter.get_finished_spans()
assert (awaited.name, many.name, waited.name) == ("nnburst.run", "nnburst.run_many", "nnburst.run")
assert awaited.parent.span_id == many.parent.span_id == frame.context.span_id
assert (run.name, outer.name, run.parent.span_id) == ("nnburst.run", "frame", outer.context.span_id)
assert run.attributes["nnburst.service.pid"] == pid and run.attributes["nnburst.device"] == "nnburst-noop"
assert not failed.status.is_ok and failed.events[0].name == "exception"
"""


def test_runs_are_spans_where_the_program_uses_opentelemetry_and_samples() -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")
    done = subprocess.run([sys.executable, "-c", SPANS], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_session_of_a_program_without_opentelemetry_is_a_plain_one() -> None:
    code = "import sys, nnburst; s = nnburst.in_process().session; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=100, check=True)


def test_file_that_is_not_a_trace_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, this is longer than the beginning of a trace.\n")
    before = path.read_bytes()
    with pytest.raises(InvalidArgument, match="not a trace"):
        trace.append(str(path), [{"ph": "M"}])
    assert path.read_bytes() == before


def test_variable_that_names_no_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_recorder", None)
    monkeypatch.setenv("NNBURST_TRACE", "/nowhere/at/all")
    monkeypatch.delenv("_NNBURST_TRACE_BEGUN", raising=False)
    with nnburst.in_process(devices=["nnburst-noop"]) as service:
        with pytest.raises(InvalidArgument, match="NNBURST_TRACE"):
            service.session(relu((1, 4)))
