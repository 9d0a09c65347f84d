"""What a model costs on a device, by the device's capabilities."""

from __future__ import annotations

from .operand_types import OperandType
from .operation_types import OperationType
from .types import Capabilities, Lifetime, Model, Operation, Subgraph

NEVER = 3.4028234663852886e38
"""Cost of a type of which nothing is known: the largest float32."""
_FLOATS = {OperandType.TENSOR_FLOAT32: "relaxed_tensor", OperandType.FLOAT32: "relaxed_scalar"}


def operation_cost(
    model: Model,
    graph: Subgraph,
    operation: Operation,
    capabilities: Capabilities,
    branches: dict[int, float] | None = None,
) -> float:
    """Return the relative time of one operation: that of the type of its first operand.

    An IF costs in addition the mean of its branches, a WHILE its condition and its body once.

    Args:
        model: Valid.
        graph: The subgraph of the operation.
        operation: Which.
        capabilities: Of the device.
        branches: Costs of referenced subgraphs that are known, by number; more are added. Each is looked at once,
            however many operations refer to it.
    """
    known_branches = {} if branches is None else branches

    def branch(position: int) -> float:
        wanted = graph.operands[operation.inputs[position]].location.offset
        todo = [wanted]  # innermost last, however deep: a valid model has no circles
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
        relaxed = getattr(capabilities, _FLOATS[OperandType(code)])
        return float(relaxed.exec_time)
    known = dict(capabilities.operand_performance)
    return known[code].exec_time if code in known else NEVER
