"""Object detection on the reference device against loops; test_oracle_detection.py has random cases."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from nnburst.errors import ErrorStatus
from support.operations import F16, F32, I32, QUANTS, Array, Box, Case, Fx, O, T, Typed, rng

X = rng(1).normal(size=(2, 8, 10, 3))
REGIONS = np.array([[0.0, 0, 20, 16], [3.5, 2, 9.25, 11], [8, 8, 8, 8], [1, 0.5, 6, 15.5]])
OWNERS = Typed([0, 1, 1, 0], I32)


def bilinear(image: Array, y: float, x: float) -> Array:
    y, x = min(max(y, 0), image.shape[0] - 1), min(max(x, 0), image.shape[1] - 1)
    total = np.zeros(image.shape[2])
    for r, c in itertools.product(range(image.shape[0]), range(image.shape[1])):
        total += max(0, 1 - abs(y - r)) * max(0, 1 - abs(x - c)) * image[r, c]
    return total


@pytest.mark.parametrize("samples", [(2, 3), (0, 0)])
def test_roi_align(samples: tuple[int, int]) -> None:
    def wanted(x: Array, regions: Array, owners: Array, ratio_h: float, ratio_w: float) -> Array:
        out = np.zeros((len(regions), 3, 2, x.shape[3]))
        for n, (x1, y1, x2, y2) in enumerate(regions / [ratio_w, ratio_h, ratio_w, ratio_h]):
            h, w = max(y2 - y1, 1), max(x2 - x1, 1)
            down, right = samples[0] or math.ceil(h / 3), samples[1] or math.ceil(w / 2)
            for i, j in itertools.product(range(3), range(2)):
                taken = [
                    bilinear(x[owners[n]], y1 + (i + (p + 0.5) / down) * h / 3, x1 + (j + (q + 0.5) / right) * w / 2)
                    for p, q in itertools.product(range(down), range(right))
                ]
                out[n, i, j] = np.mean(taken, 0)
        return out

    tail = (3, 2, Fx(2.0), Fx(2.0), *samples)
    Case(O.ROI_ALIGN, X, Box(REGIONS), OWNERS, *tail, False).check(wanted)
    Case(O.ROI_ALIGN, X.transpose(0, 3, 1, 2), Box(REGIONS), OWNERS, *tail, True).check(
        lambda x, *rest: wanted(x.transpose(0, 2, 3, 1), *rest).transpose(0, 3, 1, 2), (F32,)
    )


def test_roi_pooling() -> None:
    def wanted(x: Array, regions: Array, owners: Array, ratio_h: float, ratio_w: float) -> Array:
        out = np.zeros((len(regions), 3, 2, x.shape[3]))
        for n, box in enumerate(regions / [ratio_w, ratio_h, ratio_w, ratio_h]):
            x1, y1, x2, y2 = (math.floor(v + 0.5) for v in box)
            h, w = max(y2 - y1 + 1, 1) / 3, max(x2 - x1 + 1, 1) / 2
            for i, j in itertools.product(range(3), range(2)):
                rows = slice(max(math.floor(y1 + i * h), 0), min(math.ceil(y1 + (i + 1) * h), 8))
                columns = slice(max(math.floor(x1 + j * w), 0), min(math.ceil(x1 + (j + 1) * w), 10))
                part = x[owners[n], rows, columns]
                out[n, i, j] = part.max((0, 1)) if part.size else 0
        return out

    Case(O.ROI_POOLING, X, Box(REGIONS), OWNERS, 3, 2, Fx(2.0), Fx(2.0), False).check(wanted)


@pytest.mark.parametrize(
    ("region", "owner"),
    [([0, 0, 21, 5], 0), ([5, 0, 4, 5], 0), ([0, 5, 4, 4], 0), ([0, 0, 4, 4], 2), ([0, 0, 4, 4], -1)],
)
def test_bad_regions_fail_the_execution(region: list[int], owner: int) -> None:
    for operation, samples in ((O.ROI_ALIGN, (0, 0)), (O.ROI_POOLING, ())):
        case = Case(
            operation, X, Box(np.array([region], float)), Typed([owner], I32), 2, 2, Fx(2.0), Fx(2.0), *samples, False
        )
        with pytest.raises(AssertionError, match=str(ErrorStatus.GENERAL_FAILURE)):
            case.run(F32)


BOXES = np.array([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30], [0, 0, 10, 9], [21, 20, 30, 30]])


@pytest.mark.parametrize("kind", [F16, *QUANTS])
@pytest.mark.parametrize("kernel", [0, 1, 2])
def test_boxes_are_suppressed_in_every_type_as_in_floats(kernel: int, kind: T) -> None:
    scores = np.array([[0.1, 0.9, 0.3], [0.0, 0.85, 0.6], [0.2, 0.7, 0.1], [0.3, 0.8, 0.55], [0.1, 0.2, 0.9]])
    numbers = (Fx(0.15), 3, kernel, Fx(0.4), Fx(0.5), Fx(0.3))
    boxes, owners = Box(np.concatenate([BOXES, BOXES, BOXES + 1], 1)), Typed([0, 0, 0, 1, 1], I32)
    case = Case(O.BOX_WITH_NMS_LIMIT, scores, boxes, owners, *numbers)
    wanted, real, _ = case.run(F32)
    found, values, _ = case.run(kind)
    assert [part.tolist() for part in found[2:]] == [part.tolist() for part in wanted[2:]]
    np.testing.assert_allclose(values[0], real[0], atol=0.005)
    np.testing.assert_allclose(values[1], real[1], atol=0.07)


def test_nothing_above_the_threshold_gives_empty_outputs() -> None:
    scores, boxes = np.full((2, 2), 0.1), np.tile(BOXES[:2], (1, 2))
    case = Case(O.BOX_WITH_NMS_LIMIT, scores, Box(boxes), Typed([0, 0], I32), Fx(0.5), -1, 0, Fx(0.5), Fx(1), Fx(0))
    outputs, _, _ = case.run(F32)
    assert [out.shape for out in outputs] == [(0,), (0, 4), (0,), (0,)]


@pytest.mark.parametrize("nchw", [False, True])
def test_key_points_of_parabolas(nchw: bool) -> None:
    """On a paraboloid the fit is exact, wherever its top is between the cells."""
    size, tops = 6, [(2.3, 3.4), (1.75, 4.0)]
    rows, columns = np.mgrid[:size, :size]
    heat = np.stack([5 - (rows - r) ** 2 / 4 - (columns - c) ** 2 / 8 for r, c in tops], -1)[None]
    boxes = np.array([[8.0, 4, 20, 28]])
    x = heat.transpose(0, 3, 1, 2) if nchw else heat

    def wanted(*_: Any) -> tuple[Array, Array]:
        points = [[8 + (c + 0.5) / size * 12, 4 + (r + 0.5) / size * 24] for r, c in tops]
        return np.full((1, 2), 5.0), np.array([points])

    Case(O.HEATMAP_MAX_KEYPOINT, x, Box(boxes), nchw).check(wanted, (F32,))
    for kind in (F16, *QUANTS):
        made = [] if kind == F16 else [(0.03, 0), (0.125, 0)]
        _, values, expected = Case(O.HEATMAP_MAX_KEYPOINT, x, Box(boxes), nchw).run(kind, wanted, quantisations=made)
        np.testing.assert_allclose(values[1], expected[1], atol=0.6)
