"""What outputs say, as far as that can be seen: classes with their scores, and boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Array = npt.NDArray[Any]

_MOST_CLASSES, _MOST_ROWS = 5, 20
_SCORES, _KINDS = ("scores", "score", "conf", "confidences"), ("labels", "label", "classes", "class", "class_ids")


class Box(Struct, frozen=True):
    """One thing that was found; places in pixels of the model's input."""

    left: float
    top: float
    right: float
    bottom: float
    score: float
    kind: int


def in_words(name: str, outputs: Mapping[str, Any]) -> list[str]:
    """Return what an output says, a line each; empty if it is just numbers."""
    boxes = find_boxes(outputs).get(name)
    if boxes is not None:
        return list(_box_lines(boxes))
    value = outputs[name]
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return list(_map_lines(value))
    scores = _probabilities(value)
    if scores is None:
        return []
    best = np.argsort(-scores, kind="stable")[:_MOST_CLASSES]
    return [f"  {kind:<12} {scores[kind]:.4f}" for kind in best.tolist()]


def _map_lines(rows: Sequence[dict[Any, Any]]) -> Iterator[str]:
    """Yield the scores that each row has by class: a line for each class if there is one row, else for each row."""
    for row in rows[:_MOST_ROWS]:
        best = sorted(row.items(), key=lambda one: -one[1] if isinstance(one[1], float) else 0)[:_MOST_CLASSES]
        said = [f"{kind!s:12} {_number(score)}" for kind, score in best]
        yield from (f"  {one}" for one in said) if len(rows) == 1 else [f"  {'  '.join(said)}"]
    if len(rows) > _MOST_ROWS:
        yield f"  and {len(rows) - _MOST_ROWS} more"


def _number(score: Any) -> str:
    return f"{score:.4f}" if isinstance(score, float) else str(score)


def shortened(value: Any) -> list[str]:
    """Return a value that says nothing in words, as lines."""
    if isinstance(value, list):
        items = [line for item in value[:_MOST_ROWS] for line in shortened(item)]
        return items + [f"and {len(value) - _MOST_ROWS} more"] * (len(value) > _MOST_ROWS)
    return [np.array2string(value, threshold=40, precision=6) if isinstance(value, np.ndarray) else repr(value)]


def _probabilities(array: Any) -> Array | None:
    """Return a row of probabilities of classes."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or array.ndim == 0:
        return None
    row = array.reshape(-1).astype(np.float64)
    if array.shape[-1] != row.size or row.size < 2 or not np.isfinite(row).all():
        return None
    return row if row.min() >= 0 and abs(row.sum() - 1) < 1e-3 else None


def find_boxes(outputs: Mapping[str, Any]) -> dict[str, list[Box]]:
    """Return the boxes that outputs hold, by the name of the output.

    Known are rows of left, top, right, bottom, score and class, and rows of four places beside an output of scores and
    one of classes, each for one picture.
    """
    arrays = {
        name: array[0] if array.ndim > 1 and array.shape[0] == 1 and array.ndim > _rank(name) else array
        for name, array in outputs.items()
        if isinstance(array, np.ndarray) and array.dtype.kind in "fiu"
    }
    found = {}
    for name, array in arrays.items():
        if array.ndim != 2 or array.shape[1] not in (4, 6):
            continue
        rows = array.astype(np.float64)
        if array.shape[1] == 4:
            beside = [_beside(arrays, names, len(rows)) for names in (_SCORES, _KINDS)]
            if any(each is None for each in beside):
                continue
            rows = np.column_stack([rows, *beside])  # type: ignore[list-item]
        if _are_boxes(rows) and (len(rows) or "box" in name):
            found[name] = [
                Box(left, top, right, bottom, score, int(kind))
                for left, top, right, bottom, score, kind in rows.tolist()
            ]
    return found


def _rank(name: str) -> int:
    return 1 if name in (*_SCORES, *_KINDS) else 2


def _beside(arrays: Mapping[str, Array], names: Sequence[str], count: int) -> Array | None:
    return next((arrays[name] for name in names if name in arrays and arrays[name].shape == (count,)), None)


def _are_boxes(rows: Array) -> bool:
    left, top, right, bottom, score, kind = rows.T
    ordered = (left <= right) & (top <= bottom) & (score >= 0) & (score <= 1)
    return bool(np.isfinite(rows).all() and ordered.all() and (kind >= 0).all() and (kind == np.floor(kind)).all())


def _box_lines(boxes: Sequence[Box]) -> Iterator[str]:
    ordered = sorted(boxes, key=lambda box: -box.score)
    for box in ordered[:_MOST_ROWS]:
        places = f"({box.left:.0f}, {box.top:.0f}) to ({box.right:.0f}, {box.bottom:.0f})"
        yield f"  {box.kind:<12} {box.score:.4f}  {places}"
    if len(ordered) > _MOST_ROWS:
        yield f"  and {len(ordered) - _MOST_ROWS} more"
    if not boxes:
        yield "  nothing found"
