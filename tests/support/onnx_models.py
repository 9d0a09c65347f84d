"""ONNX models made with the `onnx` package, and their outputs in ONNX Runtime in this process."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
ort = pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from nnburst.devices.onnxruntime.graph import Graph  # noqa: E402

RNG = np.random.default_rng(7)
FLOAT = TensorProto.FLOAT

Value = tuple[str, int, Sequence[int | str | None] | None]


def graph(
    nodes: Sequence[Any],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: Mapping[str, np.ndarray] = {},
    opset: int = 17,
) -> Any:
    """Return a model of one graph. Inputs and outputs are (name, element type, shape)."""

    def values(rows: Sequence[Value]) -> list[Any]:
        return [helper.make_tensor_value_info(*row) for row in rows]

    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    made = helper.make_graph(nodes, "test", values(inputs), values(outputs), initializers)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(made, opset_imports=opsets[: 1 + any(each.domain for each in nodes)], ir_version=8)


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    return helper.make_node(operator, inputs, outputs, **attributes)


def classifier() -> Any:
    """Return a classifier like scikit-learn's exports. For each row of two numbers: a label, and scores by label."""
    labels, weights = ["cat", "dog", "é"], [1.0, 0.0, 0.0, 1.0, -1.0, -1.0]
    options = {"coefficients": weights, "intercepts": [0.0] * 3, "post_transform": "SOFTMAX"}
    ml = "ai.onnx.ml"
    nodes = [
        node("LinearClassifier", ["x"], ["label", "p"], domain=ml, classlabels_strings=labels, **options),
        node("ZipMap", ["p"], ["scores"], domain=ml, classlabels_strings=labels),
    ]
    model = graph(nodes, [("x", FLOAT, ("n", 2))], [("label", TensorProto.STRING, ("n",))])
    of = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(FLOAT, ()))
    model.graph.output.append(helper.make_value_info("scores", helper.make_sequence_type_proto(of)))
    return model


def mlp(width: int, layers: int, batch: int | str = 1) -> Any:
    """Return a model of Gemm and Relu layers, from `x` to `y`."""
    nodes, weights, last = [], {}, "x"
    for i in range(layers):
        weights[f"w{i}"] = (RNG.normal(size=(width, width)) / np.sqrt(width)).astype(np.float32)
        weights[f"b{i}"] = RNG.normal(size=width).astype(np.float32)
        out = "y" if i == layers - 1 else f"h{i}"
        nodes += [node("Gemm", [last, f"w{i}", f"b{i}"], [f"g{i}"]), node("Relu", [f"g{i}"], [out])]
        last = out
    return graph(nodes, [("x", FLOAT, (batch, width))], [("y", FLOAT, (batch, width))], weights)


def run_graph(graph: Graph, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a compiled graph on arrays. Return its outputs."""
    binding = graph.session.io_binding()
    for argument in graph.inputs:
        array = inputs[argument.name]
        binding.bind_input(argument.name, "cpu", 0, argument.element.number, list(array.shape), array.ctypes.data)
    for argument in graph.outputs:
        binding.bind_output(argument.name, "cpu")
    bound = graph.bind(binding, (), ())
    if status := bound.run(0):
        raise bound.failure(status)
    made = []
    for argument, value in zip(graph.outputs, binding.get_outputs(), strict=True):
        shape = value.shape()
        data = ctypes.string_at(value.data_ptr(), math.prod(shape) * argument.element.itemsize)
        made.append(np.frombuffer(data, argument.element.dtype).reshape(shape))
    return made


def save(model: Any, path: Path) -> str:
    onnx.save(model, path)
    return str(path)


def save_external(model: Any, path: Path, data: str = "weights.bin") -> str:
    """Save a model, with all initializers in one file beside it."""
    onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=0)
    return str(path)


def in_process(path: str | bytes, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of `InferenceSession.run` on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    result: list[np.ndarray] = session.run(None, dict(inputs))
    return result
