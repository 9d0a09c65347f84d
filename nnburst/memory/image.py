"""Strided images: pixel formats, layouts, and the copies between an image and a tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, replace

from .._core.errno import as_int
from ..errors import InvalidArgument
from ..model.types import Array

_MAX_LENGTH = 1 << 16
_PITCH_ALIGNMENT = 64


def fourcc(code: str) -> int:
    """Return the number of a DRM four-character code, e.g. ``"NV12"``."""
    return int.from_bytes(code.encode("ascii").ljust(4), "little")


class PlaneFormat(Struct, frozen=True):
    """A plane of an image. A sample has `channels` elements and covers `subsampling` pixels in each direction."""

    channels: int
    subsampling: int = 1


class PixelFormat(Struct, frozen=True):
    """A storage format of pixels.

    Attributes:
        name: Common name.
        fourcc: The DRM code, which names the channels in reverse memory order.
        dtype: Name of the type of one channel.
        order: Position in memory of each channel of the tensor; empty if memory has the tensor's order.
    """

    name: str
    fourcc: int
    dtype: str
    planes: tuple[PlaneFormat, ...]
    order: tuple[int, ...] = ()

    @property
    def element(self) -> np.dtype[Any]:
        """The NumPy type of one channel."""
        return np.dtype(self.dtype)


_SEMI_PLANAR = (PlaneFormat(1), PlaneFormat(2, 2))
_PLANAR = (PlaneFormat(1), PlaneFormat(1, 2), PlaneFormat(1, 2))
_ROWS = (
    PixelFormat("RGB", fourcc("BG24"), "|u1", (PlaneFormat(3),)),
    PixelFormat("BGR", fourcc("RG24"), "|u1", (PlaneFormat(3),), order=(2, 1, 0)),
    PixelFormat("RGBA", fourcc("AB24"), "|u1", (PlaneFormat(4),)),
    PixelFormat("BGRA", fourcc("AR24"), "|u1", (PlaneFormat(4),), order=(2, 1, 0, 3)),
    PixelFormat("FP16", fourcc("AB4H"), "<f2", (PlaneFormat(4),)),
    PixelFormat("GRAY8", fourcc("R8"), "|u1", (PlaneFormat(1),)),
    PixelFormat("GRAY16", fourcc("R16"), "<u2", (PlaneFormat(1),)),
    PixelFormat("R8G8", fourcc("GR88"), "|u1", (PlaneFormat(2),)),
    PixelFormat("R16G16", fourcc("GR32"), "<u2", (PlaneFormat(2),)),
    PixelFormat("NV12", fourcc("NV12"), "|u1", _SEMI_PLANAR),
    PixelFormat("NV21", fourcc("NV21"), "|u1", _SEMI_PLANAR),
    PixelFormat("P010", fourcc("P010"), "<u2", _SEMI_PLANAR),
    PixelFormat("I420", fourcc("YU12"), "|u1", _PLANAR),
    PixelFormat("YV12", fourcc("YV12"), "|u1", _PLANAR),
)
FORMATS: dict[str, PixelFormat] = {row.name: row for row in _ROWS}
"""The formats that can be read and written, by name."""
_BY_FOURCC = {row.fourcc: row for row in _ROWS}
_OF_ONE_PLANE = {(1, 1): "GRAY8", (1, 2): "R8G8", (2, 1): "GRAY16", (2, 2): "R16G16"}
"""Formats of single planes, by the size of an element in bytes and the number of channels."""


class ImageLayout(Struct, frozen=True):
    """The layout of a strided image's pixels.

    Attributes:
        width: Pixels.
        height: Pixels.
        layers: Number of images of equal layout; the N of the NHWC tensor.
        fourcc: DRM code of a linear format; docs/memory.md lists the supported ones.
        planes: (first byte in the memory object, bytes from row to row) of each plane of the first layer.
        layer_stride: Bytes from layer to layer; 0 if there is only one.

    Example:
        >>> layout = nnburst.memory.ImageLayout(640, 480, nnburst.memory.FORMATS["GRAY8"].fourcc, ((0, 640),))
        >>> layout.shape, layout.span
        ((1, 480, 640, 1), 307200)
    """

    width: int
    height: int
    fourcc: int
    planes: tuple[tuple[int, int], ...]
    layers: int = 1
    layer_stride: int = 0

    @property
    def start(self) -> int:
        """Position of the first pixel in the memory object, in bytes."""
        return min(offset for offset, _ in self.planes)

    @property
    def span(self) -> int:
        """Bytes from `start` to the end of the last pixel."""
        sizes = zip(self.planes, _plane_sizes(self, format_of(self)), strict=True)
        end = max(offset + (rows - 1) * pitch + row_bytes for (offset, pitch), (rows, row_bytes) in sizes)
        return (self.layers - 1) * self.layer_stride + end - self.start

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Dimensions of the NHWC tensor.

        The tensor of an image with several planes has one channel. It contains the rows of Y, then the rows of
        the other planes; each row has `width` elements. If `width` is odd, the tensor has one row with all elements.
        """
        form = format_of(self)
        if len(form.planes) == 1:
            return self.layers, self.height, self.width, form.planes[0].channels
        length = sum(rows * row_bytes for rows, row_bytes in _plane_sizes(self, form)) // form.element.itemsize
        width = length if self.width & 1 else self.width
        return self.layers, length // width, width, 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tensor's elements."""
        return format_of(self).element

    @property
    def tight_size(self) -> int:
        """Bytes of the tensor, which are the pixels without the gaps between rows, planes and layers."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_tensor(self) -> bool:
        """True if the bytes from `start` on are the tensor's bytes, without gaps and in the same order."""
        form = format_of(self)
        offsets = [offset for offset, _ in self.planes]
        return not form.order and offsets == sorted(offsets) and self.span == self.tight_size


def format_of(layout: ImageLayout) -> PixelFormat:
    """Return the format of an image. Raises `InvalidArgument` if its fourcc is unknown."""
    form = _BY_FOURCC.get(layout.fourcc)
    if form is None:
        raise InvalidArgument(
            f"images of DRM format {layout.fourcc:#x} cannot be read; those of {', '.join(FORMATS)} can"
        )
    return form


def _plane_sizes(layout: ImageLayout, form: PixelFormat) -> list[tuple[int, int]]:
    """Return (number of rows, bytes of a row without its gap) for each plane. An odd image size is rounded up."""
    return [
        (
            -(-layout.height // plane.subsampling),
            -(-layout.width // plane.subsampling) * plane.channels * form.element.itemsize,
        )
        for plane in form.planes
    ]


def check_layout(layout: ImageLayout) -> None:
    """Raise `InvalidArgument` if a layout contradicts itself or has an unknown format."""
    if not isinstance(layout, ImageLayout):
        raise InvalidArgument(f"expected an ImageLayout, got {type(layout).__name__}")
    try:
        convert(asdict(layout), ImageLayout)
    except ValidationError as error:
        raise InvalidArgument(f"the layout of an image: {error}") from None
    for name, length in (("width", layout.width), ("height", layout.height), ("layers", layout.layers)):
        if not 1 <= length <= _MAX_LENGTH:
            raise InvalidArgument(f"{name} of an image is {length}; 1 to {_MAX_LENGTH} are possible")
    form = format_of(layout)
    numbers = (layout.layer_stride, *(number for plane in layout.planes for number in plane))
    if not all(0 <= number < 1 << 47 for number in numbers):
        raise InvalidArgument("an offset, pitch or layer stride of an image is out of range")
    if len(layout.planes) != len(form.planes):
        raise InvalidArgument(f"{form.name} has {len(form.planes)} planes, not {len(layout.planes)}")
    end = 0
    for (offset, pitch), (rows, row_bytes) in sorted(zip(layout.planes, _plane_sizes(layout, form), strict=True)):
        if pitch < row_bytes:
            raise InvalidArgument(f"a row of {form.name} has {row_bytes} bytes; its pitch is {pitch}")
        if offset < end:
            raise InvalidArgument(f"a plane begins at {offset}, in the one that ends at {end}")
        end = offset + (rows - 1) * pitch + row_bytes
    if layout.layers > 1 and layout.layer_stride < end - min(offset for offset, _ in layout.planes):
        raise InvalidArgument(f"layers of {end} bytes overlap with a layer stride of {layout.layer_stride}")


def new_layout(width: int, height: int, name: str, layers: int = 1, pitch: int = 0) -> ImageLayout:
    """Return the layout of a new image. The caller checks the layout with `check_layout`.

    Args:
        name: A key of `FORMATS`.
        pitch: See `Memory.hardware_buffer`.

    Raises:
        InvalidArgument: The format is unknown, or a number is malformed or negative.
    """
    form = FORMATS.get(name) if isinstance(name, str) else None
    if form is None:
        raise InvalidArgument(f"image format {name!r} is unknown; {', '.join(FORMATS)} are the formats there are")
    width, height, layers = as_int(width, "width"), as_int(height, "height"), as_int(layers, "layers")
    pitch = as_int(pitch, "pitch", " of bytes")
    rough = ImageLayout(width, height, form.fourcc, ((0, 0),) * len(form.planes), layers)
    if min(width, height, layers) < 1:
        raise InvalidArgument(f"an image of {width} x {height} x {layers} has no pixels")
    planes: list[tuple[int, int]] = []
    end = 0
    for plane, (rows, row_bytes) in zip(form.planes, _plane_sizes(rough, form), strict=True):
        itemsize = form.element.itemsize
        derived = -(-pitch // (plane.subsampling * itemsize)) * plane.channels * itemsize if planes else pitch
        stride = derived or -(-row_bytes // _PITCH_ALIGNMENT) * _PITCH_ALIGNMENT
        planes.append((end, stride))
        end += rows * stride
    return ImageLayout(width, height, form.fourcc, tuple(planes), layers, end if layers > 1 else 0)


def plane_layout(layout: ImageLayout, index: int) -> ImageLayout:
    """Return the layout of one plane as a separate image of format GRAY8, R8G8, GRAY16 or R16G16.

    Raises:
        InvalidArgument: There is no such plane.
    """
    form = format_of(layout)
    if as_int(index, "plane") not in range(len(form.planes)):
        raise InvalidArgument(f"plane {index} of {form.name}, which has {len(form.planes)}")
    if len(form.planes) == 1:
        return layout
    itemsize, channels = form.element.itemsize, form.planes[index].channels
    rows, row_bytes = _plane_sizes(layout, form)[index]
    alone = FORMATS[_OF_ONE_PLANE[itemsize, channels]]
    width, planes = row_bytes // (itemsize * channels), (layout.planes[index],)
    return replace(layout, width=width, height=rows, fourcc=alone.fourcc, planes=planes)


def plane_views(layout: ImageLayout, raw: Array) -> tuple[Array, ...]:
    """Return a strided view (layers, rows, samples, channels) of each plane; channels are in memory order."""
    form = format_of(layout)
    element, views = form.element, []
    sizes = zip(form.planes, layout.planes, _plane_sizes(layout, form), strict=True)
    for plane, (offset, pitch), (rows, row_bytes) in sizes:
        sample = plane.channels * element.itemsize
        shape = layout.layers, rows, row_bytes // sample, plane.channels
        strides = layout.layer_stride, pitch, sample, element.itemsize
        views.append(np.ndarray(shape, element, raw, offset - layout.start, strides))
    return tuple(views)


def gather(layout: ImageLayout, planes: tuple[Array, ...], tensor: Array) -> None:
    """Copy an image into a dense tensor of `ImageLayout.shape`, with channels in the order R, G, B, A."""
    for source, target in _pairs(layout, planes, tensor):
        np.copyto(target, source)


def scatter(layout: ImageLayout, planes: tuple[Array, ...], tensor: Array) -> None:
    """Copy a dense tensor into an image; bytes between the rows stay unchanged."""
    for target, source in _pairs(layout, planes, tensor):
        np.copyto(target, source)


def _pairs(layout: ImageLayout, planes: tuple[Array, ...], tensor: Array) -> list[tuple[Array, Array]]:
    """Return pairs of views of the same shape: the first is of the image, the second of the tensor."""
    form = format_of(layout)
    if form.order:
        return [(planes[0][..., channel], tensor[..., where]) for where, channel in enumerate(form.order)]
    flat, pairs, end = tensor.reshape(layout.layers, -1), [], 0
    for plane in planes:
        start, end = end, end + plane[0].size
        pairs.append((plane, flat[:, start:end].reshape(plane.shape)))  # The tensor is dense, so this is a view.
    return pairs
