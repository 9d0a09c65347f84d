"""Time that passes at once: for runs that wait, for runs that come, and for nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import nnburst
from nnburst import BadState, InvalidArgument, MissedDeadline
from nnburst.testing import FakeClock, assert_nothing_left, inject
from support import ROOT
from support.waiting import PATIENCE

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


def hours(clock: FakeClock) -> int:
    """Return by how much the clock is ahead."""
    return round((clock.monotonic() - time.monotonic()) / AN_HOUR)


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
        assert hours(clock) == round(1e6 / AN_HOUR)


def test_fault_that_does_not_happen_lets_no_time_pass(service: nnburst.Service) -> None:
    with assert_nothing_left(), FakeClock() as clock:
        with inject(service, at="prepare", delay=0.0) as fault:
            clock.advance(AN_HOUR, when=fault)
            clock.close()
            assert hours(clock) == 0
        clock.close()
        with pytest.raises(BadState, match="stopped"):
            clock.advance(1)


def test_times_that_cannot_be_are_refused(service: nnburst.Service) -> None:
    fault = inject(service, delay=0.0)
    fault.withdraw()
    with FakeClock() as clock:
        for seconds in (-1, float("inf"), float("nan"), "1"):
            with pytest.raises(InvalidArgument, match="give seconds"):
                clock.advance(seconds)  # type: ignore[arg-type]
        with pytest.raises(BadState, match="withdrawn"):
            clock.advance(1, when=fault)


class Orders:
    """A service as `inject` sees it; the test says itself what happens."""

    def __init__(self) -> None:
        self.faults, self._orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.getpid()

    def taken(self) -> socket.socket:
        """Take an order, and return where its client hears that it happens."""
        fds = socket.recv_fds(self._orders, 4096, 1)[1]
        return socket.socket(fileno=fds[0])

    def __enter__(self) -> Orders:
        return self

    def __exit__(self, *_: object) -> None:
        self.faults.close()
        self._orders.close()


def wait_for_clocks() -> None:
    for thread in threading.enumerate():
        if thread.name == "nnburst-fake-clock":
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.mark.parametrize("how", ["the service ends", "it is withdrawn"])
def test_fault_that_cannot_happen_any_more_lets_no_time_pass(how: str) -> None:
    with Orders() as orders, FakeClock() as clock:
        fault = inject(orders, freeze="call", after=5)
        with orders.taken() as service:
            clock.advance(AN_HOUR, when=fault)
            if how == "it is withdrawn":
                fault.withdraw()
            else:
                service.close()
            wait_for_clocks()
        assert hours(clock) == 0
        with pytest.raises((TimeoutError, BadState), match=r"cannot happen|will not happen"):
            fault.wait()


@pytest.mark.parametrize("and_then", ["it goes on", "it ends"])
def test_fault_counts_for_the_clock_also_if_the_test_hears_of_it_first(
    monkeypatch: pytest.MonkeyPatch, and_then: str
) -> None:
    monkeypatch.setattr("nnburst.testing.clock._STEP", 0.2)  # the test is first
    with Orders() as orders, FakeClock() as clock:
        fault = inject(orders, crash_on=1)
        with orders.taken() as service:
            clock.advance(AN_HOUR, when=fault)
            service.send(b"!")
            fault.wait()
            if and_then == "it ends":
                service.close()
            wait_for_clocks()
        assert hours(clock) == 1
        assert fault.times == 1


def test_clock_that_is_not_closed_does_not_keep_the_program() -> None:
    program = (
        "import os, socket\n"
        "from nnburst.testing import FakeClock, inject\n"
        "class Orders:\n    pid = os.getpid()\n    faults, kept = socket.socketpair(type=socket.SOCK_SEQPACKET)\n"
        "fault, clock = inject(Orders, crash_on=1), FakeClock()\n"
        "clock.advance(1, when=fault)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=PATIENCE, check=True)
