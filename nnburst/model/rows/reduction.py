"""Rows of reductions over axes, ARGMAX, ARGMIN and TOPK_V2."""

from __future__ import annotations

from ...errors import InvalidArgument
from ..operation_types import OperationType
from ..operation_view import OperationView, OutputSpec, Signature
from ..signature import signature
from .common import FLOAT_QUANT8, I32, LATE_FLOAT, LATE_FLOAT_INT_QUANT8, LATE_FLOAT_QUANT8, Outputs, like_data


def _infer_reduction(view: OperationView) -> Outputs:
    """Infer the shape without the reduced axes; [1] if no axis remains."""
    dims, keep = view.dims("x"), view.integer("keep") > 0
    axes = view.axes("axes", len(dims))
    kept = tuple(1 if i in axes else size for i, size in enumerate(dims) if keep or i not in axes)
    return like_data(view, kept or (1,))


def _infer_argument(view: OperationView) -> Outputs:
    """Infer the shape of x without the axis `axis`; [1] if no axis remains."""
    dims = view.dims("x")
    axis = view.axis("axis", len(dims))
    return (OutputSpec(I32, dims[:axis] + dims[axis + 1 :] or (1,)),)


def _infer_topk(view: OperationView) -> Outputs:
    dims, k = view.dims("x"), view.integer("k", least=1)
    if k > dims[-1] and not (view.partial and dims[-1] == 0):
        raise InvalidArgument(f"k is {k}, but the last axis has {dims[-1]} elements")
    dims = (*dims[:-1], k)
    return (*like_data(view, dims), OutputSpec(I32, dims))


def _reduction(types: str, keep: str, outputs: str = "out:T") -> Signature:
    return signature(f"x/1-4:T axes/1:I32 keep:{keep}", types, _infer_reduction, outputs)


_ARGUMENT = signature("x:T axis:i32", LATE_FLOAT_INT_QUANT8, _infer_argument, "out:I32")
_O = OperationType

ROWS: dict[OperationType, Signature] = {
    _O.ARGMAX: _ARGUMENT,
    _O.ARGMIN: _ARGUMENT,
    _O.MEAN: _reduction(FLOAT_QUANT8, "i32", "out:T=x"),
    _O.REDUCE_ALL: _reduction("B8", "bool"),
    _O.REDUCE_ANY: _reduction("B8", "bool"),
    _O.REDUCE_MAX: _reduction(LATE_FLOAT_QUANT8, "bool", "out:T=x"),
    _O.REDUCE_MIN: _reduction(LATE_FLOAT_QUANT8, "bool", "out:T=x"),
    _O.REDUCE_PROD: _reduction(LATE_FLOAT, "bool"),
    _O.REDUCE_SUM: _reduction(LATE_FLOAT, "bool"),
    _O.TOPK_V2: signature("x:T k:i32", LATE_FLOAT_INT_QUANT8, _infer_topk, "values:T=x indices:I32"),
}
