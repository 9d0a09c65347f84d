"""The limits of a shared service that are times: priority, equal shares, runs that hang, and users beside others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import ROOT
from support.processes import run_python
from support.users import as_root

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]


def measured(program: str, tmp_path: Path) -> dict[str, Any]:
    """Return the rows of a benchmark."""
    figures = tmp_path / "figures.json"
    done = run_python(str(ROOT / "benchmarks" / program), "--json", str(figures), timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(figures.read_text()))


def test_priority_and_shares_hold_and_runs_that_hang_delay_no_other_client(tmp_path: Path) -> None:
    rows = measured("sharing.py", tmp_path)
    assert rows.keys() == {"priority", "share quick", "share slow", "hang"}
    assert rows["priority"]["p99_us"] <= rows["priority"]["limit_us"]
    for name in ("share quick", "share slow"):
        assert 45 <= rows[name]["percent"] <= 55
    assert max(rows["hang"]["p99_us"], rows["hang"]["next_us"]) <= rows["hang"]["limit_us"]


@as_root
def test_user_feels_little_of_a_greedy_endless_crashing_or_flooding_one(tmp_path: Path) -> None:
    rows = measured("users.py", tmp_path)
    for name in ("share", "share bursts"):
        assert 45 <= rows[name]["percent"] <= 55
    for name in ("greedy", "endless", "crashing", "flooding"):
        assert rows[name]["p99_us"] <= rows[name]["limit_us"]
        assert not rows[name]["failures"]
