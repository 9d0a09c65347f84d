"""The limits of a shared service that are times: priority, equal shares, and runs that hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT


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
