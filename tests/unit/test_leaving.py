"""How things end, and how long that takes: deadlines, the budget of leaving, interrupts at every step."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import nnburst
from nnburst._core import Leaving, time_left, within
from nnburst.errors import BadState, MissedDeadline
from nnburst.model import Model, ModelBuilder, OperandType, OperationType

ONE = np.ones(4, np.float32)


def relu() -> Model:
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (4,))
    b.output("y", b.add(OperationType.RELU, [x]))
    return b.build()


@pytest.fixture
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        yield service


@contextlib.contextmanager
def stopped(service: nnburst.Service) -> Iterator[None]:
    os.kill(service.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service.pid, signal.SIGCONT)


# ---- deadlines -----------------------------------------------------------------------------------------------------


def test_inner_limit_cannot_outlast_the_outer_one() -> None:
    assert time_left() is None
    assert time_left(3) == 3
    outer, inner = within(5, lambda: (time_left(60), within(1, time_left)))
    assert 4 < (outer or 0) <= 5
    assert 0 < (inner or 0) <= 1
    assert within(1, lambda: within(60, time_left) or 60) <= 1
    assert within(1, lambda: within(None, time_left)) is not None
    assert within(0, time_left) == 0


def test_limit_ends_with_the_call_that_is_interrupted() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        within(0, interrupted)
    assert time_left() is None


def test_everything_that_opening_asks_for_ends_with_its_deadline(service: nnburst.Service) -> None:
    device = service.devices[0]
    prepared = device.prepare_model(relu())
    with stopped(service):
        compilation = nnburst.Compilation(relu(), [device])
        compilation.set_timeout(0.1)
        calls = {
            "finish": compilation.finish,
            "supported": lambda: within(0.1, device.get_supported_operations, relu()),
            "prepare": lambda: within(0.1, device.prepare_model, relu()),
            "import": lambda: within(0.1, device.import_model, "name:x"),
            "burst": lambda: within(0.1, nnburst.burst.ExecutionBurstController.create, prepared),
        }
        for name, call in calls.items():
            with pytest.raises(MissedDeadline):
                call()
                pytest.fail(name)
    prepared.close()


def test_burst_compute_with_arrays_waits_for_nothing_but_its_deadline(service: nnburst.Service) -> None:
    """What it staged is given back without an answer."""
    compilation = nnburst.Compilation(relu(), service.devices)
    compilation.finish()
    burst = nnburst.Burst(compilation)
    execution = nnburst.Execution(compilation, reusable=True)
    execution.set_input(0, ONE)
    execution.set_output(0, np.zeros(4, np.float32))
    execution.set_timeout(0.1)
    asked: list[float | None] = []
    call = service.devices[0]._connection.call  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            type(call.__self__), "call", lambda self, *a, timeout=None, **k: asked.append(timeout) or call(*a, **k)
        )
        execution.burst_compute(burst)
        with stopped(service), pytest.raises(MissedDeadline):
            execution.burst_compute(burst)
    assert asked == []
    execution.burst_compute(burst)
    burst.close()
    compilation.close()


# ---- the steps of a close ------------------------------------------------------------------------------------------


class Steps:
    """Three steps of a `Leaving`, and what is done in them when they are called for the nth time."""

    def __init__(self, **tricks: list[BaseException | None]) -> None:
        self.tricks = tricks
        self.done: list[str] = []
        self.left: list[float | None] = []
        self.leaving = Leaving(self.first, self.second, self.third)

    def _step(self, name: str) -> None:
        self.left.append(time_left())
        error = self.tricks[name].pop(0) if self.tricks.get(name) else None
        if error is not None:
            raise error
        self.done.append(name)

    def first(self) -> None:
        self._step("first")

    def second(self) -> None:
        self._step("second")

    def third(self) -> None:
        self._step("third")


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_interrupted_step_and_those_after_it_are_done_without_waiting(name: str) -> None:
    steps = Steps(**{name: [KeyboardInterrupt()]})
    with pytest.raises(KeyboardInterrupt):
        steps.leaving()
    assert steps.done == ["first", "second", "third"]
    assert steps.leaving.over
    index = steps.done.index(name)
    assert steps.left == [None] * (index + 1) + [0] * (3 - index)
    steps.leaving()
    assert len(steps.done) == 3


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_step_that_is_interrupted_twice_is_left_to_the_next_close(name: str) -> None:
    steps = Steps(**{name: [KeyboardInterrupt(), KeyboardInterrupt()]})
    with pytest.raises(KeyboardInterrupt):
        steps.leaving()
    assert not steps.leaving.over
    steps.leaving()
    assert steps.done == ["first", "second", "third"]


def test_step_that_fails_keeps_no_other_from_being_done() -> None:
    steps = Steps(first=[BadState("gone")], second=[ValueError("odd"), ValueError("odd")])
    with pytest.raises(ValueError, match="odd"):
        steps.leaving()
    assert steps.done == ["third"]
    assert steps.leaving.over


def test_exception_of_a_signal_handler_does_not_skip_the_step_that_it_met() -> None:
    steps = Steps(second=[TimeoutError("of a handler")])
    with pytest.raises(TimeoutError):
        steps.leaving()
    assert steps.done == ["first", "second", "third"]


def test_forked_child_abandons_what_it_inherits() -> None:
    from nnburst._core import abandon_when_forked

    class Thing:
        where = 0

        def abandon(self) -> None:
            self.where = os.getpid()

    thing = Thing()
    abandon_when_forked(thing)
    pid = os.fork()
    if pid == 0:
        os._exit(thing.where != os.getpid())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert thing.where == 0
