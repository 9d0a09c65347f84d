"""A gunicorn app in which each worker connects to one service at its first request, after the fork.

nnburst demo --save detector.onnx
nnburst serve --name vision --model detector=detector.onnx
gunicorn --workers 4 gunicorn_app:app
curl --data-binary @detector.npy http://127.0.0.1:8000/boxes    # prints five squares
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import nnburst


@functools.cache
def session() -> nnburst.Session:
    return nnburst.connect("vision").session("detector", on_death="restart", retry=1, timeout=5)


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer a WSGI request. Flask and Django views can call `session()` in the same way."""
    image = np.load(io.BytesIO(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
    (found,) = session().run(None, {"image": image})
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(found.tolist()).encode()]
