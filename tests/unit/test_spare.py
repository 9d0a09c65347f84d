"""A service process that is started before it is needed: which one a restart gets, and what becomes of the other."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst.errors import BadState, DeviceUnavailable, InvalidArgument, MissedDeadline
from nnburst.runtime import spare as _spare
from nnburst.runtime.spare import Spare
from support.models import relu
from support.waiting import PATIENCE


class Process:
    """One that lives until the test says otherwise."""

    def __init__(self, number: int, is_spare: bool) -> None:
        self.number = number
        self.is_spare = is_spare
        self.alive = True
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Starter:
    """Starts processes 1, 2, 3, ...; spare ones when the test says so."""

    def __init__(self) -> None:
        self.started: list[Process] = []
        self.allowed = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, is_spare: bool) -> Process:
        if is_spare:
            self.begun.release()
            assert self.allowed.acquire(timeout=PATIENCE)
        if is_spare and self.error is not None:
            raise self.error
        self.started.append(Process(len(self.started) + 1, is_spare))
        return self.started[-1]


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    monkeypatch.setattr(_spare, "_PAUSE", 0.0)
    before = set(threading.enumerate())
    starter = Starter()
    yield starter
    for _ in range(10):
        starter.allowed.release()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)


def ready(spare: Spare[Any]) -> Process:
    assert spare._next is not None
    process = spare._next.result(PATIENCE)
    assert isinstance(process, Process)
    return process


def test_the_second_start_is_the_spare_and_another_one_follows(starter: Starter) -> None:
    for _ in range(2):
        starter.allowed.release()
    with contextlib.closing(Spare(starter)) as spare:
        assert not spare().is_spare
        second = ready(spare)
        assert spare() is second
        assert ready(spare).is_spare
    assert [process.closed.is_set() for process in starter.started] == [False, False, True]


def test_spare_that_has_died_is_not_given(starter: Starter) -> None:
    for _ in range(2):
        starter.allowed.release()
    with contextlib.closing(Spare(starter)) as spare:
        spare()
        dead = ready(spare)
        assert spare.state == "ready"
        dead.alive = False
        assert spare.state == "missing: it has died"
        assert not spare().is_spare
        assert dead.closed.is_set()
        ready(spare)


def test_spare_that_cannot_be_started_says_so_and_costs_nothing_but_time(
    starter: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    starter.error = DeviceUnavailable("no memory")
    with contextlib.closing(Spare(starter)) as spare:
        spare()
        assert spare.state == "starting"
        starter.allowed.release()
        assert spare._next is not None
        wait([spare._next], PATIENCE)
        assert spare.state == "missing: no memory"
        assert "no spare stands by, so that a restart will take longer: no memory" in caplog.text
        assert not spare().is_spare
        starter.error = None
        starter.allowed.release()
        assert spare() is starter.started[2]
        assert starter.started[2].is_spare
        starter.allowed.release()


def test_spare_that_is_being_started_is_waited_for_within_the_deadline(starter: Starter) -> None:
    from nnburst._core.deadline import Deadline

    with contextlib.closing(Spare(starter)) as spare:
        spare()
        with pytest.raises(MissedDeadline, match="still being started"):
            Deadline.after(0.01).call(spare)
        starter.allowed.release()
        assert spare().is_spare
        starter.allowed.release()


def test_close_while_the_spare_is_being_started_closes_it(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spare, "LEAVING", 0.01)
    spare = Spare(starter)
    spare()
    assert starter.begun.acquire(timeout=PATIENCE)
    spare.close()
    starter.allowed.release()
    while len(starter.started) < 2:
        assert starter.begun.acquire(timeout=0.01) is False
    assert starter.started[1].closed.wait(PATIENCE)


def test_close_ends_a_start_that_waits_for_the_spare(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    def waiting(*arguments: Any) -> Any:
        waits.set()
        return wait(*arguments)

    monkeypatch.setattr("concurrent.futures.wait", waiting)
    start_later, may_start = _spare._start_later, threading.Event()

    def held(*arguments: Any) -> None:
        assert may_start.wait(PATIENCE)
        start_later(*arguments)

    monkeypatch.setattr(_spare, "_start_later", held)
    monkeypatch.setattr(_spare, "LEAVING", 0.01)
    spare = Spare(starter)
    spare()
    errors: list[BaseException] = []

    def start() -> None:
        try:
            spare()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    assert waits.wait(PATIENCE)
    spare.close()
    may_start.set()
    thread.join(PATIENCE)
    assert [type(error) for error in errors] == [BadState]
    with pytest.raises(BadState, match="closed"):
        spare()
    assert len(starter.started) == 1


@pytest.mark.parametrize("restart", [False, True], ids=["session", "launch"])
def test_service_that_dies_is_followed_by_the_process_that_stood_by(restart: bool) -> None:
    with nnburst.launch(devices=["nnburst-reference"], restart=restart, spare=True) as service:
        assert service._spare is not None
        options: dict[str, Any] = {} if restart else {"on_death": "restart", "retry": 1}
        x = np.linspace(-1, 1, 8, dtype=np.float32)
        with service.session(relu((8,)), **options) as session:
            (first,) = session.run(None, {"x": x})
            spare: Any = service._spare._next
            assert spare is not None
            service._spare._hurry.set()
            pid = spare.result(PATIENCE).pid
            os.kill(service.pid, signal.SIGKILL)
            if not restart:
                assert session.run(None, {"x": x})[0].tobytes() == first.tobytes()
        with service.session(relu((8,))) as session:
            assert session.run(None, {"x": x})[0].tobytes() == first.tobytes()
        assert service.pid == pid


def test_session_keeps_a_spare_only_for_restarts_of_its_own_service() -> None:
    with pytest.raises(InvalidArgument, match="spare=True needs on_death='restart'"):
        nnburst.Session(relu((8,)), spare=True)
    with nnburst.in_process() as service, pytest.raises(InvalidArgument, match="no service="):
        nnburst.Session(relu((8,)), service=service, on_death="restart", spare=True)
