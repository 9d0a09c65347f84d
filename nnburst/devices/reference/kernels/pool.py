"""Kernels of the 2-D pooling operations."""

from __future__ import annotations

import numpy as np

from ....model.types import Array
from ....model.window import WindowGeometry, window_geometry
from ...common import activation_limits
from ..call import KernelCall, clamping
from .windows import as_nhwc, pad_image, windows


def _geometry(call: KernelCall) -> WindowGeometry:
    return window_geometry(call, call.integer("filter_h", least=1), call.integer("filter_w", least=1))


def max_pool_2d(call: KernelCall) -> None:
    """MAX_POOL_2D: compare stored values, which have the order of the real values."""
    g, out = _geometry(call), call.out()
    image = as_nhwc(call.array("x"), g.nchw)
    lowest = -np.inf if image.dtype.kind == "f" else np.iinfo(image.dtype).min
    call.do(np.max, windows(pad_image(call, image, g, lowest), g), (3, 4), as_nhwc(out, g.nchw))
    for step in clamping(out, *activation_limits(call.output(), call.integer("act")), out):
        call.do(step)


def _cells(g: WindowGeometry) -> Array:
    """Return the number of image elements in each window as [out h, out w, 1]. Padding does not count."""

    def counts(size: int, filter_: int, stride: int, head: int, out: int) -> Array:
        first = np.arange(out) * stride - head
        return np.minimum(first + filter_, size) - np.maximum(first, 0)

    h, w = g.height, g.width
    down = counts(h.size, h.filter, h.stride, h.head, h.out)
    right = counts(w.size, w.filter, w.stride, w.head, w.out)
    return (down[:, None] * right[None, :])[..., None]


def _mean(call: KernelCall, image: Array, g: WindowGeometry, out: Array) -> None:
    call.do(np.sum, windows(pad_image(call, image, g), g), (3, 4), None, out)
    call.do(np.divide, out, _cells(g).astype(out.dtype), out)


def average_pool_2d(call: KernelCall) -> None:
    """AVERAGE_POOL_2D: mean of each window's elements. Padding does not count."""
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
