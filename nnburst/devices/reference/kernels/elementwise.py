"""Arithmetic of two tensors with broadcasting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....model import OperandType
from ..call import KernelCall

__all__ = ["binary"]


def binary(function: np.ufunc) -> Callable[[KernelCall], None]:
    """Return the kernel of a ufunc of two arguments. TENSOR_INT32 wraps around, without an activation."""

    def kernel(call: KernelCall) -> None:
        if call.data_type is OperandType.TENSOR_INT32:
            call.do(function, call.array("a"), call.array("b"), call.out())
        else:
            call.do(function, call.real("a"), call.real("b"), call.real_out())

    return kernel
