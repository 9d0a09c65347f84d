"""Regions, boxes and key points at random, against ONNX Runtime where it has the operation, else against loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nnburst import ModelBuilder
from nnburst.errors import ErrorStatus
from support.operations import F32, I32, REALS, Array, Box, Case, Fx, O, T, Typed, run_model
from support.oracles import Dice, by_onnx, drawn, to_nchw, to_nhwc


def eighths(dice: Dice, count: int, height: float, width: float) -> Array:
    """Boxes x1, y1, x2, y2 inside an image, on a grid that 16 bits hold exactly."""
    edges = np.sort(dice.rng.integers(0, 8 * np.array([width, height]) + 1, (count, 2, 2)), axis=1) / 8
    return edges.reshape(count, 4)


@drawn
def test_roi_align(dice: Dice) -> None:
    size, ratio, nchw = dice.sizes(2, 9), (dice.one([1.0, 2.0, 4.0]), dice.one([1.0, 2.0])), dice.truth()
    count, out = dice.upto(4), dice.sizes(2, 4)
    samples = dice.upto(3, 0)  # 0 for as many as there are pixels; ONNX has one number for both axes
    x = dice.reals(dice.upto(2), *size, dice.upto(3))
    regions = eighths(dice, count, size[0] * ratio[0], size[1] * ratio[1])
    owners = dice.rng.integers(0, len(x), count)

    def wanted(x: Array, regions: Array, owners: Array, *_: float) -> Array:
        image = np.pad(x if nchw else to_nchw(x), [(0, 0), (0, 0), (0, 1), (0, 1)], mode="edge")
        pixels = regions / [ratio[1], ratio[0], ratio[1], ratio[0]]
        y = by_onnx(
            "RoiAlign", image, pixels, owners.astype(np.int64), mode="avg", output_height=out[0], output_width=out[1],
            sampling_ratio=samples, spatial_scale=1.0, coordinate_transformation_mode="output_half_pixel",
        )  # fmt: skip
        return y if nchw else to_nhwc(y)

    tail = (*out, Fx(ratio[0]), Fx(ratio[1]), samples, samples, nchw)
    case = Case(O.ROI_ALIGN, to_nchw(x) if nchw else x, Box(regions), Typed(owners, I32), *tail)
    case.check(wanted, (dice.one([k for k in REALS if k != T.TENSOR_FLOAT16]),))


def overlap(a: Any, b: Any) -> float:
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    common = max(w, 0.0) * max(h, 0.0)
    return float(common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common))


def boxes_at_random(dice: Dice, count: int) -> Array:
    """Boxes with an area, many of which overlap."""
    low = dice.rng.integers(0, 60, (count, 2)) / 8
    return np.concatenate([low, low + dice.rng.integers(16, 60, (count, 2)) / 8], 1)


@drawn
def test_box_with_nms_limit(dice: Dice) -> None:
    images, classes, kernel = dice.upto(3), dice.upto(4, 2), dice.upto(2, 0)
    rows, most = dice.upto(12), dice.one([-1, 1, 2, 4])
    owners = np.sort(dice.rng.integers(0, images, rows))
    scores = (dice.rng.permutation(rows * classes) + 1).reshape(rows, classes) / (rows * classes + 1)
    boxes = np.concatenate([boxes_at_random(dice, rows) for _ in range(classes)], 1)
    threshold, iou, sigma, least = 0.2003, 0.4003, 0.5, dice.one([0.1003, 0.3003])
    by_owner = [[], [], [], []]  # type: list[list[Any]]
    for image in sorted(set(owners.tolist())):
        picked: list[tuple[float, int, int]] = []
        for kind in range(1, classes):
            left = {int(r): scores[r, kind] for r in np.flatnonzero(owners == image) if scores[r, kind] > threshold}
            while left:
                best = max(left, key=lambda r: left[r])
                picked.append((left.pop(best), kind, best))
                box = boxes[best, 4 * kind : 4 * kind + 4]
                for r in list(left):
                    o = overlap(box, boxes[r, 4 * kind : 4 * kind + 4])
                    if kernel == 0:
                        left[r] = -1.0 if o >= iou else left[r]
                    else:
                        left[r] *= (1 if o < iou else 1 - o) if kernel == 1 else math.exp(-o * o / sigma)
                    if left[r] < (0 if kernel == 0 else least):
                        del left[r]
        picked = sorted(picked, reverse=True)[: most if most >= 0 else None]
        for score, kind, row in sorted(picked, key=lambda p: (p[1], -p[0])):
            for part, value in zip(by_owner, (score, boxes[row, 4 * kind : 4 * kind + 4], kind, image), strict=True):
                part.append(value)
    want = [np.array(part, float).reshape(-1, 4) if i == 1 else np.array(part) for i, part in enumerate(by_owner)]
    numbers = (Fx(threshold), most, kernel, Fx(iou), Fx(sigma), Fx(least))
    case = Case(O.BOX_WITH_NMS_LIMIT, scores, Box(boxes), Typed(owners, I32), *numbers)
    case.check(lambda *_: want, (F32,), count=4)
    if kernel == 0:  # ONNX has the hard kernel, for all classes of all images at once
        image = int(owners[0])
        mine = owners == image
        for kind in range(1, classes):
            found = by_onnx(
                "NonMaxSuppression", boxes[mine, 4 * kind : 4 * kind + 4][None], scores[mine, kind][None, None],
                np.array([rows]), np.array([iou], np.float32), np.array([threshold], np.float32),
            )  # fmt: skip
            if most < 0:
                own = [s for s, k, i in zip(want[0], want[2], want[3], strict=True) if (k, i) == (kind, image)]
                np.testing.assert_allclose(scores[mine, kind][found[:, 2]], own)


@drawn
def test_generate_proposals(dice: Dice) -> None:
    images, (h, w), anchors, nchw = dice.upto(3, 2), dice.sizes(2, 4), dice.upto(3), dice.truth()
    before, after = dice.one([-1, 3, 10]), dice.one([0, 2, 5])
    ratio, iou, smallest = (dice.one([2.0, 4.0]), dice.one([2.0, 4.0])), 0.4003, dice.one([0.5, 1.5])
    count = images * h * w * anchors
    scores = ((dice.rng.permutation(count) + 1) / (count + 1)).reshape(images, h, w, anchors)
    deltas, base = dice.reals(images, h, w, anchors * 4, low=-0.3, high=0.3), boxes_at_random(dice, anchors) - 4
    sizes = np.array([[dice.upto(20, 8), dice.upto(20, 8)] for _ in range(images)], float)
    want: list[list[Any]] = [[], [], []]
    for n in range(images):
        found = []
        for y in range(h):
            for x in range(w):
                for a in range(anchors):
                    x1, y1, x2, y2 = base[a] + np.array([x * ratio[1], y * ratio[0]] * 2)
                    dx, dy, dw, dh = deltas[n, y, x, 4 * a : 4 * a + 4]
                    cx, cy = (x1 + x2) / 2 + dx * (x2 - x1), (y1 + y2) / 2 + dy * (y2 - y1)
                    ww, hh = (x2 - x1) * math.exp(dw) / 2, (y2 - y1) * math.exp(dh) / 2
                    limit_h, limit_w = sizes[n]
                    corners = [
                        min(max(v, 0.0), limit_w if i % 2 == 0 else limit_h)
                        for i, v in enumerate((cx - ww, cy - hh, cx + ww, cy + hh))
                    ]
                    found.append((float(scores[n, y, x, a]), corners))
        found.sort(key=lambda row: -row[0])
        found = found[: before if before > 0 else None]
        found = [
            (s, c) for s, c in found
            if c[2] - c[0] > smallest and c[3] - c[1] > smallest
            and (c[0] + c[2]) / 2 < sizes[n][1] and (c[1] + c[3]) / 2 < sizes[n][0]
        ]  # fmt: skip
        kept: list[tuple[float, list[float]]] = []
        for s, c in found:
            if all(overlap(c, k) < iou for _, k in kept):
                kept.append((s, c))
        for s, c in kept[: after if after > 0 else None]:
            for part, value in zip(want, (s, c, n), strict=True):
                part.append(value)
    arrays = [np.array(want[0], float), np.array(want[1], float).reshape(-1, 4), np.array(want[2], float)]
    laid = [to_nchw(v) if nchw else v for v in (scores, deltas)]
    numbers = (Fx(ratio[0]), Fx(ratio[1]), before, after, Fx(iou), Fx(smallest), nchw)
    Case(O.GENERATE_PROPOSALS, *laid, Box(base), Box(sizes), *numbers).check(lambda *_: arrays, (F32,), count=3)


@drawn
def test_detection_postprocessing(dice: Dice) -> None:
    batch, count, classes, regular = dice.upto(2), dice.upto(10), dice.upto(4, 2), dice.truth()
    most, each_box, each_class, background = dice.upto(6), dice.upto(classes - 1), dice.upto(4), dice.truth()
    scale = (10.0, 5.0, 4.0, 2.0)
    ranks = dice.rng.permutation(batch * count * classes) + 1
    scores = (ranks / (len(ranks) + 1)).reshape(batch, count, classes)
    deltas, corners = dice.reals(batch, count, dice.upto(6, 4), low=-1, high=1), boxes_at_random(dice, count)
    anchors = np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1)
    threshold, iou = 0.3003, 0.4003
    want = [np.zeros((batch, most)), np.zeros((batch, most, 4)), np.zeros((batch, most)), np.zeros(batch)]
    for n in range(batch):
        boxes = []
        for (y, x, h, w), d in zip(anchors, deltas[n], strict=True):
            cy, cx = y + d[0] / scale[0] * h, x + d[1] / scale[1] * w
            hh, ww = math.exp(d[2] / scale[2]) * h / 2, math.exp(d[3] / scale[3]) * w / 2
            boxes.append((cy - hh, cx - ww, cy + hh, cx + ww))

        def kept(value: Any, limit: int, boxes: Any = boxes) -> list[int]:
            chosen: list[int] = []
            for i in sorted((i for i in range(count) if value[i] > threshold), key=lambda i: -value[i]):
                if len(chosen) < limit and all(overlap(boxes[i], boxes[j]) < iou for j in chosen):
                    chosen.append(i)
            return chosen

        found: list[tuple[float, int, int]] = []
        if regular:
            for kind in range(1, classes):
                found += [(scores[n, i, kind], kind, i) for i in kept(scores[n, :, kind], each_class)]
            found.sort(reverse=True)
        else:
            for i in kept(scores[n, :, 1:].max(1), most):
                by_class = sorted(((scores[n, i, kind], kind, i) for kind in range(1, classes)), reverse=True)
                found += by_class[:each_box]
        for place, (score, kind, i) in enumerate(found[:most]):
            want[0][n, place], want[1][n, place], want[2][n, place] = score, boxes[i], kind - (0 if background else 1)
        want[3][n] = len(found[:most])
    tail = (regular, most, each_box, each_class, Fx(threshold), Fx(iou), background)
    case = Case(O.DETECTION_POSTPROCESSING, scores, deltas, anchors, *(Fx(s) for s in scale), *tail)
    case.check(lambda *_: want, (F32,), count=4)


@drawn
def test_heatmap_max_keypoint(dice: Dice) -> None:
    """The top of the parabola that has the derivatives of finite differences, found by a fine search around it."""
    count, size, points, nchw = dice.upto(3), dice.upto(7, 3), dice.upto(3), dice.truth()
    at = dice.rng.uniform(1.2, size - 2.2, (count, points, 2)) if size > 3 else np.ones((count, points, 2))
    grid = np.arange(size)
    mixed = dice.rng.uniform(-0.2, 0.2, (count, points))
    heat = np.zeros((count, size, size, points))
    for n in range(count):
        for k in range(points):
            dy, dx = grid[:, None] - at[n, k, 0], grid[None, :] - at[n, k, 1]
            heat[n, :, :, k] = 2 - 0.3 * dy * dy - 0.2 * dx * dx + mixed[n, k] * dx * dy
    boxes = eighths(dice, count, 20, 20)

    def wanted(*_: Array) -> list[Array]:
        """A paraboloid is its own expansion: its top is where it was put, unless the step from the best cell is cut."""
        places = np.zeros((count, points, 2))
        for n, (x1, y1, x2, y2) in enumerate(boxes):
            for k in range(points):
                y, x = at[n, k]
                places[n, k] = x1 + (x + 0.5) / size * (x2 - x1), y1 + (y + 0.5) / size * (y2 - y1)
        return [np.full((count, points), 2.0), places]

    inner = heat[:, 1:-1, 1:-1]
    same = (heat.max((1, 2)) == inner.max((1, 2))).all()  # at the border there is a mirror instead of a neighbour
    if same:
        Case(O.HEATMAP_MAX_KEYPOINT, to_nchw(heat) if nchw else heat, Box(boxes), nchw).check(wanted, (F32,))


@drawn
def test_axis_aligned_bbox_transform(dice: Dice) -> None:
    images, classes, count = dice.upto(3), dice.upto(3), dice.upto(5)
    sizes = np.array([[dice.upto(30, 10), dice.upto(30, 10)] for _ in range(images)], float)
    owners, regions = np.sort(dice.rng.integers(0, images, count)), boxes_at_random(dice, count)
    kind = T.TENSOR_QUANT8_ASYMM if dice.truth() else T.TENSOR_QUANT8_ASYMM_SIGNED
    deltas = dice.rng.integers(-50, 50, (count, 4 * classes))
    want = np.zeros((count, 4 * classes))
    for n in range(count):
        for k in range(classes):
            x1, y1, x2, y2 = regions[n]
            dx, dy, dw, dh = deltas[n, 4 * k : 4 * k + 4] * 0.02
            cx, cy = (x1 + x2) / 2 + dx * (x2 - x1), (y1 + y2) / 2 + dy * (y2 - y1)
            w, h = (x2 - x1) * math.exp(dw) / 2, (y2 - y1) * math.exp(dh) / 2
            limit_h, limit_w = sizes[owners[n]]
            for i, v in enumerate((cx - w, cy - h, cx + w, cy + h)):
                want[n, 4 * k + i] = min(max(v, 0.0), limit_w if i % 2 == 0 else limit_h)
    case = Case(O.AXIS_ALIGNED_BBOX_TRANSFORM, regions, deltas * 0.02, Typed(owners, I32), sizes)
    case.check(lambda *_: want, (F32,))
    b, eighth = ModelBuilder(), T.TENSOR_QUANT16_ASYMM
    zero = 128 if kind == T.TENSOR_QUANT8_ASYMM else 0
    inputs = [
        b.input("roi", eighth, regions.shape, scale=0.125),
        b.input("delta", kind, deltas.shape, scale=0.02, zero_point=zero),
        b.input("batch", I32, (count,)),
        b.input("image", eighth, sizes.shape, scale=0.125),
    ]
    b.output("y", b.operation(O.AXIS_ALIGNED_BBOX_TRANSFORM, *inputs)[0])
    stored = (deltas + zero).astype(np.uint8 if zero else np.int8)
    given = [np.uint16(regions * 8), stored, owners.astype(np.int32), np.uint16(sizes * 8)]
    status, (found,), _ = run_model(b.build(), given)
    assert status is ErrorStatus.NONE
    np.testing.assert_allclose(found / 8, want, atol=0.126)
