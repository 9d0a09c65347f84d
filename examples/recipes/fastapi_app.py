"""A FastAPI app in which each uvicorn process connects to one service at its start, and awaits its answers.

nnburst serve --name vision --model detector=detector.onnx
uvicorn --workers 4 fastapi_app:app
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from fastapi import FastAPI

import nnburst


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with nnburst.connect("vision") as service:
        with service.session("detector", concurrency=4, on_death="restart", retry=1, timeout=5) as session:
            app.state.session = session
            yield


app = FastAPI(lifespan=lifespan)


@app.post("/scores")
async def scores(image: list[float]) -> list[float]:
    (found,) = await app.state.session.arun(None, {"image": np.array([image], np.float32)})
    return found[0].tolist()
