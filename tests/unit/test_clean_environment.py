"""What the user has set for Python or for the package reaches no test."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import ROOT
from support.waiting import PATIENCE

SET = {"NNBURST_RUNTIME_DIR": "/nowhere", "NNBURST_CACHE": "0", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_no_variable_of_python_or_of_the_package_is_set() -> None:
    named = {name for name in os.environ if name.startswith(("PYTHON", "NNBURST_"))}
    assert {name for name in named if not name.startswith("NNBURST_TEST_")} == set()


@pytest.mark.check
@pytest.mark.parametrize("processes", [0, 1])
def test_variables_of_the_user_are_gone_before_a_test_begins(processes: int) -> None:
    test = f"{__file__}::{test_no_variable_of_python_or_of_the_package_is_set.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes), test],
        env=os.environ | SET,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
