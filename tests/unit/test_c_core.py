"""Builds and runs the C tests of tests/c (the plain build; `make sanitize` runs them under sanitizers)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

C_TESTS = Path(__file__).resolve().parents[1] / "c"


@pytest.mark.skipif(not (shutil.which("make") and shutil.which("cc")), reason="needs make and a C compiler")
def test_every_c_test_passes() -> None:
    done = subprocess.run(["make", "-s", "-C", str(C_TESTS), "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith(("ok ", "skip "))}
    assert passed == {path.stem for path in C_TESTS.glob("test_*.c")}
