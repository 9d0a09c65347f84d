"""The operation table: one row per operation.

A row says everything about an operation that does not depend on a device: since when, which inputs, outputs and data
types, and what comes out. To add an operation, add its code to `operation_types.py`, its row to the family in `rows/`
and its kernel to the reference device.
"""

from __future__ import annotations

from msgspec import Struct

from .operand_types import HalVersion
from .operation_types import OperationType, operation_since
from .rows import ROWS
from .signature import Signature


class OperationInfo(Struct, frozen=True):
    """One row: the operation, the HAL version that introduced it, and its signature (None for OEM_OPERATION)."""

    type: OperationType
    since: HalVersion
    signature: Signature | None = None


OPERATIONS: dict[int, OperationInfo] = {
    operation: OperationInfo(operation, operation_since(operation), ROWS.get(operation)) for operation in OperationType
}
"""Every operation by code."""
