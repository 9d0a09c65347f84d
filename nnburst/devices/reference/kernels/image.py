"""Images: blocks moved between depth, batch and space; resizing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....model import pad_widths
from ..call import Array, KernelCall
from .windows import as_nhwc


def _move_image(call: KernelCall, function: Callable[[Array], Array]) -> None:
    """Append a step that moves stored values of an NHWC view of x to one of the output."""
    nchw = bool(call.integer("nchw", 0))
    out = as_nhwc(call.out(), nchw)

    def step(x: Array) -> None:
        out[...] = function(as_nhwc(x, nchw)).reshape(out.shape)

    call.do(step, call.array("x"))


def depth_to_space(call: KernelCall) -> None:
    """Channels become blocks of block x block."""
    k = call.integer("block")

    def function(x: Array) -> Array:
        b, h, w, c = x.shape
        return x.reshape(b, h, w, k, k, c // (k * k)).transpose(0, 1, 3, 2, 4, 5)

    _move_image(call, function)


def space_to_depth(call: KernelCall) -> None:
    """Blocks of block x block become channels."""
    k = call.integer("block")

    def function(x: Array) -> Array:
        b, h, w, c = x.shape
        return x.reshape(b, h // k, k, w // k, k, c).transpose(0, 1, 3, 2, 4, 5)

    _move_image(call, function)


def batch_to_space(call: KernelCall) -> None:
    """Images of a batch become the elements of blocks."""
    down, right = call.integers("block")

    def function(x: Array) -> Array:
        b, h, w, c = x.shape
        return x.reshape(down, right, b // (down * right), h, w, c).transpose(2, 3, 0, 4, 1, 5)

    _move_image(call, function)


def space_to_batch(call: KernelCall) -> None:
    """Elements of blocks become images of a batch; the image is padded with the zero of its type."""
    down, right = call.integers("block")
    pads = [(0, 0), *pad_widths(call, 2), (0, 0)]
    zero = call.operand("x").zero_point

    def function(x: Array) -> Array:
        padded = np.pad(x, pads, constant_values=zero)
        b, h, w, c = padded.shape
        return padded.reshape(b, h // down, down, w // right, right, c).transpose(2, 4, 0, 1, 3, 5)

    _move_image(call, function)


def _positions(call: KernelCall, size: int, out: int, *, centred: bool) -> Array:
    """Return where each element of the result lies in the image, in float32.

    Args:
        call: A resize.
        size: Elements of the image along the axis.
        out: Elements of the result.
        centred: Whether half-pixel centres are subtracted again.
    """
    align, half = bool(call.integer("align_corners", 0)), bool(call.integer("half_pixel", 0))
    step = np.float32(size - 1) / np.float32(out - 1) if align and out > 1 else np.float32(size) / np.float32(out)
    offset = np.float32(0.5 if half else 0)
    place = (np.arange(out, dtype=np.float32) + offset) * step
    return np.asarray(place - offset if centred else place)


def resize_bilinear(call: KernelCall) -> None:
    """Each element is the mean of its four neighbours, weighted by distance."""
    nchw = bool(call.integer("nchw", 0))
    out = as_nhwc(call.real_out(), nchw)
    _, height, width, _ = as_nhwc(call.array("x"), nchw).shape

    def neighbours(size: int, out: int, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
        place = np.clip(_positions(call, size, out, centred=True), 0, size - 1)
        first = np.floor(place).astype(np.intp)
        return first, np.minimum(first + 1, size - 1), (place - first).astype(call.real_dtype).reshape(shape)

    down = neighbours(height, out.shape[1], (-1, 1, 1))
    across = neighbours(width, out.shape[2], (-1, 1))

    def along(image: Array, axis: int, places: tuple[Array, Array, Array]) -> Array:
        first, second, part = places
        return np.asarray(np.take(image, first, axis) * (1 - part) + np.take(image, second, axis) * part)

    rows_first = _rows_first((height, width), out.shape[1:3])

    def step(x: Array) -> None:
        image = as_nhwc(x, nchw)
        out[...] = along(along(image, 1, down), 2, across) if rows_first else along(along(image, 2, across), 1, down)

    call.do(step, call.real("x"))


def _rows_first(size: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Whether rows are taken before columns: what is in between must be no larger than the image or the result."""
    return out[0] * size[1] <= size[0] * out[1]


def resize_nearest(call: KernelCall) -> None:
    """Each element is that of the image which is nearest: rounded with aligned corners, else rounded down."""
    nchw, align = bool(call.integer("nchw")), bool(call.integer("align_corners", 0))
    _, height, width, _ = as_nhwc(call.array("x"), nchw).shape
    _, out_height, out_width, _ = as_nhwc(call.out(), nchw).shape

    def nearest(size: int, out: int) -> Array:
        place = _positions(call, size, out, centred=False)
        return np.minimum(np.floor(place + np.float32(0.5 if align else 0)).astype(np.intp), size - 1)

    rows, columns = nearest(height, out_height), nearest(width, out_width)
    if _rows_first((height, width), (out_height, out_width)):
        _move_image(call, lambda x: x[:, rows][:, :, columns])
    else:
        _move_image(call, lambda x: x[:, :, columns][:, rows])
