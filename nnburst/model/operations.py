"""The operation table: one row per operation, and the view of an operation through its row.

A row says everything about an operation that does not depend on a device: since when, which inputs, outputs and data
types, and what comes out. To add an operation, add its code to `operation_types.py`, its row to the family in `rows/`
and its kernel to the reference device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from .operand_types import HalVersion
from .operation_types import OperationType, operation_since
from .operation_view import OperationView, Signature
from .rows import ROWS
from .signature import match_signature
from .types import OperandDesc, Operation


class OperationInfo(Struct, frozen=True):
    """One row: the operation, the HAL version that introduced it, and its signature (None for OEM_OPERATION)."""

    type: OperationType
    since: HalVersion
    signature: Signature | None = None


OPERATIONS: dict[int, OperationInfo] = {
    operation: OperationInfo(operation, operation_since(operation), ROWS.get(operation)) for operation in OperationType
}
"""Every operation by code."""


def view_operation(
    operation: Operation,
    operands: Sequence[OperandDesc],
    version: HalVersion = HalVersion.V1_3,
    *,
    value_of: Callable[[int], np.ndarray[Any, np.dtype[Any]] | None] | None = None,
    with_outputs: bool = True,
) -> OperationView | None:
    """Match an operation with its signature.

    Args:
        value_of: Returns an operand's stored value if it is known.
        with_outputs: See `match_signature`.

    Returns:
        The view, or None for an operation whose signature is not built.

    Raises:
        InvalidArgument: The operation does not fit its signature.
    """
    entry = OPERATIONS.get(operation.type)
    if entry is None or entry.signature is None:
        return None
    match = match_signature(entry.signature, operation, operands, version, with_outputs=with_outputs)
    return OperationView(operation, operands, entry.signature, match, value_of=value_of)
