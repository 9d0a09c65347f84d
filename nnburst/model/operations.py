"""Views of operations, made with the rows of the operation table.

A row contains the properties of an operation that are the same on all devices. To add an operation, add its code to
`operation_types.py`, a row to a module of `rows/`, and a kernel to the reference device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .operand_types import HalVersion
from .operation_view import OperationView
from .rows import OPERATIONS
from .signature import match_signature
from .types import Array, OperandDesc, Operation


def view_operation(
    operation: Operation,
    operands: Sequence[OperandDesc],
    version: HalVersion = HalVersion.V1_3,
    *,
    value_of: Callable[[int], Array | None] | None = None,
    with_outputs: bool = True,
) -> OperationView | None:
    """Match an operation with its signature.

    Args:
        value_of: Function that returns the stored value of an operand, if known.
        with_outputs: See `match_signature`.

    Returns:
        The view; None for OEM_OPERATION or an extension's operation, which have no signature.

    Raises:
        InvalidArgument: The operation does not fit its signature.
    """
    row = OPERATIONS.get(operation.type)
    if row is None:
        return None
    match = match_signature(row, operation, operands, version, with_outputs=with_outputs)
    return OperationView(operation, operands, row, match, value_of=value_of)
