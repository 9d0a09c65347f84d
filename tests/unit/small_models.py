"""Models that tests of many files run."""

from __future__ import annotations

from nnburst.model import Model, ModelBuilder, OperandType


def relu(shape: tuple[int, ...] = (4,)) -> Model:
    """y = max(x, 0) of floats."""
    b = ModelBuilder()
    b.output("y", b.relu(b.input("x", OperandType.TENSOR_FLOAT32, shape)))
    return b.build()
