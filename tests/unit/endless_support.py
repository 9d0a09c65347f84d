"""Models that run for longer than any test waits."""

from __future__ import annotations

from nnburst.model import (
    DataLocation,
    Lifetime,
    Model,
    OperandDesc,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)


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
