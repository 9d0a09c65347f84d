"""The cost of operations on a device, estimated from the device's capabilities."""

from __future__ import annotations

import math

from .operand_types import OperandType
from .operation_types import OperationType
from .rows import OPERATIONS, recurrent
from .types import Capabilities, Lifetime, Model, Operation, Subgraph

NEVER = 3.4028234663852886e38
"""Cost of an operand type that a device's capabilities lack: the largest float32."""
_ELEMENT = 16
"""Work of one multiplication in an elementwise operation. A multiplication in a matrix product counts as 1."""
_PRODUCTS = {kind for kind, row in OPERATIONS.items() if {"filter", "bias"} <= {param.name for param in row.forms[0]}}
_CELLS = recurrent.ROWS.keys()
"""Recurrent operations, which multiply a row by all matrices in each step."""
_FLOATS = {OperandType.TENSOR_FLOAT32: "relaxed_tensor", OperandType.FLOAT32: "relaxed_scalar"}


def operation_cost(
    model: Model,
    graph: Subgraph,
    operation: Operation,
    capabilities: Capabilities,
    branches: dict[int, float] | None = None,
) -> float:
    """Return the cost of an operation: its work, times the cost of the first input's type, plus a fixed cost.

    An IF costs a fixed cost plus the mean of its branches. A WHILE costs a fixed cost plus one run of condition and
    body.

    Args:
        branches: Known costs of referenced subgraphs, by number. This function adds the costs that it computes.
    """
    known_branches = {} if branches is None else branches

    def branch(position: int) -> float:
        wanted = graph.operands[operation.inputs[position]].location.offset
        todo = [wanted]  # The innermost subgraph is last. A valid model has no cycles.
        while wanted not in known_branches:
            inner = model.referenced[todo[-1]]
            refers = (each.location.offset for each in inner.operands if each.lifetime == Lifetime.SUBGRAPH)
            if deeper := [index for index in refers if index not in known_branches]:
                todo += deeper
            else:
                known_branches[todo.pop()] = sum(
                    operation_cost(model, inner, each, capabilities, known_branches) for each in inner.operations
                )
        return known_branches[wanted]

    if operation.type == OperationType.IF:
        return capabilities.if_performance.exec_time + (branch(1) + branch(2)) / 2
    if operation.type == OperationType.WHILE:
        return capabilities.while_performance.exec_time + branch(0) + branch(1)
    if not operation.inputs:
        return 0.0
    code = graph.operands[operation.inputs[0]].type
    if model.relax_computation_float32_to_float16 and code in _FLOATS:
        each = getattr(capabilities, _FLOATS[OperandType(code)]).exec_time
    else:
        known = dict(capabilities.operand_performance)
        each = known[code].exec_time if code in known else NEVER
    return NEVER if each >= NEVER else capabilities.operation_time + float(each) * operation_work(graph, operation)


def operation_work(graph: Subgraph, operation: Operation) -> int:
    """Estimate the multiplications and additions of an operation. An unknown dimension counts as 1."""

    def elements(index: int) -> int:
        return math.prod(size or 1 for size in graph.operands[index].dimensions)

    result = max(operation.outputs, key=elements)
    if operation.type in _PRODUCTS:
        products = elements(operation.inputs[1]) * elements(result) // elements(operation.inputs[2])
        return products * (_ELEMENT if operation.type == OperationType.DEPTHWISE_CONV_2D else 1)
    if operation.type in _CELLS:
        width = (graph.operands[result].dimensions or (1,))[-1] or 1
        return sum(map(elements, operation.inputs[1:])) * elements(result) // width
    return _ELEMENT * max(map(elements, (*operation.inputs, result)))
