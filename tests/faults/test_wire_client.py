"""A client in C that knows docs/WIRE.md and nothing else, against `nnburst serve`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support import ROOT
from support.onnx_models import FLOAT, graph, node, save
from support.services import shared_service
from support.waiting import PATIENCE

pytestmark = pytest.mark.check

SOURCE = ROOT / "examples" / "wire" / "client.c"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = tmp_path_factory.mktemp("client") / "client"
    warnings = ("-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", "-std=c11", "-O2", *warnings, "-o", program, SOURCE], check=True, timeout=PATIENCE)
    return str(program)


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("served")
    half = graph([node("Mul", ["x", "f"], ["y"])], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))], {"f": np.float32([0.5])})
    failing = graph([node("Gather", ["t", "x"], ["y"])], [("x", 6, (4,))], [("y", FLOAT, (4,))], {"t": np.float32([1])})
    models = {"half": half, "failing": failing}
    options = [f"--model={name}={save(model, directory / f'{name}.onnx')}" for name, model in models.items()]
    with shared_service(directory, *options) as shared:
        yield shared.address.removeprefix("unix:")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.parametrize("runs", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_it_runs_a_model(client: str, socket: str, runs: int) -> None:
    done = run(client, socket, "half", str(runs))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [list(map(float, line.split())) for line in done.stdout.splitlines()]
    assert lines == [[(i + k) / 2 for k in range(4)] for i in range(runs)]


def test_it_is_told_what_is_wrong(client: str, socket: str, tmp_path: Path) -> None:
    for model, why in (
        ("other", "has only the models ['failing', 'half']"),
        ("failing", "a run failed: ONNX Runtime: "),
    ):
        done = run(client, socket, model, "3")
        assert (done.returncode, done.stdout) == (1, "")
        assert why in done.stderr
    assert "no service there" in run(client, str(tmp_path / "none"), "half", "1").stderr
