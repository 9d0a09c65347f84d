"""A model that takes its runtime down takes nothing else with it."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

import nnburst
from nnburst import BadState, DeadObject
from nnburst.testing import inject
from support.onnx_models import mlp, save

OTHERS = [signal.SIGABRT, signal.SIGFPE, signal.SIGKILL, signal.SIGUSR1]


@pytest.mark.parametrize("number", [signal.SIGSEGV, *(pytest.param(n, marks=pytest.mark.check) for n in OTHERS)])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "run"])
def test_crash_of_the_runtime_is_a_dead_object_and_the_next_session_works(
    tmp_path: Path, number: signal.Signals, bound: bool
) -> None:
    path = save(mlp(16, 2), tmp_path / "m.onnx")
    ones = np.ones((1, 16), np.float32)
    with nnburst.launch(devices=["nnburst-onnxruntime"], restart=True, faults=True) as service:
        with service.session(path) as session:
            (expected,) = session.run(None, {"x": ones})
            inject(service, crash_on=1, crash_with=number)
            with pytest.raises(DeadObject, match=number.name):
                if bound:
                    session.bind().run()
                else:
                    session.run(None, {"x": ones})
            with pytest.raises((DeadObject, BadState)):
                session.run(None, {"x": ones})
        with service.session(path) as session:
            assert np.array_equal(session.run(None, {"x": ones})[0], expected)
