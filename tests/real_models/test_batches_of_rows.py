"""Which rows of a model run together: those of few shapes at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnburst.devices.onnxruntime.batch import Batches
from nnburst.devices.onnxruntime.graph import SessionSettings, compile_graph
from support.onnx_models import FLOAT, graph, node


def batches(model: Any, most: int = 8) -> Batches:
    return Batches(compile_graph(model.SerializeToString(), {}, SessionSettings()), most)


def of_any_length() -> Any:
    """y = -x."""
    return graph([node("Neg", ["x"], ["y"])], [("x", FLOAT, ("N", "L"))], [("y", FLOAT, ("N", "L"))])


def joins(them: Batches, *shape: int) -> object:
    """Bind a request of such an input `x` and output `y`; returns what has to be kept, None if it runs alone."""
    them_graph = them.graph
    place = np.zeros(4 * int(np.prod(shape)), np.uint8)
    bound = them_graph.bound(them_graph.session.io_binding(), (), ())
    inputs, outputs = [(them_graph.inputs[0], shape, place)], [(them_graph.outputs[0], shape, place)]
    return them.join(bound.kernel, inputs, outputs)


def test_model_with_other_rows_in_its_output_runs_alone() -> None:
    twice = batches(
        graph([node("Concat", ["x", "x"], ["y"], axis=0)], [("x", FLOAT, ("N", 6))], [("y", FLOAT, ("M", 6))])
    )
    place = np.zeros(48, np.uint8)
    bound = twice.graph.bound(twice.graph.session.io_binding(), (), ())
    inputs, outputs = [(twice.graph.inputs[0], (1, 6), place[:24])], [(twice.graph.outputs[0], (2, 6), place)]
    assert twice.join(bound.kernel, inputs, outputs) is None


def test_few_shapes_and_little_memory_are_kept_for_a_model() -> None:
    plain = batches(of_any_length(), 128)
    kept = [joins(plain, 1, size) for size in range(1, 20)]
    assert [one is not None for one in kept] == [True] * 8 + [False] * 11
    assert joins(plain, 1, 3) is not None  # with those that there are
    del kept[2]
    assert joins(plain, 1, 20) is not None
    kept.clear()
    assert joins(plain, 1, 5 << 20) is None  # two, with their outputs, are 80 MiB
    large = joins(plain, 1, 1 << 18)  # of 2 MiB with its output, of which 32 are kept
    assert large is not None
    assert sum(batch.nbytes for batch in plain._batches.values()) <= 64 << 20
    assert joins(plain, 1, 3) is None


def test_request_without_rows_runs_alone() -> None:
    plain = batches(of_any_length())
    assert joins(plain, 0, 4) is joins(plain, 4, 0) is None
