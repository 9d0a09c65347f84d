"""What users must not write: each line is refused by mypy --strict and by pyright, or `make lint` fails.

A line says the rule that refuses it, of either; both find a rule that refuses nothing. Never run.
"""

from __future__ import annotations

import numpy as np

import nnburst
from nnburst.fmq import MessageQueue
from nnburst.testing import inject

image = np.zeros((1, 8), np.float32)


def sessions(service: nnburst.Service) -> None:
    nnburst.Session("m.onnx", on_death="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnburst.Session("m.onnx", sandbox="none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnburst.Session("m.onnx", priority="urgent")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnburst.Session("m.onnx", preference="fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnburst.Session("m.onnx", timeout="1s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnburst.Session("m.onnx", retries=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nnburst.Session(["m.onnx"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    service.session("m.onnx", on_death="retry")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    service.session("m.onnx", priority=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def services() -> None:
    nnburst.launch(sandbox="loose")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnburst.launch(log_level="verbose")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnburst.launch(scheduler=("batch", 1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnburst.launch(quotas={"models": "many"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    nnburst.connect(b"vision")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def runs(session: nnburst.Session) -> None:
    session.run(None, [image])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    session.run_many([{"image": image}], on_error="skip")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    session.run_many([image])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    for outcome in session.run_many([{"image": image}], on_error="return"):
        outcome[0]  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    session.run(None, {"image": image})["scores"]  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


async def awaited(session: nnburst.Session) -> None:
    session.arun(None, {"image": image})[0]  # type: ignore[index]  # pyright: ignore[reportIndexIssue]


def compilations(compilation: nnburst.nnapi.Compilation) -> None:
    compilation.set_caching("cache", "token")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    compilation.set_preference("turbo")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    compilation.set_priority("lowest")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def models(builder: nnburst.ModelBuilder, x: nnburst.Operand) -> None:
    builder.conv_2d(x, x, activation="gelu")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    builder.conv_2d(x, x, layout="CHW")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    builder.conv_2d(x, x, padding="full")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    builder.max_pool_2d(x, 2, layout="HWC")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    builder.max_pool_2d(x, 2, strides=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    builder.add(x, x, scales=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    builder.relu()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def memory() -> None:
    nnburst.Memory.hardware_buffer(4, 4, "YUV")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    MessageQueue(np.int32, 8, flavour="sync")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    MessageQueue(np.int32, 8, layout="packed")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def faults(service: nnburst.Service) -> None:
    inject(service, at="later")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    inject(service, freeze="thread")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
