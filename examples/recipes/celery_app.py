"""A Celery app in which each worker process connects to one service at its first task.

nnburst serve --name vision --model detector=detector.onnx
celery --app celery_app worker --concurrency 4
python -c 'from celery_app import scores; print(scores.delay([0.0] * 64).get())'
"""

from __future__ import annotations

import functools

import numpy as np
from celery import Celery

import nnburst

app = Celery("detector", broker="redis://", backend="redis://")


@functools.cache
def session() -> nnburst.Session:
    return nnburst.connect("vision").session("detector", on_death="restart", retry=1, timeout=5)


@app.task
def scores(image: list[float]) -> list[float]:
    (found,) = session().run(None, {"image": np.array([image], np.float32)})
    return found[0].tolist()
