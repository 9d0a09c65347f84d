"""Rows of the operation table, one module for each family of operations.

A row is a `Signature`: input and output lists, data types, ranks, and the function that infers the outputs. The
function reads dimensions and parameters through an `OperationView`, and returns an `OutputSpec` for each output. It
raises `InvalidArgument` if the inputs do not fit together. In a partial view, 0 is an unknown dimension and stays 0.
"""

from __future__ import annotations

from ..operation_view import Signature
from . import activation, arithmetic, control, detection, image, lookup, recurrent, reduction, shape, window

_FAMILIES = (activation, arithmetic, control, detection, image, lookup, recurrent, reduction, shape, window)
OPERATIONS: dict[int, Signature] = {operation: row for family in _FAMILIES for operation, row in family.ROWS.items()}
"""The signature of every operation, by its code."""
