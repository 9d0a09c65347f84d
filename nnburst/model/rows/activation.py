"""The operation table, part: activations, elementary functions, normalisations and casts, which keep the shape."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidArgument
from ..operand_types import OperandType
from ..operation_types import OperationType
from ..operation_view import OperationView, OutputSpec, Signature
from ..signature import signature
from ..window import image_dims
from .common import (
    FLOAT,
    FLOAT_QUANT8,
    FLOAT_QUANT8_LATE,
    LATE_FLOAT,
    LATE_FLOAT_QUANT8,
    SIGNED_UNIT,
    UNIT,
    Outputs,
    infer_same_shape,
    like_data,
)


def _infer_softmax(view: OperationView) -> Outputs:
    dims = view.dims("x")
    view.axis("axis", len(dims))
    if not view.number("beta") > 0:
        raise InvalidArgument(f"beta is {view.number('beta'):g}; it must be positive")
    return like_data(view, dims)


def _infer_along_axis(view: OperationView) -> Outputs:
    dims = view.dims("x")
    view.axis("axis", len(dims))
    return like_data(view, dims)


def _infer_local_response(view: OperationView) -> Outputs:
    view.integer("radius", least=0)
    return _infer_along_axis(view)


def _infer_image(view: OperationView) -> Outputs:
    image_dims(view)
    return infer_same_shape(view)


def _infer_quantize(view: OperationView) -> Outputs:
    """Infer the output of QUANTIZE: the shape of x. The output operand determines type and quantisation."""
    return (OutputSpec(OperandType.TENSOR_QUANT8_ASYMM, view.dims("x")),)


def _infer_dequantize(view: OperationView) -> Outputs:
    """Infer the output of DEQUANTIZE. Its type is float32 here, but the output operand can also be float16."""
    return (OutputSpec(OperandType.TENSOR_FLOAT32, view.dims("x")),)


def _map(types: str, form: str = "x/1-4:T", outputs: str = "out:T", **options: Any) -> Signature:
    return signature(form, types, infer_same_shape, outputs, **options)


_O = OperationType

ROWS: dict[OperationType, Signature] = {
    _O.ABS: _map("F32 F16 I32@1.3", "x:T"),
    _O.CAST: signature("x:T", "F32 F16 I32 Q8 B8@1.3 Q16A@1.3 Q16S@1.3 Q8S@1.3 Q8Y@1.3", infer_same_shape, "out:cast"),
    _O.DEQUANTIZE: signature(
        "x/1-4:T", "Q8 Q8Y@1.2 Q8C@1.2 Q8S@1.3", _infer_dequantize, "out:F16@1.2|F32", zero_sized=True
    ),
    _O.ELU: _map(LATE_FLOAT, "x:T alpha:fx"),
    _O.EXP: _map(LATE_FLOAT, "x:T"),
    _O.FLOOR: _map(FLOAT),
    _O.HARD_SWISH: _map(LATE_FLOAT_QUANT8, "x:T", zero_sized=True),
    _O.INSTANCE_NORMALIZATION: signature("x/4:T gamma:fx beta:fx epsilon:fx nchw:bool", LATE_FLOAT, _infer_image),
    _O.L2_NORMALIZATION: signature(
        "x/1-4:T [axis:i32@1.2]", FLOAT_QUANT8_LATE, _infer_along_axis, output_quantisation=SIGNED_UNIT
    ),
    _O.LOCAL_RESPONSE_NORMALIZATION: signature(
        "x/1-4:T radius:i32 bias:fx alpha:fx beta:fx [axis:i32@1.2]", FLOAT, _infer_local_response
    ),
    _O.LOG: _map(LATE_FLOAT, "x:T"),
    _O.LOG_SOFTMAX: signature("x:T beta:fx axis:i32", LATE_FLOAT, _infer_softmax),
    _O.LOGISTIC: _map(FLOAT_QUANT8, output_quantisation=UNIT, zero_sized=True),
    _O.NEG: _map("F32 F16 I32", "x:T"),
    _O.QUANTIZE: signature("x:T", LATE_FLOAT, _infer_quantize, "out:Q8S@1.3|Q8", zero_sized=True),
    _O.RELU: _map(FLOAT_QUANT8, outputs="out:T=x", zero_sized=True),
    _O.RELU1: _map(FLOAT_QUANT8, outputs="out:T=x", zero_sized=True),
    _O.RELU6: _map(FLOAT_QUANT8, outputs="out:T=x", zero_sized=True),
    _O.RSQRT: _map(LATE_FLOAT, "x:T"),
    _O.SIN: _map(LATE_FLOAT, "x:T"),
    _O.SOFTMAX: signature(
        "x/1-4:T beta:fx [axis:i32@1.2]", FLOAT_QUANT8, _infer_softmax, output_quantisation=UNIT, zero_sized=True
    ),
    _O.SQRT: _map(LATE_FLOAT, "x:T"),
    _O.TANH: _map(FLOAT_QUANT8_LATE, output_quantisation=SIGNED_UNIT, zero_sized=True),
}
