"""Geometry of sliding windows: convolutions and pools."""

from __future__ import annotations

from msgspec import Struct

from ..errors import InvalidArgument
from .operation_types import PaddingScheme
from .operation_view import OperationView


class Axis(Struct, frozen=True):
    """One spatial axis: all numbers in elements; `out` 0 is "not known yet"."""

    size: int
    filter: int
    stride: int
    dilation: int
    head: int
    tail: int
    out: int

    @property
    def is_plain(self) -> bool:
        """Whether nothing is padded."""
        return self.head == 0 and self.tail == 0


class WindowGeometry(Struct, frozen=True):
    """A window that slides over an image, in NHWC terms whatever the layout in memory."""

    batch: int
    channels: int
    height: Axis
    width: Axis
    nchw: bool

    def output_dims(self, channels: int) -> tuple[int, int, int, int]:
        """Return the dimensions of the output in the layout of the operation."""
        h, w = self.height.out, self.width.out
        return (self.batch, channels, h, w) if self.nchw else (self.batch, h, w, channels)


def image_dims(view: OperationView, name: str = "x") -> tuple[int, int, int, int, bool]:
    """Return batch, height, width, channels and whether the layout is NCHW."""
    dims = view.dims(name)
    if len(dims) != 4:
        raise InvalidArgument(f"{name} has rank {len(dims)}; it must be 4")
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
    view: OperationView, size: int, filter_size: int, stride_name: str, sides: tuple[str, str], given: int | None
) -> Axis:
    """An axis of a transposed convolution: `size` is that of the image, `out` that of the larger result."""
    stride = view.integer(stride_name, least=1)
    if filter_size < 1:
        raise InvalidArgument(f"the filter is {filter_size} wide; it must be at least 1")
    if view.partial and size == 0:
        return Axis(0, filter_size, stride, 1, 0, 0, 0)
    extent = (size - 1) * stride + filter_size
    if given is None:
        head, tail = (view.integer("pad_" + side, least=0) for side in sides)
        out = extent - head - tail
    else:
        scheme, out = view.integer("scheme"), given
        if scheme not in tuple(PaddingScheme):
            raise InvalidArgument(f"padding scheme {scheme} is neither 1 (SAME) nor 2 (VALID)")
        head = max(0, extent - out) // 2 if scheme == PaddingScheme.SAME else 0
        tail = extent - out - head
    if size < 1 or out < 1:
        raise InvalidArgument(f"{size} steps of a window of {filter_size} leave {out} elements")
    return Axis(size, filter_size, stride, 1, head, tail, out)


def transposed_axes(view: OperationView, filter_height: int, filter_width: int) -> WindowGeometry:
    """Return the geometry of a transposed convolution; `tail` may be negative, where nothing reaches.

    Raises:
        InvalidArgument: A number is out of range or nothing is left of the result.
    """
    batch, height, width, channels, nchw = image_dims(view)
    given: tuple[int | None, int | None] = (None, None)
    if view.count("out_shape"):
        shape = view.integers("out_shape")
        if len(shape) != 4:
            raise InvalidArgument(f"out_shape {shape} must have 4 entries")
        given = (shape[2], shape[3]) if nchw else (shape[1], shape[2])
    return WindowGeometry(
        batch,
        channels,
        _transposed_axis(view, height, filter_height, "stride_h", ("top", "bottom"), given[0]),
        _transposed_axis(view, width, filter_width, "stride_w", ("left", "right"), given[1]),
        nchw,
    )


def window_geometry(view: OperationView, filter_height: int, filter_width: int) -> WindowGeometry:
    """Return the geometry of an operation with strides and padding in the usual places of its signature.

    Raises:
        InvalidArgument: A number is out of range or the window does not fit.
    """
    batch, height, width, channels, nchw = image_dims(view)
    return WindowGeometry(
        batch,
        channels,
        _axis(view, height, filter_height, "stride_h", ("top", "bottom")),
        _axis(view, width, filter_width, "stride_w", ("left", "right")),
        nchw,
    )
