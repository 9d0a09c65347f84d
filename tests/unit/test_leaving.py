"""How things end, and how long that takes: deadlines, the budget of leaving, interrupts at every step."""

from __future__ import annotations

import gc
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst._core.deadline import Deadline
from nnburst._core.leaving import Leaving, abandon_when_forked, process_lock
from nnburst.errors import BadState, MissedDeadline, ResourceExhausted
from nnburst.model.types import DeviceStatus
from nnburst.runtime import session as _session
from nnburst.service.connection import transport
from nnburst.service.connection.pending import PendingCall
from nnburst.service.process import launch
from nnburst.service.wire.protocol import ListDevices
from nnburst.testing import assert_nothing_left
from support.models import compiled, described, ready, relu
from support.processes import stop, stopped
from support.users import as_user
from support.waiting import PATIENCE, Background, Held, until

ONE = np.ones(4, np.float32)
PACKAGE = str(Path(nnburst.__file__).parent)


@pytest.fixture
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        yield service


# ---- deadlines -----------------------------------------------------------------------------------------------------


def test_inner_deadline_cannot_outlast_the_outer_one() -> None:
    def left(seconds: float | None = None) -> float | None:
        return Deadline.after(seconds).left()

    assert left() is None
    assert 200 < (left(300) or 0) <= 300
    outer, inner = Deadline.after(500).call(lambda: (left(6000), Deadline.after(100).call(left)))
    assert 400 < (outer or 0) <= 500
    assert 0 < (inner or 0) <= 100
    assert Deadline.after(100).call(lambda: Deadline.after(6000).call(left) or 6000) <= 100
    assert Deadline.after(100).call(lambda: Deadline.never.call(left)) is not None
    assert Deadline.after(0).call(left) == 0


def test_deadline_is_postponed_by_the_time_that_does_not_count() -> None:
    now = time.monotonic_ns()
    assert 60 < (Deadline(now + 60 * 10**9).postpone(now - 30 * 10**9).left() or 0) <= 90
    assert Deadline.never.postpone(now) == Deadline.never
    assert Deadline.after(0).postpone(time.monotonic_ns()).left() == 0
    assert Deadline(5).earlier(Deadline(7)) == Deadline(7).earlier(Deadline(5)) == Deadline(5)
    assert Deadline(5).earlier(Deadline.never) == Deadline.never.earlier(Deadline(5)) == Deadline(5)


def test_limit_ends_with_the_call_that_is_interrupted() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Deadline.after(0).call(interrupted)
    assert Deadline.after() == Deadline.never


def test_everything_that_opening_asks_for_ends_with_its_deadline(service: nnburst.Service) -> None:
    device = service.devices[0]
    prepared = device.prepare_model(relu())
    with stopped(service.pid):
        compilation = nnburst.nnapi.Compilation(relu(), [device])
        compilation.set_timeout(0.1)
        calls = {
            "finish": compilation.finish,
            "supported": lambda: Deadline.after(0.1).call(device.get_supported_operations, relu()),
            "prepare": lambda: Deadline.after(0.1).call(device.prepare_model, relu()),
            "import": lambda: Deadline.after(0.1).call(device.import_model, "name:x"),
            "burst": lambda: Deadline.after(0.1).call(nnburst.burst.ExecutionBurstController.create, prepared),
        }
        for name, call in calls.items():
            with pytest.raises(MissedDeadline):
                call()
                pytest.fail(name)
    prepared.close()


def test_burst_compute_with_arrays_waits_for_nothing_but_its_deadline(service: nnburst.Service) -> None:
    """What it staged is given back without an answer."""
    asked: list[float | None] = []
    call = service.devices[0].place().connection.call  # type: ignore[attr-defined]
    with compiled(relu(), service.devices) as compilation, nnburst.nnapi.Burst(compilation) as burst:
        execution = ready(compilation, ONE, np.zeros(4, np.float32), reusable=True)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                type(call.__self__), "call", lambda self, *a, timeout=None, **k: asked.append(timeout) or call(*a, **k)
            )
            execution.burst_compute(burst)
            with stopped(service.pid), pytest.raises(MissedDeadline):
                execution.burst_compute(burst, timeout=0.1)
        assert asked == []
        execution.burst_compute(burst)


# ---- the steps of a close ------------------------------------------------------------------------------------------


class Steps:
    """Three steps of a `Leaving`, and what is done in them when they are called for the nth time."""

    def __init__(self, **tricks: list[BaseException | None]) -> None:
        self.tricks = tricks
        self.done: list[str] = []
        self.left: list[float | None] = []
        self.leaving = Leaving(*(partial(self._step, name) for name in ("first", "second", "third")))

    def _step(self, name: str) -> None:
        self.left.append(Deadline.after().left())
        error = self.tricks[name].pop(0) if self.tricks.get(name) else None
        if error is not None:
            raise error
        self.done.append(name)


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_interrupted_step_and_those_after_it_are_done_without_waiting(name: str) -> None:
    steps = Steps(**{name: [KeyboardInterrupt()]})
    with pytest.raises(KeyboardInterrupt):
        steps.leaving()
    assert steps.done == ["first", "second", "third"]
    index = steps.done.index(name)
    assert steps.left == [None] * (index + 1) + [0] * (3 - index)
    steps.leaving()
    assert len(steps.done) == 3


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_step_that_is_interrupted_twice_is_left_to_the_next_close(name: str) -> None:
    steps = Steps(**{name: [KeyboardInterrupt(), KeyboardInterrupt()]})
    with pytest.raises(KeyboardInterrupt):
        steps.leaving()
    steps.leaving()
    assert steps.done == ["first", "second", "third"]


def test_step_that_fails_keeps_no_other_from_being_done() -> None:
    steps = Steps(first=[BadState("gone")], second=[ValueError("odd"), ValueError("odd")])
    with pytest.raises(ValueError, match="odd"):
        steps.leaving()
    assert steps.done == ["third"]


def test_exception_of_a_signal_handler_does_not_skip_the_step_that_it_met() -> None:
    steps = Steps(second=[TimeoutError("of a handler")])
    with pytest.raises(TimeoutError):
        steps.leaving()
    assert steps.done == ["first", "second", "third"]


# ---- one budget ----------------------------------------------------------------------------------------------------


class Waits:
    """How long calls may wait for their answers, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[Any] = []
        wait = PendingCall.wait

        def waiting(pending: PendingCall, timeout: float | None) -> bool:
            self.seconds.append(timeout)
            return wait(pending, timeout)

        monkeypatch.setattr(PendingCall, "wait", waiting)


@pytest.mark.check
def test_things_of_a_service_that_does_not_answer_are_closed_within_one_budget(
    service: nnburst.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "LEAVING", 0.2)
    sessions = [service.session(relu()) for _ in range(3)]
    executions = [session.bind() for session in sessions]
    for execution in executions:
        execution.run()
    with stopped(service.pid):
        waits = Waits(monkeypatch)
        for thing in (*executions, *sessions):
            thing.close()
        first, *others = waits.seconds
        assert first > 0
        assert len(others) >= 5
        assert set(others) == {0.0}, "another one waits, too"
    # It has come to all of them, and is waited for again.
    again = service.session(relu())
    waits.seconds.clear()
    connection = service.devices[0].place().connection  # type: ignore[attr-defined]
    until(lambda: connection._leave_by == math.inf)
    again.close()
    assert service.device("nnburst-reference").status is DeviceStatus.AVAILABLE


@pytest.mark.check
def test_stopped_service_is_killed_when_leaving_has_taken_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LEAVING", 0.1)
    given: list[float] = []
    reap = launch.Child.reap
    monkeypatch.setattr(launch.Child, "reap", lambda child, seconds: (given.append(seconds), reap(child, seconds)))
    service = nnburst.launch(devices=["nnburst-reference"])
    session = service.session(relu())
    pidfd = os.pidfd_open(service.pid)
    stop(service.pid)
    session.close()
    service.close()
    assert not service.alive
    assert given == [0.0]
    assert select.select([pidfd], [], [], 0)[0]
    os.close(pidfd)


def test_sessions_are_opened_within_the_limit_that_is_named(service: nnburst.Service) -> None:
    with stopped(service.pid):
        for kind in ("plain", "with a limit of the runs"):
            with pytest.raises(MissedDeadline):
                service.session(relu(), open_timeout=0.1, timeout=None if kind == "plain" else 5)
    assert service.session(relu(), open_timeout=None).run(None, {"x": ONE})[0][0] == 1


@pytest.mark.check
def test_limit_of_runs_also_limits_opening(service: nnburst.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(_session, "OPENING", 0.1)
        with stopped(service.pid), pytest.raises(MissedDeadline):
            service.session(relu(), timeout=0.01)
    service.session(relu(), timeout=0.01).close()


# ---- interrupts ----------------------------------------------------------------------------------------------------


class InterruptAt:
    """Raises KeyboardInterrupt in this thread at the nth line of the package that is reached, finalisers included."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> object:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt  # which ends the tracing, too
        return self._trace


def interrupt_everywhere(open_one: Callable[[], Any], close: Callable[[Any], None], step: int = 1) -> int:
    """Interrupt ``close`` at every line (every `step`th) that it reaches, then call it again. Returns how many."""
    count = 1
    while True:
        thing = open_one()
        with InterruptAt(count) as interrupt:
            try:
                close(thing)
            except KeyboardInterrupt:
                pass
        close(thing)
        if interrupt.left > 0:
            return count
        count += step


@pytest.mark.check
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # swallowed in a finaliser
@pytest.mark.parametrize("where", ["a service", "in process"])
def test_session_whose_close_is_interrupted_at_any_line_leaves_nothing(where: str) -> None:
    with (nnburst.launch if where == "a service" else nnburst.in_process)(devices=["nnburst-reference"]) as service:
        warm = service.session(relu())
        warm.run(None, {"x": ONE})
        warm.close()
        there = len(os.listdir(f"/proc/{service.pid}/fd"))

        def open_one() -> nnburst.Session:
            session = service.session(relu())
            session.run(None, {"x": ONE})
            return session

        with assert_nothing_left():
            assert interrupt_everywhere(open_one, nnburst.Session.close) > 50
        until(lambda: len(os.listdir(f"/proc/{service.pid}/fd")) <= there + 2)


@pytest.mark.check
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_memory_of_a_device_whose_close_is_interrupted_at_any_line_is_given_back(service: nnburst.Service) -> None:
    with compiled(relu(), service.devices) as compilation:
        host_side = service.devices[0]

        def open_one() -> nnburst.nnapi.DeviceMemory:
            return described((compilation, "input", 0)).create_memory()

        lines = interrupt_everywhere(open_one, lambda memory: memory.close())
        assert lines > 10
        wire = host_side.place().connection  # type: ignore[attr-defined]
        wire.call(ListDevices(), timeout=PATIENCE)
        with pytest.raises(ResourceExhausted, match="1024"):  # as many as if none was ever made
            kept = []
            for _ in range(1025):
                kept.append(open_one())
        assert len(kept) == 1024


@pytest.mark.check
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_service_whose_close_is_interrupted_at_any_line_ends() -> None:
    pidfds: list[int] = []

    def open_one() -> nnburst.Service:
        service = nnburst.launch(devices=["nnburst-noop"])
        pidfds.append(os.pidfd_open(service.pid))
        return service

    with assert_nothing_left():
        interrupt_everywhere(open_one, nnburst.Service.close, step=7)
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], PATIENCE)[0]
            os.close(pidfd)


STORM = """
import random, signal, sys
import nnburst
from nnburst.testing import assert_nothing_left
random.seed(int(sys.argv[1]))
b = nnburst.ModelBuilder()
x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (4,))
b.output("y", b.relu(x))
model = b.build()
import numpy as np
def interrupt(_, frame):
    while frame and frame.f_code is not nnburst.Session.close.__code__:
        frame = frame.f_back
    if frame:
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
def interrupted():
    session = nnburst.Session(model)
    session.run(None, {"x": np.ones(4, np.float32)})
    signal.setitimer(signal.ITIMER_REAL, 0.0001 + random.random() * 0.02, 0.003)
    for _ in range(2):
        try:
            session.close()
            break
        except KeyboardInterrupt:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    session.close()
for i in range(12):
    with assert_nothing_left():
        interrupted()
print("nothing left")
"""


@pytest.mark.check
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 7))])
def test_storm_of_interrupts_over_close_leaves_nothing(seed: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", STORM, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "nothing left", done.stderr


def test_lock_of_the_process_that_another_thread_holds_is_free_in_a_forked_child() -> None:
    lock, held = process_lock(), Held()

    def hold() -> None:
        with lock:
            held()

    holding = Background(hold)
    assert held.entered.wait(PATIENCE)
    said = as_user(None, lambda: lock.acquire(timeout=PATIENCE))
    held.go_on.set()
    assert holding.result() is None
    assert said == "True"


# ---- what was opened on a service ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["a service", "in process"])
def test_what_was_opened_on_a_service_ends_with_it(where: str) -> None:
    threads = set(threading.enumerate())
    service = (nnburst.launch if where == "a service" else nnburst.in_process)(devices=["nnburst-reference"])
    session = service.session(relu())
    bound = session.bind()
    compilation = nnburst.nnapi.Compilation(relu(), service.devices)
    compilation.finish()
    burst = nnburst.nnapi.Burst(compilation)
    execution = ready(compilation, ONE, np.zeros(4, np.float32), reusable=True)
    uses: dict[str, Callable[[], object]] = {
        "Session.run": lambda: session.run(None, {"x": ONE}),
        "Execution.run": bound.run,
        "Session.bind": session.bind,
        "compute": execution.compute,
        "burst_compute": lambda: execution.burst_compute(burst),
        "Burst": lambda: nnburst.nnapi.Burst(compilation),
        "session": lambda: service.session(relu()),
    }
    for name, use in uses.items():
        if name != "session":
            use()
    service.close()
    for name, use in uses.items():
        with pytest.raises(BadState):
            use()
            pytest.fail(name)
    until(lambda: set(threading.enumerate()) <= threads)  # the thread of the burst that was only dropped
    for thing in (bound, burst, compilation, session, service):
        thing.close()


def test_service_does_not_keep_what_is_dropped() -> None:
    with nnburst.in_process(devices=["nnburst-reference"]) as service:
        for _ in range(3):
            service.session(relu())
        gc.collect()
        assert not service._opened


def test_a_child_lets_go_of_what_it_inherits_though_one_of_it_raises() -> None:
    class Thing:
        is_abandoned = False

        def abandon(self) -> None:
            self.is_abandoned = True
            raise KeyboardInterrupt

    things = [Thing(), Thing()]
    for thing in things:
        abandon_when_forked(thing)
    told: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda raised: told.append(raised.exc_type))
        said = as_user(None, lambda: [thing.is_abandoned for thing in things] + [error.__name__ for error in told])
    assert said == "[True, True, 'KeyboardInterrupt']"
