"""The meaning of an image's bytes in each format, written independently of `nnburst.memory.image`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from nnburst.memory import FORMATS, ImageLayout

CHANNELS = {
    "RGB": (0, 1, 2),
    "BGR": (2, 1, 0),
    "RGBA": (0, 1, 2, 3),
    "BGRA": (2, 1, 0, 3),
    "FP16": (0, 1, 2, 3),
    "GRAY8": (0,),
    "GRAY16": (0,),
    "R8G8": (0, 1),
    "R16G16": (0, 1),
}
"""Positions of R, G, B and A (or of the existing channels) in a pixel, for formats with one plane."""
PLANES = {"NV12": 2, "NV21": 2, "P010": 2, "I420": 3, "YV12": 3}
"""Number of planes of the other formats: Y, then one plane with pairs of U and V, or a plane of U and one of V."""
BYTES = {"FP16": 2, "GRAY16": 2, "R16G16": 2, "P010": 2}
FOURCC = {
    "RGB": "BG24",
    "BGR": "RG24",
    "RGBA": "AB24",
    "BGRA": "AR24",
    "FP16": "AB4H",
    "GRAY8": "R8  ",
    "GRAY16": "R16 ",
    "R8G8": "GR88",
    "R16G16": "GR32",
    "NV12": "NV12",
    "NV21": "NV21",
    "P010": "P010",
    "I420": "YU12",
    "YV12": "YV12",
}


def places(name: str, layout: ImageLayout) -> Iterator[int]:
    """Yield the offset in memory of each element of the tensor, in the order of the tensor."""
    size, width, height = BYTES.get(name, 1), layout.width, layout.height
    half_width, half_height = (width + 1) // 2, (height + 1) // 2
    for layer in range(layout.layers):
        base = layer * layout.layer_stride
        (first, pitch), *rest = layout.planes
        if name in CHANNELS:
            for y in range(height):
                for x in range(width):
                    for channel in CHANNELS[name]:
                        yield base + first + y * pitch + (x * len(CHANNELS[name]) + channel) * size
            continue
        for y in range(height):
            for x in range(width):
                yield base + first + y * pitch + x * size
        if len(rest) == 1:
            for y in range(half_height):
                for x in range(half_width):
                    for part in range(2):
                        yield base + rest[0][0] + y * rest[0][1] + (2 * x + part) * size
        for offset, step in rest if len(rest) == 2 else ():
            for y in range(half_height):
                for x in range(half_width):
                    yield base + offset + y * step + x * size


def pixel_bytes(name: str, layout: ImageLayout) -> set[int]:
    """Return the offsets of all bytes that belong to pixels. All other bytes are gaps."""
    return {place + i for place in places(name, layout) for i in range(BYTES.get(name, 1))}


def decode(name: str, layout: ImageLayout, raw: bytes) -> list[int]:
    """Return the numbers in memory in the order of the tensor. FP16 numbers are returned as their bits."""
    size = BYTES.get(name, 1)
    return [int.from_bytes(raw[place : place + size], "little") for place in places(name, layout)]


def bits(tensor: np.ndarray[Any, Any]) -> list[int]:
    """Return a tensor's numbers in the form that `decode` returns."""
    return tensor.reshape(-1).view(f"<u{tensor.dtype.itemsize}").tolist()  # type: ignore[no-any-return]


@st.composite
def layouts(draw: st.DrawFn, name: str) -> ImageLayout:
    """Draw a layout of a small image. The size, the order of the planes and the gaps vary."""
    width, height, layers = (draw(st.integers(1, most)) for most in (9, 7, 3))
    size, gap = BYTES.get(name, 1), st.integers(0, 3)
    half_width, half_height = (width + 1) // 2, (height + 1) // 2
    sizes = {
        1: [(height, width * size * len(CHANNELS.get(name, "Y")))],
        2: [(height, width * size), (half_height, 2 * half_width * size)],
        3: [(height, width), (half_height, half_width), (half_height, half_width)],
    }[PLANES.get(name, 1)]
    planes: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    end = start = draw(st.integers(0, 20))
    for index in draw(st.permutations(range(len(sizes)))):
        rows, row = sizes[index]
        pitch = row + draw(gap)
        planes[index] = end, pitch
        end += (rows - 1) * pitch + row + draw(gap)
    stride = end - start + draw(gap) if layers > 1 else 0
    fourcc = int.from_bytes(FOURCC[name].encode(), "little")
    return ImageLayout(width, height, fourcc, tuple(planes), layers, stride)


assert FOURCC.keys() == FORMATS.keys()
