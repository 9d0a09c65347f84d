"""Kernels of SELECT and of functions of two tensors, element by element with broadcasting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....model.operand_types import OperandType
from ....model.types import Array
from ..call import KernelCall


def binary(function: np.ufunc) -> Callable[[KernelCall], None]:
    """Return the kernel of a ufunc of two arguments. TENSOR_INT32 wraps around and ignores the activation."""

    def kernel(call: KernelCall) -> None:
        if call.data_type is OperandType.TENSOR_INT32:
            call.do(function, call.array("a"), call.array("b"), out=call.out())
        else:
            call.do(function, call.real("a"), call.real("b"), out=call.real_out())

    return kernel


def divide(call: KernelCall) -> None:
    """DIV: the quotient a / b. A quotient of integers is rounded down, or 0 if b is 0."""
    if call.data_type is not OperandType.TENSOR_INT32:
        call.do(np.divide, call.real("a"), call.real("b"), call.real_out())
        return

    # NumPy checks divisors for 0 and reads them again, so a client could change them in between.
    call.move(lambda a, b: np.floor_divide(a.copy(), b.copy()), call.array("a"), call.array("b"))


def comparison(function: np.ufunc) -> Callable[[KernelCall], None]:
    """Return the kernel of a comparison: of numbers, of truth values, or of the real values of quantised data.

    Real values are rounded to float32, so that 3 x 0.1 equals 1 x 0.3.
    """

    def kernel(call: KernelCall) -> None:
        if call.data_type is OperandType.TENSOR_BOOL8:
            call.move(lambda a, b: function(a != 0, b != 0), call.array("a"), call.array("b"))
        elif call.data_type is OperandType.TENSOR_INT32:
            call.move(function, call.array("a"), call.array("b"))
        elif call.info.is_quantised:
            call.move(lambda a, b: function(np.float32(a), np.float32(b)), call.real("a"), call.real("b"))
        else:
            call.move(function, call.real("a"), call.real("b"))

    return kernel


def logical(function: np.ufunc) -> Callable[[KernelCall], None]:
    """Return the kernel of a function of two truth values. Any byte but 0 is true."""

    def kernel(call: KernelCall) -> None:
        call.move(function, call.array("a"), call.array("b"))

    return kernel


def logical_not(call: KernelCall) -> None:
    call.move(np.logical_not, call.array("a"))


def prelu(call: KernelCall) -> None:
    """PRELU: x, or alpha x below 0."""
    call.compute(lambda x, alpha: np.where(x >= 0, x, alpha * x), call.real("x"), call.real("alpha"))


def select(call: KernelCall) -> None:
    """SELECT: an element of a where the condition is true, else of b."""

    def function(condition: Array, a: Array, b: Array) -> Array:
        return np.where(condition != 0, a, b)

    if call.info.is_quantised:
        call.compute(function, call.array("cond"), call.real("a"), call.real("b"))
    else:
        call.move(function, call.array("cond"), call.array("a"), call.array("b"))
