"""Kernels of convolutions and FULLY_CONNECTED.

Floats are computed in float32. For quantised data, stored values minus zero points are multiplied and summed in
float64, which is exact. Then the sums are scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np

from ....model.types import Array
from ....model.window import Axis, WindowGeometry, transposed_axes, window_geometry
from ..call import KernelCall, quantise
from .windows import as_nhwc, pad_image, windows

_COLUMNS_BYTES = 4 << 20
"""Largest size of a convolution's unfolded image in bytes. A larger image is unfolded in parts."""


def _store(call: KernelCall, sums: Callable[[], Array], nchw: bool = False) -> None:
    """Append a step that computes `sums` (channels last), adds the bias and stores the result."""
    bias, filter_, operand, code = call.centred("bias"), call.operand("filter"), call.output(), call.integer("act")
    if not call.info.is_quantised:
        real = as_nhwc(call.real_out(), nchw)
        call.do(lambda: np.add(sums(), bias, real))
        return
    channels, out = call.channel_scales("filter"), as_nhwc(call.out(), nchw)
    scales = filter_.scale if channels is None else np.array(channels[0])
    factor = call.operand("x").scale * scales / operand.scale
    call.do(lambda: np.copyto(out, quantise((sums() + bias) * factor, operand, code), "unsafe"))


def fully_connected(call: KernelCall) -> None:
    """FULLY_CONNECTED: [n, in] x [units, in] transposed."""
    matrix = call.centred("filter", lambda filter_: filter_.T)
    x = call.centred("x").reshape(-1, len(matrix))
    _store(call, lambda: x @ matrix)


def _windows(call: KernelCall, g: WindowGeometry) -> Array:
    return windows(pad_image(call, as_nhwc(call.centred("x"), g.nchw), g), g)


def conv_2d(call: KernelCall) -> None:
    """CONV_2D: multiply windows, unfolded to rows, by the filter as a matrix."""
    co, fh, fw, _ = call.dims("filter")
    g = window_geometry(call, fh, fw)
    matrix = call.centred("filter", lambda filter_: filter_.reshape(co, -1).T)
    _store(call, partial(_unfolded_product, _windows(call, g), matrix), g.nchw)


def _unfolded_product(every: Array, matrix: Array) -> Array:
    """Multiply windows by a matrix. About `_COLUMNS_BYTES` of windows at a time are unfolded to rows."""
    batch, height, width = every.shape[:3]
    size, co = matrix.shape
    at_once = max(1, _COLUMNS_BYTES // (size * matrix.itemsize))
    if batch * height * width <= at_once:
        return (every.reshape(-1, size) @ matrix).reshape(batch, height, width, co)
    sums = np.empty((batch, height, width, co), matrix.dtype)
    rows, wide = max(1, min(height, at_once // width)), min(width, at_once)
    for b, top, left in product(range(batch), range(0, height, rows), range(0, width, wide)):
        part, target = (array[b, top : top + rows, left : left + wide] for array in (every, sums))
        target[...] = (part.reshape(-1, size) @ matrix).reshape(target.shape)
    return sums


def depthwise_conv_2d(call: KernelCall) -> None:
    """DEPTHWISE_CONV_2D: convolve each channel separately, with `multiplier` results per channel."""
    _one, fh, fw, _ = call.dims("filter")
    g, multiplier = window_geometry(call, fh, fw), call.integer("multiplier")
    weights = call.centred("filter", lambda filter_: filter_.reshape(fh, fw, -1, multiplier))
    every = _windows(call, g)[..., None]

    def sums() -> Array:
        total = every[:, :, :, 0, 0] * weights[0, 0]
        for i, j in list(np.ndindex(fh, fw))[1:]:
            total += every[:, :, :, i, j] * weights[i, j]
        return np.asarray(total.reshape(*total.shape[:3], -1))

    _store(call, sums, g.nchw)


def grouped_conv_2d(call: KernelCall) -> None:
    """GROUPED_CONV_2D: convolve each group of channels with its own filters."""
    co, fh, fw, _ = call.dims("filter")
    groups, g = call.integer("groups"), window_geometry(call, fh, fw)
    matrices = call.centred("filter", lambda filter_: filter_.reshape(groups, co // groups, -1).transpose(0, 2, 1))
    parts = np.split(_windows(call, g), groups, -1)
    _store(call, lambda: np.concatenate(list(map(_unfolded_product, parts, matrices)), -1), g.nchw)


def transpose_conv_2d(call: KernelCall) -> None:
    """TRANSPOSE_CONV_2D: for each element of the image, add the filter times the element to the result."""
    co, fh, fw, _ = call.dims("filter")
    g = transposed_axes(call, fh, fw)
    matrices = call.centred("filter", lambda filter_: filter_.transpose(1, 2, 3, 0))
    image = as_nhwc(call.centred("x"), g.nchw)

    def sums() -> Array:
        dense, total = np.ascontiguousarray(image), np.zeros((g.batch, g.height.out, g.width.out, co), image.dtype)
        for i, j in np.ndindex(fh, fw):
            (rows, to_rows), (columns, to_columns) = _overlap(g.height, i), _overlap(g.width, j)
            total[:, to_rows, to_columns] += dense[:, rows, columns] @ matrices[i, j]
        return total

    _store(call, sums, g.nchw)


def _overlap(axis: Axis, tap: int) -> tuple[slice, slice]:
    """Return a slice of the image, and the slice of the result that gets the products with filter element `tap`."""
    shift = tap - axis.head
    first = max(0, -(shift // axis.stride))
    end = min(axis.size, (axis.out - 1 - shift) // axis.stride + 1)
    start = first * axis.stride + shift
    return slice(first, max(first, end)), slice(start, start + max(0, end - first) * axis.stride, axis.stride)
