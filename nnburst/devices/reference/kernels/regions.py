"""Kernels of regions of interest in images, and of key points in heat maps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ....errors import GeneralFailure
from ....model.types import Array
from ..call import KernelCall
from .boxes import real_values
from .windows import as_nhwc

_MOST_SAMPLES = 1 << 12
"""Largest number of samples of a bin along an axis. More samples would not change the mean."""
_LARGEST_STEP = 1.5
_SINGULAR = 1e-5


def _each_region(
    call: KernelCall, image: Array, out: Array, fill: Callable[[Array, tuple[float, ...], Array], None]
) -> None:
    """Append a step that calls `fill(image, region in pixels, part of the output)` for each region."""
    nchw = bool(call.integer("nchw"))
    ratios = np.array([call.number("ratio_w"), call.number("ratio_h")] * 2)
    to_pixels = real_values(call, "roi")

    def step(image: Array, roi: Array, batch: Array) -> None:
        pictures, results = as_nhwc(image, nchw), as_nhwc(out, nchw)
        count, height, width, _ = pictures.shape
        regions, owners = to_pixels(roi) / ratios, batch.copy()
        limits = np.array([width, height] * 2)
        inside = (regions >= 0) & (regions <= limits * (1 + 1e-6)) & (regions == regions)
        ordered = (regions[:, :2] <= regions[:, 2:]).all()
        if not (inside.all() and ordered and ((owners >= 0) & (owners < count)).all()):
            raise GeneralFailure("a region is not inside its image, or has negative size, or no such image")
        for region, owner, result in zip(regions, owners, results, strict=True):
            fill(pictures[owner], tuple(float(number) for number in region), result)

    call.do(step, image, call.array("roi"), call.array("batch"))


def roi_align(call: KernelCall) -> None:
    """ROI_ALIGN: each bin is the mean of samples, interpolated between pixels."""
    samples = [call.integer(name) for name in ("samples_h", "samples_w")]

    def fill(image: Array, region: tuple[float, ...], out: Array) -> None:
        left, top, right, bottom = region
        columns = [_bin(left, right, out.shape[1], j, samples[1], image.shape[1]) for j in range(out.shape[1])]
        for i in range(out.shape[0]):
            rows, weights = _bin(top, bottom, out.shape[0], i, samples[0], image.shape[0])
            row = np.tensordot(weights, image[rows], 1)
            for j, (part, across) in enumerate(columns):
                out[i, j] = across @ row[part]

    _each_region(call, call.real("x"), call.real_out(), fill)


def _bin(start: float, end: float, bins: int, which: int, count: int, size: int) -> tuple[slice, Array]:
    """Return the pixels that a bin touches along an axis, and their weights in the bin's mean.

    Args:
        end: End of the region. A region shorter than a pixel is extended to one pixel.
        count: Number of samples in a bin; 0 for one per pixel.
    """
    length = max(end - start, 1.0) / bins
    count = min(count or int(np.ceil(length)), _MOST_SAMPLES)
    place = np.clip(start + length * (which + (np.arange(count) + 0.5) / count), 0, size - 1)
    first = np.floor(place).astype(np.intp)
    low, high = int(first[0]), min(int(first[-1]) + 1, size - 1)
    weights = np.zeros(high - low + 1)
    np.add.at(weights, first - low, 1 - (place - first))
    np.add.at(weights, np.minimum(first + 1, high) - low, place - first)
    return slice(low, high + 1), weights / count


def roi_pooling(call: KernelCall) -> None:
    """ROI_POOLING: each bin, with borders rounded outwards, is the maximum of its pixels, or 0 without pixels."""
    zero = call.operand("x").zero_point

    def borders(start: float, end: float, bins: int, size: int) -> tuple[Array, Array]:
        first = math.floor(start + 0.5)
        length, which = max(math.floor(end + 0.5) - first + 1, 1), np.arange(bins)
        low, high = first + length * which // bins, first - (-length * (which + 1) // bins)
        return np.clip(low, 0, size), np.clip(high, 0, size)

    def fill(image: Array, region: tuple[float, ...], out: Array) -> None:
        left, top, right, bottom = region
        rows = list(zip(*borders(top, bottom, out.shape[0], image.shape[0]), strict=True))
        columns = list(zip(*borders(left, right, out.shape[1], image.shape[1]), strict=True))
        for i, (y0, y1) in enumerate(rows):
            for j, (x0, x1) in enumerate(columns):
                part = image[y0:y1, x0:x1]
                out[i, j] = part.max((0, 1)) if part.size else zero

    _each_region(call, call.array("x"), call.out(), fill)


def heatmap_max_keypoint(call: KernelCall) -> None:
    """HEATMAP_MAX_KEYPOINT: the top of a parabola around the highest element of each heat map."""
    nchw = bool(call.integer("nchw"))
    scores, points = call.real_out(0), call.real_out(1)
    to_pixels = real_values(call, "boxes")

    def step(heat: Array, boxes: Array) -> None:
        maps = heat if nchw else heat.transpose(0, 3, 1, 2)
        for n, (x1, y1, x2, y2) in enumerate(to_pixels(boxes)):
            if not (x1 <= x2 and y1 <= y2):
                raise GeneralFailure(f"box {n} has negative size")
            for k, picture in enumerate(maps[n]):
                size = len(picture)
                row, column = divmod(int(picture.argmax()), size)
                right, down, scores[n, k] = _top(picture.astype(np.float64), row, column)
                points[n, k] = (
                    x1 + (column + right + 0.5) / size * (x2 - x1),
                    y1 + (row + down + 0.5) / size * (y2 - y1),
                )

    call.do(step, call.real("x"), call.array("boxes"))


def _top(picture: Array, row: int, column: int) -> tuple[float, float, float]:
    """Fit a parabola to an element and its neighbours. Return (x offset, y offset, height) of the parabola's top."""
    last = len(picture) - 1

    def around(centre: int) -> list[int]:
        """Return the positions of a pixel's neighbours along an axis, mirrored at the image's border."""
        return [centre - 1 if centre else 1, centre, centre + 1 if centre < last else last - 1]

    g = picture[np.ix_(around(row), around(column))]
    gradient = np.array([(g[1, 2] - g[1, 0]) / 2, (g[2, 1] - g[0, 1]) / 2])
    mixed = (g[2, 2] - g[2, 0] - g[0, 2] + g[0, 0]) / 4
    curvature = np.array([[g[1, 0] - 2 * g[1, 1] + g[1, 2], mixed], [mixed, g[0, 1] - 2 * g[1, 1] + g[2, 1]]])
    straight, mixed_twice = curvature[0, 0] * curvature[1, 1], mixed * mixed
    if not abs(straight - mixed_twice) >= _SINGULAR * (1 + straight):
        return 0.0, 0.0, float(g[1, 1])
    step = np.linalg.solve(curvature, -gradient)
    step *= min(1.0, _LARGEST_STEP / max(float(np.abs(step).max()), 1e-30))
    return float(step[0]), float(step[1]), float(g[1, 1] + gradient @ step + step @ curvature @ step / 2)
