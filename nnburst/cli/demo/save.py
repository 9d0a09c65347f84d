"""`nnburst demo --save`: ONNX files to try things with, and an input for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import InvalidArgument
from ..targets import writing
from .network import DATA, INPUT, OUTPUT, load_digits

if TYPE_CHECKING:
    from onnx import ModelProto

Array = npt.NDArray[Any]

_OPSET, _IR = 17, 8
_FLOAT, _UINT8 = 1, 2
"""Numbers of ONNX's types."""
_CELL, _STEP = 16, 4
"""Pixels that the detector looks at together, and from one place to the next."""
_LEAST_SCORE, _MOST_OVERLAP, _MOST_BOXES = 0.5, 0.3, 50


def save(file: Path) -> Path:
    """Write the model that a file's name says, and an input for it beside it. Returns the input's file.

    Raises:
        InvalidArgument: There is no such model, or ONNX is not installed.
        click.ClickException: A file cannot be written.
    """
    if file.name not in MODELS:
        raise InvalidArgument(f"--save {file}: the models are called {' and '.join(MODELS)}")
    try:
        import onnx
    except ImportError:
        raise InvalidArgument("--save makes an ONNX file: pip install 'nnburst[onnx]'") from None
    make, example = MODELS[file.name]
    model, beside = make(), file.with_suffix(".npy")
    onnx.checker.check_model(model, full_check=True)
    with writing(file):
        file.write_bytes(model.SerializeToString())
    with writing(beside):
        np.save(beside, example())
    return beside


def digits() -> ModelProto:
    """Return the network of the demo: images float32 [n, 8, 8, 1] in, probabilities [n, 10] out."""
    g = _Graph()
    with np.load(DATA / "weights.npz") as weights:
        w = {name: array if array.ndim < 3 else array.transpose(0, 3, 1, 2) for name, array in weights.items()}
    x = g.add("Transpose", INPUT, perm=[0, 3, 1, 2])
    for layer in ("conv1", "conv2"):
        x = g.add("Conv", x, w[f"{layer}_filter"], w[f"{layer}_bias"], auto_pad="SAME_UPPER")
        x = g.add("Relu", x)
        if layer == "conv1":
            x = g.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.add("Flatten", g.add("Transpose", x, perm=[0, 2, 3, 1]))
    x = g.add("Gemm", x, w["dense_weights"], w["dense_bias"], transB=1)
    g.add("Softmax", x, output=OUTPUT)
    return g.model("digits", {INPUT: (_FLOAT, ["n", 8, 8, 1])}, {OUTPUT: (_FLOAT, ["n", 10])})


def detector() -> ModelProto:
    """Return what finds bright and dark squares of 16 pixels: a frame uint8 [height, width, 3] in, boxes [n, 6] out.

    A box is left, top, right, bottom, score and class, 0 for a bright square and 1 for a dark one.
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
    """Nodes and constants of a model that is being made."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def add(self, op: str, *inputs: str | Array | np.float32, output: str = "", **attributes: Any) -> str:
        """Add a node, whose inputs are names or arrays; return the name of its output."""
        from onnx import helper

        output = output or f"{op.lower()}{len(self._nodes)}"
        names = [each if isinstance(each, str) else self._constant(np.asarray(each)) for each in inputs]
        self._nodes.append(helper.make_node(op, names, [output], **attributes))
        return output

    def _constant(self, array: Array) -> str:
        from onnx import numpy_helper

        name = f"constant{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return name

    def model(self, name: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> ModelProto:
        """Return the model; inputs and outputs are types and shapes by name."""
        from onnx import helper

        ends = [[helper.make_tensor_value_info(n, *of) for n, of in each.items()] for each in (inputs, outputs)]
        graph = helper.make_graph(self._nodes, name, *ends, self._constants)
        opsets = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR, producer_name="nnburst")


def _digit() -> Array:
    """Return an image that the network has not seen: [1, 8, 8, 1]."""
    held_out = load_digits()
    image: Array = held_out.images[held_out.held_out][0]
    return image


def frame() -> Array:
    """Return three bright squares and two dark ones on noise: [120, 160, 3]."""
    image = np.random.default_rng(0).normal(128, 8, (120, 160, 3))
    for left, top, value in ((20, 12, 230), (120, 24, 250), (64, 80, 240), (92, 48, 20), (8, 88, 10)):
        image[top + 2 : top + _CELL - 2, left + 2 : left + _CELL - 2] = value
    return image.astype(np.uint8)


MODELS: dict[str, tuple[Callable[[], ModelProto], Callable[[], Array]]] = {
    "digits.onnx": (digits, _digit),
    "detector.onnx": (detector, frame),
}
