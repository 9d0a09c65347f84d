"""The examples that need ONNX do what they say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

pytestmark = pytest.mark.check

pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")
pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")

LIVE = ROOT / "examples" / "live"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, str(LIVE / program), *arguments], capture_output=True, text=True, timeout=90, env=env
    )


def check_plot(done: subprocess.CompletedProcess[str], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        assert "pip install matplotlib" in done.stderr
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_camera_loop_recognises_what_it_films(tmp_path: Path) -> None:
    done = run("camera_loop.py", "--frames", "300", "--plot", str(tmp_path / "plot.png"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("camera: 300 frames, 100.0% right, "), done.stdout
    check_plot(done, tmp_path / "plot.png")


def test_audio_loop_hears_what_is_dialled(tmp_path: Path) -> None:
    done = run("audio_loop.py", "--number", "0123456789*#ABCD5550", "--plot", str(tmp_path / "plot.png"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("audio: 400 blocks, heard 0123456789*#ABCD5550 (as dialled), "), done.stdout
    check_plot(done, tmp_path / "plot.png")
    assert run("audio_loop.py", "--number", "12X").returncode == 2


def test_two_programs_use_one_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(tmp_path / "run"))
    done = run("../shared/two_programs.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both programs used the one service" in done.stdout
    assert list((tmp_path / "run").iterdir()) == []
