"""Time that passes at once: for runs that wait, for runs that come, and for nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import nnburst
from nnburst import BadState, InvalidArgument, MissedDeadline
from nnburst.testing import FakeClock, assert_nothing_left, inject

ONES = {"x": np.ones((1, 4), np.float32)}
AN_HOUR = 3600.0


@pytest.fixture(scope="module")
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-reference"], faults=True, log_level="error") as service:
        yield service


@pytest.fixture
def session(service: nnburst.Service) -> Iterator[nnburst.Session]:
    b = nnburst.ModelBuilder()
    b.output("y", b.relu(b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))))
    with service.session(b.build(), timeout=AN_HOUR) as session:
        session.run(None, ONES)
        yield session


Use = Callable[[], object]


@pytest.mark.parametrize("polling_window", [0.0, 5e-5])
def test_run_that_waits_is_late_when_its_time_has_passed(service: nnburst.Service, polling_window: float) -> None:
    b = nnburst.ModelBuilder()
    b.output("y", b.relu(b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))))
    with (
        FakeClock() as clock,
        service.session(b.build(), timeout=AN_HOUR, polling_window=polling_window) as session,
        session.bind() as execution,
    ):
        execution.run()
        before = clock.monotonic()
        with inject(service, freeze="call") as fault:
            clock.advance(AN_HOUR, when=fault)
            with pytest.raises(MissedDeadline):
                execution.run()
        assert clock.monotonic() - before >= AN_HOUR
        execution.run()  # the late answer is dropped; this run has an hour of its own
        assert session.stats.dropped == 1


def test_time_that_is_not_enough_changes_nothing(service: nnburst.Service, session: nnburst.Session) -> None:
    with FakeClock() as clock, session.bind() as execution:
        with inject(service, delay=0.3) as fault:
            clock.advance(AN_HOUR - 60, when=fault)
            execution.run()
            assert fault.times == 1
        clock.advance(2 * AN_HOUR)  # before a run: it begins later, that is all
        execution.run()


def test_run_without_a_limit_is_never_late(service: nnburst.Service, session: nnburst.Session) -> None:
    with service.session(session.compilation.model) as endless, FakeClock() as clock:
        endless.run(None, ONES)
        with inject(service, delay=0.2) as fault:
            clock.advance(1e8, when=fault)
            endless.run(None, ONES)


def test_service_keeps_the_real_time(service: nnburst.Service, session: nnburst.Session) -> None:
    """The deadline that travels with a request is by the clock that both processes have."""
    with FakeClock() as clock:
        clock.advance(1e6)
        session.run(None, ONES)
        assert clock.monotonic() - time.monotonic() == pytest.approx(1e6)


def test_fault_that_does_not_happen_lets_no_time_pass(service: nnburst.Service) -> None:
    with assert_nothing_left(), FakeClock() as clock:
        with inject(service, at="prepare", delay=0.0) as fault:
            clock.advance(AN_HOUR, when=fault)
            clock.close()
            assert clock.monotonic() - time.monotonic() < AN_HOUR
        clock.close()
        with pytest.raises(BadState, match="stopped"):
            clock.advance(1)


def test_times_and_faults_that_cannot_be_are_refused(service: nnburst.Service) -> None:
    fault = inject(service, delay=0.0)
    fault.withdraw()
    with FakeClock() as clock:
        for seconds in (-1, float("inf"), float("nan")):
            with pytest.raises(InvalidArgument, match="give seconds"):
                clock.advance(seconds)
        with pytest.raises(BadState, match="withdrawn"):
            clock.advance(1, when=fault)
