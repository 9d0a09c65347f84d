"""Runs the C tests of `tests/c` with the plain build (`make sanitize` runs them under sanitizers)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

C_TESTS = Path(__file__).resolve().parents[1] / "c"
SKIPPED = 77

pytestmark = pytest.mark.skipif(
    not (shutil.which("make") and shutil.which(os.environ.get("CC", "cc"))), reason="needs make and a C compiler"
)


@pytest.mark.parametrize("program", sorted(source.stem for source in C_TESTS.glob("test_*.c")))
def test_c_program(program: str) -> None:
    target = f"build/plain/{program}"
    # Make variables of a surrounding `make test` are not meant for this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    made = subprocess.run(
        ["make", "-s", target], cwd=C_TESTS, env=environment, capture_output=True, text=True, timeout=110
    )
    assert made.returncode == 0, made.stdout + made.stderr
    ran = subprocess.run([C_TESTS / target], cwd=C_TESTS, capture_output=True, text=True, timeout=110)
    if ran.returncode == SKIPPED:
        pytest.skip(ran.stdout.strip() or f"{program} cannot run here")
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}{ran.stderr}"


def test_there_are_c_programs() -> None:
    assert list(C_TESTS.glob("test_*.c"))
