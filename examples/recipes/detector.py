"""The network of the recipes, to be replaced by yours. It turns 64 numbers into a score for each of 10 classes.

`MODEL` needs only nnburst; `save` writes it as an ONNX file, which needs the package onnx.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import nnburst

PIXELS, CLASSES = 64, 10
WEIGHTS = np.random.default_rng(1).normal(size=(CLASSES, PIXELS)).astype(np.float32)


def model(count: int = 1) -> nnburst.Model:
    """Return the network for `count` images at a time, or for any number if `count` is 0."""
    b = nnburst.ModelBuilder()
    image = b.input("image", nnburst.OperandType.TENSOR_FLOAT32, (count, PIXELS))
    b.output("scores", b.fully_connected(image, WEIGHTS, np.zeros(CLASSES, np.float32)))
    return b.build()


MODEL = model()


def images(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return `count` reproducible images."""
    return np.random.default_rng(2).normal(size=(count, PIXELS)).astype(np.float32)


def right(image: np.ndarray[Any, Any], scores: np.ndarray[Any, Any]) -> bool:
    """Return True if `scores` are the network's scores of the image or images."""
    return bool(np.allclose(scores, image @ WEIGHTS.T, atol=1e-3))


def save(path: str, mebibytes: int = 0) -> None:
    """Write the network as an ONNX file, with `mebibytes` MiB of additional unused weights."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        sys.exit("this example makes an ONNX model: pip install 'nnburst[onnx]'")

    room = np.ones((PIXELS, mebibytes << 20 >> 8), np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["image", "w"], ["all"]),
            helper.make_node("Slice", ["all", "first", "end", "axis"], ["scores"]),
        ],
        "detector",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", PIXELS])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES])],
        [
            numpy_helper.from_array(np.hstack([WEIGHTS.T, room]), "w"),
            *(
                numpy_helper.from_array(np.array([n]), name)
                for name, n in (("first", 0), ("end", CLASSES), ("axis", 1))
            ),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
