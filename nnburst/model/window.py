"""Geometry of image operations: sliding windows, moved blocks, and positions of a resize."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from ..errors import InvalidArgument
from .operation_types import OperationType, PaddingScheme
from .operation_view import OperationView
from .types import Array


class Axis(Struct, frozen=True):
    """One spatial axis of a sliding window, in elements. `out` is 0 if unknown."""

    size: int
    filter: int
    stride: int
    dilation: int
    head: int
    tail: int
    out: int

    @property
    def is_plain(self) -> bool:
        return self.head == 0 and self.tail == 0


class WindowGeometry(Struct, frozen=True):
    """A window that slides over an image."""

    batch: int
    channels: int
    height: Axis
    width: Axis
    nchw: bool

    def output_dims(self, channels: int) -> tuple[int, int, int, int]:
        h, w = self.height.out, self.width.out
        return (self.batch, channels, h, w) if self.nchw else (self.batch, h, w, channels)


def image_dims(view: OperationView) -> tuple[int, int, int, int, bool]:
    """Return (batch, height, width, channels, True for NCHW) of the operation's input "x"."""
    dims = view.dims("x")
    if len(dims) != 4:
        raise InvalidArgument(f"x has rank {len(dims)}; it must be 4")
    nchw = bool(view.integer("nchw", 0))
    b, h, w, c = (dims[0], dims[2], dims[3], dims[1]) if nchw else dims
    return b, h, w, c, nchw


def _axis(view: OperationView, size: int, filter_size: int, stride_name: str, sides: tuple[str, str]) -> Axis:
    stride = view.integer(stride_name, least=1)
    dilation = view.integer("dilation_" + stride_name[-1], 1, least=1)
    extent = (filter_size - 1) * dilation + 1
    if filter_size < 1:
        raise InvalidArgument(f"the filter is {filter_size} wide; it must be at least 1")
    if size == 0 and view.partial:
        return Axis(0, filter_size, stride, dilation, 0, 0, 0)
    head = tail = 0
    if view.count("scheme"):
        scheme = view.integer("scheme")
        if scheme == PaddingScheme.SAME:
            total = max(0, (-(-size // stride) - 1) * stride + extent - size)
            head, tail = total // 2, total - total // 2
        elif scheme != PaddingScheme.VALID:
            raise InvalidArgument(f"padding scheme {scheme} is neither 1 (SAME) nor 2 (VALID)")
    else:
        head, tail = (view.integer("pad_" + side, least=0) for side in sides)
    out = (size + head + tail - extent) // stride + 1
    if size < 1 or out < 1:
        raise InvalidArgument(f"a window of {extent} does not fit into {size} elements padded by {head} and {tail}")
    return Axis(size, filter_size, stride, dilation, head, tail, out)


def _transposed_axis(
    view: OperationView, size: int, filter_size: int, stride_name: str, sides: tuple[str, str], out_size: int | None
) -> Axis:
    """Return one axis of a transposed convolution. The image has `size` elements along the axis."""
    stride = view.integer(stride_name, least=1)
    if filter_size < 1:
        raise InvalidArgument(f"the filter is {filter_size} wide; it must be at least 1")
    if view.partial and size == 0:
        return Axis(0, filter_size, stride, 1, 0, 0, 0)
    extent = (size - 1) * stride + filter_size
    if out_size is None:
        head, tail = (view.integer("pad_" + side, least=0) for side in sides)
        out = extent - head - tail
    else:
        scheme, out = view.integer("scheme"), out_size
        if scheme not in tuple(PaddingScheme):
            raise InvalidArgument(f"padding scheme {scheme} is neither 1 (SAME) nor 2 (VALID)")
        head = max(0, extent - out) // 2 if scheme == PaddingScheme.SAME else 0
        tail = extent - out - head
    if size < 1 or out < 1:
        raise InvalidArgument(f"{size} steps of a window of {filter_size} leave {out} elements")
    return Axis(size, filter_size, stride, 1, head, tail, out)


def transposed_axes(view: OperationView, filter_height: int, filter_width: int) -> WindowGeometry:
    """Return the geometry of a transposed convolution.

    If the `tail` of an axis is -n, no product is added to the last n elements of the result along this axis.
    """
    batch, height, width, channels, nchw = image_dims(view)
    out_sizes: tuple[int | None, int | None] = (None, None)
    if view.count("out_shape"):
        shape = view.integers("out_shape")
        if len(shape) != 4:
            raise InvalidArgument(f"out_shape {shape} must have 4 entries")
        out_sizes = (shape[2], shape[3]) if nchw else (shape[1], shape[2])
    return WindowGeometry(
        batch,
        channels,
        _transposed_axis(view, height, filter_height, "stride_h", ("top", "bottom"), out_sizes[0]),
        _transposed_axis(view, width, filter_width, "stride_w", ("left", "right"), out_sizes[1]),
        nchw,
    )


def window_geometry(view: OperationView, filter_height: int, filter_width: int) -> WindowGeometry:
    """Return the geometry of a convolution or pooling operation."""
    batch, height, width, channels, nchw = image_dims(view)
    return WindowGeometry(
        batch,
        channels,
        _axis(view, height, filter_height, "stride_h", ("top", "bottom")),
        _axis(view, width, filter_width, "stride_w", ("left", "right")),
        nchw,
    )


def block_axes(view: OperationView, dims: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of six axes that split a padded NHWC image into blocks, and the axes' new order."""
    (b, h, w, c), block = dims, view.integers("block")
    down, right = block if len(block) == 2 else block * 2
    match view.operation.type:
        case OperationType.DEPTH_TO_SPACE:
            return (b, h, w, down, right, c // (down * right)), (0, 1, 3, 2, 4, 5)
        case OperationType.SPACE_TO_DEPTH:
            return (b, h // down, down, w // right, right, c), (0, 1, 3, 2, 4, 5)
        case OperationType.BATCH_TO_SPACE_ND:
            return (down, right, b // (down * right), h, w, c), (2, 3, 0, 4, 1, 5)
    return (b, h // down, down, w // right, right, c), (2, 4, 0, 1, 3, 5)


def _resize_positions(view: OperationView, size: int, out: int, *, centred: bool) -> Array:
    """Return, for each element of the result, the position in the image as float32."""
    align, half = bool(view.integer("align_corners", 0)), bool(view.integer("half_pixel", 0))
    step = np.float32(size - 1) / np.float32(out - 1) if align and out > 1 else np.float32(size) / np.float32(out)
    offset = np.float32(0.5 if half else 0)
    place = (np.arange(out, dtype=np.float32) + offset) * step
    return np.asarray(place - offset if centred else place)


def nearest_places(view: OperationView, size: int, out: int) -> Array:
    """Return the index of each result element's source: rounded if corners are aligned, else rounded down."""
    place = _resize_positions(view, size, out, centred=False)
    half = np.float32(0.5 if view.integer("align_corners", 0) else 0)
    return np.minimum(np.floor(place + half).astype(np.int64), size - 1)


def neighbour_places(view: OperationView, size: int, out: int) -> tuple[Array, Array, Array]:
    """Return the two source elements around each result element, and the second one's weight."""
    place = np.clip(_resize_positions(view, size, out, centred=True), 0, size - 1)
    first = np.floor(place).astype(np.int64)
    return first, np.minimum(first + 1, size - 1), place - first


def resizes_rows_first(size: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Return True if resizing the rows first makes the intermediate array smaller."""
    return out[0] * size[1] <= size[0] * out[1]
