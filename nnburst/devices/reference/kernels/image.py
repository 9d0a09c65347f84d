"""Kernels that resize images, or move blocks between depth, batch and space."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....model.rows.shape import pad_widths
from ....model.types import Array
from ....model.window import block_axes, nearest_places, neighbour_places, resizes_rows_first
from ..call import KernelCall
from .windows import as_nhwc


def _move_image(call: KernelCall, function: Callable[[Array], Array]) -> None:
    """Append a step that applies `function` to the stored values of x in NHWC, and stores the result."""
    nchw = bool(call.integer("nchw", 0))
    out = as_nhwc(call.out(), nchw)

    def step(x: Array) -> None:
        out[...] = function(as_nhwc(x, nchw)).reshape(out.shape)

    call.do(step, call.array("x"))


def move_blocks(call: KernelCall) -> None:
    """Move blocks between depth, batch and space. Padding is the image's zero point."""
    dims = as_nhwc(call.array("x"), bool(call.integer("nchw", 0))).shape
    pads = [(0, 0), *pad_widths(call, 2), (0, 0)] if call.count("pads") else []
    zero = call.operand("x").zero_point
    padded = tuple(size + sum(pad) for size, pad in zip(dims, pads, strict=True)) if pads else dims
    apart, axes = block_axes(call, padded)

    def function(x: Array) -> Array:
        image = np.pad(x, pads, constant_values=zero) if pads else x
        return image.reshape(apart).transpose(axes)

    _move_image(call, function)


def resize_bilinear(call: KernelCall) -> None:
    """RESIZE_BILINEAR: compute the mean of four neighbours, weighted by distance."""
    nchw = bool(call.integer("nchw", 0))
    out = as_nhwc(call.real_out(), nchw)
    _, height, width, _ = as_nhwc(call.array("x"), nchw).shape
    down, across = neighbour_places(call, height, out.shape[1]), neighbour_places(call, width, out.shape[2])

    def along(axis: int, places: tuple[Array, Array, Array]) -> Callable[[Array], Array]:
        first, second, part = places
        part = part.astype(call.real_dtype).reshape(-1, *[1] * (3 - axis))
        return lambda image: np.take(image, first, axis) * (1 - part) + np.take(image, second, axis) * part

    ways = along(1, down), along(2, across)
    before, after = ways if resizes_rows_first((height, width), out.shape[1:3]) else ways[::-1]

    def step(x: Array) -> None:
        out[...] = after(before(as_nhwc(x, nchw)))

    call.do(step, call.real("x"))


def resize_nearest(call: KernelCall) -> None:
    nchw = bool(call.integer("nchw"))
    _, height, width, _ = as_nhwc(call.array("x"), nchw).shape
    _, out_height, out_width, _ = as_nhwc(call.out(), nchw).shape
    rows, columns = nearest_places(call, height, out_height), nearest_places(call, width, out_width)
    _move_image(call, lambda x: x[:, rows[:, None], columns])
