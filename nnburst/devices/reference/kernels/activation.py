"""Kernels of functions of one tensor, element by element: activations, elementary functions, conversions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ....model.operand_types import OperandType
from ....model.types import Array
from ..call import KernelCall, encode_table

Function = Callable[[Array, Array], Any]
"""A function that computes the second array from the first."""


def unary(function: Function) -> Callable[[KernelCall], None]:
    """Return the kernel of a function of one number. For quantised data, a table contains all 256 results."""

    def through_table(call: KernelCall) -> Array:
        def of_real(real: Array) -> Array:
            result = np.empty_like(real)
            function(real, result)
            return result

        return encode_table(call.operand("x"), call.output(), of_real)

    def kernel(call: KernelCall) -> None:
        if call.info.is_quantised:
            table = call.derive("table", lambda: through_table(call))
            call.do(table.take, call.array("x").view(np.uint8), None, call.out(), "clip")
        elif call.data_type is OperandType.TENSOR_INT32:
            call.do(function, call.array("x"), call.out())
        else:
            call.do(function, call.real("x"), call.real_out())

    return kernel


def clamp(low: float, high: float | None) -> Callable[[KernelCall], None]:
    """Return a kernel that clips to a range. If `high` is None, the range has no upper limit."""

    def function(x: Array, out: Array) -> None:
        np.maximum(x, x.dtype.type(low), out=out)
        if high is not None:
            np.minimum(out, x.dtype.type(high), out=out)

    return unary(function)


def logistic(x: Array, out: Array) -> None:
    """LOGISTIC: 1 / (1 + exp(-x)). If exp overflows, the result is 0."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, 1, out=out)
    np.reciprocal(out, out=out)


def reciprocal_root(x: Array, out: Array) -> None:
    """RSQRT: 1 / sqrt(x)."""
    np.sqrt(x, out=out)
    np.reciprocal(out, out=out)


def hard_swish(x: Array, out: Array) -> None:
    """HARD_SWISH: x * clamp(x + 3, 0, 6) / 6."""
    np.multiply(x, np.clip(x + x.dtype.type(3), 0, 6) / x.dtype.type(6), out=out)


def elu(call: KernelCall) -> None:
    """ELU: x, or alpha * (exp(x) - 1) if x < 0."""
    alpha = call.real_dtype(call.number("alpha"))
    call.compute(lambda x: np.where(x >= 0, x, alpha * np.expm1(x)), call.real("x"))


def convert(call: KernelCall) -> None:
    """QUANTIZE, DEQUANTIZE: convert with `real` and `real_out`."""
    call.do(partial(np.copyto, casting="same_kind"), call.real_out(), call.real("x"))


def cast(call: KernelCall) -> None:
    """CAST: convert stored values, ignoring quantisation. Integer results are clipped, and lose the fraction."""
    x, dtype = call.array("x"), call.out().dtype
    if dtype.kind == "f" or dtype == x.dtype:
        call.move(lambda x: x, x)
        return
    bounds = np.iinfo(dtype)
    call.move(lambda x: np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0), bounds.min, bounds.max).astype(dtype), x)
