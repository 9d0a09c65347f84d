"""Kernels that move boxes by deltas and suppress overlapping boxes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....errors import GeneralFailure
from ....model.types import Array
from ..call import KernelCall, quantise

_HARD, _LINEAR = 0, 1


def _overlaps(box: Array, others: Array) -> Array:
    """Return the intersection over union of a box (two corners) with each other box."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    common = np.maximum(high - low, 0).prod(1)
    area = (others[:, 2:] - others[:, :2]).prod(1) + (box[2:] - box[:2]).prod() - common
    return np.asarray(np.divide(common, area, out=np.zeros_like(common), where=area > 0))


def _suppress(
    scores: Array, boxes: Array, decay: Callable[[Array], Array], least: float, most: int
) -> list[tuple[int, float]]:
    """Take the box with the best score, multiply other scores by ``decay(overlaps)``, and repeat.

    Drop boxes that get a factor of 0 or a score below `least`.

    Returns:
        (index, score) of the taken boxes in order, at most `most` (negative: all).
    """
    left, now = np.arange(len(scores)), scores.astype(np.float64)
    taken: list[tuple[int, float]] = []
    while len(left) and not 0 <= most <= len(taken):
        best = int(now.argmax())
        index = int(left[best])
        taken.append((index, float(now[best])))
        left, now = np.delete(left, best), np.delete(now, best)
        factor = decay(_overlaps(boxes[index], boxes[left]))
        now = now * factor
        kept = (factor > 0) & (now >= least)
        left, now = left[kept], now[kept]
    return taken


def _hard(threshold: float) -> Callable[[Array], Array]:
    return lambda overlap: (overlap < threshold).astype(np.float64)


def _transform(regions: Array, deltas: Array, size: Array) -> Array:
    """Move and scale regions [n, 4] by deltas [n, 4 x classes], and clip them to images of `size` (height, width)."""
    parts = deltas.reshape(len(deltas), -1, 4)
    extent = (regions[:, 2:] - regions[:, :2])[:, None]
    centre = (regions[:, None, :2] + regions[:, None, 2:]) / 2 + parts[..., :2] * extent
    half = np.exp(parts[..., 2:]) * extent / 2
    limits = np.asarray(size, np.float64)[..., ::-1].reshape(-1, 1, 2)
    corners = [np.clip(corner, 0, limits) for corner in (centre - half, centre + half)]
    return np.concatenate(corners, -1).reshape(len(regions), -1)


def real_values(call: KernelCall, name: str) -> Callable[[Array], Array]:
    """Return the function that converts an input's stored values to real values in float64."""
    operand = call.operand(name)
    scale = operand.scale or 1.0
    return lambda stored: np.asarray((stored.astype(np.float64) - operand.zero_point) * scale)


def _real(call: KernelCall, name: str) -> Array:
    return real_values(call, name)(call.array(name))


def bbox_transform(call: KernelCall) -> None:
    to_regions, to_deltas, to_sizes = (real_values(call, name) for name in ("roi", "delta", "image"))

    def function(roi: Array, delta: Array, image: Array, batch: Array) -> Array:
        regions, deltas, sizes, owners = to_regions(roi), to_deltas(delta), to_sizes(image), batch.copy()
        if not ((owners >= 0) & (owners < len(sizes))).all():
            raise GeneralFailure("a batch index names no image")
        if not (regions[:, :2] <= regions[:, 2:]).all():
            raise GeneralFailure("a region has negative size")
        return _transform(regions, deltas, sizes[owners])

    call.compute(function, *(call.array(name) for name in ("roi", "delta", "image", "batch")))


def _place_measured(call: KernelCall, results: list[Array]) -> None:
    """Create and fill the arrays of outputs whose sizes this run has found."""
    for which, real in enumerate(results):
        call.place(which, real.shape)
        operand, out = call.output(which), call.out(which)
        out[...] = quantise(real / operand.scale, operand) if operand.scale else real


def box_with_nms_limit(call: KernelCall) -> None:
    """BOX_WITH_NMS_LIMIT: suppress boxes in each class but class 0; keep the best boxes of each image."""
    scores, boxes, batch = _real(call, "scores"), _real(call, "boxes"), call.array("batch").copy()
    threshold, least, sigma = (call.number(name) for name in ("score_threshold", "nms_threshold", "sigma"))
    kernel, iou, most = call.integer("kernel"), call.number("iou_threshold"), call.integer("max_boxes")
    if kernel == _HARD:
        decay, least = _hard(iou), -np.inf
    elif kernel == _LINEAR:
        decay = lambda overlap: np.where(overlap < iou, 1, 1 - overlap)  # noqa: E731
    else:
        decay = lambda overlap: np.exp(-np.square(overlap) / sigma)  # noqa: E731
    found: list[tuple[int, int, float, int]] = []  # (image, class, score, row)
    for image in sorted(set(batch.tolist())):
        rows = np.flatnonzero(batch == image)
        mine: list[tuple[int, int, float, int]] = []
        for kind in range(1, scores.shape[1]):
            able = rows[scores[rows, kind] > threshold]
            corners = boxes[able, 4 * kind : 4 * kind + 4]
            mine += [
                (image, kind, score, int(able[index]))
                for index, score in _suppress(scores[able, kind], corners, decay, least, -1)
            ]
        if 0 <= most < len(mine):
            mine = sorted(mine, key=lambda row: -row[2])[:most]
        found += sorted(mine, key=lambda row: (row[1], -row[2]))
    picked = [boxes[row, 4 * kind : 4 * kind + 4] for _, kind, _, row in found]
    results = [
        np.array([score for _, _, score, _ in found]),
        np.array(picked).reshape(-1, 4),
        np.array([kind for _, kind, _, _ in found], np.int32),
        np.array([image for image, *_ in found], np.int32),
    ]
    _place_measured(call, results)


def generate_proposals(call: KernelCall) -> None:
    """GENERATE_PROPOSALS: move the anchors at each point of a feature map by deltas; suppress overlapping boxes."""
    scores, deltas, anchors, sizes = (_real(call, name) for name in ("scores", "deltas", "anchors", "image"))
    if call.integer("nchw"):
        scores, deltas = scores.transpose(0, 2, 3, 1), deltas.transpose(0, 2, 3, 1)
    iou, smallest = call.number("iou_threshold"), call.number("min_size")
    before, after = call.integer("pre_nms"), call.integer("post_nms")
    _, height, width, _ = scores.shape
    down, right = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    shift = np.stack([right, down, right, down], -1) * np.array([call.number("ratio_w"), call.number("ratio_h")] * 2)
    regions = (shift[:, :, None] + anchors).reshape(-1, 4)
    kept: list[list[Array]] = [[np.zeros(0)], [np.zeros((0, 4))], [np.zeros(0, np.int64)]]
    for image, size in enumerate(sizes):
        score = scores[image].reshape(-1)
        order = np.argsort(-score, kind="stable")[: before if before > 0 else None]
        boxes = _transform(regions[order], deltas[image].reshape(-1, 4)[order], size)
        extent, centre = boxes[:, 2:] - boxes[:, :2], (boxes[:, 2:] + boxes[:, :2]) / 2
        large = (extent > smallest).all(1) & (centre < size[::-1]).all(1)
        able, boxes = score[order][large], boxes[large]
        taken = [index for index, _ in _suppress(able, boxes, _hard(iou), -np.inf, after if after > 0 else -1)]
        for part, values in zip(kept, (able[taken], boxes[taken], np.full(len(taken), image)), strict=True):
            part.append(values)
    _place_measured(call, [np.concatenate(part) for part in kept])


def detection_postprocessing(call: KernelCall) -> None:
    """DETECTION_POSTPROCESSING: move anchors by deltas; suppress overlapping boxes, in each class or among all."""
    scales = np.array([call.number(f"scale_{name}") for name in "yxhw"])
    threshold, iou = call.number("score_threshold"), call.number("iou_threshold")
    most, classes, each = (call.integer(name) for name in ("max_detections", "max_classes", "max_per_class"))
    regular, offset = bool(call.integer("regular")), 0 if call.integer("background") else 1
    outs = [call.real_out(0), call.real_out(1), call.out(2), call.out(3)]

    def of_each_class(scores: Array, boxes: Array) -> list[tuple[float, int, int]]:
        found = []
        for kind in range(1, scores.shape[1]):
            able = np.flatnonzero(scores[:, kind] > threshold)
            taken = _suppress(scores[able, kind], boxes[able], _hard(iou), -np.inf, each)
            found += [(score, kind, int(able[index])) for index, score in taken]
        return sorted(found, key=lambda row: -row[0])

    def of_best_class(scores: Array, boxes: Array) -> list[tuple[float, int, int]]:
        best = scores[:, 1:].max(1)
        able = np.flatnonzero(best > threshold)
        taken = [int(able[index]) for index, _ in _suppress(best[able], boxes[able], _hard(iou), -np.inf, most)]
        found = []
        for index in taken:
            for kind in np.argsort(-scores[index, 1:], kind="stable")[:classes] + 1:
                found.append((float(scores[index, kind]), int(kind), index))
        return found

    def step(scores: Array, deltas: Array, anchors: Array) -> None:
        for out in outs:
            out[...] = 0
        moved = deltas[..., :4].astype(np.float64) / scales
        centre = anchors[:, :2] + moved[..., :2] * anchors[:, 2:]
        half = np.exp(moved[..., 2:]) * anchors[:, 2:] / 2
        corners = np.concatenate([centre - half, centre + half], -1)
        for image in range(len(scores)):
            choose = of_each_class if regular else of_best_class
            found = choose(scores[image].astype(np.float64), corners[image])[:most]
            for place, (score, kind, index) in enumerate(found):
                outs[0][image, place], outs[1][image, place] = score, corners[image, index]
                outs[2][image, place] = kind - offset
            outs[3][image] = len(found)

    call.do(step, *(call.real(name) for name in ("scores", "deltas", "anchors")))
