"""The recipes run as a user would run them, and each checks its own answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec

import pytest

from support import ROOT

FOLDER = ROOT / "examples" / "recipes"
NO_CONTAINERS = 77
PACKAGES = {"fastapi_app.py": ["uvicorn", "fastapi"], "gunicorn_app.py": ["gunicorn"], "celery_app.py": ["celery"]}
"""Programs of these, which web_workers.py runs."""
COMMANDS = {
    "threads.py": [],
    "asyncio_server.py": [],
    "fastapi_app.py": ["fastapi_app"],
    "gunicorn_app.py": ["gunicorn_app", "--memory", "64"],
    "celery_app.py": ["celery_app"],
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
    for package in ["onnx", "onnxruntime", *PACKAGES[name]] if name in PACKAGES else []:
        if find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    program = FOLDER / ("web_workers.py" if name in PACKAGES else name)
    command = [sys.executable, *(["-m", "pytest"] if name.startswith("test_") else []), str(program)]
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
    if name in PACKAGES:
        assert "4 workers of" in done.stdout
        assert done.stderr.count("another one runs its model") >= 1, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
    if name == "gunicorn_app.py":
        shared, each = map(int, re.findall(r": (\d+) MiB", done.stdout))
        assert shared < each
    if name == "crash_and_hang.py":
        assert done.stdout.count("another service after ") == 2
    if name == "standby.py":
        assert "3 services were killed" in done.stdout


def test_page_names_every_recipe_and_each_is_run() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`examples/recipes/(\w+\.py)`", page))
    assert named - {"web_workers.py"} == set(COMMANDS)
    assert named == {path.name for path in FOLDER.glob("*.py")} - {"detector.py"}
