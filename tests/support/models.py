"""Models that tests of many files run, and requests on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnburst import Memory, Model, ModelBuilder, OperandType
from nnburst.model import Request
from nnburst.model.types import DataLocation, OperandDesc, RequestArgument, Subgraph
from nnburst.nnapi import Compilation, Execution, MemoryDesc


def built(inputs: Sequence[OperandDesc], make: Callable[..., Any]) -> Model:
    """Return a model. `make` gets a builder and the inputs, and returns one output operand or several."""
    b = ModelBuilder()
    given = [
        b.input(f"x{i}", x.type, x.dimensions, scale=x.scale, zero_point=x.zero_point) for i, x in enumerate(inputs)
    ]
    made = make(b, *given)
    for i, y in enumerate(made if isinstance(made, tuple) else (made,)):
        b.output(f"y{i}", y)
    return b.build()


def relu(
    shape: tuple[int, ...] = (4,), type: OperandType = OperandType.TENSOR_FLOAT32, count: int = 1, **quantisation: Any
) -> Model:
    """Return y = max(x, 0), or `count` independent operations of this kind in one model."""
    b = ModelBuilder()
    for number in range(count) if count > 1 else ("",):
        x = b.input(f"x{number}", type, shape, **quantisation)
        b.output(f"y{number}", b.relu(x, dimensions=shape))
    return b.build()


def tiny_model(constant_bytes: int = 16) -> Model:
    """Return y = x + constant. A constant of more than 128 bytes gets its own pool."""
    builder = ModelBuilder()
    n = constant_bytes // 4
    x = builder.input("x", OperandType.TENSOR_FLOAT32, (n,))
    c = builder.constant(np.arange(n, dtype=np.float32))
    builder.output("y", builder.add(x, c))
    return builder.build()


def request_on(pool: Memory, nbytes: int = 256) -> Request:
    inputs = (RequestArgument(location=DataLocation(0, 0, nbytes)),)
    outputs = (RequestArgument(location=DataLocation(0, 256, nbytes)),)
    return Request(inputs, outputs, (pool,))


def add_model() -> Model:
    """Return y = x + [1, 2, 3, 4]."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (4,))
    b.output("y", b.add(x, np.array([1, 2, 3, 4], np.float32)))
    return b.build()


def counter() -> Model:
    """Return t_out = t + 1."""
    b = ModelBuilder()
    b.output("t_out", b.add(b.input("t", OperandType.TENSOR_FLOAT32, (4,)), np.ones(4, np.float32)))
    return b.build()


def add_with_activation(shape: tuple[int, ...]) -> Model:
    """Return y = activation(a + b). The activation is an input, so an invalid one makes a run fail."""
    b = ModelBuilder()
    both = [b.input(name, OperandType.TENSOR_FLOAT32, shape) for name in "ab"]
    b.output("y", b.add(*both, activation=b.input("activation", OperandType.INT32), dimensions=shape))
    return b.build()


def open_model() -> Model:
    """Return y = x + 1 with an open first dimension."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (0, 2))
    b.output("y", b.add(x, np.ones((1, 2), np.float32)))
    return b.build()


def chained(outer: Model, levels: int) -> Model:
    """Nest a model in itself: each of `levels` levels refers to the next, and the last to the model's own subgraphs."""

    def level(number: int) -> Subgraph:
        operands = [
            replace(each, location=DataLocation(0, number)) if each.type == OperandType.SUBGRAPH else each
            for each in outer.main.operands
        ]
        return replace(outer.main, operands=tuple(operands))

    return replace(outer, referenced=(*map(level, range(1, levels)), *outer.referenced))


def doubling_model(levels: int = 40) -> Model:
    """Return y = ±x in 2 ** levels operations: each level runs the next level twice, in two IFs one after the other."""
    model: Model | None = None
    for _ in range(2):
        b = ModelBuilder()
        c, x = b.input("c", OperandType.TENSOR_BOOL8, (1,)), b.input("x", OperandType.TENSOR_FLOAT32, (1,))
        y = b.neg(x) if model is None else b.branch(c, model, model, [c, *b.branch(c, model, model, [c, x])])[0]
        b.output("y", y)
        model = b.build()
    assert model is not None
    return chained(model, levels)


@contextlib.contextmanager
def compiled(model: Any, devices: Any) -> Iterator[Compilation]:
    """Yield the finished compilation of a model for `devices`, which are devices or a service."""
    with Compilation(model, devices) as compilation:
        compilation.finish()
        yield compilation


def described(*roles: tuple[Compilation, str, int], dimensions: tuple[int, ...] = ()) -> MemoryDesc:
    """Return a finished description of a device memory."""
    desc = MemoryDesc()
    for compilation, kind, index in roles:
        getattr(desc, f"add_{kind}_role")(compilation, index)
    if dimensions:
        desc.set_dimensions(dimensions)
    desc.finish()
    return desc


def ready(compilation: Compilation, x: Any, y: Any, **options: Any) -> Execution:
    """Return an execution with its first input and first output set."""
    execution = Execution(compilation, **options)
    execution.set_input(0, x)
    execution.set_output(0, y)
    return execution
