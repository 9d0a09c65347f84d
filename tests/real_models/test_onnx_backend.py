"""ONNX's own conformance suite through `nnburst.onnx_backend`; all of it with ``-m soak``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx_suite import Outcome, compare

from nnburst import GeneralFailure, InvalidArgument, onnx_backend
from support.onnx_models import RNG, in_process, mlp, save


@pytest.fixture(scope="module", autouse=True)
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNX_HOME", str(tmp_path_factory.mktemp("onnx-home")))  # the suite keeps copies of networks there
        onnx_backend.run_model(mlp(4, 1), [np.zeros((1, 4), np.float32)])
        yield
    onnx_backend.shutdown()


def check(pattern: str, at_least: int) -> None:
    passed = 0
    lost: list[Outcome] = []
    for ours, theirs in compare(pattern):
        passed += ours.kind == "passed"
        if theirs.kind == "passed" and ours.kind not in ("passed", "refused"):
            lost.append(ours)
    assert not lost
    assert passed >= at_least


@pytest.mark.parametrize(("pattern", "at_least"), [("^test_(a(?!tt)|b|d)", 100), ("^test_(re|sp|if|loop|scan)", 150)])
def test_cases_that_pass_in_process_pass_through_a_burst(pattern: str, at_least: int) -> None:
    check(pattern, at_least)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_case_that_passes_in_process_passes_through_a_burst() -> None:
    check("", 1200)


def test_backend_takes_models_bytes_and_paths(tmp_path: Path) -> None:
    model, x = mlp(16, 2), RNG.normal(size=(1, 16)).astype(np.float32)
    (expected,) = in_process(model.SerializeToString(), {"x": x})
    path = save(model, tmp_path / "m.onnx")
    for given in (model, model.SerializeToString(), path, Path(path)):
        for inputs in ([x], x):
            assert np.array_equal(onnx_backend.run_model(given, inputs)[0], expected)
    with pytest.raises(InvalidArgument, match="1 inputs"):
        onnx_backend.run_model(model, [x, x])


def test_backend_is_for_the_cpu() -> None:
    assert onnx_backend.supports_device("CPU")
    assert not onnx_backend.is_compatible(mlp(4, 1), "CUDA")
    with pytest.raises(InvalidArgument, match="CUDA"):
        onnx_backend.prepare(mlp(4, 1), "CUDA")
    with pytest.raises((InvalidArgument, GeneralFailure), match="ONNX"):
        onnx_backend.prepare(b"no model")
