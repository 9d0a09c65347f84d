"""Time that passes at once: for runs that wait, for runs that come, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import BadState, InvalidArgument, MissedDeadline
from nnburst.testing import FakeClock, inject
from support.models import relu
from support.waiting import Background

ONES = {"x": np.ones((1, 4), np.float32)}
AN_HOUR = 3600.0


@pytest.fixture(scope="module")
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-reference"], faults=True, log_level="error") as service:
        yield service


@pytest.fixture
def session(service: nnburst.Service) -> Iterator[nnburst.Session]:
    with service.session(relu((1, 4)), timeout=AN_HOUR) as session:
        session.run(None, ONES)
        yield session


def run_late(session: nnburst.Session, clock: FakeClock, seconds: float, **fault: Any) -> object:
    """Run, let time pass as soon as a fault has happened, and return the outputs or the error."""
    with inject(session.service, **fault) as happens:
        run = Background(lambda: session.run(None, ONES))
        happens.wait()
        clock.advance(seconds)
        return run.result()


@pytest.mark.parametrize("polling_window", [0.0, 5e-5])
def test_run_that_waits_is_late_when_its_time_has_passed(service: nnburst.Service, polling_window: float) -> None:
    clock = FakeClock()
    with service.session(relu((1, 4)), timeout=AN_HOUR, polling_window=polling_window) as session:
        session.run(None, ONES)
        before = clock.monotonic()
        assert isinstance(run_late(session, clock, AN_HOUR, freeze="call"), MissedDeadline)
        assert clock.monotonic() - before >= AN_HOUR
        session.run(None, ONES)  # the late answer is dropped; this run has an hour of its own
        assert session.stats.dropped == 1


def test_time_that_is_not_enough_changes_nothing(session: nnburst.Session) -> None:
    clock = FakeClock()
    assert isinstance(run_late(session, clock, AN_HOUR - 60, delay=0.3), list)
    clock.advance(2 * AN_HOUR)  # before a run: it begins later, that is all
    session.run(None, ONES)


def test_run_without_a_limit_is_never_late(service: nnburst.Service) -> None:
    with service.session(relu((1, 4))) as endless:
        assert isinstance(run_late(endless, FakeClock(), 1e8, delay=0.2), list)


def test_service_keeps_the_real_time(session: nnburst.Session) -> None:
    """The deadline that travels with a request is by the clock that both processes have."""
    FakeClock().advance(1e6)
    session.run(None, ONES)


def test_times_that_cannot_be_are_refused() -> None:
    for seconds in (-1, float("inf"), float("nan"), "1"):
        with pytest.raises(InvalidArgument, match="give seconds"):
            FakeClock().advance(seconds)  # type: ignore[arg-type]


def test_fault_that_cannot_happen_any_more_is_not_waited_for(service: nnburst.Service) -> None:
    fault = inject(service, freeze="call", after=5)
    fault.withdraw()
    with pytest.raises(BadState, match="will not happen"):
        fault.wait()
    with nnburst.launch(devices=["nnburst-noop"], faults=True) as other:
        fault = inject(other, freeze="call", after=5)
    with pytest.raises(TimeoutError, match="cannot happen"):
        fault.wait()
