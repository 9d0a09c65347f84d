"""How sessions, executions and services end: in any order, dropped, from signal handlers, in the collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import BadState, Memory, MissedDeadline, ResourceExhausted, Tensor, declare
from nnburst._core.deadline import Deadline
from nnburst.burst import ExecutionBurstController
from nnburst.devices.registry import create_device
from nnburst.model import Request
from nnburst.model.types import DataLocation, DeviceStatus, RequestArgument
from nnburst.runtime.run import permits
from nnburst.service.wire.protocol import ListDevices
from support.models import compiled, counter, ready, relu
from support.processes import stop, stopped
from support.waiting import PATIENCE, Background, handling, until, without_collector

ONE = {"x": np.ones(4, np.float32)}
FUNCTIONS = """
import time
from nnburst.devices.function import Tensor, declare

@declare(inputs=[Tensor("x", "float32", (4,))], outputs=[Tensor("y", "float32", (4,))])
def slow(x):
    begun.append(x)
    time.sleep(float(x[0]))
    return x + 1

@declare(inputs=[Tensor("x", "float32", (4,))], outputs=[Tensor("y", "float32", (4,))])
def count(x):
    return x + len(begun)

begun = []
"""


@pytest.fixture(params=["child", "in process"])
def service(request: pytest.FixtureRequest) -> Iterator[nnburst.Service]:
    with (nnburst.launch if request.param == "child" else nnburst.in_process)(devices=["nnburst-reference"]) as service:
        yield service


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device with a function that takes as many seconds as its input says."""
    (tmp_path / "slow_function.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "nnburst-function:call=slow_function:slow+slow_function:count"
    sys.modules.pop("slow_function", None)


def fds_of(service: nnburst.Service) -> int:
    return len(os.listdir(f"/proc/{service.pid}/fd"))


def test_executions_that_are_dropped_give_their_memory_back(service: nnburst.Service) -> None:
    with service.session(relu()) as session:
        for _ in range(3):
            execution = session.bind()
            execution.run()
            del execution
        before = fds_of(service)
        for _ in range(50):
            execution = session.bind()
            execution.run()
            del execution
        until(lambda: fds_of(service) <= before + 2)
        assert len(session.burst.controller._slots) <= 2


def test_session_that_is_closed_keeps_no_memory_of_executions_that_were_dropped(service: nnburst.Service) -> None:
    with service.session(relu()) as session:
        execution = session.bind()
        memory = weakref.ref(execution._arguments.layout.memory)
        del execution
        assert memory() is not None  # until another one is bound
    gc.collect()
    assert memory() is None


@pytest.mark.check
def test_memory_that_was_dropped_goes_wherever_a_handler_takes_it_first(service: nnburst.Service) -> None:
    """Before each line in turn of what gives it back, the same thread binds a request below it."""
    with service.session(relu()) as session:
        for line in range(1, 100):
            dropped = session.bind()
            dropped.run()
            del dropped
            gc.collect()
            lines = iter(range(1, 100))

            def handle(frame: object, event: str, argument: object, lines: Any = lines, line: int = line) -> Any:
                if event == "line" and next(lines) == line:
                    session.bind().close()
                return handle

            sys.settrace(
                lambda frame, *_, to=handle: (
                    to if frame.f_code is ExecutionBurstController.forget_dropped.__code__ else None
                )
            )
            try:
                session.bind().close()
            finally:
                sys.settrace(None)
            assert len(session.burst.controller._slots) == 0
            if next(lines) <= line:
                break
    assert line > 5


def test_states_that_are_dropped_give_their_memory_back(service: nnburst.Service) -> None:
    with service.session(counter()) as session:
        for round in range(20):
            execution = session.bind(state={"t_out": "t"})
            execution.run()
            del execution
            if round == 2:
                before = fds_of(service)
        session.bind()
        until(lambda: fds_of(service) <= before + 2)
        assert len(session.burst.controller._slots) <= 4
        gc.collect()
        tracker = getattr(session.device, "_tracker", None)
        assert tracker is None or not tracker._buffers  # only in process there is one to look at


@pytest.mark.parametrize("state", [None, {"t_out": "t"}])
def test_execution_keeps_its_session(service: nnburst.Service, state: dict[str, str] | None) -> None:
    step: Any = service.session(counter()).bind(state=state)  # type: ignore[call-overload]
    gc.collect()
    step.run()
    step.close()


def test_closing_in_the_wrong_order_is_harmless() -> None:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        session = service.session(counter())
        plain, stateful = session.bind(), session.bind(state={"t_out": "t"})
        plain.run()
        stateful.run()
    for thing in (plain, stateful, session):
        thing.close()
        thing.close()
    with pytest.raises(BadState):
        plain.run()


def test_state_that_is_closed_says_so(service: nnburst.Service) -> None:
    with service.session(counter()) as session:
        execution = session.bind(state={"t_out": "t"})
        execution.close()
        for use in (execution.run, execution.get_state, execution.reset_state):
            with pytest.raises(BadState, match="closed"):
                use()


def test_reset_that_is_refused_leaves_the_state(service: nnburst.Service) -> None:
    with service.session(counter()) as session, session.bind(state={"t_out": "t"}) as execution:
        execution.run()
        for wrong in ({"typo": np.ones(4, np.float32)}, {"t": np.ones(5, np.float32)}):
            with pytest.raises(nnburst.InvalidArgument):
                execution.reset_state(wrong)
        assert (execution.get_state()["t"] == 1).all()


@pytest.mark.check
def test_session_is_closed_by_a_signal_handler_while_it_runs(slow: str) -> None:
    """The usual way to shut down."""
    with nnburst.launch(devices=[slow]) as service:
        session = service.session("slow")
        with handling(signal.SIGALRM, lambda *_: session.close()):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with contextlib.suppress(BadState):  # the service finishes what it does, so there may be an answer
                session.run(None, {"x": np.ones(4, np.float32)})
        assert session.closed
        with pytest.raises(BadState, match="closed"):
            session.run(None, {"x": np.ones(4, np.float32)})


def test_run_of_a_signal_handler_over_the_same_execution_is_refused_and_harms_nothing() -> None:
    seen: list[BaseException] = []
    with nnburst.launch(devices=["nnburst-reference"]) as service, service.session(relu()) as session:
        execution = session.bind()
        execution.inputs["x"][:] = 0.4

        def again(*_: object) -> None:
            try:
                execution.run()
            except BadState as error:
                seen.append(error)

        def interrupt() -> None:
            try:
                until(lambda: not session.burst.controller.is_free)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
                until(lambda: seen)
            finally:
                os.kill(service.pid, signal.SIGCONT)

        with handling(signal.SIGALRM, again):
            stop(service.pid)
            interrupting = Background(interrupt)
            execution.run()
            assert interrupting.result() is None
        assert len(seen) == 1
        assert (execution.outputs["y"] == np.float32(0.4)).all()


@pytest.mark.parametrize("where", ["child", "in process"])
def test_runs_that_were_given_up_are_not_run_after_the_end(slow: str, where: str) -> None:
    with (nnburst.launch if where == "child" else nnburst.in_process)(devices=[slow]) as service:
        (before,) = service.session("count").run(None, {"x": np.zeros(4, np.float32)})
        session = service.session("slow")
        session.run(None, {"x": np.zeros(4, np.float32)})
        execution = session.bind()
        execution.timeout = 0.02
        execution.inputs["x"][:] = 0.3
        for _ in range(20):
            with pytest.raises(MissedDeadline):
                execution.run()
        session.close()
        (after,) = service.session("count").run(None, {"x": np.zeros(4, np.float32)})
    assert after[0] - before[0] < 21


def test_run_does_not_overtake_runs_that_were_given_up(slow: str) -> None:
    """A full ring is no reason to run beside the queue, as a request that is too long for it does."""
    device = create_device(slow)
    prepared = device.prepare_model(device.import_model("name:slow").model)
    with Memory.ashmem(32) as memory, ExecutionBurstController.create(prepared, channel_length=16) as burst:
        memory.array(np.float32, (8,))[:4] = 0.3
        request = Request(
            (RequestArgument(False, DataLocation(0, 0, 16)),),
            (RequestArgument(False, DataLocation(0, 16, 16)),),
            (memory,),
        )
        execution = burst.bind(request)
        execution.timeout = 0.01
        for _ in range(8):
            with pytest.raises(MissedDeadline):
                execution.run()
        assert burst.stats.fallbacks == 0


class _Cycle:
    """Keeps something until the collector comes."""

    def __init__(self, kept: object) -> None:
        self.kept = kept
        self.me = self


def test_collector_may_find_a_session_in_the_connection_s_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nobody could read an answer."""
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        connection = service._backend.connection  # type: ignore[attr-defined]
        collected, calling, call = threading.Event(), list[str](), type(connection).call

        def recorded(*args: Any, **options: Any) -> Any:
            calling.append(threading.current_thread().name)
            return call(*args, **options)

        monkeypatch.setattr(type(connection), "call", recorded)

        def collect() -> None:
            gc.collect()
            collected.set()

        with without_collector():
            session = service.session(relu())
            session.run(None, ONE)
            _Cycle(session)
            del session
            # What handles a reply runs in the reader thread; so does what becomes of one that came too late.
            with stopped(service.pid), pytest.raises(MissedDeadline):  # so that the answer is late
                connection.call(ListDevices(), timeout=0.2, on_late=lambda reply: collect())
            assert collected.wait(PATIENCE)
        assert service.devices[0].status is DeviceStatus.AVAILABLE
        assert not any(name.startswith("nnburst-client-reader") for name in calling)


@pytest.mark.parametrize("what", ["sessions", "bursts of nnapi"])
def test_what_is_dropped_ends_its_listeners(what: str) -> None:
    before = set(threading.enumerate())
    with nnburst.in_process(devices=["nnburst-reference"]) as service, compiled(relu(), service) as compilation:
        for _ in range(3):
            if what == "sessions":
                session = service.session(relu())
                session.run(None, ONE)
                _Cycle(session)
                del session
            else:
                burst = nnburst.nnapi.Burst(compilation)
                ready(compilation, ONE["x"], np.zeros(4, np.float32)).burst_compute(burst)
                del burst
        gc.collect()
        until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("where", ["launch", "in_process"])
def test_run_after_the_end_of_the_interpreter_s_services_is_refused(where: str) -> None:
    """A function that was registered before nnburst was imported comes last."""
    program = f"""
import atexit
@atexit.register
def last():
    try:
        execution.run()
        print("ran")
    except nnburst.NNBurstError as error:
        print(type(error).__name__)
import nnburst
b = nnburst.ModelBuilder()
x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (4,))
b.output("y", b.relu(x))
service = nnburst.{where}(devices=["nnburst-reference"])
execution = service.session(b.build()).bind()
execution.run()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() in ("DeadObject", "BadState")


HANDLER = """
import random, signal
import nnburst
b = nnburst.ModelBuilder()
x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (4,))
b.output("y", b.relu(x))
model = b.build()
random.seed(1)
signal.signal(signal.SIGALRM, lambda *_: session.close())
with nnburst.{where}(devices=["nnburst-reference"]) as service:
    for _ in range(300):
        session = service.session(model)
        signal.setitimer(signal.ITIMER_REAL, 0.0003 + random.random() * 0.003)
        try:
            while True:
                execution = session.bind()
                execution.run()
                service.devices[0].status
                execution.close()
        except nnburst.BadState:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
print("ended")
"""


@pytest.mark.check
@pytest.mark.parametrize("where", ["launch", "in_process"])
def test_signal_handler_may_close_a_session_over_any_step(where: str) -> None:
    program = HANDLER.format(where=where)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "ended", done.stderr


def test_timeout_is_read_from_a_session_and_given_when_it_is_opened() -> None:
    with nnburst.in_process() as service, service.session(relu(), timeout=5) as session:
        assert session.timeout == 5
        with pytest.raises(AttributeError):
            session.timeout = 1  # type: ignore[misc]


def test_permit_goes_to_those_that_wait_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permits, "_LONGEST_WAIT", PATIENCE)  # nobody looks without being woken
    home, took = permits.Permits(1), list[str]()
    permit = home.take(Deadline.never)
    assert permit is not None

    def wait(name: str, seconds: float | None) -> None:
        if (mine := home.take(Deadline.after(seconds))) is not None:
            took.append(name)
            home.put_back(mine)

    waits = {"first": None, "hasty": 0.05, "last": None}
    waiting = list[Background]()
    for i, (name, seconds) in enumerate(waits.items(), 1):
        waiting.append(Background(partial(wait, name, seconds)))
        until(lambda i=i: len(home.waiting) == i or waiting[1].is_over)  # type: ignore[misc]
    assert waiting[1].result() is None
    assert home.take(Deadline.after(0)) is None
    home.put_back(permit)
    assert [each.result() for each in waiting] == [None] * 3
    assert took == ["first", "last"]
    assert home.idle == [permit]
    assert not home.waiting


def test_permit_is_found_behind_one_that_cannot_run() -> None:
    home = permits.Permits(1)
    permit = home.take(Deadline.never)
    home.waiting.append(lambda _: None)  # below a signal handler, or a task whose event loop is held up
    threading.Timer(0.01, home.idle.append, [permit]).start()
    assert home.take(Deadline.after(PATIENCE)) is permit


def test_task_that_nobody_wakes_finds_a_permit() -> None:
    home = permits.Permits(1)
    permit = home.take(Deadline.never)

    async def wait() -> permits.Permit | None:
        task = asyncio.create_task(home.atake(Deadline.never))
        while not home.waiting:
            await asyncio.sleep(0)
        home.idle.append(permit)  # and whoever does so is interrupted before it wakes the task
        return await asyncio.wait_for(task, PATIENCE)

    assert asyncio.run(wait()) is permit
    assert not home.waiting


@pytest.mark.parametrize("run", [nnburst.Session.run, lambda *arguments: asyncio.run(nnburst.Session.arun(*arguments))])
@pytest.mark.parametrize("what", ["input", "output"])
def test_session_runs_again_after_a_run_that_exceeded_a_quota(run: Any, what: str) -> None:
    x, y = Tensor("x", "float32", ("n",)), Tensor("y", "float32", ("m",))
    take = declare(inputs=[x], outputs=[y], name="input")(lambda x: x[:1])
    give = declare(inputs=[x], outputs=[y], name="output")(lambda x: np.ones(int(x[0]), np.float32))
    with nnburst.launch(functions=[take, give], quotas={"mapped_bytes": 1 << 20}) as service:
        with service.session(what) as session:
            for count in (10, 1 << 19, 10):
                refused = pytest.raises(ResourceExhausted, match="quota mapped_bytes=N")
                with refused if count > 10 else contextlib.nullcontext():
                    x_of_count = np.full(count if what == "input" else 1, count, np.float32)
                    run(session, None, {"x": x_of_count})


def test_unknown_option_is_named_beside_those_there_are() -> None:
    with pytest.raises(TypeError, match=r"no option 'time_out'; it has .*timeout"):
        nnburst.Session(relu(), time_out=3)  # type: ignore[call-arg]
