"""The limits of a shared service that are times: priority, equal shares, runs that hang, and users beside others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.users import as_root


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_priority_and_shares_hold_and_runs_that_hang_delay_no_other_client(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "sharing.py"), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(figures.read_text())
    assert rows.keys() == {"priority", "share quick", "share slow", "hang"}
    assert rows["priority"]["p99_us"] <= rows["priority"]["limit_us"]
    for name in ("share quick", "share slow"):
        assert 45 <= rows[name]["percent"] <= 55
    assert max(rows["hang"]["p99_us"], rows["hang"]["next_us"]) <= rows["hang"]["limit_us"]


@pytest.mark.soak
@pytest.mark.timeout(0)
@as_root
def test_user_feels_little_of_a_greedy_endless_crashing_or_flooding_one(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "users.py"), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(figures.read_text())
    for name in ("share", "share bursts"):
        assert 45 <= rows[name]["percent"] <= 55
    for name in ("greedy", "endless", "crashing", "flooding"):
        assert rows[name]["p99_us"] <= 2 * rows[name]["alone_p99_us"]
        assert not rows[name]["failures"]
