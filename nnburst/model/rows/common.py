"""The operation table, part: functions that the other modules of this package share."""

from __future__ import annotations

from ...errors import InvalidArgument
from ..operand_types import OperandType
from ..operation_types import FusedActivation
from ..operation_view import OperationView, OutputSpec

Outputs = tuple[OutputSpec, ...]

FLOAT = "F32 F16@1.2"
FLOAT_QUANT8 = "F32 F16@1.2 Q8 Q8S@1.3"
FLOAT_QUANT8_LATE = "F32 F16@1.2 Q8@1.2 Q8S@1.3"
FLOAT_QUANT8_INT = "F32 F16@1.2 Q8 Q8S@1.3 I32@1.3"
LATE_FLOAT = "F32 F16"
LATE_FLOAT_QUANT8 = "F32 F16 Q8 Q8S@1.3"
LATE_FLOAT_INT_QUANT8 = "F32 F16 I32 Q8 Q8S@1.3"
"""Data types of many operations. These operations are new in HAL 1.2."""

I32 = OperandType.TENSOR_INT32
UNIT = {OperandType.TENSOR_QUANT8_ASYMM: (1 / 256, 0), OperandType.TENSOR_QUANT8_ASYMM_SIGNED: (1 / 256, -128)}
SIGNED_UNIT = {OperandType.TENSOR_QUANT8_ASYMM: (1 / 128, 128), OperandType.TENSOR_QUANT8_ASYMM_SIGNED: (1 / 128, 0)}
"""Quantisation (scale, zero point) of results in -1 … 1, by type."""


def like_data(view: OperationView, *shapes: tuple[int, ...]) -> Outputs:
    """Return an output for each shape. It has the operation's data type, and the quantisation that its row requires."""
    return tuple(OutputSpec(view.data_type, dims, *view.output_quantisation()) for dims in shapes)


def infer_same_shape(view: OperationView) -> Outputs:
    return like_data(view, view.dims("x"))


def add(view: OperationView, size: int, more: int) -> int:
    """Return size + more, or 0 if the size is unknown."""
    return 0 if view.partial and size == 0 else size + more


def check_activation(view: OperationView) -> None:
    code = view.integer("act")
    if code not in tuple(FusedActivation):
        raise InvalidArgument(f"act is {code}; it must be 0 (NONE), 1 (RELU), 2 (RELU1) or 3 (RELU6)")


def require_equal(what: str, found: int, wanted: int, partial: bool) -> None:
    """Check that two sizes are equal. In a partial view, an unknown size (0) equals any size."""
    if found != wanted and not (partial and 0 in (found, wanted)):
        raise InvalidArgument(f"{what} is {found}; it must be {wanted}")
