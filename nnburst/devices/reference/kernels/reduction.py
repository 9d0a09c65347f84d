"""Kernels of reductions over axes, ARGMAX, ARGMIN and TOPK_V2."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....model.types import Array
from ..call import KernelCall


def _reduction(
    function: Callable[[Array, tuple[int, ...]], Array], *, of_real: bool = False
) -> Callable[[KernelCall], None]:
    """Return the kernel that calls `function` with an array and axes. If `of_real`, it dequantises the array."""

    def kernel(call: KernelCall) -> None:
        axes, shape = call.axes("axes", call.array("x").ndim), call.out().shape
        append, x = (call.compute, call.real("x")) if of_real else (call.move, call.array("x"))
        append(lambda x: function(x, axes).reshape(shape), x)

    return kernel


mean = _reduction(lambda x, axes: np.asarray(x.mean(axes, np.float64)), of_real=True)


def reduce_floats(function: np.ufunc) -> Callable[[KernelCall], None]:
    """Return the kernel of a sum or product, computed in float64."""
    return _reduction(lambda x, axes: function.reduce(x, axes, np.float64), of_real=True)


def reduce_stored(function: np.ufunc) -> Callable[[KernelCall], None]:
    return _reduction(function.reduce)


def reduce_truth(function: np.ufunc) -> Callable[[KernelCall], None]:
    return _reduction(lambda x, axes: function.reduce(x != 0, axes))


def argument(function: Callable[[Array, int], Array]) -> Callable[[KernelCall], None]:
    """Return the kernel of ARGMAX or ARGMIN, which returns the first of equal elements."""

    def kernel(call: KernelCall) -> None:
        axis, shape = call.axis("axis", call.array("x").ndim), call.out().shape
        call.move(lambda x: function(x, axis).reshape(shape), call.array("x"))

    return kernel


def topk(call: KernelCall) -> None:
    """TOPK_V2: the k largest elements along the last axis, descending. Of equal elements, the last comes first."""
    k, values, indices = call.integer("k"), call.out(0), call.out(1)

    def function(x: Array) -> None:
        x = x.copy()
        order = np.argsort(x, -1, kind="stable")[..., ::-1][..., :k]
        indices[...] = order
        values[...] = np.take_along_axis(x, order, -1)

    call.do(function, call.array("x"))
