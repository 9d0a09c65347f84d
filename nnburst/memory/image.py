"""Strided images: pixel formats, layouts, and the copies between an image and an NHWC tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from ..errors import GeneralFailure, InvalidArgument
from ..model import Array

_MAX_LENGTH = 1 << 16
_PITCH_ALIGNMENT = 64


def fourcc(code: str) -> int:
    """Return the number of a DRM four-character code, e.g. ``"NV12"``."""
    return int.from_bytes(code.encode("ascii").ljust(4), "little")


class PlaneFormat(Struct, frozen=True):
    """One plane: `channels` elements per sample, and how many pixels of each direction share a sample."""

    channels: int
    subsampling: int = 1


class PixelFormat(Struct, frozen=True):
    """How a DRM fourcc stores pixels.

    Attributes:
        name: What people call it.
        fourcc: The DRM code; it names the channels from the highest bits down, hence seemingly backwards.
        dtype: Type of one channel.
        planes: The planes.
        order: For each channel of the tensor, its position in memory.
    """

    name: str
    fourcc: int
    dtype: str
    planes: tuple[PlaneFormat, ...]
    order: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one channel of one pixel."""
        return np.dtype(self.dtype).itemsize


_ROWS = (
    PixelFormat("RGB", fourcc("BG24"), "|u1", (PlaneFormat(3),), (0, 1, 2)),
    PixelFormat("BGR", fourcc("RG24"), "|u1", (PlaneFormat(3),), (2, 1, 0)),
    PixelFormat("RGBA", fourcc("AB24"), "|u1", (PlaneFormat(4),), (0, 1, 2, 3)),
    PixelFormat("BGRA", fourcc("AR24"), "|u1", (PlaneFormat(4),), (2, 1, 0, 3)),
    PixelFormat("GRAY8", fourcc("R8"), "|u1", (PlaneFormat(1),), (0,)),
    PixelFormat("NV12", fourcc("NV12"), "|u1", (PlaneFormat(1), PlaneFormat(2, 2)), (0,)),
    PixelFormat("FP16", fourcc("AB4H"), "<f2", (PlaneFormat(4),), (0, 1, 2, 3)),
)
FORMATS: dict[str, PixelFormat] = {row.name: row for row in _ROWS}
"""The formats that can be staged, by name."""
_BY_FOURCC = {row.fourcc: row for row in _ROWS}


class ImageLayout(Struct, frozen=True):
    """Where the pixels of a strided image lie.

    Attributes:
        width: Pixels.
        height: Pixels.
        layers: Images of equal layout, one behind the other; the N of the tensor.
        fourcc: DRM code.
        planes: (offset of the first byte, bytes from row to row) of each plane of the first layer.
        layer_stride: Bytes from layer to layer; 0 if there is one.
        modifier: DRM modifier; 0, linear, is the one that can be read.
    """

    width: int
    height: int
    fourcc: int
    planes: tuple[tuple[int, int], ...]
    layers: int = 1
    layer_stride: int = 0
    modifier: int = 0

    @property
    def span(self) -> int:
        """Bytes from the start of the object to the end of the last pixel."""
        return (self.layers - 1) * self.layer_stride + self._layer_end

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Dimensions of the NHWC tensor. NV12 is one channel of height * 3 / 2 rows: Y, then U and V interleaved."""
        form = format_of(self)
        height = self.height * 3 // 2 if len(form.planes) == 2 else self.height
        return self.layers, height, self.width, len(form.order)

    @property
    def known_shape(self) -> tuple[int, int, int, int] | None:
        """`shape`, or None if the format cannot be read here."""
        return None if self.fourcc not in _BY_FOURCC or self.modifier else self.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tensor's elements."""
        return np.dtype(format_of(self).dtype)

    @property
    def tight_size(self) -> int:
        """Bytes of the tensor: the pixels without the gaps between rows and layers."""
        n, h, w, c = self.shape
        return n * h * w * c * format_of(self).itemsize

    @property
    def _layer_end(self) -> int:
        form = _BY_FOURCC.get(self.fourcc)
        if form is None:  # nothing will be read; its part of a quota is guessed
            return max((offset + self.height * pitch for offset, pitch in self.planes), default=0)
        return max(
            offset + (rows - 1) * pitch + row_bytes
            for (offset, pitch), (rows, row_bytes) in zip(self.planes, _plane_sizes(self, form), strict=True)
        )


def format_of(layout: ImageLayout) -> PixelFormat:
    """Return the format of an image.

    Raises:
        GeneralFailure: The fourcc or the modifier cannot be read here.
    """
    form = _BY_FOURCC.get(layout.fourcc)
    if form is None or layout.modifier:
        code = layout.fourcc.to_bytes(4, "little").decode("ascii", "replace")
        raise GeneralFailure(
            f"images of DRM format {code!r} with modifier {layout.modifier:#x} cannot be read; linear "
            f"{', '.join(FORMATS)} can"
        )
    return form


def _plane_sizes(layout: ImageLayout, form: PixelFormat) -> list[tuple[int, int]]:
    """Return (rows, bytes of the pixels of a row) of each plane."""
    return [
        (layout.height // plane.subsampling, layout.width // plane.subsampling * plane.channels * form.itemsize)
        for plane in form.planes
    ]


def check_layout(layout: ImageLayout) -> None:
    """Refuse a layout that contradicts itself. An unknown format is not a contradiction: see `format_of`.

    Raises:
        InvalidArgument: A number is out of range, or rows, planes or layers overlap.
    """
    if not isinstance(layout, ImageLayout):
        raise InvalidArgument(f"expected an ImageLayout, got {type(layout).__name__}")
    for name, length in (("width", layout.width), ("height", layout.height), ("layers", layout.layers)):
        if not 1 <= length <= _MAX_LENGTH:
            raise InvalidArgument(f"{name} of an image is {length}; 1 to {_MAX_LENGTH} are possible")
    if not 0 <= layout.fourcc < 1 << 32 or not 0 <= layout.modifier < 1 << 64:
        raise InvalidArgument("fourcc has 32 bits and modifier 64")
    if not 1 <= len(layout.planes) <= 4 or any(min(offset, pitch) < 0 for offset, pitch in layout.planes):
        raise InvalidArgument(f"planes {layout.planes} of an image: 1 to 4 (offset, pitch) pairs are possible")
    if max(max(plane) for plane in layout.planes) >= 1 << 47 or not 0 <= layout.layer_stride < 1 << 47:
        raise InvalidArgument("an offset, pitch or layer stride of an image is out of range")
    form = _BY_FOURCC.get(layout.fourcc)
    if form is None:
        return
    if len(layout.planes) != len(form.planes):
        raise InvalidArgument(f"{form.name} has {len(form.planes)} planes, not {len(layout.planes)}")
    if any(plane.subsampling > 1 for plane in form.planes) and (layout.width | layout.height) & 1:
        raise InvalidArgument(f"{form.name} needs an even width and height, not {layout.width} x {layout.height}")
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
    """Lay out an image.

    Args:
        width: Pixels.
        height: Pixels.
        name: A key of `FORMATS`.
        layers: Number of images.
        pitch: Bytes from row to row; 0 for rows on 64-byte boundaries.

    Raises:
        InvalidArgument: The format is unknown or a number is out of range.
    """
    form = FORMATS.get(name) if isinstance(name, str) else None
    if form is None:
        raise InvalidArgument(f"image format {name!r} is unknown; {', '.join(FORMATS)} are the formats there are")
    rough = ImageLayout(width, height, form.fourcc, ((0, 0),) * len(form.planes), layers)
    if min(width, height, layers) < 1:
        raise InvalidArgument(f"an image of {width} x {height} x {layers} has no pixels")
    planes, end = [], 0
    for rows, row_bytes in _plane_sizes(rough, form):
        stride = pitch or -(-row_bytes // _PITCH_ALIGNMENT) * _PITCH_ALIGNMENT
        planes.append((end, stride))
        end += rows * stride
    layout = ImageLayout(width, height, form.fourcc, tuple(planes), layers, end if layers > 1 else 0)
    check_layout(layout)
    return layout


def plane_views(layout: ImageLayout, raw: Array) -> tuple[Array, ...]:
    """View the planes of an image in the bytes that hold it.

    Returns:
        For each plane a strided view (layers, rows, samples, channels), channels as they are in memory.
    """
    form = format_of(layout)
    return tuple(
        np.ndarray(
            (layout.layers, rows, row_bytes // (plane.channels * form.itemsize), plane.channels),
            form.dtype,
            raw,
            offset,
            (layout.layer_stride, pitch, plane.channels * form.itemsize, form.itemsize),
        )
        for plane, (offset, pitch), (rows, row_bytes) in zip(
            form.planes, layout.planes, _plane_sizes(layout, form), strict=True
        )
    )


def gather(layout: ImageLayout, planes: tuple[Array, ...], tensor: Array) -> None:
    """Copy an image into an NHWC tensor of `ImageLayout.shape`, channels as R, G, B, A."""
    for source, target in _pairs(layout, planes, tensor):
        np.copyto(target, source)


def scatter(layout: ImageLayout, planes: tuple[Array, ...], tensor: Array) -> None:
    """Copy an NHWC tensor into an image; what lies between the rows is left alone."""
    for target, source in _pairs(layout, planes, tensor):
        np.copyto(target, source)


def _pairs(layout: ImageLayout, planes: tuple[Array, ...], tensor: Array) -> list[tuple[Array, Array]]:
    """Return views of equal shape on image and tensor."""
    order = format_of(layout).order
    if len(planes) == 1:
        return [(planes[0][..., channel], tensor[..., where]) for where, channel in enumerate(order)]
    luma, chroma = planes
    n, rows, width, _ = luma.shape
    below = tensor[:, rows:].reshape(n, rows // 2, width // 2, 2)  # a view: the tensor is dense
    return [(luma, tensor[:, :rows]), (chroma, below)]
