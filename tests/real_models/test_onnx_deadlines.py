"""A run of ONNX Runtime ends at its deadline, inside the service."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

import nnburst
from nnburst.devices.onnxruntime.kernel import BoundGraph
from nnburst.errors import GeneralFailure, MissedDeadline, NNBurstError
from support.onnx_models import FLOAT, TensorProto, graph, node, onnx
from support.waiting import PATIENCE


@pytest.mark.parametrize("rows", [256, "rows"], ids=["fixed shape", "open shape"])
def test_run_ends_at_its_deadline_and_the_next_one_runs(
    rows: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["x", *(f"t{i}" for i in range(300)), "y"]
    nodes = [node("MatMul", [a, "x"], [b]) for a, b in itertools.pairwise(names)]
    onnx.save(graph(nodes, [("x", FLOAT, (rows, 256))], [("y", FLOAT, (rows, 256))]), tmp_path / "chain.onnx")
    ended: SimpleQueue[Exception] = SimpleQueue()
    failed = BoundGraph._client_error

    def noted(graph: BoundGraph, status: int, deadline_ns: int) -> NNBurstError:
        ended.put(error := failed(graph, status, deadline_ns))
        return error

    monkeypatch.setattr(BoundGraph, "_client_error", noted)
    with nnburst.in_process() as service, service.session(str(tmp_path / "chain.onnx")) as session:
        execution = session.bind(shapes={"x": (256, 256)})
        execution.inputs["x"][:] = 0
        execution.run()
        started = time.monotonic()
        execution.run()
        execution.timeout = (time.monotonic() - started) / 4
        given_up = time.monotonic() + PATIENCE
        while ended.empty() and time.monotonic() < given_up:  # one that comes to its turn too late does not begin
            with contextlib.suppress(MissedDeadline):
                execution.run()
                execution.timeout /= 2  # it has ended in time: the measured one was held up
        assert isinstance(ended.get_nowait(), MissedDeadline)
        execution.timeout = PATIENCE
        execution.run()
        assert not execution.outputs["y"].any()


def test_loop_that_ends_at_its_deadline_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    info = onnx.helper.make_tensor_value_info
    i, go = info("i", onnx.TensorProto.INT64, []), info("go", onnx.TensorProto.BOOL, [])
    x, y = (info(name, FLOAT, [64, 64]) for name in "xy")
    body = onnx.helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("MatMul", ["s", "s"], ["t"])],
        "body",
        [i, go, info("s", FLOAT, [64, 64])],
        [info("on", onnx.TensorProto.BOOL, []), info("t", FLOAT, [64, 64])],
    )
    loop = onnx.helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    whole = onnx.helper.make_graph([loop], "loop", [x, info("n", onnx.TensorProto.INT64, [])], [y])
    model = onnx.helper.make_model(whole, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    with nnburst.in_process() as service, service.session(model.SerializeToString(), timeout=0.2) as session:
        with pytest.raises(MissedDeadline):
            session.run(None, {"x": np.zeros((64, 64), np.float32), "n": np.array(1 << 40)})
    assert not capfd.readouterr().err


def test_run_that_fails_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    model = graph(
        [node("Gather", ["x", "i"], ["y"])], [("x", FLOAT, (4,)), ("i", TensorProto.INT64, (1,))], [("y", FLOAT, (1,))]
    )
    with nnburst.in_process() as service, service.session(model.SerializeToString()) as session:
        with pytest.raises(GeneralFailure, match="99"):
            session.run(None, {"x": np.zeros(4, np.float32), "i": np.array([99])})
    assert not capfd.readouterr().err
