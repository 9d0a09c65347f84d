"""Write the ONNX files of `nnburst demo --save`: digits.onnx (from weights.npz) and detector.onnx.

Usage: python examples/digits/models.py [--output DIRECTORY]      (needs onnx)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

DATA = Path(__file__).resolve().parents[2] / "nnburst" / "cli" / "demo" / "data"
Array = npt.NDArray[Any]

_OPSET, _IR = 17, 8
_FLOAT, _UINT8 = 1, 2
"""ONNX's codes of the element types float and uint8."""
_CELL, _STEP = 16, 4
"""Width in pixels of the detector's window, and its step."""
_LEAST_SCORE, _MOST_OVERLAP, _MOST_BOXES = 0.5, 0.3, 50


def digits() -> onnx.ModelProto:
    """Return the network of the demo, from images float32 [n, 8, 8, 1] to probabilities [n, 10]."""
    g = _Graph()
    with np.load(DATA / "weights.npz") as weights:
        w = {name: array if array.ndim < 3 else array.transpose(0, 3, 1, 2) for name, array in weights.items()}
    x = g.add("Transpose", "image", perm=[0, 3, 1, 2])
    for layer in ("conv1", "conv2"):
        x = g.add("Conv", x, w[f"{layer}_filter"], w[f"{layer}_bias"], auto_pad="SAME_UPPER")
        x = g.add("Relu", x)
        if layer == "conv1":
            x = g.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.add("Flatten", g.add("Transpose", x, perm=[0, 2, 3, 1]))
    x = g.add("Gemm", x, w["dense_weights"], w["dense_bias"], transB=1)
    g.add("Softmax", x, output="probabilities")
    return g.model("digits", {"image": (_FLOAT, ["n", 8, 8, 1])}, {"probabilities": (_FLOAT, ["n", 10])})


def detector() -> onnx.ModelProto:
    """Return a detector of squares of 16 pixels, from a frame uint8 [height, width, 3] to boxes [n, 6].

    A box has left, top, right, bottom, score and class (0 for a bright square, 1 for a dark one).
    """
    g = _Graph()
    gray = g.add("ReduceMean", g.add("Cast", "image", to=_FLOAT), axes=[2], keepdims=0)
    gray = g.add("Unsqueeze", g.add("Mul", gray, np.float32(1 / 255)), np.array([0, 1]))
    inside = np.zeros((_CELL, _CELL), bool)
    inside[2:-2, 2:-2] = True
    contrast = np.where(inside, 1 / inside.sum(), -1 / (~inside).sum()).astype(np.float32)
    found = g.add("Conv", gray, 2 * np.stack([contrast, -contrast])[:, None], strides=[_STEP, _STEP])
    scores = g.add("Reshape", g.add("Clip", found, np.float32(0), np.float32(1)), np.array([1, 2, -1]))
    size = g.add("Shape", found)
    rows, columns = (g.add("Gather", size, np.array(axis)) for axis in (2, 3))
    grid = g.add("Concat", *(g.add("Unsqueeze", each, np.array([0])) for each in (rows, columns)), axis=0)
    corners = []
    for count, axis in ((rows, 1), (columns, 0)):
        places = g.add("Mul", g.add("Range", np.array(0), count, np.array(1)), np.array(_STEP))
        places = g.add("Expand", g.add("Unsqueeze", places, np.array([axis])), grid)
        corners.append(g.add("Reshape", g.add("Cast", places, to=_FLOAT), np.array([-1, 1])))
    top, left = corners
    bottom, right = (g.add("Add", corner, np.float32(_CELL)) for corner in corners)
    boxes = g.add("Concat", left, top, right, bottom, axis=1)
    limits = (np.array(limit) for limit in (_MOST_BOXES, np.float32(_MOST_OVERLAP), np.float32(_LEAST_SCORE)))
    chosen = g.add("NonMaxSuppression", g.add("Unsqueeze", boxes, np.array([0])), scores, *limits)
    kind, place = (g.add("Gather", chosen, np.array([column]), axis=1) for column in (1, 2))
    parts = (
        g.add("GatherND", boxes, place),
        g.add("Unsqueeze", g.add("GatherND", scores, chosen), np.array([1])),
        g.add("Cast", kind, to=_FLOAT),
    )
    g.add("Concat", *parts, output="boxes", axis=1)
    return g.model("detector", {"image": (_UINT8, ["height", "width", 3])}, {"boxes": (_FLOAT, ["n", 6])})


class _Graph:
    """Builder of an ONNX model from nodes and constants."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def add(self, op: str, *inputs: str | Array | np.float32, output: str = "", **attributes: Any) -> str:
        """Add a node with names or arrays as inputs. Return the name of its output."""
        output = output or f"{op.lower()}{len(self._nodes)}"
        names = [each if isinstance(each, str) else self._constant(np.asarray(each)) for each in inputs]
        self._nodes.append(helper.make_node(op, names, [output], **attributes))
        return output

    def _constant(self, array: Array) -> str:
        name = f"constant{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return name

    def model(self, name: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> onnx.ModelProto:
        """Return the model. `inputs` and `outputs` are types and shapes by name."""
        ends = [[helper.make_tensor_value_info(n, *of) for n, of in each.items()] for each in (inputs, outputs)]
        graph = helper.make_graph(self._nodes, name, *ends, self._constants)
        opsets = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR, producer_name="nnburst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DATA)
    output = parser.parse_args().output
    for make in (digits, detector):
        model = make()
        onnx.checker.check_model(model, full_check=True)
        (output / f"{make.__name__}.onnx").write_bytes(model.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
