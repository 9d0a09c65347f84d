"""Functions of one number, and SOFTMAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..call import KernelCall, encode_table

__all__ = ["clamp", "logistic", "softmax", "tanh", "unary"]

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[[Array, Array], Any]
"""Computes from the first array into the second."""


def unary(function: Function) -> Callable[[KernelCall], None]:
    """Return the kernel of a function of one number. Quantised data goes through a table of 256 results."""

    def through_table(call: KernelCall) -> Array:
        def of_real(real: Array) -> Array:
            result = np.empty_like(real)
            function(real, result)
            return result

        return encode_table(call.operand("x"), call.output(), of_real)

    def kernel(call: KernelCall) -> None:
        if call.info.is_quantised:
            table = call.derived("table", lambda: through_table(call))
            call.do(table.take, call.array("x").view(np.uint8), None, call.out(), "clip")
        else:
            call.do(function, call.real("x"), call.real_out())

    return kernel


def clamp(low: float, high: float | None) -> Function:
    """Return the function that cuts to a range; None is no upper limit."""

    def function(x: Array, out: Array) -> None:
        np.maximum(x, low, out=out)
        if high is not None:
            np.minimum(out, high, out=out)

    return function


def logistic(x: Array, out: Array) -> None:
    """1 / (1 + exp(-x)); an exp that overflows gives the right limit, 0."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, 1, out=out)
    np.reciprocal(out, out=out)


def tanh(x: Array, out: Array) -> None:
    """Hyperbolic tangent."""
    np.tanh(x, out=out)


def softmax(call: KernelCall) -> None:
    """exp(beta (x - max)) / sum, along an axis."""
    x, out = call.real("x"), call.real_out()
    axis, beta = call.axis("axis", x.ndim), call.real_dtype(call.number("beta"))
    reduced = np.empty([1 if i == axis else size for i, size in enumerate(x.shape)], x.dtype)
    call.do(np.maximum.reduce, x, axis, None, reduced, True)
    call.do(np.subtract, x, reduced, out)
    if beta != 1:
        call.do(np.multiply, out, beta, out)
    call.do(np.exp, out, out)
    call.do(np.add.reduce, out, axis, None, reduced, True)
    call.do(np.divide, out, reduced, out)
