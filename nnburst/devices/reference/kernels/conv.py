"""Sums of products: convolutions and FULLY_CONNECTED.

Floats are computed in float32. Quantised values are centred (stored - zero point) and summed where products of bytes
and their sums are exact integers, in float32 if a filter is small enough, else in float64; the scales come last.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from ....model import Array, Axis, WindowGeometry, transposed_axes, window_geometry
from ..call import KernelCall
from .windows import as_nhwc, inner_part, padded_shape, windows

_COLUMNS_BYTES = 4 << 20
"""Size from which the unfolded image of a convolution is made piece by piece."""
_STRIP_BYTES = 1 << 16
"""Of a result that is added up at a time, tap by tap."""


def _new_sums(call: KernelCall, channel_axis: int, nchw: bool) -> Array:
    """Return the array for sums of products, channels last: the output itself if that can hold them."""
    out = as_nhwc(call.out(), nchw) if call.out().ndim == 4 else call.out()
    dtype = call.sum_dtype("filter", channel_axis)
    return out if out.dtype == dtype and not nchw else call.scratch(out.shape, dtype)


def _accumulate(call: KernelCall, sums: Array, nchw: bool = False) -> None:
    """Append bias, scales and activation, and move the sums of products to the output."""
    bias = call.centred("bias")
    if not call.info.is_quantised:
        call.do(np.add, sums, bias, sums)
        out = as_nhwc(call.real_out(), nchw) if sums.ndim == 4 else call.real_out()
        if not np.shares_memory(sums, out):
            call.do(np.copyto, out, sums)
        return
    channels, out = call.channel_scales("filter"), as_nhwc(call.out(), nchw) if sums.ndim == 4 else call.out()
    scales = call.operand("filter").scale if channels is None else np.array(channels[0])
    stored = call.scratch(out.shape, out.dtype) if nchw else out
    rows = (-1, sums.shape[-1])
    call.store_sums(sums.reshape(rows), stored.reshape(rows), bias, call.operand("x").scale * scales)
    if nchw:
        call.do(np.copyto, out, stored)


def fully_connected(call: KernelCall) -> None:
    """FULLY_CONNECTED: [n, in] x [units, in] transposed."""
    sums = _new_sums(call, 0, False)
    matrix = call.centred("filter", lambda filter_: filter_.T, sums.dtype.type)
    x = call.array("x").reshape(-1, matrix.shape[0])
    if x.dtype != sums.dtype:
        rows = call.scratch(x.shape, sums.dtype)
        call.centre_into("x", x, rows)
        x = rows
    call.do(np.matmul, x, matrix, sums)
    _accumulate(call, sums)


def _centred_image(call: KernelCall, g: WindowGeometry, dtype: Any) -> Array:
    """Return the image in NHWC, centred and padded with zeros; the array itself when nothing is to be done."""
    image = as_nhwc(call.array("x"), g.nchw)
    if image.dtype == dtype and g.height.is_plain and g.width.is_plain:
        return image
    padded = call.scratch(padded_shape(g), dtype)
    padded.fill(0)
    call.centre_into("x", image, inner_part(padded, g))
    return padded


def conv_2d(call: KernelCall) -> None:
    """CONV_2D: windows unfolded to rows, times the filter as a matrix."""
    co, fh, fw, ci = call.dims("filter")
    g = window_geometry(call, fh, fw)
    sums = _new_sums(call, 0, g.nchw)
    matrix = call.centred("filter", lambda filter_: filter_.reshape(co, -1).T, sums.dtype.type)
    image = _centred_image(call, g, sums.dtype)
    pointwise = fh == fw == g.height.stride == g.width.stride == 1
    if pointwise and image.flags.c_contiguous:
        call.do(np.matmul, image.reshape(-1, ci), matrix, sums.reshape(-1, co))
    else:
        _unfolded_product(call, windows(image, g), matrix, sums)
    _accumulate(call, sums, g.nchw)


def _unfolded_product(call: KernelCall, every: Array, matrix: Array, sums: Array) -> None:
    """Append copy and product for all windows at once, or for as many at a time as fit the limit."""
    batch, height, width = every.shape[:3]
    size, co = matrix.shape
    at_once = max(1, _COLUMNS_BYTES // (size * matrix.itemsize))
    if batch * height * width <= at_once:
        columns = call.scratch(every.shape, matrix.dtype)
        call.do(np.copyto, columns, every)
        call.do(np.matmul, columns.reshape(-1, size), matrix, sums.reshape(-1, co))
        return
    rows, wide = max(1, min(height, at_once // width)), min(width, at_once)
    buffer = call.scratch((rows * wide * size,), matrix.dtype)
    for b, top, left in product(range(batch), range(0, height, rows), range(0, width, wide)):
        part = every[b, top : top + rows, left : left + wide]
        piece = buffer[: part.size].reshape(part.shape)
        call.do(np.copyto, piece, part)
        target = sums[b, top : top + rows, left : left + wide].reshape(-1, co)
        call.do(np.matmul, piece.reshape(-1, size), matrix, target)


def depthwise_conv_2d(call: KernelCall) -> None:
    """DEPTHWISE_CONV_2D: each channel by itself, `multiplier` results per channel."""
    _one, fh, fw, co = call.dims("filter")
    g = window_geometry(call, fh, fw)
    sums = _new_sums(call, 3, g.nchw)
    weights = call.centred("filter", lambda filter_: filter_.reshape(fh, fw, co), sums.dtype.type)
    every = windows(_centred_image(call, g, sums.dtype), g)
    multiplier = call.integer("multiplier")
    if multiplier > 1:  # images of one row, of which each channel is seen by several filters
        weights, every = weights.reshape(fh, fw, -1, multiplier), every[..., None]
    call.do(_sum_taps, every, weights, sums.reshape(*sums.shape[:3], *weights.shape[2:]))
    _accumulate(call, sums, g.nchw)


def _sum_taps(every: Array, weights: Array, sums: Array) -> None:
    """Add up the cells of all windows times their weights, some rows of the result at a time, to stay in a cache."""
    batch, height = sums.shape[:2]
    rows = max(1, _STRIP_BYTES * height * batch // sums.nbytes)
    multiple = np.empty((min(rows, height), *sums.shape[2:]), sums.dtype)
    cells = [(i, j) for i in range(weights.shape[0]) for j in range(weights.shape[1])]
    for b, top in product(range(batch), range(0, height, rows)):
        target = sums[b, top : top + rows]
        part, product_ = every[b, top : top + rows], multiple[: len(target)]
        for i, j in cells:
            if i == j == 0:
                np.multiply(part[:, :, i, j], weights[i, j], target)
            else:
                np.multiply(part[:, :, i, j], weights[i, j], product_)
                np.add(target, product_, target)


def grouped_conv_2d(call: KernelCall) -> None:
    """GROUPED_CONV_2D: every group of channels has filters of its own."""
    co, fh, fw, ci = call.dims("filter")
    groups, g = call.integer("groups"), window_geometry(call, fh, fw)
    sums = _new_sums(call, 0, g.nchw)
    matrices = call.centred(
        "filter", lambda filter_: filter_.reshape(groups, co // groups, -1).transpose(0, 2, 1), sums.dtype.type
    )
    every = windows(_centred_image(call, g, sums.dtype), g)
    part = call.scratch((*sums.shape[:3], co // groups), sums.dtype)
    for group in range(groups):
        _unfolded_product(call, every[..., group * ci : (group + 1) * ci], matrices[group], part)
        call.do(np.copyto, sums[..., group * (co // groups) : (group + 1) * (co // groups)], part)
    _accumulate(call, sums, g.nchw)


def transpose_conv_2d(call: KernelCall) -> None:
    """TRANSPOSE_CONV_2D: every element of the image adds a multiple of the filter to the result."""
    _, fh, fw, _ = call.dims("filter")
    g = transposed_axes(call, fh, fw)
    sums = _new_sums(call, 0, g.nchw)
    matrices = call.centred("filter", lambda filter_: filter_.transpose(1, 2, 3, 0), sums.dtype.type)
    image = as_nhwc(call.array("x"), g.nchw)
    centred = call.scratch(image.shape, sums.dtype)
    call.centre_into("x", image, centred)
    call.do(sums.fill, 0)
    for i, j in np.ndindex(fh, fw):
        rows, to_rows = _reached(g.height, i)
        columns, to_columns = _reached(g.width, j)
        target = sums[:, to_rows, to_columns]
        if target.size:
            call.do(_add_product, centred[:, rows, columns], matrices[i, j], target)
    _accumulate(call, sums, g.nchw)


def _reached(axis: Axis, tap: int) -> tuple[slice, slice]:
    """Return the elements of an image whose product with a tap of the filter stays in the result, and where it goes."""
    shift = tap - axis.head
    first = max(0, -(shift // axis.stride))
    end = min(axis.size, (axis.out - 1 - shift) // axis.stride + 1)
    start = first * axis.stride + shift
    return slice(first, max(first, end)), slice(start, start + max(0, end - first) * axis.stride, axis.stride)


def _add_product(a: Array, b: Array, sums: Array) -> None:
    sums += a @ b
