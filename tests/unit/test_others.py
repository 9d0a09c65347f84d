"""`nnburst.cli.others`: the share of other programs, and the line of `demo` and `bench` that tells of it."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner

from nnburst.cli import main, others
from nnburst.cli.bench import clients
from nnburst.cli.bench import command as bench
from nnburst.cli.demo import command as demo
from nnburst.cli.demo.network import load_digits
from nnburst.cli.demo.race import Lap


def test_share_of_others_is_what_is_busy_and_not_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, own, now = iter([100.0, 112.0]), iter([50.0, 54.0]), iter([7.0, 17.0])
    monkeypatch.setattr(others, "_busy_seconds", lambda cpus: next(busy))
    monkeypatch.setattr(others, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(others.time, "monotonic", lambda: next(now))
    assert others.watch_others({2, 3})() == (12 - 4) / 10 / 2


def test_busy_seconds_are_those_of_the_named_cpus_without_their_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    #                user nice system idle iowait irq softirq steal guest
    text = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 4 900 900 8 16 32 900 0\ncpu1 100 0 0 900 0 0 0 0 0 0\n"
    monkeypatch.setattr(others.Path, "read_text", lambda path, **how: text)
    monkeypatch.setattr(others.os, "sysconf", lambda name: 1)
    assert others._busy_seconds({0}) == 63
    assert others._busy_seconds({0, 1}) == 163


SPIN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_time_of_processes_of_our_processes_is_our_own() -> None:
    """One that has ended, and one that lives."""
    before = others._own_seconds()
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert others._own_seconds() - before >= 0.25  # it is counted in ticks
        child.communicate(b"\n")
    assert others._own_seconds() - before >= 0.25


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = np.zeros((len(load_digits().images), 1, 10), np.float32)
    names = (demo.BURST, demo.PIPE, demo.LOCAL, demo.BURST_ALONE, demo.PIPE_ALONE)
    laps = {name: Lap(np.arange(1, 99, dtype=np.int64), answers, ()) for name in names}
    monkeypatch.setattr(demo, "_run", lambda *arguments: laps)
    monkeypatch.setattr(clients, "measure_shares", lambda *arguments: [clients.Share(1, 1, 1.0, (7,))])


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("share", [0.1, 0.34])
@pytest.mark.parametrize(("command", "module"), [(["demo"], demo), (["bench", "--clients", "1"], bench)])
def test_a_line_says_that_others_had_more_than_a_tenth(
    command: list[str], module: ModuleType, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "watch_others", lambda cpus: lambda: share)
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    said = [line for line in done.stdout.splitlines() if "Other programs" in line]
    expected = ["Other programs or the host had 34% of the processors: an idle machine is faster."]
    assert said == (expected if share > 0.1 else [])
