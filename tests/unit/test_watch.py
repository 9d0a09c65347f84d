"""The statistics page of a service: what is in it, who may touch it, and that looking disturbs nothing."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import nnburst
from nnburst._core import ffi, lib
from nnburst.cli import main
from nnburst.errors import DeviceUnavailable
from nnburst.watch import FoundPage, RowKind, RowStats, ServiceStats, find_services, look
from nnburst.watch.metrics import Collector
from nnburst.watch.page import MOST_ROWS, Page
from nnburst.watch.reader import Viewer
from nnburst.watch.stats import Histogram
from support import ROOT
from support.models import ready, relu
from support.processes import stop, stopped
from support.users import GUEST, as_root, beside
from support.waiting import Background, until

RUNS = 3000


@pytest.fixture(scope="module")
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-noop"]) as service:
        yield service


def page_of(pid: int) -> FoundPage:
    (page,) = find_services(pid)
    return page


def newest(stats: ServiceStats, kind: RowKind) -> RowStats:
    return stats.of(kind)[-1]


def test_page_of_a_child_has_what_its_burst_did(service: nnburst.Service) -> None:
    with service.session(relu((1, 4))) as session, session.bind() as execution:
        for _ in range(RUNS):
            execution.run()
        stats = look(page_of(service.pid))
        burst, model = newest(stats, RowKind.BURST), newest(stats, RowKind.MODEL)
        client = session.stats
    assert (burst.client_pid, burst.client_uid, burst.parent) == (os.getpid(), os.geteuid(), model.number)
    assert model.label == "nnburst-noop: x → y"
    wanted = {"requests": RUNS, "results": RUNS, "plan_hits": RUNS - 1, "plan_misses": 1, "slot_misses": 1}
    assert {name: burst.counters[name] for name in wanted} == wanted
    assert client.sent == client.received == RUNS
    assert RUNS - 512 <= burst.queue_wait.count <= RUNS  # one timed run stands for at most 512
    assert RUNS - 512 <= burst.execution.count <= RUNS
    assert 0 < burst.execution.sum_ns < 60e9
    assert burst.execution.percentile_ns(50) <= burst.execution.percentile_ns(99) <= burst.execution.max_ns


def test_what_ends_is_in_the_sums_above_it(service: nnburst.Service) -> None:
    def total(name: str, rows: tuple[RowStats, ...]) -> int:
        return sum(row.counters[name] for row in rows)

    before = look(page_of(service.pid))
    with service.session(relu((1, 4))) as session:
        session.run(None, {"x": np.zeros((1, 4), np.float32)})
        during = look(page_of(service.pid))
    after = look(page_of(service.pid))
    assert len(during.rows) == len(before.rows) + 2
    assert len(after.rows) == len(before.rows)
    for name in ("requests", "models", "bursts", "slot_misses", "compiled"):
        assert total(name, after.rows) == total(name, before.rows) + 1, name
    assert after.rows[0].kind is RowKind.SERVICE
    assert after.rows[0].execution.count == before.rows[0].execution.count + 1


def test_execution_without_a_burst_is_counted_with_its_model(service: nnburst.Service) -> None:
    x, y = (np.zeros((1, 4), np.float32) for _ in range(2))
    with service.session(relu((1, 4))) as session, ready(session.compilation, x, y) as execution:
        execution.compute()
        model = newest(look(page_of(service.pid)), RowKind.MODEL)
    assert model.counters["fallbacks"] == model.execution.count == 1


def test_frozen_service_can_be_looked_at() -> None:
    with nnburst.launch(devices=["nnburst-noop"]) as service, service.session(relu((1, 4))) as session:
        session.run(None, {"x": np.zeros((1, 4), np.float32)})
        with stopped(service.pid):
            result = CliRunner().invoke(main, ["top", "--once", "--json", str(service.pid)])
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)
    assert report["pid"] == service.pid
    assert report["models"][0]["bursts"][0]["counters"]["results"] == 1


def test_look_into_a_pipe_is_not_cut_to_a_terminal_s_width(service: nnburst.Service) -> None:
    b = nnburst.ModelBuilder()
    b.output(
        "a_long_name_of_an_output",
        b.softmax(b.input("a_long_name_of_an_input", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))),
    )
    with service.session(b.build()) as session:
        session.run(None, {"a_long_name_of_an_input": np.zeros((1, 4), np.float32)})
        result = CliRunner().invoke(main, ["top", "--once", str(service.pid)])
        narrow = CliRunner(env={"FORCE_COLOR": "1", "TERM": "dumb"}).invoke(main, ["top", "--once", str(service.pid)])
    assert narrow.stdout.split("\n")[0].split()[2:] == ["model", "runs/s", "busy", "run", "p50", "p99", "failed"]
    head, total, burst = (line.split() for line in result.stdout.splitlines()[:3])
    assert head[-3:] == ["sleeps", "hits", "failed"]
    assert total[:2] == ["child", f"({service.pid})"]
    assert " ".join(burst).startswith(f"{Path('/proc/self/comm').read_text().strip()} ({os.getpid()}) nnburst-noop: ")
    assert "a_long_name_of_an_input → a_long_name_of_an_output" in " ".join(burst)


def test_no_other_process_can_write_a_page(service: nnburst.Service) -> None:
    try:
        fd = os.open(page_of(service.pid).path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def looks_of(viewer: Viewer, until: Callable[[], bool]) -> ServiceStats:
    """Look again and again: no number ever falls, none contradicts another by more than one run. Return the last."""
    most_per_run = 512  # one timed run stands for at most as many
    before: dict[int, RowStats] = {}
    while True:
        ended = until()
        stats = viewer.look()
        for row in stats.rows:
            old = before.get(row.number, row)
            assert (row.kind, row.parent, row.label, row.since_ns) == (old.kind, old.parent, old.label, old.since_ns)
            assert all(row.counters[name] >= old.counters[name] for name in row.counters)
            assert row.counters["results"] <= row.counters["requests"] + 1
            for name in ("queue_wait", "execution", "spin"):
                now, then = getattr(row, name), getattr(old, name)
                assert now.count >= then.count
                assert now.sum_ns >= then.sum_ns
                assert now.max_ns >= then.max_ns
                filled = dict(now.buckets)
                assert all(filled.get(start, 0) >= n for start, n in then.buckets)
                assert abs(now.count - sum(n for _, n in now.buckets)) <= most_per_run
        before = {row.number: row for row in stats.rows}
        if ended:
            return stats


@pytest.mark.check
def test_readers_that_are_killed_change_nothing(service: nnburst.Service) -> None:
    found = page_of(service.pid)
    draw = random.Random(5)
    with service.session(relu((1, 4))) as session, session.bind() as execution:
        runs = 0
        for _ in range(10):
            reader = os.fork()
            if reader == 0:
                try:
                    looks_of(Viewer(found), lambda: False)
                finally:
                    os._exit(1)  # it looks until it is killed
            end = time.monotonic() + draw.uniform(0.001, 0.05)
            while time.monotonic() < end:
                execution.run()
                runs += 1
            os.kill(reader, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == -signal.SIGKILL
        stats = looks_of(Viewer(found), lambda: True)
        assert newest(stats, RowKind.BURST).counters["results"] == runs == session.stats.received


@pytest.mark.check
def test_writers_that_are_killed_leave_true_numbers_to_those_who_look() -> None:
    draw = random.Random(6)
    for _ in range(3):
        dead, runs = threading.Event(), 0
        with (
            nnburst.launch(devices=["nnburst-noop"]) as service,
            service.session(relu((1, 4))) as session,
            ThreadPoolExecutor(1) as pool,
        ):
            execution, viewer = session.bind(), Viewer(page_of(service.pid))
            seen = pool.submit(looks_of, viewer, dead.is_set)
            killer = threading.Timer(draw.uniform(0.001, 0.1), os.kill, (service.pid, signal.SIGKILL))
            killer.start()
            with contextlib.suppress(nnburst.DeadObject):
                while True:
                    execution.run()
                    runs += 1
            killer.join()
            dead.set()
            burst = newest(seen.result(), RowKind.BURST)
            assert runs <= burst.counters["results"] + 1
            assert burst.counters["results"] <= burst.counters["requests"] <= runs + 1
        assert list(find_services(service.pid)) == []


def test_latency_of_a_session_is_about_all_its_runs_and_knows_the_slowest(service: nnburst.Service) -> None:
    with service.session(relu((1, 4))) as session, session.bind() as execution:
        assert repr(session.latency()) == "<Latency: no runs>"
        assert session.latency()._repr_html_() == "<p>&lt;Latency: no runs&gt;</p>"
        execution.run()
        stop(service.pid)

        def let_it_go_on() -> None:
            until(lambda: session.stats.sent == 2)
            time.sleep(0.05)
            os.kill(service.pid, signal.SIGCONT)

        waiting = Background(let_it_go_on)
        execution.run()
        waiting.result()
        for _ in range(RUNS):
            execution.run()
        latency = session.latency()
        text = repr(session)
    assert RUNS + 2 - 512 <= latency.count <= RUNS + 2
    assert latency.max >= 0.05 > latency.p50 > 0
    assert latency.p50 <= latency.p99 <= latency.max
    assert latency.queue_wait.max_ns >= 50e6
    assert latency.execution.sum_ns < latency.round_trip.sum_ns
    assert f"{latency.count:,} runs: p50 " in repr(latency)
    bars = re.findall(r"<title>from .+?: ([\d,]+) timed</title>", latency._repr_html_())
    assert sum(int(bar.replace(",", "")) for bar in bars) == sum(n for _, n in latency.round_trip.buckets)
    assert "x (1, 4) float32 → y (1, 4) float32 on nnburst-noop, 3,002 runs" in text
    assert repr(session).endswith("closed>")


def test_rows_run_out_and_are_counted() -> None:
    page = Page("few", rows=3)
    model = page.open(RowKind.MODEL, "m", page.service)
    burst = page.open(RowKind.BURST, "", model)
    assert model is not None
    assert burst is not None
    assert page.open(RowKind.BURST, "", model) is None
    stats = look(page_of(os.getpid()))
    assert (stats.name, stats.unwatched, len(stats.rows)) == ("few", 1, 3)
    model.close()  # before what is below it
    burst.count("bursts", 5)
    burst.close()
    (service,) = page.look()
    assert service.counters["bursts"] == 5
    again = page.open(RowKind.BURST, "again")
    assert again is not None
    assert page.look()[-1].counters["bursts"] == 0
    page.close()


@pytest.mark.parametrize("how", ["no magic", "other version", "too many rows", "more than a service has", "not sealed"])
def test_memory_that_is_no_page_is_refused(how: str) -> None:
    page = Page("", rows=MOST_ROWS + 1 if how == "more than a service has" else 2)
    if how == "not sealed":
        fd = os.memfd_create("nnburst-watch")
        os.ftruncate(fd, 1 << 20)
        found = FoundPage(os.getpid(), f"/proc/self/fd/{fd}")
    else:
        fd = -1
        header = ffi.cast("nnb_page *", page.memory.addr)
        found = page_of(os.getpid())
        if how == "no magic":
            header.magic = b"other..."
        elif how == "other version":
            header.version += 1
        elif how == "too many rows":
            header.n_rows = 2**31
    with pytest.raises(DeviceUnavailable):
        Viewer(found)
    page.close()
    if fd >= 0:
        os.close(fd)


def test_page_that_lies_later_is_read_within_its_bounds() -> None:
    page = Page("x\x1b[2J", rows=2)
    viewer = Viewer(page_of(os.getpid()))
    header = ffi.cast("nnb_page *", page.memory.addr)
    header.n_rows = header.n_used = 2**32 - 1
    stats = viewer.look()
    assert len(stats.rows) == 1
    assert "\x1b" not in stats.name
    page.close()


@pytest.mark.check
def test_page_with_more_in_it_than_a_service_writes_is_refused() -> None:
    page = Page("full", rows=MOST_ROWS)
    rows = [page.open(RowKind.BURST, "", page.service) for _ in range(130)]
    for row in rows:
        assert row is not None
        for histogram in row.pointer.histograms:
            histogram.count = lib.NNB_BUCKETS
            histogram.buckets = [1] * lib.NNB_BUCKETS
    viewer = Viewer(page_of(os.getpid()))
    with pytest.raises(DeviceUnavailable, match="more in it than a service writes"):
        viewer.look()
    asked = CliRunner().invoke(main, ["top", "--once", str(os.getpid())])
    assert (asked.exit_code, "more in it than a service writes" in asked.output) == (1, True)
    assert CliRunner().invoke(main, ["top", "--once"]).exit_code == 0
    if find_spec("prometheus_client"):
        assert "nnburst_unreadable_workers 1.0" in OneWorker(os.getpid()).lines()
    for row in rows[10:]:
        assert row is not None
        row.close()
    assert len(viewer.look().rows) == 11
    page.close()


def test_number_that_several_rows_have_is_counted_once() -> None:
    page = Page("twice", rows=4)
    for kind in (RowKind.MODEL, RowKind.BURST, RowKind.BURST):
        row = page.open(kind, "", page.service)
        assert row is not None
        row.pointer.number = row.pointer.parent = 7
    stats = look(page_of(os.getpid()))
    assert [row.number for row in stats.rows] == [page.service.pointer.number, 7]
    page.close()


def test_page_that_says_it_is_of_another_process_is_shown_as_that_of_its_own() -> None:
    page = Page("liar", rows=2)
    ffi.cast("nnb_page *", page.memory.addr).pid = 1
    assert look(page_of(os.getpid())).pid == os.getpid()
    page.close()


@as_root
def test_services_of_other_users_are_looked_at_if_that_is_asked() -> None:
    def shown(*options: str) -> set[int]:
        result = CliRunner().invoke(main, ["top", "--once", "--json", *options])
        return {one["pid"] for one in json.loads(result.stdout)}

    with beside(GUEST, lambda: contextlib.closing(Page("theirs", rows=2))):
        (child,) = shown("theirs")
        assert shown(str(child)) == {child}
        assert [look(page).name for page in find_services(child)] == ["theirs"]
        assert child not in shown()
        assert child in shown("--every-user")


def test_histogram_knows_percentiles_to_a_sixteenth() -> None:
    draw = random.Random(7)
    values = [int(2 ** draw.uniform(0, 35)) for _ in range(4000)]
    raw = ffi.new("nnb_histogram *")
    for value in values:
        lib.nnb_histogram_add(raw, value, 1)
        bucket = lib.nnb_bucket_of(value)
        assert lib.nnb_bucket_start(bucket) <= value < lib.nnb_bucket_start(bucket + 1)
    buckets = tuple((lib.nnb_bucket_start(i), n) for i, n in enumerate(raw.buckets) if n)
    histogram = Histogram(raw.count, raw.sum, raw.max, buckets)
    assert (histogram.count, histogram.sum_ns, histogram.max_ns) == (len(values), sum(values), max(values))
    for percent in (1, 50, 90, 99, 100):
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert abs(histogram.percentile_ns(percent) - exact) <= max(1, exact / 16)
    assert lib.nnb_bucket_of(2**64 - 1) == lib.NNB_BUCKETS - 1


DASHBOARD = ROOT / "deploy" / "grafana" / "nnburst.json"


class OneWorker(Collector):
    """What a monitoring system asks of a service of which this process is the only worker."""

    def _look_for_workers(self) -> None:
        self._workers = {os.getpid(): Viewer(page_of(os.getpid()))}

    def lines(self) -> list[str]:
        from prometheus_client.exposition import generate_latest

        return generate_latest(self).decode().splitlines()  # type: ignore[arg-type]  # of a registry only collect()


def test_metrics_are_what_the_page_says() -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra nnburst[metrics]")
    page = Page("m", rows=4)
    model = page.open(RowKind.MODEL, "detector", page.service)
    burst = page.open(RowKind.BURST, "", model)
    assert burst is not None
    burst.count("results", 41)
    for ns in (900, 1500, 2_000_000):
        burst.time_execution(ns)
    lines = OneWorker(os.getpid()).lines()
    assert 'nnburst_results_total{model="detector",user=""} 41.0' in lines
    assert 'nnburst_execution_seconds_count{model="detector",user=""} 3.0' in lines
    assert 'nnburst_execution_seconds_bucket{le="1e-06",model="detector",user=""} 1.0' in lines
    assert 'nnburst_execution_seconds_bucket{le="2e-06",model="detector",user=""} 2.0' in lines
    assert "nnburst_open_bursts 1.0" in lines
    queries = " ".join(re.findall('"expr": "(.*)"', DASHBOARD.read_text("utf-8")))
    shown = set(re.findall(r"nnburst_\w+", queries))
    assert len(shown) > 10
    assert shown <= {re.split("[{ ]", line)[0] for line in lines}  # of the dashboard in deploy/
    labels = {*re.findall(r"(\w+)=~", queries), *", ".join(re.findall(r"by \(([^)]*)\)", queries)).split(", ")}
    assert {"model"} < labels <= set(re.findall(r'(\w+)="', " ".join(lines)))
    page.close()


@pytest.mark.check
def test_shared_service_is_watched_by_name_and_scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra nnburst[metrics]")
    monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(tmp_path))
    command = "from nnburst.cli import main; main()"
    options = ["serve", "--name", "watched", "--device", "nnburst-noop", "--metrics", "0", "--json"]
    with subprocess.Popen([sys.executable, "-c", command, *options], stdout=subprocess.PIPE) as serving:
        try:
            assert serving.stdout is not None
            ready = json.loads(serving.stdout.readline())
            with nnburst.connect("watched") as service, service.session(relu((1, 4))) as session:
                session.run(None, {"x": np.zeros((1, 4), np.float32)})
                pid = service.pid
                result = CliRunner().invoke(main, ["top", "--once", "--json", "watched"])
                with urllib.request.urlopen(ready["metrics"], timeout=60) as answer:
                    text = answer.read().decode()
        finally:
            serving.terminate()
    assert serving.returncode == 0
    shared, own = json.loads(result.stdout)
    assert (shared["name"], shared["pid"], shared["counters"]["results"]) == ("watched", pid, 0)
    assert (own["name"], own["counters"]["results"]) == (f"watched of user {os.geteuid()}", 1)
    labels = f'model="nnburst-noop: x → y",user="{os.geteuid()}"'
    assert f"nnburst_results_total{{{labels}}} 1.0" in text.splitlines()


def test_sum_of_histograms_is_that_of_all_their_samples() -> None:
    one = Histogram(3, 60, 30, ((10, 2), (30, 1)))
    other = Histogram(3, 75, 40, ((5, 1), (30, 1), (40, 1)))
    assert one + other == Histogram(6, 135, 40, ((5, 1), (10, 2), (30, 2), (40, 1)))
    assert one + Histogram() == Histogram() + one == one
