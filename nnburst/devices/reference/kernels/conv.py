"""Sums of products: convolutions and FULLY_CONNECTED.

Floats are computed in float32. Quantised values are centred (stored - zero point) and summed in float64, where
products of bytes and their sums are exact integers; the scales come last.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from ....model import Axis, WindowGeometry, transposed_axes, window_geometry
from ..call import KernelCall
from .windows import as_nhwc, padded_shape, taps, windows, within

__all__ = ["conv_2d", "depthwise_conv_2d", "fully_connected", "grouped_conv_2d", "transpose_conv_2d"]

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
    padded = call.scratch(padded_shape(g), call.real_dtype)
    padded.fill(0)
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
    """Append copy and product for all windows at once, or for as many at a time as fit the limit."""
    batch, height, width = every.shape[:3]
    size, co = matrix.shape
    at_once = max(1, _COLUMNS_BYTES // (size * matrix.itemsize))
    if batch * height * width <= at_once:
        columns = np.empty(every.shape, matrix.dtype)
        call.do(np.copyto, columns, every)
        call.do(np.matmul, columns.reshape(-1, size), matrix, sums.reshape(-1, co))
        return
    rows, wide = max(1, min(height, at_once // width)), min(width, at_once)
    buffer: Array = np.empty(rows * wide * size, matrix.dtype)
    for b, top, left in product(range(batch), range(0, height, rows), range(0, width, wide)):
        part = every[b, top : top + rows, left : left + wide]
        piece = buffer[: part.size].reshape(part.shape)
        call.do(np.copyto, piece, part)
        target = sums[b, top : top + rows, left : left + wide].reshape(-1, co)
        call.do(np.matmul, piece.reshape(-1, size), matrix, target)


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
    multiple = np.empty(grouped.shape, grouped.dtype)
    for i, j, view in taps(image, g):
        if i == j == 0:
            call.do(np.multiply, view[..., None], weights[i, j], grouped)
        else:
            call.do(np.multiply, view[..., None], weights[i, j], multiple)
            call.do(np.add, grouped, multiple, grouped)
    _accumulate(call, sums, out)


def grouped_conv_2d(call: KernelCall) -> None:
    """GROUPED_CONV_2D: every group of channels has filters of its own."""
    co, fh, fw, ci = call.dims("filter")
    groups, g = call.integer("groups"), window_geometry(call, fh, fw)
    matrices = call.centred("filter", lambda filter_: filter_.reshape(groups, co // groups, -1).transpose(0, 2, 1))
    every = windows(_centred_image(call, g), g)
    out = as_nhwc(call.real_out(), g.nchw)
    sums = out if not g.nchw else np.empty(out.shape, call.real_dtype)
    part = np.empty((*out.shape[:3], co // groups), call.real_dtype)
    for group in range(groups):
        _unfolded_product(call, every[..., group * ci : (group + 1) * ci], matrices[group], part)
        call.do(np.copyto, sums[..., group * (co // groups) : (group + 1) * (co // groups)], part)
    _accumulate(call, sums, out)


def transpose_conv_2d(call: KernelCall) -> None:
    """TRANSPOSE_CONV_2D: every element of the image adds a multiple of the filter to the result."""
    _, fh, fw, _ = call.dims("filter")
    g = transposed_axes(call, fh, fw)
    matrices = call.centred("filter", lambda filter_: filter_.transpose(1, 2, 3, 0))
    image = as_nhwc(call.array("x"), g.nchw)
    centred = np.empty(image.shape, call.real_dtype)
    call.centre_into("x", image, centred)
    out = as_nhwc(call.real_out(), g.nchw)
    sums = np.empty(out.shape, call.real_dtype)
    call.do(sums.fill, 0)
    for i, j in np.ndindex(fh, fw):
        rows, to_rows = _reached(g.height, i)
        columns, to_columns = _reached(g.width, j)
        target = sums[:, to_rows, to_columns]
        if target.size:
            call.do(_add_product, centred[:, rows, columns], matrices[i, j], target)
    _accumulate(call, sums, out)


def _reached(axis: Axis, tap: int) -> tuple[slice, slice]:
    """Return the elements of an image whose product with a tap of the filter stays in the result, and where it goes."""
    shift = tap - axis.head
    first = max(0, -(shift // axis.stride))
    end = min(axis.size, (axis.out - 1 - shift) // axis.stride + 1)
    start = first * axis.stride + shift
    return slice(first, max(first, end)), slice(start, start + max(0, end - first) * axis.stride, axis.stride)


def _add_product(a: Array, b: Array, sums: Array) -> None:
    sums += a @ b
