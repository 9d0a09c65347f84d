"""Kernels: one row per operation. A kernel binds one operation: it appends NumPy calls to its `KernelCall`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....model import OperationType
from ..call import KernelCall
from . import activation, conv, elementwise, pool, quant, shape

__all__ = ["KERNELS"]

_T = OperationType

KERNELS: dict[int, Callable[[KernelCall], None]] = {
    _T.ADD: elementwise.binary(np.add),
    _T.AVERAGE_POOL_2D: pool.average_pool_2d,
    _T.CONCATENATION: shape.concatenation,
    _T.CONV_2D: conv.conv_2d,
    _T.DEPTHWISE_CONV_2D: conv.depthwise_conv_2d,
    _T.DEQUANTIZE: quant.convert,
    _T.FULLY_CONNECTED: conv.fully_connected,
    _T.L2_POOL_2D: pool.l2_pool_2d,
    _T.LOGISTIC: activation.unary(activation.logistic),
    _T.MAX_POOL_2D: pool.max_pool_2d,
    _T.MUL: elementwise.binary(np.multiply),
    _T.QUANTIZE: quant.convert,
    _T.RELU: activation.unary(activation.clamp(0.0, None)),
    _T.RELU1: activation.unary(activation.clamp(-1.0, 1.0)),
    _T.RELU6: activation.unary(activation.clamp(0.0, 6.0)),
    _T.RESHAPE: shape.copy,
    _T.SLICE: shape.slice_,
    _T.SOFTMAX: activation.softmax,
    _T.SQUEEZE: shape.copy,
    _T.SUB: elementwise.binary(np.subtract),
    _T.TANH: activation.unary(activation.tanh),
    _T.TRANSPOSE: shape.transpose,
}
"""Every operation that the reference device runs."""
