"""Runs the contenders in turns and keeps their times and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .contenders import Contender

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
WARM_UP = 100
CHUNK = 200
"""Images between two looks at the progress bar, which is drawn outside the timed part."""


@dataclass(frozen=True, slots=True)
class Lap:
    """What one contender did.

    Attributes:
        nanoseconds: int64, duration of each call, in order.
        answers: float32 [n, 1, 10] of the last pass.
        differences: Answers of any pass whose bits are not those of the expected ones, in words.
    """

    nanoseconds: npt.NDArray[np.int64]
    answers: npt.NDArray[np.float32]
    differences: tuple[str, ...]

    def percentiles_us(self) -> tuple[float, ...]:
        """Return the `PERCENTILES` of the durations in microseconds."""
        return tuple(float(value) / 1e3 for value in np.percentile(self.nanoseconds, PERCENTILES, method="higher"))


def race(
    contenders: Mapping[str, Contender],
    images: npt.NDArray[np.float32],
    expected: Mapping[str, npt.NDArray[np.float32]],
    passes: int,
    advance: Callable[[str, int], None],
) -> dict[str, Lap]:
    """Let every contender classify every image, one image per execution, `passes` times.

    The contenders take turns pass by pass, so that a disturbance of the machine meets all of them.

    Args:
        contenders: Name → contender.
        expected: Name → right answers [n, 1, 10], for the contenders whose answers are to be checked.
        passes: How often each contender sees all images.
        advance: Called with a contender's name and a number of finished calls, outside the timed part.
    """
    durations: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in contenders}
    answers: dict[str, npt.NDArray[np.float32]] = {}
    differences: dict[str, list[str]] = {name: [] for name in contenders}
    for contender in contenders.values():
        for image in images[:WARM_UP]:
            contender.classify(image)
    for _ in range(passes):
        for name, contender in contenders.items():
            got: list[npt.NDArray[np.float32]] = []
            for start in range(0, len(images), CHUNK):
                chunk = list(images[start : start + CHUNK])
                taken, chunk_answers = _timed(contender, chunk)
                durations[name].append(np.array(taken, dtype=np.int64))
                got += chunk_answers
                advance(name, len(chunk))
            answers[name] = np.stack(got)
            if name in expected:
                differences[name] += _compare(name, expected[name], answers[name])
    return {name: Lap(np.concatenate(durations[name]), answers[name], tuple(differences[name])) for name in contenders}


def _timed(
    contender: Contender, images: Sequence[npt.NDArray[np.float32]]
) -> tuple[list[int], list[npt.NDArray[np.float32]]]:
    classify, clock = contender.classify, time.perf_counter_ns
    taken: list[int] = []
    answers: list[npt.NDArray[np.float32]] = []
    for image in images:
        before = clock()
        answer = classify(image)
        taken.append(clock() - before)
        answers.append(answer)
    return taken, answers


def _compare(name: str, expected: npt.NDArray[np.float32], got: npt.NDArray[np.float32]) -> list[str]:
    different = (expected.view(np.uint32) != got.view(np.uint32)).reshape(len(expected), -1).any(axis=1)
    far = np.abs(expected - got).reshape(len(expected), -1).max(axis=1)
    return [f"{name}, image {i}: probabilities differ by up to {far[i]:.3g}" for i in np.flatnonzero(different)]
