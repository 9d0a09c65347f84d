"""Tests of a program with a network that dies, hangs and is late on demand.

    pytest examples/recipes/test_program.py

The fixtures come with nnburst: each test has its own service, with fault points.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from detector import CLASSES, MODEL, images, right

import nnburst
from nnburst.testing import FakeClock, inject


class Classifier:
    """The program under test, which answers "don't know" rather than late or not at all."""

    def __init__(self, service: nnburst.Service) -> None:
        self.session = service.session(MODEL, on_death="restart", timeout=60)

    def scores(self, image: np.ndarray) -> np.ndarray:
        try:
            return self.session.run(None, {"image": image[None]})[0][0]
        except (nnburst.MissedDeadline, nnburst.DeadObject):
            return np.zeros(CLASSES, np.float32)


def test_crash_costs_one_answer(nnburst_leaves_nothing: None, nnburst_service: nnburst.Service) -> None:
    classifier = Classifier(nnburst_service)
    (image,) = images(1)
    inject(nnburst_service, crash_on=2)
    assert right(image, classifier.scores(image))
    assert not classifier.scores(image).any()
    assert right(image, classifier.scores(image))


def test_late_answer_is_none(nnburst_leaves_nothing: None, nnburst_service: nnburst.Service) -> None:
    classifier = Classifier(nnburst_service)
    (image,) = images(1)
    assert right(image, classifier.scores(image))
    with ThreadPoolExecutor(1) as pool, inject(nnburst_service, freeze="call") as hang:
        scores = pool.submit(classifier.scores, image)
        hang.wait()
        FakeClock().advance(60)  # the test does not wait for this minute
        assert not scores.result().any()
    assert right(image, classifier.scores(image))
