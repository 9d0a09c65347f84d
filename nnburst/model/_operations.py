"""The operation table: one row per operation (facts sheet `model.md` §2).

An operation with a `Signature` is *built*: its use in a model is checked completely and its outputs can be inferred.
The others are known: a model may contain them, their structure is checked, and no device here runs them yet. Building
one is a row in `_BUILT`, a function in `_infer.py` and a kernel in the reference device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import _infer as infer
from ._operand_types import HalVersion, OperandType
from ._operation_types import OperationType, operation_since
from ._signature import Signature, signature

__all__ = ["OPERATIONS", "OperationInfo"]


@dataclass(frozen=True, slots=True)
class OperationInfo:
    """One row: the operation, the HAL version that introduced it, and its signature once it is built."""

    type: OperationType
    since: HalVersion
    signature: Signature | None = None


_FLOAT = "F32 F16@1.2"
_FLOAT_QUANT8 = "F32 F16@1.2 Q8 Q8S@1.3"
_FLOAT_QUANT8_LATE = "F32 F16@1.2 Q8@1.2 Q8S@1.3"
_FLOAT_QUANT8_INT = "F32 F16@1.2 Q8 Q8S@1.3 I32@1.3"

_EXPLICIT = "pad_left:i32 pad_right:i32 pad_top:i32 pad_bottom:i32 stride_w:i32 stride_h:i32"
_IMPLICIT = "scheme:i32 stride_w:i32 stride_h:i32"
_LAYOUT = "[nchw:bool@1.2]"
_LAYOUT_DILATION = "[nchw:bool@1.2 [dilation_w:i32 dilation_h:i32]]"
_CONV = [f"x:T filter:W bias:B {padding} act:i32 {_LAYOUT_DILATION}" for padding in (_EXPLICIT, _IMPLICIT)]
_DEPTHWISE = [
    f"x:T filter:W bias:B {padding} multiplier:i32 act:i32 {_LAYOUT_DILATION}" for padding in (_EXPLICIT, _IMPLICIT)
]
_POOL = [f"x:T {padding} filter_w:i32 filter_h:i32 act:i32 {_LAYOUT}" for padding in (_EXPLICIT, _IMPLICIT)]

_RANK_1_TO_4 = {"x": (1, 4)}
_CONV_RANKS = {"x": (4, 4), "filter": (4, 4), "bias": (1, 1)}
_UNIT = {OperandType.TENSOR_QUANT8_ASYMM: (1 / 256, 0), OperandType.TENSOR_QUANT8_ASYMM_SIGNED: (1 / 256, -128)}
_SIGNED_UNIT = {OperandType.TENSOR_QUANT8_ASYMM: (1 / 128, 128), OperandType.TENSOR_QUANT8_ASYMM_SIGNED: (1 / 128, 0)}


def _binary(types: str, check: Callable[..., None] | None = None) -> Signature:
    return signature("a:T b:T act:i32", types, infer.infer_binary, ranks={"a": (1, 4), "b": (1, 4)}, check=check)


def _pool(types: str) -> Signature:
    return signature(_POOL, types, infer.infer_pool, ranks={"x": (4, 4)}, output_quantisation="same")


def _activation(types: str, quantisation: str | dict[OperandType, tuple[float, int]]) -> Signature:
    return signature("x:T", types, infer.infer_unary, ranks=_RANK_1_TO_4, output_quantisation=quantisation)


_T = OperationType

_BUILT: dict[OperationType, Signature] = {
    _T.ADD: _binary(_FLOAT_QUANT8_INT),
    _T.AVERAGE_POOL_2D: _pool(_FLOAT_QUANT8),
    _T.CONCATENATION: signature(
        "x:T+ axis:i32", _FLOAT_QUANT8, infer.infer_concatenation, ranks=_RANK_1_TO_4, check=infer.check_concatenation
    ),
    _T.CONV_2D: signature(_CONV, _FLOAT_QUANT8, infer.infer_conv, ranks=_CONV_RANKS, check=infer.check_bias_before_1_2),
    _T.DEPTHWISE_CONV_2D: signature(
        _DEPTHWISE,
        _FLOAT_QUANT8,
        infer.infer_depthwise_conv,
        ranks=_CONV_RANKS,
        check=partial(infer.check_bias_before_1_2, channel_dim=3),
    ),
    _T.DEQUANTIZE: signature(
        "x:T", "Q8 Q8Y@1.2 Q8C@1.2 Q8S@1.3", infer.infer_dequantize, outputs="out:F16@1.2|F32", ranks=_RANK_1_TO_4
    ),
    _T.FULLY_CONNECTED: signature(
        "x:T filter:T bias:B act:i32",
        _FLOAT_QUANT8,
        infer.infer_fully_connected,
        ranks={"x": (2, 4), "filter": (2, 2), "bias": (1, 1)},
        check=infer.check_bias_before_1_2,
    ),
    _T.L2_POOL_2D: _pool(_FLOAT),
    _T.LOGISTIC: _activation(_FLOAT_QUANT8, _UNIT),
    _T.MAX_POOL_2D: _pool(_FLOAT_QUANT8),
    _T.MUL: _binary(_FLOAT_QUANT8_INT, infer.check_mul),
    _T.RELU: _activation(_FLOAT_QUANT8, "same"),
    _T.RELU1: _activation(_FLOAT_QUANT8, "same"),
    _T.RELU6: _activation(_FLOAT_QUANT8, "same"),
    _T.RESHAPE: signature(
        "x:T shape:I32",
        _FLOAT_QUANT8,
        infer.infer_reshape,
        ranks={"x": (1, 4), "shape": (1, 1)},
        output_quantisation="same",
        zero_sized=False,
    ),
    _T.SOFTMAX: signature(
        "x:T beta:fx [axis:i32@1.2]",
        _FLOAT_QUANT8,
        infer.infer_softmax,
        ranks=_RANK_1_TO_4,
        output_quantisation=_UNIT,
        check=infer.check_softmax,
    ),
    _T.TANH: _activation(_FLOAT_QUANT8_LATE, _SIGNED_UNIT),
    _T.SQUEEZE: signature(
        "x:T axes:I32?",
        _FLOAT_QUANT8,
        infer.infer_squeeze,
        ranks={"x": (1, 4), "axes": (1, 1)},
        output_quantisation="same",
        zero_sized=False,
    ),
    _T.SLICE: signature(
        "x:T begin:I32 size:I32",
        "F32 F16 I32 Q8 Q8S@1.3",
        infer.infer_slice,
        ranks={"begin": (1, 1), "size": (1, 1)},
        output_quantisation="same",
    ),
    _T.SUB: _binary("F32 F16@1.2 Q8@1.2 Q8S@1.3 I32@1.3"),
    _T.TRANSPOSE: signature(
        "x:T perm:I32?",
        _FLOAT_QUANT8,
        infer.infer_transpose,
        ranks={"x": (1, 4), "perm": (1, 1)},
        output_quantisation="same",
    ),
    _T.QUANTIZE: signature("x:T", "F32 F16", infer.infer_quantize, outputs="out:Q8S@1.3|Q8", ranks=_RANK_1_TO_4),
}

OPERATIONS: dict[int, OperationInfo] = {
    operation: OperationInfo(operation, operation_since(operation), _BUILT.get(operation))
    for operation in OperationType
}
"""Every operation by code."""
