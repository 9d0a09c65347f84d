"""Examples and recipes run as a user would run them, and notice what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from support import ROOT
from support.processes import run_python


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example in a directory whose own `nnburst` cannot be imported, as in a source tree that is not built."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "nnburst.py").write_text("raise ImportError", encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": path}
        return run_python(str(ROOT / "examples" / name), *arguments, cwd=directory, env=env)


@pytest.mark.check
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("recurrent_state.py --units 32 --steps 40", "40 steps of 32 units.*the results agree"),
        ("cached_start.py --width 300 --starts 2", "SAVED .*HIT .*all answers are the same"),
        ("camera_ring.py --frames 60 --fps 300 --slots 3", r"^[1-9]\d* frames at .*every answer is right"),
        ("live/v4l2_like.py --frames 60 --fps 300 --buffers 3", "lines are read where they are.*every answer is right"),
        ("live/v4l2_like.py --frames 60 --fps 300 --buffers 3 --copy", "lines are copied.*every answer is right"),
        ("shared/camera_service_viewer.py --frames 40 --fps 300", r"viewer: [1-9]\d* frames seen by .* 0 wrong"),
        ("shared/functions.py", r"serves \['brightness', 'edges'\].*the service and this program agree"),
    ],
)
def test_example_runs_and_its_answers_are_right(command: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="nnburst-") as directory:  # short enough for a socket
        monkeypatch.setenv("NNBURST_RUNTIME_DIR", directory)
        done = run(*command.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(said, done.stdout, re.DOTALL), done.stdout


@pytest.mark.check
@pytest.mark.parametrize(
    "name", ["shared/two_programs.py", "recipes/web_workers.py", "live/audio_loop.py", "live/camera_loop.py"]
)
def test_example_without_its_extra_names_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx.py").write_text("raise ModuleNotFoundError", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run(name)
    assert done.returncode == 1
    assert done.stderr == "this example makes an ONNX model: pip install 'nnburst[onnx]'\n"


def test_every_example_is_listed() -> None:
    pages = [ROOT / "docs" / "gallery.md", ROOT / "docs" / "recipes.md", *(ROOT / "examples").rglob("README.md")]
    listed = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [path for path in (ROOT / "examples").rglob("*.py") if not re.search(rf"[/`]{path.name}`", listed)] == []


# ---- recipes -------------------------------------------------------------------------------------------------------


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
        assert done.stdout.count("another service after ") >= 2
    if name == "standby.py":
        assert "3 services were killed" in done.stdout


def test_page_names_every_recipe_and_each_is_run() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`examples/recipes/(\w+\.py)`", page))
    assert named - {"web_workers.py"} == set(COMMANDS)
    assert named == {path.name for path in FOLDER.glob("*.py")} - {"detector.py"}
