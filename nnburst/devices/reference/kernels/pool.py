"""2-D pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....model import Array, WindowGeometry, window_geometry
from ..call import KernelCall
from .windows import as_nhwc, inner_part, padded_shape, taps, windows

_MANY_TAPS = 16
"""Above it one reduction over all windows is faster than a call per cell."""


def _geometry(call: KernelCall) -> WindowGeometry:
    return window_geometry(call, call.integer("filter_h", least=1), call.integer("filter_w", least=1))


def _padded(call: KernelCall, image: Array, g: WindowGeometry, filler: Any) -> Array:
    """Return the image, or a copy with `filler` around it that a step fills."""
    if g.height.is_plain and g.width.is_plain:
        return image
    padded = call.scratch(padded_shape(g), image.dtype)
    padded.fill(filler)
    call.do(np.copyto, inner_part(padded, g), image)
    return padded


def _reduce(call: KernelCall, function: np.ufunc, padded: Array, g: WindowGeometry, out: Array) -> None:
    """Append the steps that reduce every window to one element of `out`."""
    if g.height.filter * g.width.filter > _MANY_TAPS:
        call.do(function.reduce, windows(padded, g), (3, 4), None, out)
        return
    for i, j, view in taps(padded, g):
        if i == j == 0:
            call.do(np.copyto, out, view)
        else:
            call.do(function, out, view, out=out)


def max_pool_2d(call: KernelCall) -> None:
    """MAX_POOL_2D on stored values: a larger one is a larger real one, whatever the quantisation."""
    g = _geometry(call)
    image = as_nhwc(call.array("x"), g.nchw)
    lowest = -np.inf if image.dtype.kind == "f" else np.iinfo(image.dtype).min
    _reduce(call, np.maximum, _padded(call, image, g, lowest), g, as_nhwc(call.out(), g.nchw))
    call.clamp_out()


def _cells(g: WindowGeometry) -> Array:
    """Return how many cells of each window are inside the image, as [out h, out w, 1]."""

    def counts(size: int, filter_: int, stride: int, head: int, out: int) -> Array:
        first = np.arange(out) * stride - head
        return np.minimum(first + filter_, size) - np.maximum(first, 0)

    h, w = g.height, g.width
    down = counts(h.size, h.filter, h.stride, h.head, h.out)
    right = counts(w.size, w.filter, w.stride, w.head, w.out)
    return (down[:, None] * right[None, :])[..., None]


def _mean(call: KernelCall, image: Array, g: WindowGeometry, out: Array) -> None:
    _reduce(call, np.add, _padded(call, image, g, 0), g, out)
    call.do(np.divide, out, _cells(g).astype(out.dtype), out)


def average_pool_2d(call: KernelCall) -> None:
    """AVERAGE_POOL_2D: the divisor counts only cells inside the image."""
    g = _geometry(call)
    _mean(call, as_nhwc(call.real("x"), g.nchw), g, as_nhwc(call.real_out(), g.nchw))


def l2_pool_2d(call: KernelCall) -> None:
    """L2_POOL_2D: square root of the mean of squares."""
    g = _geometry(call)
    image, out = as_nhwc(call.real("x"), g.nchw), as_nhwc(call.real_out(), g.nchw)
    squares = call.scratch(image.shape, image.dtype)
    call.do(np.multiply, image, image, squares)
    _mean(call, squares, g, out)
    call.do(np.sqrt, out, out)
