"""The operation table, part: SELECT, and elementwise functions of two tensors with broadcasting."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import InvalidArgument
from ..operand_types import OperandType
from ..operation_types import FusedActivation, OperationType
from ..operation_view import OperationView, OutputSpec, Signature
from ..signature import signature
from .common import (
    FLOAT_QUANT8_INT,
    I32,
    LATE_FLOAT,
    LATE_FLOAT_INT_QUANT8,
    LATE_FLOAT_QUANT8,
    Outputs,
    check_activation,
    like_data,
)


def _broadcast_size(m: int, n: int, partial: bool) -> int:
    if partial and 0 in (m, n):
        return max(m, n) if max(m, n) > 1 else 0
    if m == n or n == 1:
        return m
    if m == 1:
        return n
    raise InvalidArgument(f"sizes {m} and {n} cannot be broadcast to each other")


def _broadcast(view: OperationView, first: str, second: str) -> tuple[int, ...]:
    """Return the broadcast shape, as in NumPy. A 0 (unknown size) and a 1 give 0."""
    a, b = view.dims(first), view.dims(second)
    rank = max(len(a), len(b))
    wide_a, wide_b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(_broadcast_size(m, n, view.partial) for m, n in zip(wide_a, wide_b, strict=True))


def _infer_fused(view: OperationView) -> Outputs:
    check_activation(view)
    if view.data_type is I32 and view.integer("act") != FusedActivation.NONE:
        raise InvalidArgument("TENSOR_INT32 arithmetic has no fused activation; act must be 0")
    return _infer_pair(view)


def _infer_pair(view: OperationView) -> Outputs:
    return like_data(view, _broadcast(view, "a", "b"))


def _infer_prelu(view: OperationView) -> Outputs:
    return like_data(view, _broadcast(view, "x", "alpha"))


def _infer_comparison(view: OperationView) -> Outputs:
    return (OutputSpec(OperandType.TENSOR_BOOL8, _broadcast(view, "a", "b")),)


def _infer_not(view: OperationView) -> Outputs:
    return like_data(view, view.dims("a"))


def _infer_select(view: OperationView) -> Outputs:
    """Infer the output of SELECT, which does not broadcast."""
    dims = view.dims("a")
    for name in ("cond", "b"):
        other = view.dims(name)
        same = len(other) == len(dims) and all(
            m == n or (view.partial and 0 in (m, n)) for m, n in zip(other, dims, strict=True)
        )
        if not same:
            raise InvalidArgument(f"{name} has dimensions {list(other)}; they must be {list(dims)}")
    return like_data(view, dims)


def _check_mul(view: OperationView) -> None:
    """Check that the scale of a quantised product is larger than the product of the inputs' scales."""
    if view.data_type is OperandType.TENSOR_QUANT8_ASYMM:
        product = view.operand("a").scale * view.operand("b").scale
        if not view.output().scale > product:
            raise InvalidArgument(f"the output's scale {view.output().scale:g} must be above {product:g} = a x b")


def _fused(types: str, check: Callable[[OperationView], None] | None = None) -> Signature:
    return signature("a/1-4:T b/1-4:T act:i32", types, _infer_fused, check=check, zero_sized=True)


def _pair(types: str) -> Signature:
    return signature("a:T b:T", types, _infer_pair)


_COMPARISON = signature("a:T b:T", "B8 " + LATE_FLOAT_INT_QUANT8, _infer_comparison, "out:B8")
_O = OperationType

ROWS: dict[OperationType, Signature] = {
    _O.ADD: _fused(FLOAT_QUANT8_INT),
    _O.DIV: _fused("F32 F16@1.2 I32@1.3"),
    _O.EQUAL: _COMPARISON,
    _O.GREATER: _COMPARISON,
    _O.GREATER_EQUAL: _COMPARISON,
    _O.LESS: _COMPARISON,
    _O.LESS_EQUAL: _COMPARISON,
    _O.LOGICAL_AND: _pair("B8"),
    _O.LOGICAL_NOT: signature("a:T", "B8", _infer_not),
    _O.LOGICAL_OR: _pair("B8"),
    _O.MAXIMUM: _pair(LATE_FLOAT_INT_QUANT8),
    _O.MINIMUM: _pair(LATE_FLOAT_INT_QUANT8),
    _O.MUL: _fused(FLOAT_QUANT8_INT, _check_mul),
    _O.NOT_EQUAL: _COMPARISON,
    _O.POW: _pair(LATE_FLOAT),
    _O.PRELU: signature("x:T alpha:T", LATE_FLOAT_QUANT8, _infer_prelu),
    _O.SELECT: signature("cond:B8 a:T b:T", LATE_FLOAT_INT_QUANT8, _infer_select),
    _O.SUB: _fused("F32 F16@1.2 Q8@1.2 Q8S@1.3 I32@1.3"),
}
