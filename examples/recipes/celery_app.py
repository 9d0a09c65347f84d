"""A Celery app in which each worker process connects to one service at its first task.

nnburst demo --save detector.onnx
nnburst serve --name vision --model detector=detector.onnx
celery --app celery_app worker --concurrency 4
python -c 'import numpy as np; from celery_app import boxes; print(boxes.delay(np.load("detector.npy").tolist()).get())'
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from celery import Celery

import nnburst

app = Celery("detector", broker="redis://", backend="redis://")


@functools.cache
def session() -> nnburst.Session:
    return nnburst.connect("vision").session("detector", on_death="restart", retry=1, timeout=5)


@app.task
def boxes(image: list[Any]) -> list[list[float]]:
    (found,) = session().run(None, {"image": np.array(image, session().get_inputs()[0].dtype)})
    return found.tolist()
