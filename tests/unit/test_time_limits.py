"""Time limits: what a run may take, what setting up may take, and that a run's is kept inside the service, too."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from test_control_flow import counting_model

import nnburst
from nnburst import Service
from nnburst._core.deadline import Deadline
from nnburst.burst.server.group import ListenerGroup
from nnburst.devices.deadline import call_at
from nnburst.devices.function import FunctionDevice, Tensor, declare
from nnburst.devices.reference.program import Program
from nnburst.devices.registry import create_device
from nnburst.errors import MissedDeadline
from nnburst.nnapi import Execution
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.host.host import ServiceHost
from support.connections import socket_pair
from support.doubles import Ended
from support.models import ready, relu
from support.processes import stopped
from support.waiting import PATIENCE, until

X = np.ones(4, np.float32)
TINY = 1e-6


@pytest.fixture(scope="module")
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        yield service


def one_by_one(session: nnburst.Session, run: Callable[[Execution], Any]) -> Any:
    out = np.empty(4, np.float32)
    run(ready(session.compilation, X, out))
    return out


def of_bound(session: nnburst.Session, run: Callable[[Execution], Any], **options: Any) -> Any:
    with session.bind(**options) as execution:
        execution.inputs["x"][:] = X
        run(execution)
        return execution.outputs["y"].copy()


Way = Callable[[nnburst.Session, float | None], Any]
WAYS: dict[str, Way] = {
    "run": lambda s, t: s.run(None, {"x": X}, timeout=t)[0],
    "arun": lambda s, t: asyncio.run(s.arun(None, {"x": X}, timeout=t))[0],
    "bind": lambda s, t: of_bound(s, nnburst.Execution.run, timeout=t),
    "run_many": lambda s, t: next(s.run_many([{"x": X}], timeout=t))[0],
    "Execution.run": lambda s, t: of_bound(s, lambda e: e.run(timeout=t)),
    "Execution.arun": lambda s, t: of_bound(s, lambda e: asyncio.run(e.arun(timeout=t))),
    "Execution.submit": lambda s, t: of_bound(s, lambda e: e.submit(timeout=t).result()),
    "compute": lambda s, t: one_by_one(s, lambda e: e.compute(timeout=t)),
    "start_compute": lambda s, t: one_by_one(s, lambda e: e.start_compute(timeout=t).wait()),
    "burst_compute": lambda s, t: one_by_one(s, lambda e: e.burst_compute(s.burst, timeout=t)),
    "start_compute_with_dependencies": lambda s, t: one_by_one(
        s, lambda e: e.start_compute_with_dependencies(timeout=t).wait()
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_run_takes_a_time_limit_of_its_own(service: nnburst.Service, way: str) -> None:
    with service.session(relu(), timeout=TINY, open_timeout=PATIENCE) as session:
        for timeout in (None, PATIENCE):
            assert WAYS[way](session, timeout).tolist() == X.tolist()
        with pytest.raises(nnburst.InvalidArgument, match="timeout=-1"):
            WAYS[way](session, -1)
    with service.session(relu(), open_timeout=PATIENCE) as session:
        with pytest.raises(nnburst.MissedDeadline):
            WAYS[way](session, 0)
        assert WAYS[way](session, None).tolist() == X.tolist()


def test_setting_up_does_not_count_towards_the_limit_of_a_run(service: nnburst.Service) -> None:
    with service.session(relu(), timeout=TINY) as session:
        with session.bind(state={"y": "x"}, initial_state={"x": X}) as execution:
            assert execution.get_state()["x"].tolist() == X.tolist()
            execution.reset_state({"x": 2 * X})
            execution.run(timeout=None)
            assert execution.timeout == TINY
            assert execution.get_state()["x"].tolist() == (2 * X).tolist()


def test_setting_up_has_a_limit_of_its_own(service: nnburst.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with service.session(relu()) as session, session.bind(state={"y": "x"}) as execution:
        monkeypatch.setattr(session._pool, "free", lambda: None)  # what there is runs something
        options = replace(session._options, open_timeout=0.5)
        monkeypatch.setattr(session._pool, "options", options)
        monkeypatch.setattr(session, "_options", options)
        with stopped(service.pid):
            for setting_up in (
                lambda: session.run(None, {"x": X}),
                lambda: asyncio.run(session.arun(None, {"x": X})),
                session.bind,
                lambda: next(session.run_many([{"x": X}])),
                execution.reset_state,
                execution.get_state,
            ):
                with pytest.raises(nnburst.MissedDeadline, match=r"no answer within 0(\.[0-4]\d*)? s|0\.5 s"):
                    setting_up()
        assert session.run(None, {"x": X})[0].tolist() == X.tolist()


def test_message_of_a_missed_deadline_has_the_limit_as_people_write_it_and_a_remedy(service: nnburst.Service) -> None:
    with service.session(relu(), concurrency=1) as session:
        session.run(None, {"x": X})
        permit = session._runs.permits.take(Deadline.after(0))
        assert permit is not None
        with pytest.raises(nnburst.MissedDeadline, match=r"within 0\.0667 s.*concurrency="):
            asyncio.run(session.arun(None, {"x": X}, timeout=0.2 / 3))
        session._runs.permits.put_back(permit)
    with service.session(relu()) as session:
        one, two = session.bind(), session.bind()
        with stopped(service.pid):
            for run in (lambda: one.run(timeout=0.2 / 3), lambda: asyncio.run(two.arun(timeout=0.2 / 3))):
                with pytest.raises(nnburst.MissedDeadline, match=r"within 0\.0667 s.*Give more time \(timeout=\)"):
                    run()


# ---- a run's deadline, inside the service --------------------------------------------------------------------------


SHORT = 0.02


class Recorded(FunctionDevice):
    """Its function ``call`` notes what it gets; a 0 keeps it until `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.inside, self.released = threading.Event(), threading.Event()
        x, y = (Tensor(name, "float32", (4,)) for name in "xy")
        self._functions["call"] = declare(inputs=[x], outputs=[y], name="call")(lambda x: self.call(x))

    def call(self, x: Any) -> Any:
        self.seen.append(float(x[0]))
        if x[0] == 0:
            self.inside.set()
            assert self.released.wait(PATIENCE)
        return np.array(x)


@pytest.fixture(params=[False, True], ids=["own listener", "shared"])
def rig(request: pytest.FixtureRequest) -> Iterator[tuple[Service, Recorded]]:
    device = Recorded()
    mine, theirs = socket_pair()
    host = ServiceHost(
        [create_device("nnburst-reference"), device], listeners=ListenerGroup(runs=2) if request.param else None
    )
    host.serve(theirs)
    with Service(ServiceConnection(mine), "test") as service:
        yield service, device
        device.released.set()
    host.close()


def missed(execution: nnburst.Execution) -> bool:
    """Run, and find that the time is over."""
    with pytest.raises(MissedDeadline):
        execution.run()
    return True


def test_request_that_has_not_begun_by_its_deadline_is_dropped(rig: tuple[Service, Recorded]) -> None:
    service, device = rig
    session = service.session("call")
    execution = session.bind()
    execution.inputs["x"][:] = 1
    execution.run()  # bound from now on
    execution.timeout = SHORT
    execution.inputs["x"][:] = 0
    while missed(execution) and not device.inside.is_set():  # none has begun in time
        execution.timeout *= 2  # few wait in the ring, which knows the deadlines of the last four
    execution.timeout = SHORT
    execution.inputs["x"][:] = 7
    for _ in range(2):  # these never leave the ring in time
        assert missed(execution)
    device.released.set()
    execution.timeout = PATIENCE
    execution.inputs["x"][:] = 5
    execution.run()
    assert execution.outputs["y"].tolist() == [5] * 4
    assert device.seen == [1, 0, 5]


def test_loop_ends_at_the_deadline_of_its_run(rig: tuple[Service, Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    service, _ = rig
    ended = Ended(monkeypatch, Program)
    session = service.session(counting_model(step=0.0))
    execution = session.bind()
    execution.timeout = SHORT
    for array in execution.inputs.values():
        array[...] = 0
    until(lambda: missed(execution) and ended.errors, "none begins in time")
    assert isinstance(ended.first(), MissedDeadline)
    for array in execution.inputs.values():
        array[...] = 5
    execution.timeout = PATIENCE
    execution.run()


def test_what_is_due_is_called_and_nothing_else() -> None:
    called = threading.Event()
    with call_at(time.monotonic_ns() + 3600 * 10**9, lambda: pytest.fail("not due")):
        with call_at(time.monotonic_ns() + 10**7, called.set):
            assert called.wait(PATIENCE)
        late = threading.Event()
        with call_at(time.monotonic_ns() - 1, late.set):
            assert late.wait(PATIENCE)
    with call_at(2**63 - 2, called.clear):
        assert called.is_set()
