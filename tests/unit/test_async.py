"""Awaiting runs in asyncio and Trio: results, order, cancelling, time limits, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_flights import FUNCTIONS, filled, relu

import nnburst
from nnburst.burst.client import in_flight
from nnburst.runtime import service as runtime_service
from nnburst.runtime.run import event_loop
from nnburst.service.client.proxies import RemoteBurstContext
from support.processes import stop, stopped
from support.waiting import PATIENCE, Background, until

Main = Callable[[], Awaitable[Any]]


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("functions")
    (directory / "async_function.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH")))))
        yield "nnburst-function:call=async_function:slow"


@pytest.fixture(scope="module")
def service(function: str) -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-reference", function]) as service:
        yield service


@pytest.fixture
def session(service: nnburst.Service) -> Iterator[nnburst.Session]:
    with service.session(relu()) as session:
        yield session


@pytest.fixture
def slow(service: nnburst.Service) -> Iterator[nnburst.Session]:
    with service.session("slow") as session:
        yield session


def in_asyncio(main: Main) -> Any:
    return asyncio.run(asyncio.wait_for(main(), PATIENCE))  # type: ignore[arg-type]


def in_trio(main: Main) -> Any:
    trio = pytest.importorskip("trio")

    async def within() -> None:
        with trio.fail_after(PATIENCE):
            await main()

    return trio.run(within)


@pytest.fixture(params=[in_asyncio, in_trio])
def loop(request: pytest.FixtureRequest) -> Callable[[Main], Any]:
    return request.param  # type: ignore[no-any-return]


def test_awaited_runs_return_what_run_returns(loop: Callable[[Main], Any], session: nnburst.Session) -> None:
    async def main() -> None:
        for i in range(50):
            (y,) = await session.arun(None, filled(i))
            assert int(y[0]) == i
        assert [int(y[0]) for y in await session.arun(["y", "y"], filled(7))] == [7, 7]
        execution = session.bind()
        execution.inputs["x"][:] = 5
        await execution.arun()
        assert int(execution.outputs["y"][0]) == 5
        with pytest.raises(nnburst.InvalidArgument):
            await session.arun(None, {"x": np.zeros(5, np.float32)})

    loop(main)


def test_runs_that_take_long_suspend_their_task_alone(loop: Callable[[Main], Any], slow: nnburst.Session) -> None:
    async def main() -> None:
        execution = slow.bind()
        for _ in range(3):
            execution.inputs["x"][:] = 0.05
            await execution.arun()
            (y,) = await slow.arun(None, filled(0.02))
            assert y[0] == np.float32(0.02)
        execution.inputs["x"][1] = -4
        with pytest.raises(nnburst.GeneralFailure, match="refused -4"):
            await execution.arun()

    loop(main)


def test_thousand_awaited_at_once_finish_without_threads_of_their_own(session: nnburst.Session) -> None:
    threads = set(threading.enumerate())

    async def one(i: int) -> bool:
        (y,) = await session.arun(None, filled(i))
        return int(y[0]) == i

    async def main() -> None:
        assert all(await asyncio.gather(*(one(i) for i in range(1000))))

    in_asyncio(main)
    made = [thread.name for thread in set(threading.enumerate()) - threads]
    made = [name for name in made if not name.startswith("nnburst-client")]
    assert made in ([], ["nnburst-jobs"])  # which opened the second burst


def test_other_tasks_run_between_runs_that_are_answered_at_once(session: nnburst.Session) -> None:
    async def main() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        execution = session.bind()
        for _ in range(2000):
            await execution.arun()
        task.cancel()
        assert turns > 10

    in_asyncio(main)


@pytest.fixture
def patient(service: nnburst.Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[nnburst.Session]:
    """One whose runs poll for longer than any test, in very short shares of each turn of the loop."""
    monkeypatch.setattr(event_loop, "_LONGEST_TURN", 1)
    with service.session("slow", polling_window=PATIENCE) as session:
        yield session


def test_polling_ends_with_the_turn_of_the_loop_and_goes_on_in_the_next(
    loop: Callable[[Main], Any], patient: nnburst.Session, service: nnburst.Service
) -> None:
    async def main() -> None:
        execution = patient.bind()

        async def other() -> None:
            for _ in range(10):
                await sleep(0)
            os.kill(service.pid, signal.SIGCONT)

        for _ in range(1000):
            for _ in range(4):
                execution.run()  # now it is known that answers come within the window
            async with tasks(loop) as start:
                stop(service.pid)
                start(other)
                slept = patient.stats.sleeps
                await execution.arun()
            if patient.stats.sleeps == slept:
                return
            # the service was asleep before it was stopped: such a run is not polled for
        raise AssertionError("it was suspended in place of polling on")

    loop(main)


def test_run_that_is_cancelled_between_two_looks_is_given_up(
    loop: Callable[[Main], Any], patient: nnburst.Session, service: nnburst.Service
) -> None:
    async def main() -> None:
        execution = patient.bind()
        with stopped(service.pid):
            await cancelled_after(0.01, execution.arun)
        while execution.is_in_flight:  # for ever, if it was forgotten
            await sleep(0.01)
        await execution.arun()

    loop(main)


def test_cancelled_run_lands_before_its_arrays_are_used_again(
    loop: Callable[[Main], Any], slow: nnburst.Session, service: nnburst.Service
) -> None:
    async def main() -> None:
        execution = slow.bind()
        await execution.arun()
        with stopped(service.pid):
            await cancelled_after(0.05, execution.arun)
            assert execution.is_in_flight
            with pytest.raises(nnburst.BadState, match="execution is running"):
                await execution.arun()
        while execution.is_in_flight:
            await sleep(0.01)
        await execution.arun()

    loop(main)


def test_run_that_was_given_up_lands_without_its_loop(loop: Callable[[Main], Any], service: nnburst.Service) -> None:
    with service.session("slow", concurrency=1) as session:
        session.run(None, filled(0))

        async def main() -> None:
            with stopped(service.pid):
                await cancelled_after(0.05, session.arun, None, filled(0))

        loop(main)
        run = Background(lambda: session.run(None, filled(0))[0].tolist())
        assert run.result() == [0] * 4, "the run waits for one that never lands"


@contextlib.asynccontextmanager
async def tasks(loop: Callable[[Main], Any]) -> AsyncIterator[Callable[[Main], Any]]:
    """What starts tasks that end by themselves."""
    if loop is in_asyncio:
        started: list[asyncio.Task[Any]] = []
        yield lambda main: started.append(asyncio.create_task(main()))  # type: ignore[arg-type]
        await asyncio.gather(*started)
    else:
        trio = pytest.importorskip("trio")
        async with trio.open_nursery() as nursery:
            yield nursery.start_soon


async def sleep(seconds: float) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        import trio

        await trio.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


async def cancelled_after(seconds: float, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        import trio

        with trio.move_on_after(seconds) as scope:
            await function(*args)
        assert scope.cancelled_caught
    else:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(function(*args), seconds)


def cancel_at_random(session: nnburst.Session, seconds: float) -> int:
    """Runs for so long, and until one was cancelled, at random moments; every answer is right."""
    draw = random.Random(3)
    cancelled = 0

    async def one(i: int) -> None:
        nonlocal cancelled
        task = asyncio.ensure_future(session.arun(None, {"x": np.array([draw.random() / 2000, i, i, i], np.float32)}))
        await asyncio.sleep(draw.random() / 2000)
        if draw.random() < 0.7:
            task.cancel()
        try:
            (y,) = await task
            assert int(y[3]) == i
        except asyncio.CancelledError:
            cancelled += 1

    async def main() -> None:
        end, i = time.monotonic() + seconds, 0
        while time.monotonic() < end or cancelled == 0:
            await asyncio.gather(*(one(i + k) for k in range(8)))
            i += 8
        (y,) = await session.arun(None, filled(0))
        assert int(y[0]) == 0

    asyncio.run(main())
    return cancelled


@pytest.mark.check
def test_runs_that_are_cancelled_at_random_spoil_no_other(slow: nnburst.Session) -> None:
    cancel_at_random(slow, 1.5)


@pytest.mark.soak
def test_ten_thousand_runs_cancelled_at_random(slow: nnburst.Session) -> None:
    cancelled = 0
    while cancelled < 10_000:
        cancelled += cancel_at_random(slow, 10)


def test_time_limit_of_an_awaited_run(loop: Callable[[Main], Any], service: nnburst.Service) -> None:
    async def main() -> None:
        with service.session("slow", timeout=0.1) as session:
            with pytest.raises(nnburst.MissedDeadline):
                await session.arun(None, filled(0.5))
            await session.arun(None, filled(0), timeout=PATIENCE)

    loop(main)


@pytest.mark.check
def test_death_of_the_service_reaches_every_awaiting_task(function: str) -> None:
    with nnburst.launch(devices=[function]) as service, service.session("slow") as session:

        async def main() -> None:
            tasks = [asyncio.ensure_future(session.arun(None, filled(60))) for _ in range(6)]
            await asyncio.sleep(0.2)
            os.kill(service.pid, signal.SIGKILL)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, nnburst.DeadObject) for result in results), results

        in_asyncio(main)


def test_permit_comes_back_though_the_service_takes_one_request_at_a_time(
    service: nnburst.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service.session(relu(), concurrency=1) as session:
        with monkeypatch.context() as older:
            older.setattr(session.burst.controller, "_flights", None)
            older.setattr(session._pool, "free", lambda: None)
            with pytest.raises(nnburst.GeneralFailure, match="one request at a time") as refused:
                in_asyncio(lambda: session.arun(None, filled(0)))
        assert refused.tb is not None, "what the traceback holds is not garbage"
        session.run(None, filled(0), 1.0)


@pytest.mark.check
def test_start_of_another_service_does_not_hold_up_the_loop(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, starts = 0, list[bool]()
    with nnburst.launch(devices=[function]) as service:
        monkeypatch.setattr(runtime_service, "_wait", lambda seconds: starts.append(until(lambda: ticks > 5)))
        with service.session("slow", on_death="restart", retry=1) as session:
            execution = session.bind()

            async def main() -> None:
                nonlocal ticks
                for run in (execution.arun, lambda: session.arun(None, filled(0))):
                    await session.arun(None, filled(0))
                    await asyncio.to_thread(end, service)
                    task = asyncio.ensure_future(run())
                    ticks = 0
                    while not task.done():
                        ticks += 1
                        await asyncio.sleep(0.001)
                    await task

            in_asyncio(main)
            assert len(session.restarts) == len(starts) == 2


def end(service: nnburst.Service) -> None:
    os.kill(service.pid, signal.SIGKILL)
    until(lambda: not service.alive)


def test_reason_of_a_failure_is_awaited_too(slow: nnburst.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = threading.Event(), threading.Event()

    def reason(self: object) -> str:
        asked.set()
        assert told.wait(PATIENCE)  # by the loop, which goes on
        return "because"

    monkeypatch.setattr(RemoteBurstContext, "failure_reason", reason)
    execution = slow.bind()
    execution.inputs["x"][:] = [0, -1, 0, 0]

    async def main() -> None:
        task = asyncio.ensure_future(execution.arun())
        while not asked.is_set():
            await asyncio.sleep(0.001)
        with pytest.raises(nnburst.BadState, match="running"):
            await execution.arun()
        told.set()
        with pytest.raises(nnburst.GeneralFailure, match="because"):
            await task
        asked.clear()
        told.clear()
        task = asyncio.ensure_future(slow.arun(None, {"x": execution.inputs["x"]}))
        while not asked.is_set():
            await asyncio.sleep(0.001)
        idle = len(slow._idle)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(slow._idle) == idle  # its arrays are in use until the end is known
        told.set()
        while len(slow._idle) == idle:
            await asyncio.sleep(0.001)
        await slow.arun(None, filled(0))

    in_asyncio(main)


def test_awaiting_without_an_event_loop_says_so(session: nnburst.Session) -> None:
    coroutine = session.bind().arun()
    with pytest.raises(nnburst.BadState, match="no event loop"):
        coroutine.send(None)


def test_threads_and_tasks_share_a_session(session: nnburst.Session) -> None:
    def in_thread() -> None:
        for i in range(200):
            assert int(session.run(None, filled(i))[0][0]) == i

    async def main() -> None:
        for i in range(200):
            assert int((await session.arun(None, filled(1000 + i)))[0][0]) == 1000 + i

    running = [Background(in_thread) for _ in range(2)]
    in_asyncio(main)
    assert [each.result() for each in running] == [None] * 2


@pytest.mark.check
def test_burst_that_is_closed_before_trio_watches_it_ends_its_runs(
    slow: nnburst.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = event_loop._TrioLoop.watch

    def closing(loop: Any, flights: Any) -> None:
        attend(loop, flights)
        slow.close()

    async def main() -> None:
        with pytest.raises(nnburst.NNBurstError):
            await slow.arun(None, filled(1))

    monkeypatch.setattr(event_loop._TrioLoop, "watch", closing)
    in_trio(main)


def test_session_that_is_closed_while_a_run_begins_ends_the_run(
    loop: Callable[[Main], Any], service: nnburst.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closing:
        """What each call is made with, after the session was closed."""

        def __getattr__(self, name: str) -> Any:
            if name == "nnb_execution_launch":
                assert Background(session.close).result() is None
            return getattr(lib, name)

    lib = in_flight.lib
    with service.session(relu()) as session:

        async def main() -> None:
            monkeypatch.setattr(in_flight, "lib", Closing())
            with pytest.raises(nnburst.BadState, match="closed"):
                await session.arun(None, filled(1))
            monkeypatch.setattr(in_flight, "lib", lib)

        loop(main)


def abandoned(session: nnburst.Session, *, runs: int) -> asyncio.AbstractEventLoop:
    """Return a loop that has stopped over tasks that await runs."""
    session.run(None, filled(0))
    loop = asyncio.new_event_loop()

    async def main() -> None:
        started = [asyncio.ensure_future(session.arun(None, filled(0.2))) for _ in range(runs)]
        await asyncio.wait(started, timeout=0.05)

    with stopped(session.service.pid):
        loop.run_until_complete(main())
    return loop


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_session_closes_over_tasks_whose_loop_is_closed(service: nnburst.Service) -> None:
    session = service.session("slow", concurrency=1)
    loop = abandoned(session, runs=2)
    loop.close()
    session.close()
    del loop, session
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_task_that_is_dropped_with_its_closed_burst_leaves_the_burst_alone(
    service: nnburst.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = service.session("slow", concurrency=1)
    loop = abandoned(session, runs=1)
    session.close()
    monkeypatch.setattr(in_flight, "lib", None)  # what it would be asked about may be freed
    given_up: list[bool] = []
    give_up = in_flight.InFlightRuns.withdraw
    monkeypatch.setattr(in_flight.InFlightRuns, "withdraw", lambda *flight: given_up.append(give_up(*flight)))
    loop.close()
    del loop, session
    gc.collect()
    assert given_up == [True]


def test_run_that_would_wait_for_tasks_of_its_own_thread_is_refused(service: nnburst.Service) -> None:
    with service.session("slow", concurrency=2) as session:

        async def main() -> None:
            with stopped(service.pid):
                started = [asyncio.ensure_future(session.arun(None, filled(0))) for _ in range(2)]
                await asyncio.wait(started, timeout=0.05)
                refused = r"2 runs of the session are under way in this thread, .*await arun"
                with pytest.raises(nnburst.BadState, match=refused):
                    session.run(None, filled(0))
            await asyncio.to_thread(session.run, None, filled(0))
            await asyncio.gather(*started)
            with stopped(service.pid):
                for _ in range(2):
                    await cancelled_after(0.05, session.arun, None, filled(0))
            session.run(None, filled(0))  # these land without the loop

        in_asyncio(main)
