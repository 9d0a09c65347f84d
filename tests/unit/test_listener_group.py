"""A few listener threads that serve the bursts of many clients, through the public API."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnburst import Service
from nnburst.burst import ExecutionBurstController
from nnburst.burst.server import server as burst_server
from nnburst.burst.server.group import FlowQueue, ListenerGroup
from nnburst.devices.function import FunctionDevice, Tensor, declare
from nnburst.devices.interfaces import CacheFiles, CompileJob
from nnburst.devices.registry import create_device
from nnburst.errors import GeneralFailure, ResourceExhausted
from nnburst.model import Priority
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.host.host import ServiceHost
from support.connections import socket_pair
from support.doubles import refuse_threads
from support.models import tiny_model
from support.waiting import PATIENCE, Background, until

ONES = np.ones(4, np.float32)


class Hooked(FunctionDevice):
    """A device with the function ``call``, which a test says."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        x, y = (Tensor(name, "float32", (4,)) for name in "xy")
        self._functions["call"] = declare(inputs=[x], outputs=[y], name="call")(lambda x: function(x))


class Shared:
    """A service of this process that programs share; each `connect` is one of them."""

    def __init__(self, function: Callable[[Any], Any], **options: Any) -> None:
        self.group = ListenerGroup(**options)
        self.host = ServiceHost([create_device("nnburst-reference"), Hooked(function)], listeners=self.group)
        self.services: list[Service] = []

    def connect(self) -> Service:
        mine, theirs = socket_pair()
        self.host.serve(theirs)
        service = Service(ServiceConnection(mine), "shared")
        self.services.append(service)
        return service


@pytest.fixture
def shared() -> Iterator[Callable[..., Shared]]:
    made: list[Shared] = []

    def make(function: Callable[[Any], Any] = np.array, **options: Any) -> Shared:
        made.append(Shared(function, **options))
        return made[-1]

    with contextlib.ExitStack() as stack:
        yield make
        for one in made:
            stack.callback(one.host.close)
            for service in one.services:
                stack.callback(service.close)


def run(session: Any, value: float = 1.0) -> np.ndarray[Any, Any]:
    (y,) = session.run(None, {"x": ONES * value})
    return np.asarray(y)


@pytest.mark.parametrize("words", [127, 2, 0], ids=["one sleeper", "watchers", "no futex_waitv"])
@pytest.mark.parametrize("window", [None, 0.0], ids=["polling", "sleeping"])
def test_bursts_of_many_clients_are_served_by_few_threads(
    shared: Callable[..., Shared], words: int, window: float | None
) -> None:
    service = shared(lambda x: x + 1, runs=2, most_words=words)
    sessions = [
        connection.session("call", polling_window=window)
        for connection in [service.connect() for _ in range(4)]
        for _ in range(3)
    ]
    for round in range(20):
        for number, session in enumerate(sessions):
            assert run(session, number + round)[0] == number + round + 1
    assert service.group.threads < len(sessions)
    for session in sessions[::2]:
        session.close()
    for session in sessions[1::2]:
        assert run(session, 5)[0] == 6


def hangs_on_zero() -> tuple[Callable[[Any], Any], threading.Semaphore, threading.Event]:
    """Return a function that hangs if it is called with 0, what it releases then, and what it waits for."""
    inside, released = threading.Semaphore(0), threading.Event()

    def function(x: Any) -> Any:
        if x[0] == 0:
            inside.release()
            assert released.wait(PATIENCE)
        return np.array(x)

    return function, inside, released


def test_runs_of_all_priorities_that_hang_delay_no_other_client(shared: Callable[..., Shared]) -> None:
    function, inside, released = hangs_on_zero()
    service = shared(function, runs=2)
    bad, good = (
        [service.connect().session("call", priority=priority) for priority in ("low", "low", "medium", "high", "high")]
        for _ in range(2)
    )
    for session in bad[::-1] + good:
        run(session)
    hanging = list[Background]()
    try:
        for session in bad:
            hanging.append(Background(partial(run, session, 0.0)))
            assert inside.acquire(timeout=PATIENCE)
        for _ in range(20):  # none of these returns before the others are released
            for session in good:
                assert run(session)[0] == 1
        assert run(service.connect().session("call"))[0] == 1
    finally:
        released.set()
    assert [each.result()[0] for each in hanging] == [0] * 5


def test_runs_of_one_client_that_repeat_leave_room_for_its_others(shared: Callable[..., Shared]) -> None:
    begun: list[float] = []
    hangs, inside, released = hangs_on_zero()

    def function(x: Any) -> Any:
        begun.append(float(x[0]))
        return hangs(x)

    service = shared(function, runs=2)
    client = service.connect()
    first, second, third = (client.session("call", polling_window=0.01) for _ in range(3))
    for session in (first, second, third):
        run(session, 9)

    def repeat(session: Any) -> None:
        run(session, 0)
        for _ in range(500):
            if 2 in begun:
                break
            run(session, 3)

    repeating = list[Background]()
    for session in (first, second):
        repeating.append(Background(partial(repeat, session)))
        assert inside.acquire(timeout=PATIENCE)
    waiting = Background(lambda: run(third, 2)[0])
    try:
        until(lambda: third.stats.sent >= 2)
        time.sleep(0.05)  # the leader sleeps
    finally:
        released.set()
    assert [each.result() for each in repeating] == [None] * 2
    assert waiting.result() == 2
    followed = begun[: begun.index(2)].count(3)  # a turn or two of theirs may come first
    assert followed < 500, "the third waited for what followed the others"


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_group_without_threads_refuses_bursts_until_there_are_some(
    shared: Callable[..., Shared], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    service = shared()
    connection = service.connect()
    refuse_threads(monkeypatch, "nnburst-listener", error)
    for _ in range(2):
        with pytest.raises(ResourceExhausted, match="needs a thread"):
            connection.session("call")
    monkeypatch.undo()
    one = connection.session("call")
    assert run(one)[0] == 1
    refuse_threads(monkeypatch, "nnburst-listener", error)
    other = connection.session("call")  # the thread that is there serves it
    assert run(other)[0] == 1
    assert run(one)[0] == 1


def test_listener_that_fails_fails_its_run_and_another_takes_its_place(
    shared: Callable[..., Shared], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = shared()
    find = service.group._burst_of
    failures: list[BaseException] = []

    def find_or_fail(plan: int) -> Any:
        if failures:
            raise failures.pop()
        return find(plan)

    monkeypatch.setattr(service.group, "_burst_of", find_or_fail)
    unlucky, lucky = (service.connect().session("call") for _ in range(2))
    assert run(lucky)[0] == 1
    # The first where the request is bound, the second where that is answered.
    failures += [SystemExit("on purpose"), SystemExit("on purpose")]
    with pytest.raises(GeneralFailure):
        run(unlucky)
    assert run(lucky, 2.0)[0] == 2
    assert run(unlucky, 3.0)[0] == 3
    assert "another one takes its place" in caplog.text


def test_priority_of_a_model_reaches_its_queue_also_from_cache_files(
    shared: Callable[..., Shared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Priority] = []
    add = ListenerGroup.add

    def recorded(group: ListenerGroup, burst: Any, flow_queue: FlowQueue, endpoint: Any) -> None:
        seen.append(flow_queue.priority)
        add(group, burst, flow_queue, endpoint)

    monkeypatch.setattr(ListenerGroup, "add", recorded)
    device = shared().connect().device("nnburst-reference")
    with contextlib.ExitStack() as stack:
        models, data = device.get_number_of_cache_files_needed()
        fds = [os.open(tmp_path / str(i), os.O_RDWR | os.O_CREAT) for i in range(models + data)]
        stack.callback(lambda: [os.close(fd) for fd in fds])
        files = CacheFiles(tuple(fds[:models]), tuple(fds[models:]), bytes(32), priority=Priority.HIGH)
        compiled = device.prepare_model(tiny_model(), CompileJob(priority=Priority.LOW, cache=files))
        restored = device.prepare_model_from_cache(files)
        for prepared in (compiled, restored):
            stack.callback(prepared.close)
            stack.enter_context(ExecutionBurstController.create(prepared))
    assert seen == [Priority.LOW, Priority.HIGH]


def test_client_that_dies_leaves_no_burst(shared: Callable[..., Shared]) -> None:
    service = shared()
    gone = service.connect()
    (hosted,) = service.host.connections
    stays = service.connect()
    session, other = gone.session("call"), stays.session("call")
    run(session)
    run(other)
    gone._backend.connection._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    assert hosted.connection.wait_ended(PATIENCE)
    assert hosted.ledger.used["bursts"] == 0
    assert run(other)[0] == 1
    assert sum(burst is not None for burst in service.group._bursts) == 1


def test_memory_that_is_freed_while_its_burst_ends_leaves_the_plans_of_the_next_one(
    shared: Callable[..., Shared], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = shared()
    session = service.connect().session("call")
    run(session)
    (burst,) = (burst for burst in service.group._bursts if burst is not None)
    plans, marks = service.group._plans, [lambda: None] * len(service.group._plans)
    drop_plans = burst_server.drop_plans

    def late(*arguments: Any) -> list[Any]:
        monkeypatch.undo()
        session.close()
        until(lambda: not any(service.group._bursts), "the burst did not end")
        plans[:] = marks  # what a burst with the same places puts there
        return drop_plans(*arguments)

    monkeypatch.setattr(burst_server, "drop_plans", late)
    burst.forget_plans()  # type: ignore[attr-defined]
    assert burst_server.drop_plans is drop_plans
    assert plans == marks


def test_group_that_is_closed_takes_no_burst(shared: Callable[..., Shared]) -> None:
    service = shared()
    connection = service.connect()
    service.group.close()
    assert service.group.threads == 0
    with pytest.raises(GeneralFailure, match="group is closed"):
        connection.session("call")
    service.group.close()
