"""Rows of the operation table, one module per family; each row stands below the functions that it needs.

A row is a `Signature`: input and output lists, data types, ranks, and the function that infers the outputs. Such a
function reads dimensions and parameters through the view and returns one `OutputSpec` per output, or raises
`InvalidArgument` when the inputs do not fit together. In a partial view 0 is an unknown dimension and stays 0.
"""

from __future__ import annotations

from ..operation_view import Signature
from . import activation, arithmetic, control, detection, image, lookup, recurrent, reduction, shape, window

_FAMILIES = (activation, arithmetic, control, detection, image, lookup, recurrent, reduction, shape, window)
OPERATIONS: dict[int, Signature] = {operation: row for family in _FAMILIES for operation, row in family.ROWS.items()}
"""The signature of every operation, by its code."""
