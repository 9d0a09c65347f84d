"""The examples run as a user would run them, and notice what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
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
def test_recurrent_state_agrees_with_numpy() -> None:
    done = run("recurrent_state.py", "--units", "32", "--steps", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 steps of 32 units" in done.stdout
    assert "the results agree" in done.stdout


@pytest.mark.check
def test_cached_start_gives_the_same_answers_from_the_cache() -> None:
    done = run("cached_start.py", "--width", "300", "--starts", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 loads") == 1
    assert "all answers are the same" in done.stdout


@pytest.mark.check
def test_camera_ring_gives_right_answers_for_every_frame_it_counts() -> None:
    done = run("camera_ring.py", "--frames", "60", "--fps", "300", "--slots", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    seen, torn, lost = (
        int(n)
        for n in re.match(r"(\d+) frames at .*; (\d+) overwritten meanwhile, (\d+) lost", done.stdout).groups()  # type: ignore[union-attr]
    )
    assert seen > 0
    assert seen + torn + lost <= 60
    assert "every answer is right" in done.stdout


@pytest.mark.check
@pytest.mark.parametrize(("arguments", "how"), [([], "read where they are"), (["--copy"], "copied")])
def test_frames_of_a_v4l2_like_camera_get_right_answers(arguments: list[str], how: str) -> None:
    done = run("live/v4l2_like.py", "--frames", "60", "--fps", "300", "--buffers", "3", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.match(rf"(\d+) frames in 3 buffers, (\d+) lost; lines are {how}", done.stdout)
    assert found is not None, done.stdout
    assert 0 < int(found[1]) + int(found[2]) <= 60
    assert "every answer is right" in done.stdout


@pytest.mark.check
def test_camera_service_and_viewer_share_frames_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="nnburst-") as directory:  # short enough for a socket
        monkeypatch.setenv("NNBURST_RUNTIME_DIR", directory)
        done = run("shared/camera_service_viewer.py", "--frames", "40", "--fps", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"viewer: (\d+) frames seen by process (\d+), (\d+) overwritten, 0 wrong", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) > 0
    assert f"service: process {found[2]};" not in done.stdout, "the broker runs the model"


@pytest.mark.check
def test_functions_of_a_shared_service_give_what_they_give_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="nnburst-") as directory:  # short enough for a socket
        monkeypatch.setenv("NNBURST_RUNTIME_DIR", directory)
        done = run("shared/functions.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "serves ['brightness', 'edges']" in done.stdout
    assert "the service and this program agree" in done.stdout


@pytest.mark.check
@pytest.mark.parametrize(
    "name",
    ["shared/two_programs.py", "recipes/web_workers.py", "live/audio_loop.py", "live/camera_loop.py"],
)
def test_example_without_its_extra_names_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx.py").write_text("raise ModuleNotFoundError", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run(name)
    assert done.returncode == 1
    assert done.stderr == "this example makes an ONNX model: pip install 'nnburst[onnx]'\n"


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert f"`{path.name}`" in listed
