"""A model that takes its runtime down takes nothing else with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from onnx_support import mlp, save

import nnburst
from nnburst import BadState, DeadObject

HERE = Path(__file__).resolve().parent


@pytest.fixture
def crash_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    info = tmp_path / "site" / "test_crash-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-crash\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nnburst.devices]\ntest-crash = crash_device:CrashDevice\n")
    paths = (str(tmp_path / "site"), str(HERE), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return "test-crash"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGKILL, signal.SIGUSR1])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "run"])
def test_crash_of_the_runtime_is_a_dead_object_and_the_next_session_works(
    crash_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, bound: bool
) -> None:
    monkeypatch.setenv("NNBURST_TEST_SIGNAL", str(int(number)))
    path = save(mlp(16, 2), tmp_path / "m.onnx")
    good, bad = np.ones((1, 16), np.float32), np.full((1, 16), 666, np.float32)
    with nnburst.Session(path, device=crash_device) as session:
        (expected,) = session.run(None, {"x": good})
        if bound:
            execution = session.bind()
            execution.inputs["x"][:] = bad
            with pytest.raises(DeadObject):
                execution.run()
        else:
            with pytest.raises(DeadObject):
                session.run(None, {"x": bad})
        with pytest.raises((DeadObject, BadState)):
            session.run(None, {"x": good})
    with nnburst.Session(path, device=crash_device) as session:
        assert np.array_equal(session.run(None, {"x": good})[0], expected)
