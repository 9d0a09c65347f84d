"""Random uses of operations, compared with independent implementations: ONNX Runtime, or loops over numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from support.operations import Array

onnx = pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
ort = pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")

from onnx import TensorProto, helper  # noqa: E402

_TYPES = {
    "float32": TensorProto.FLOAT,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
}
_OPTIONS = ort.SessionOptions()
_OPTIONS.intra_op_num_threads = 1
_OPTIONS.log_severity_level = 3

FEW, SOME, MANY = 6, 30, 2000
"""Number of draws in `make test`, `make check` and a soak."""


def drawn(function: Callable[[Dice], None]) -> Callable[[range], None]:
    """Turn a function of `Dice` into a test, whose number of draws is `FEW`, `SOME` or `MANY`."""

    def test(draws: range) -> None:
        for seed in draws:
            try:
                function(Dice(zlib.crc32(function.__name__.encode()) + seed))
            except Exception as error:
                raise AssertionError(f"draw {seed}: {error}") from error

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    some = pytest.param(range(FEW, SOME), marks=pytest.mark.check, id="some")
    many = pytest.param(range(SOME, MANY), marks=[pytest.mark.soak, pytest.mark.timeout(0)], id="many")
    return pytest.mark.parametrize("draws", [pytest.param(range(FEW), id="few"), some, many])(test)


class Dice:
    """A seeded source of random choices."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def upto(self, most: int, least: int = 1) -> int:
        return int(self.rng.integers(least, most + 1))

    def sizes(self, rank: int, most: int = 5) -> tuple[int, ...]:
        return tuple(self.upto(most) for _ in range(rank))

    def reals(self, *shape: int, low: float = -2.0, high: float = 2.0) -> Array:
        return self.rng.uniform(low, high, shape)

    def truth(self) -> bool:
        return bool(self.rng.random() < 0.5)


def by_onnx(operator: str, *inputs: Any, outputs: int = 1, opset: int = 18, **attributes: Any) -> Any:
    """Run one ONNX operator. Inputs of float64 become float32; None omits an input."""
    arrays = [None if x is None else _narrowed(np.asarray(x)) for x in inputs]
    names = ["" if x is None else f"x{i}" for i, x in enumerate(arrays)]
    node = helper.make_node(operator, names, [f"y{i}" for i in range(outputs)], **attributes)
    given = [(name, x) for name, x in zip(names, arrays, strict=True) if x is not None]
    values = [helper.make_tensor_value_info(name, _TYPES[x.dtype.name], x.shape) for name, x in given]
    outs = [helper.make_value_info(f"y{i}", helper.make_tensor_type_proto(0, None)) for i in range(outputs)]
    for out in outs:
        out.ClearField("type")
    graph = helper.make_graph([node], "one", values, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), _OPTIONS, providers=["CPUExecutionProvider"])
    found = session.run(None, dict(given))
    return found[0] if outputs == 1 else found


def _narrowed(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == np.float64 else array


def to_nchw(x: Array) -> Array:
    return x.transpose(0, 3, 1, 2)


def to_nhwc(x: Array) -> Array:
    return x.transpose(0, 2, 3, 1)
