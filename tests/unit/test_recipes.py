"""The recipes run as a user would run them, and each checks its own answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

import pytest

from support import ROOT

FOLDER = ROOT / "examples" / "recipes"
NO_CONTAINERS = 77
COMMANDS = {
    "threads.py": [],
    "asyncio_server.py": [],
    "web_workers.py": [],
    "throughput.py": ["--inputs", "1000"],
    "real_time.py": ["--steps", "100"],
    "crash_and_hang.py": [],
    "standby.py": [],
    "containers.py": [],
    "test_program.py": ["-q", "-p", "no:cacheprovider"],
}


@pytest.mark.check
@pytest.mark.parametrize("name", COMMANDS)
def test_recipe_runs_and_its_answers_are_right(name: str) -> None:
    if name == "web_workers.py":
        pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
    command = [sys.executable, *(["-m", "pytest"] if name.startswith("test_") else []), str(FOLDER / name)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    with tempfile.TemporaryDirectory(prefix="nnburst-") as directory:
        env = {**os.environ, "PYTHONPATH": path, "NNBURST_STATE_DIR": directory}
        done = subprocess.run(
            command + COMMANDS[name], cwd=FOLDER, env=env, capture_output=True, text=True, timeout=110, check=False
        )
    if name == "containers.py" and done.returncode == NO_CONTAINERS:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("2 passed" if name.startswith("test_") else "every answer is right") in done.stdout
    if name == "web_workers.py":
        assert int(done.stdout.partition("answered by ")[2].split()[0]) >= 2
        assert "Traceback" not in done.stderr, done.stderr
    if name == "crash_and_hang.py":
        assert done.stdout.count("another service after ") == 2
    if name == "standby.py":
        assert "3 services were killed" in done.stdout


def test_page_names_every_recipe_and_each_is_run() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`examples/recipes/(\w+\.py)`", page))
    assert named == set(COMMANDS) == {path.name for path in FOLDER.glob("*.py")} - {"detector.py"}
