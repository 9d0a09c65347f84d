"""A run's deadline is kept inside the service, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_control_flow import counting_model

from nnburst import Execution, Service
from nnburst.burst.server.group import ListenerGroup
from nnburst.devices.deadline import calling_at
from nnburst.devices.function import FunctionDevice, Tensor, declare
from nnburst.devices.reference.program import Program
from nnburst.devices.registry import create_device
from nnburst.errors import MissedDeadline
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.host.host import ServiceHost
from support.connections import socket_pair
from support.doubles import Ended
from support.waiting import PATIENCE, until

ONES = np.ones(4, np.float32)
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


def missed(execution: Execution) -> bool:
    """Run, and find that the time is over."""
    with pytest.raises(MissedDeadline):
        execution.run()
    return True


def test_request_that_has_not_begun_by_its_deadline_is_dropped(rig: tuple[Service, Recorded]) -> None:
    service, device = rig
    session = service.session("call")
    session.run(None, {"x": ONES})  # bound from now on
    execution = session.bind()
    execution.timeout = SHORT
    execution.inputs["x"][:] = 0
    until(lambda: missed(execution) and device.inside.is_set(), "none begins in time")
    execution.inputs["x"][:] = 7
    for _ in range(3):  # these never leave the ring in time
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
    with calling_at(time.monotonic_ns() + 3600 * 10**9, lambda: pytest.fail("not due")):
        with calling_at(time.monotonic_ns() + 10**7, called.set):
            assert called.wait(PATIENCE)
        late = threading.Event()
        with calling_at(time.monotonic_ns() - 1, late.set):
            assert late.wait(PATIENCE)
    with calling_at(2**63 - 2, called.clear):
        assert called.is_set()
