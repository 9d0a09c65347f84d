"""Models that the rows run, and how sizes are named."""

from __future__ import annotations

from ...model import Model, ModelBuilder, OperandType


def bytes_in_bytes_out(nbytes: int) -> Model:
    """Return a model with one input and one output of `nbytes` each."""
    builder = ModelBuilder()
    x = builder.input("x", OperandType.TENSOR_QUANT8_ASYMM, (1, nbytes), scale=1.0, zero_point=0)
    builder.output("y", builder.relu(x))
    return builder.build()


def step_model(nbytes: int) -> Model:
    """The least that a step can be: one pass over the state, and a small input and output beside it."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (1, 4))
    h = b.input("h_in", OperandType.TENSOR_FLOAT32, (1, nbytes // 4))
    b.output("h_out", b.relu(h))
    b.output("y", b.relu(x))
    return b.build()


def size_name(nbytes: int) -> str:
    """As in ``64 KiB``."""
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"
