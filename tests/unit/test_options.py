"""The words that type checkers let through are those that calls accept. What checkers refuse: tests/typing."""

from __future__ import annotations

import contextlib
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import nnburst
from nnburst import _options as options
from nnburst.fmq.descriptor import Flavour, Layout
from nnburst.memory.image import FORMATS
from nnburst.model import ExecutionPreference, Priority
from nnburst.model.builder import _ACTIVATIONS, _SCHEMES
from nnburst.service.process.options import POLICIES

SOURCE = Path(__file__).read_text("utf-8")


def names(members: type[IntEnum]) -> set[str]:
    return {member.name.lower() for member in members}


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        (options.PreferenceName, names(ExecutionPreference)),
        (options.PriorityName, names(Priority)),
        (options.FlavourName, names(Flavour)),
        (options.QueueLayout, names(Layout)),
        (options.ActivationName, {name for name in _ACTIVATIONS if name not in (None, "none")}),
        (options.PaddingName, {*_SCHEMES}),
        (options.ImageFormat, {*FORMATS}),
        (options.RealTimePolicy, {*POLICIES}),
    ],
)
def test_words_are_those_of_the_table(words: Any, accepted: set[str]) -> None:
    assert {*get_args(words)} == accepted


def model(layout: Any = "NHWC") -> nnburst.Model:
    builder = nnburst.ModelBuilder()
    x = builder.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 2, 3, 1))
    builder.output("y", builder.max_pool_2d(x, 1, layout=layout))
    return builder.build()


def launched(**options: Any) -> None:
    with contextlib.suppress(nnburst.DeviceUnavailable):  # not every kernel has all walls
        nnburst.launch(devices=["nnburst-noop"], **options).close()


def ran(on_error: Any) -> None:
    with nnburst.in_process() as service, service.session(model()) as session:
        list(session.run_many([], on_error=on_error))


def opened(on_death: Any) -> None:
    with nnburst.in_process() as service:
        service.session(model(), on_death=on_death).close()


def test_calls_accept_these_words_and_no_others() -> None:
    for words, call in (
        (options.TensorLayout, model),
        (options.LogLevel, lambda word: launched(log_level=word)),
        (options.SandboxMode, lambda word: launched(sandbox=word)),
        (options.OnDeath, opened),
        (options.OnError, ran),
    ):
        for word in get_args(words):
            call(word)
        with pytest.raises(nnburst.InvalidArgument, match="other"):
            call("other")


def test_every_type_is_compared_above() -> None:
    words = {name for name, value in vars(options).items() if get_origin(value) is Literal}
    assert {name for name in words if f"(options.{name}, " not in SOURCE} == set()
