"""A run of ONNX Runtime ends at its deadline, inside the service."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from onnx_support import FLOAT, graph, node, onnx
from service_support import WATCHDOG, Ended

import nnburst
from nnburst.devices.onnxruntime._kernel import BoundGraph
from nnburst.errors import MissedDeadline


@pytest.mark.parametrize("rows", [256, "rows"], ids=["fixed shape", "open shape"])
def test_run_ends_at_its_deadline_and_the_next_one_runs(
    rows: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["x", *(f"t{i}" for i in range(300)), "y"]
    nodes = [node("MatMul", [a, "x"], [b]) for a, b in itertools.pairwise(names)]
    onnx.save(graph(nodes, [("x", FLOAT, (rows, 256))], [("y", FLOAT, (rows, 256))]), tmp_path / "chain.onnx")
    ended = Ended(monkeypatch, BoundGraph)
    with nnburst.in_process() as service, service.session(str(tmp_path / "chain.onnx")) as session:
        execution = session.bind(shapes={"x": (256, 256)})
        execution.inputs["x"][:] = 0
        execution.run()
        started = time.monotonic()
        execution.run()
        execution.timeout = (time.monotonic() - started) / 4
        with pytest.raises(MissedDeadline):
            execution.run()
        assert isinstance(ended.first(), MissedDeadline)
        execution.timeout = WATCHDOG
        execution.run()
        assert not execution.outputs["y"].any()
