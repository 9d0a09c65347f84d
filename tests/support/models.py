"""Models that tests of many files run, and requests on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnburst.memory import Memory
from nnburst.model import (
    DataLocation,
    Lifetime,
    Model,
    ModelBuilder,
    OperandDesc,
    OperandType,
    Operation,
    OperationType,
    Request,
    RequestArgument,
    Subgraph,
)


def relu(
    shape: tuple[int, ...] = (4,), type: OperandType = OperandType.TENSOR_FLOAT32, count: int = 1, **quantisation: Any
) -> Model:
    """y = max(x, 0); or so many of them that have nothing to do with each other."""
    b = ModelBuilder()
    for number in range(count) if count > 1 else ("",):
        x = b.input(f"x{number}", type, shape, **quantisation)
        b.output(f"y{number}", b.relu(x, dimensions=shape))
    return b.build()


def tiny_model(constant_bytes: int = 16) -> Model:
    """y = x + constant, of floats; a constant of more than 128 bytes is a pool of its own."""
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
    """y = x + [1, 2, 3, 4]."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (4,))
    b.output("y", b.add(x, np.array([1, 2, 3, 4], np.float32)))
    return b.build()


def add_with_activation(shape: tuple[int, ...]) -> Model:
    """y = activation(a + b), where the activation is an input, so that a run can fail."""
    b = ModelBuilder()
    both = [b.input(name, OperandType.TENSOR_FLOAT32, shape) for name in "ab"]
    b.output("y", b.add(*both, activation=b.input("activation", OperandType.INT32), dimensions=shape))
    return b.build()


def open_model() -> Model:
    """y = x + 1 with an open first dimension."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (0, 2))
    b.output("y", b.add(x, np.ones((1, 2), np.float32)))
    return b.build()


def doubling_model(levels: int = 40) -> Model:
    """y = ±x by 2 ** levels operations: each level runs the next one twice, in two IFs one after the other."""
    truth, one = OperandDesc(OperandType.TENSOR_BOOL8, (1,)), OperandDesc(OperandType.TENSOR_FLOAT32, (1,))

    def level(number: int) -> Subgraph:
        if number == levels:
            inputs = _as(truth, Lifetime.SUBGRAPH_INPUT, 0), _as(one, Lifetime.SUBGRAPH_INPUT, 1)
            output = _as(one, Lifetime.SUBGRAPH_OUTPUT, 0)
            return Subgraph((*inputs, output), (Operation(OperationType.NEG, (1,), (2,)),), (0, 1), (2,))
        operands = (
            _as(truth, Lifetime.SUBGRAPH_INPUT, 4),
            _as(one, Lifetime.SUBGRAPH_INPUT, 1),
            OperandDesc(OperandType.SUBGRAPH, (), 4, lifetime=Lifetime.SUBGRAPH, location=DataLocation(0, number)),
            _as(one, Lifetime.TEMPORARY_VARIABLE, 1),
            _as(one, Lifetime.SUBGRAPH_OUTPUT, 0),
        )
        first = Operation(OperationType.IF, (0, 2, 2, 0, 1), (3,))
        second = Operation(OperationType.IF, (0, 2, 2, 0, 3), (4,))
        return Subgraph(operands, (first, second), (0, 1), (4,))

    main, *referenced = map(level, range(levels + 1))
    return Model(main, tuple(referenced), input_names=("c", "x"), output_names=("y",))


def _as(operand: OperandDesc, lifetime: Lifetime, consumers: int) -> OperandDesc:
    return OperandDesc(operand.type, operand.dimensions, consumers, lifetime=lifetime)
