"""From an operation of a model to its view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .operand_types import HalVersion
from .operation_view import OperationView
from .operations import OPERATIONS
from .signature import match_signature
from .types import OperandDesc, Operation


def view_operation(
    operation: Operation,
    operands: Sequence[OperandDesc],
    version: HalVersion = HalVersion.V1_3,
    *,
    dims_of: Callable[[int], tuple[int, ...]] | None = None,
    value_of: Callable[[int], np.ndarray[Any, np.dtype[Any]] | None] | None = None,
    partial: bool = True,
    with_outputs: bool = True,
) -> OperationView | None:
    """Match an operation with its signature.

    Args:
        operation: The operation.
        operands: The operands of its subgraph.
        version: `HalVersion` of the model.
        dims_of: Returns the known dimensions of an operand; default: those of the operand itself.
        value_of: Returns an operand's stored value if it is known.
        partial: See `OperationView`.
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
    return OperationView(
        operation, operands, entry.signature, match, dims_of=dims_of, value_of=value_of, partial=partial
    )
