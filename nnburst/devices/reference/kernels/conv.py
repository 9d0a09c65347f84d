"""Sums of products: convolutions and FULLY_CONNECTED.

Floats are computed in float32. Quantised values are centred (stored - zero point) and summed in float64, where
products of bytes and their sums are exact integers; the scales come last.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....model import WindowGeometry, window_geometry
from ..call import KernelCall
from .windows import as_nhwc, padded_shape, taps, windows, within

__all__ = ["conv_2d", "depthwise_conv_2d", "fully_connected"]

Array = np.ndarray[Any, np.dtype[Any]]

_COLUMNS_BYTES = 4 << 20
"""Size from which the unfolded image of a convolution is made piece by piece."""


def _accumulate(call: KernelCall, sums: Array, out: Array) -> None:
    """Append bias and scales to the sums of products, whose last axis is the channel, and move them to `out`."""
    call.do(np.add, sums, call.centred("bias"), sums)
    if call.info.is_quantised:
        scales = call.channel_scales("filter")
        factor = call.operand("x").scale * np.array(call.operand("filter").scale if scales is None else scales[0])
        call.do(np.multiply, sums, factor, sums)
    if not np.shares_memory(sums, out):
        call.do(np.copyto, out, sums)


def fully_connected(call: KernelCall) -> None:
    """FULLY_CONNECTED: [n, in] x [units, in] transposed."""
    matrix = call.centred("filter", lambda filter_: filter_.T)
    x = call.array("x").reshape(-1, matrix.shape[0])
    if x.dtype != call.real_dtype:
        rows = np.empty(x.shape, call.real_dtype)
        call.centre_into("x", x, rows)
        x = rows
    out = call.real_out()
    call.do(np.matmul, x, matrix, out)
    _accumulate(call, out, out)


def _centred_image(call: KernelCall, g: WindowGeometry) -> Array:
    """Return the image in NHWC, centred and padded with zeros; the array itself when nothing is to be done."""
    image = as_nhwc(call.array("x"), g.nchw)
    if image.dtype == call.real_dtype and g.height.is_plain and g.width.is_plain:
        return image
    padded = np.zeros(padded_shape(g), call.real_dtype)
    call.centre_into("x", image, within(padded, g))
    return padded


def conv_2d(call: KernelCall) -> None:
    """CONV_2D: windows unfolded to rows, times the filter as a matrix."""
    co, fh, fw, ci = call.dims("filter")
    g = window_geometry(call, fh, fw)
    matrix = call.centred("filter", lambda filter_: filter_.reshape(co, -1).T)
    image = _centred_image(call, g)
    out = as_nhwc(call.real_out(), g.nchw)
    sums = out if not g.nchw else np.empty(out.shape, call.real_dtype)
    pointwise = fh == fw == g.height.stride == g.width.stride == 1
    if pointwise and image.flags.c_contiguous:
        call.do(np.matmul, image.reshape(-1, ci), matrix, sums.reshape(-1, co))
    else:
        _unfolded_product(call, windows(image, g), matrix, sums)
    _accumulate(call, sums, out)


def _unfolded_product(call: KernelCall, every: Array, matrix: Array, sums: Array) -> None:
    """Append copy and product for all windows at once, or for as many rows at a time as fit the limit."""
    batch, height, width = every.shape[:3]
    size, co = matrix.shape
    row_bytes = width * size * matrix.itemsize
    if batch * height * row_bytes <= _COLUMNS_BYTES:
        columns = np.empty(every.shape, matrix.dtype)
        call.do(np.copyto, columns, every)
        call.do(np.matmul, columns.reshape(-1, size), matrix, sums.reshape(-1, co))
        return
    rows = max(1, min(height, _COLUMNS_BYTES // row_bytes))
    buffer = np.empty((rows, *every.shape[2:]), matrix.dtype)
    for b in range(batch):
        for first in range(0, height, rows):
            part = every[b, first : first + rows]
            columns = buffer[: len(part)]
            call.do(np.copyto, columns, part)
            target = sums[b, first : first + rows].reshape(-1, co)
            call.do(np.matmul, columns.reshape(-1, size), matrix, target)


def depthwise_conv_2d(call: KernelCall) -> None:
    """DEPTHWISE_CONV_2D: each channel by itself, `multiplier` results per channel."""
    _one, fh, fw, _co = call.dims("filter")
    g = window_geometry(call, fh, fw)
    multiplier = call.integer("multiplier")
    weights = call.centred("filter", lambda filter_: filter_.reshape(fh, fw, -1, multiplier))
    image = _centred_image(call, g)
    out = as_nhwc(call.real_out(), g.nchw)
    sums = out if not g.nchw else np.empty(out.shape, call.real_dtype)
    grouped = sums.reshape(*sums.shape[:3], g.channels, multiplier)
    product = np.empty(grouped.shape, grouped.dtype)
    for i, j, view in taps(image, g):
        if i == j == 0:
            call.do(np.multiply, view[..., None], weights[i, j], grouped)
        else:
            call.do(np.multiply, view[..., None], weights[i, j], product)
            call.do(np.add, grouped, product, grouped)
    _accumulate(call, sums, out)
