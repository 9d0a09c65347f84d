"""Validation rule V16 (docs/requirements): the signatures of IF and WHILE."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgument
from .dimensions import combine_dimensions
from .operand_types import OperandType, type_name
from .operation_types import OperationType
from .types import Lifetime, Model, OperandDesc, Operation, Subgraph


def check_control_flow(model: Model, subgraph: Subgraph, operation: Operation) -> None:
    """Raise `InvalidArgument` unless an IF or WHILE fits the inputs and outputs of its subgraphs."""
    inputs = [subgraph.operands[index] for index in operation.inputs]
    outputs = [subgraph.operands[index] for index in operation.outputs]
    if not outputs:
        raise InvalidArgument("it has no output")
    (_check_if if operation.type == OperationType.IF else _check_while)(model, inputs, outputs)


def _check_if(model: Model, inputs: list[OperandDesc], outputs: list[OperandDesc]) -> None:
    if len(inputs) < 3:
        raise InvalidArgument("it needs a condition and two subgraphs")
    _check_condition(inputs[0], "input 0")
    for position, name in ((1, "then"), (2, "else")):
        branch = _subgraph(model, inputs[position], f"input {position}")
        _check_compatible(branch, branch.input_indexes, inputs[3:], f"inputs of {name}")
        _check_compatible(branch, branch.output_indexes, outputs, f"outputs of {name}")


def _check_while(model: Model, inputs: list[OperandDesc], outputs: list[OperandDesc]) -> None:
    if len(inputs) < 3:
        raise InvalidArgument("it needs a condition, a body and a value")
    condition = _subgraph(model, inputs[0], "input 0")
    body = _subgraph(model, inputs[1], "input 1")
    values = inputs[2:]
    _check_compatible(condition, condition.input_indexes, values, "inputs of the condition")
    _check_compatible(body, body.input_indexes, values, "inputs of the body")
    carried = body.output_indexes
    if len(condition.output_indexes) != 1:
        raise InvalidArgument(f"the condition has {len(condition.output_indexes)} outputs; it must have 1")
    _check_condition(condition.operands[condition.output_indexes[0]], "the condition's output")
    if not len(outputs) <= len(carried) <= len(values):
        raise InvalidArgument(
            f"the body has {len(carried)} outputs; it needs at least {len(outputs)} and at most {len(values)}"
        )
    _check_compatible(body, carried, values[: len(carried)], "outputs of the body, as its next inputs,")
    _check_compatible(body, carried[: len(outputs)], outputs, "outputs of the body")


def _check_condition(operand: OperandDesc, what: str) -> None:
    if operand.type != OperandType.TENSOR_BOOL8:
        raise InvalidArgument(f"{what} is {type_name(operand.type)}; it must be TENSOR_BOOL8")
    if operand.dimensions not in ((), (0,), (1,)):
        raise InvalidArgument(f"{what} has dimensions {list(operand.dimensions)}; they must be [1]")


def _subgraph(model: Model, operand: OperandDesc, what: str) -> Subgraph:
    if operand.lifetime != Lifetime.SUBGRAPH:
        raise InvalidArgument(f"{what} is {type_name(operand.type)}; it must be a SUBGRAPH")
    return model.referenced[operand.location.offset]


def _check_compatible(subgraph: Subgraph, indexes: Sequence[int], outer: Sequence[OperandDesc], what: str) -> None:
    """Compare a subgraph's operands with those of its IF or WHILE: first their count, to limit the work."""
    if len(indexes) != len(outer):
        raise InvalidArgument(f"{what} are {len(indexes)}; the operation has {len(outer)}")
    for position, (index, b) in enumerate(zip(indexes, outer, strict=True)):
        a = subgraph.operands[index]
        if a.meaning != b.meaning:
            raise InvalidArgument(f"{what} differ from the operation's in type or quantisation at {position}")
        try:
            combine_dimensions(a.dimensions, b.dimensions)
        except InvalidArgument as error:
            raise InvalidArgument(f"{what} differ from the operation's at {position}: {error}") from None
