"""Reductions over axes, arguments of extremes, TOPK_V2."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..call import Array, KernelCall


def _axes(call: KernelCall) -> tuple[int, ...]:
    return call.axes("axes", call.array("x").ndim)


def mean(call: KernelCall) -> None:
    """Mean of real values, in float64."""
    axes, shape = _axes(call), call.out().shape
    call.compute(lambda x: x.mean(axes, np.float64).reshape(shape), call.real("x"))


def reduce_floats(function: np.ufunc) -> Callable[[KernelCall], None]:
    """Return the kernel of a sum or product, in float64."""

    def kernel(call: KernelCall) -> None:
        axes, shape = _axes(call), call.out().shape
        call.compute(lambda x: function.reduce(x, axes, np.float64).reshape(shape), call.real("x"))

    return kernel


def reduce_stored(function: np.ufunc) -> Callable[[KernelCall], None]:
    """Return the kernel of an extreme: a larger stored value is a larger real one."""

    def kernel(call: KernelCall) -> None:
        axes, shape = _axes(call), call.out().shape
        call.move(lambda x: function.reduce(x, axes).reshape(shape), call.array("x"))

    return kernel


def reduce_truth(function: np.ufunc) -> Callable[[KernelCall], None]:
    """Return the kernel of "all" or "any"."""

    def kernel(call: KernelCall) -> None:
        axes, shape = _axes(call), call.out().shape
        call.move(lambda x: function.reduce(x != 0, axes).reshape(shape), call.array("x"))

    return kernel


def argument(function: Callable[[Array, int], Array]) -> Callable[[KernelCall], None]:
    """Return the kernel of ARGMAX or ARGMIN; the first index wins a tie."""

    def kernel(call: KernelCall) -> None:
        axis, shape = call.axis("axis", call.array("x").ndim), call.out().shape
        call.move(lambda x: function(x, axis).reshape(shape), call.array("x"))

    return kernel


def topk(call: KernelCall) -> None:
    """The k largest of the last axis, descending; of equal ones the last comes first."""
    k, values, indices = call.integer("k"), call.out(0), call.out(1)

    def function(x: Array) -> None:
        x = x.copy()
        order = np.argsort(x, -1, kind="stable")[..., ::-1][..., :k]
        indices[...] = order
        values[...] = np.take_along_axis(x, order, -1)

    call.do(function, call.array("x"))
