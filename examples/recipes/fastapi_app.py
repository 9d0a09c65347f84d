"""A FastAPI app in which each uvicorn process connects to one service at its start, and awaits the answers.

nnburst demo --save detector.onnx
nnburst serve --name vision --model detector=detector.onnx
uvicorn --workers 4 fastapi_app:app
curl --data-binary @detector.npy http://127.0.0.1:8000/boxes    # prints five squares
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from fastapi import FastAPI, Request

import nnburst


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with nnburst.connect("vision") as service:
        with service.session("detector", concurrency=4, on_death="restart", retry=1, timeout=5) as session:
            app.state.session = session
            yield


app = FastAPI(lifespan=lifespan)


@app.post("/boxes")
async def boxes(request: Request) -> list[list[float]]:
    image = np.load(io.BytesIO(await request.body()))
    (found,) = await app.state.session.arun(None, {"image": image})
    return found.tolist()
