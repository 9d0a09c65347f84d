"""Faults on order: each is what it says, as its client sees it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import BadState, DeadObject, Execution, GeneralFailure, InvalidArgument, MissedDeadline, Service, Session
from nnburst.errors import OutputShape
from nnburst.testing import assert_nothing_left, inject
from support.models import relu
from support.waiting import PATIENCE, Background, until

pytestmark = pytest.mark.check

ONES = {"x": np.ones((1, 4), np.float32)}
Launch = Callable[..., Service]


@pytest.fixture
def service(nnburst_launch: Launch) -> Service:
    return nnburst_launch(devices=["nnburst-reference"], log_level="error")


@pytest.fixture
def session(service: Service) -> Iterator[Session]:
    with service.session(relu((1, 4))) as session:
        session.run(None, ONES)
        yield session


def assert_right(session: Session) -> None:
    assert session.run(None, ONES)[0].tolist() == [[1, 1, 1, 1]]


def is_late(execution: Execution) -> bool:
    """Run, and find that the time is over."""
    with pytest.raises(MissedDeadline):
        execution.run(timeout=0.05)
    return True


def test_crash_comes_with_the_run_that_was_named(service: Service, session: Session) -> None:
    fault = inject(service, crash_on=3)
    assert_right(session)
    assert_right(session)
    assert fault.times == 0
    with pytest.raises(DeadObject, match="killed by SIGKILL"):
        session.run(None, ONES)
    assert fault.times == 1
    with pytest.raises(BadState, match="has ended"):
        inject(service, crash_on=1)


@pytest.mark.representative
@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ({"crash_on": 1, "crash_with": signal.SIGSEGV}, "killed by SIGSEGV"),
        ({"crash_on": 1, "crash_with": signal.SIGABRT}, "killed by SIGABRT"),
        ({"exit_on": 2, "exit_status": 7}, "ended with status 7"),
    ],
)
def test_process_ends_as_it_was_told(service: Service, session: Session, fault: dict[str, Any], how: str) -> None:
    inject(service, **fault)
    with session.bind() as execution, pytest.raises(DeadObject, match=how):
        for _ in range(2):
            execution.run()


def test_delay_lasts_until_it_is_withdrawn(service: Service, session: Session) -> None:
    with inject(service, delay=0.05, after=1) as fault:
        assert_right(session)
        started = time.monotonic()
        for _ in range(2):
            assert_right(session)
        assert time.monotonic() - started >= 0.1
        assert fault.times == 2
    assert_right(session)
    assert fault.times == 2


def test_delay_beyond_the_timeout_is_a_missed_deadline_and_the_late_answer_is_dropped(service: Service) -> None:
    with service.session(relu((1, 4))) as session, session.bind() as execution:
        execution.run()
        with inject(service, delay=PATIENCE) as fault:
            until(lambda: is_late(execution) and fault.times, "no run comes to the fault in its time")
        execution.run()


@pytest.mark.representative
@pytest.mark.parametrize("freeze", ["process", "call"])
def test_frozen_service_is_a_missed_deadline_and_goes_on_when_it_is_released(service: Service, freeze: Any) -> None:
    with service.session(relu((1, 4))) as session, session.bind() as execution:
        execution.run()
        with inject(service, freeze=freeze) as fault:
            until(lambda: is_late(execution) and fault.times, "no run comes to the fault in its time")
            others = Background(lambda: service.devices[0].get_supported_operations(relu((1, 4))))
            if freeze == "call":  # which alone stands still
                assert others.result() == (True,)
        assert others.result() == (True,)
        execution.run()


def test_interpreter_that_is_frozen_serves_nothing_and_is_killed_by_close(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnburst.service.connection.transport.LEAVING", 0.05)
    with service.session(relu((1, 4))) as session, session.bind() as execution:
        execution.run()
        fault = inject(service, freeze="interpreter")
        until(lambda: is_late(execution) and fault.times, "no run comes to the fault in its time")
        with pytest.raises(MissedDeadline):
            service.session(relu((1, 4)), open_timeout=0.05)
        service.close()


def test_shape_that_no_array_has_is_refused_though_it_is_empty(service: Service) -> None:
    with service.session(relu((0, 0, 0))) as session, session.bind(shapes={"x": (1, 1, 1)}) as bound:
        bound._arguments.check_shapes([OutputShape((0, 1, 2**32 - 1))])
        with pytest.raises(GeneralFailure, match="told shape"):
            bound._arguments.check_shapes([OutputShape((0, 2**32 - 1, 2**32 - 1))])


def test_points_of_the_control_plane_are_passed_before_the_device_is_asked(service: Service) -> None:
    for point, use in {
        "supported": lambda: service.devices[0].get_supported_operations(relu((1, 4))),
        "prepare": lambda: service.devices[0].prepare_model(relu((1, 4))),
        "burst": lambda: service.session(relu((1, 4))).close(),
    }.items():
        with inject(service, at=point, freeze="call") as fault:  # type: ignore[arg-type]
            call = Background(use)
            fault.wait(PATIENCE)
        assert not isinstance(call.result(), Exception)


@pytest.mark.parametrize("point", ["supported", "prepare", "burst", "restore"])
def test_death_at_a_point_of_the_control_plane_is_a_dead_object(
    point: Any, service: Service, nnburst_directories: Path
) -> None:
    def open_session() -> None:
        with nnburst.nnapi.Compilation(relu((1, 4)), service) as compilation:
            if point == "restore":
                compilation.set_caching_auto(nnburst_directories / "cache")
            compilation.finish()
            nnburst.nnapi.Burst(compilation).close()

    open_session()  # now there is something to restore
    fault = inject(service, at=point, exit_on=1, exit_status=9)
    with pytest.raises(DeadObject, match="ended with status 9"):
        open_session()
    assert fault.times == 1


def test_fault_that_is_withdrawn_does_not_happen(service: Service, session: Session) -> None:
    with inject(service, crash_on=1):
        pass
    assert_right(session)


def test_faults_of_one_point_happen_in_the_order_of_the_calls(service: Service, session: Session) -> None:
    delay, crash = inject(service, delay=0.0), inject(service, crash_on=2)
    assert_right(session)
    with pytest.raises(DeadObject):
        session.run(None, ONES)
    assert (delay.times, crash.times) == (2, 1)


def test_fault_that_does_not_happen_is_waited_for_no_longer_than_asked(service: Service) -> None:
    with inject(service, crash_on=1) as fault, pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        fault.wait(0.01)


def test_each_process_of_a_program_has_faults_of_its_own(nnburst_start_method: BaseContext) -> None:
    process = nnburst_start_method.Process(target=_crash_and_go_on)  # type: ignore[attr-defined]
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    process.close()


def _crash_and_go_on() -> None:
    with assert_nothing_left():
        _crash()


def _crash() -> None:
    with nnburst.launch(devices=["nnburst-noop"], faults=True) as service, service.session(relu((1, 4))) as session:
        inject(service, crash_on=1)
        with pytest.raises(DeadObject):
            session.run(None, ONES)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "0 faults"),
        ({"crash_on": 1, "delay": 1.0}, "2 faults"),
        ({"crash_on": 0}, "1 is the next one"),
        ({"delay": -1}, "give seconds"),
        ({"freeze": "all"}, "choose 'process', 'call' or 'interpreter'"),
        ({"crash_on": 1, "at": "x"}, "choose 'supported', "),
        ({"crash_on": 1, "after": -1}, "give a count"),
        ({"delay": 1, "after": "x"}, "after is 'x'"),
        ({"crash_on": 1, "crash_with": "SIGKILL"}, "crash_with is 'SIGKILL'"),
        ({"exit_on": 1, "exit_status": None}, "exit_status is None"),
    ],
)
def test_order_that_makes_no_sense_is_an_invalid_argument(service: Service, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        inject(service, **given)
    with pytest.raises(InvalidArgument, match="expected a service, got 'x'"):
        inject("x", freeze="call")  # type: ignore[arg-type]


def test_service_without_fault_points_says_how_to_have_them(tmp_path: Path) -> None:
    with nnburst.launch(devices=["nnburst-noop"]) as service:
        with pytest.raises(BadState, match="faults=True"):
            inject(service, crash_on=1)
