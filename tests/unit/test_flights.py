"""Several executions in flight: futures and many inputs, their order, their ends, and what they leave."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import Memory
from nnburst._core.deadline import Deadline
from nnburst.runtime.run.burst_pool import BurstPool
from nnburst.runtime.run.ring import Ring
from nnburst.watch import find_services, look
from support.models import relu
from support.processes import stopped
from support.users import in_forked_child
from support.waiting import PATIENCE, Background, Held, handling, until

FUNCTIONS = """
import os, time
from nnburst.devices.function import Tensor, declare

go_on = os.path.join(os.path.dirname(__file__), "go_on")

@declare(inputs=[Tensor("x", "float32", (4,))], outputs=[Tensor("y", "float32", (4,))])
def slow(x):
    while x[0] == 60 and not os.path.exists(go_on):
        time.sleep(0.001)
    time.sleep(float(x[0]) % 60)
    if x[1] < 0:
        raise ValueError(f"refused {x[1]}")
    return x.copy()
"""


def filled(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full(4, value, np.float32)}


@pytest.fixture(scope="module", params=["child", "in process"])
def service(request: pytest.FixtureRequest) -> Iterator[nnburst.Service]:
    start = nnburst.launch if request.param == "child" else nnburst.in_process
    with start(devices=["nnburst-reference"]) as service:
        yield service


@pytest.fixture
def session(service: nnburst.Service) -> Iterator[nnburst.Session]:
    with service.session(relu()) as session:
        yield session


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("functions")


@pytest.fixture(scope="module")
def function(directory: Path) -> Iterator[str]:
    """A device with a function that takes as many seconds as its input says, and refuses what is negative."""
    (directory / "flight_function.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH")))))
        yield "nnburst-function:call=flight_function:slow"


@pytest.fixture(scope="module")
def slow_service(function: str) -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=[function]) as service:
        yield service


@pytest.fixture
def slow(slow_service: nnburst.Service) -> Iterator[nnburst.Session]:
    with slow_service.session("slow") as session:
        yield session


@pytest.fixture
def go_on(directory: Path) -> Iterator[Path]:
    """Once there is this file, runs with 60 end."""
    file = directory / "go_on"
    yield file
    file.touch()  # also if the test has failed
    file.unlink()


@pytest.fixture
def mortal(function: str) -> Iterator[nnburst.Session]:
    """Its service is this test's own."""
    with nnburst.launch(devices=[function]) as service, service.session("slow") as session:
        yield session


# ---- futures ---------------------------------------------------------------------------------------------------------


def test_futures_of_one_burst_are_done_in_order_and_each_has_its_own_outputs(session: nnburst.Session) -> None:
    executions = [session.bind() for _ in range(20)]
    for i, execution in enumerate(executions):
        execution.inputs["x"][:] = i
    futures = [execution.submit() for execution in executions]
    done = [future.result(PATIENCE) for future in concurrent.futures.as_completed(futures, PATIENCE)]
    assert {id(execution) for execution in done} == {id(execution) for execution in executions}
    assert [int(execution.outputs["y"][3]) for execution in executions] == list(range(20))
    assert all(future.done() and not future.cancel() for future in futures)


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_submitting_starts_one_thread_for_a_burst_which_ends_with_it(service: nnburst.Service, ends: str) -> None:
    def attendants() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "nnburst-attendant"]

    until(lambda: not attendants())  # of other tests
    session = service.session(relu())
    for future in [execution.submit() for execution in [session.burst.bind() for _ in range(30)]]:
        future.result(PATIENCE)
        assert len(attendants()) == 1
    if ends == "closed":
        session.close()
    del session, future
    gc.collect()
    until(lambda: not attendants())


def test_execution_in_flight_can_be_neither_run_nor_submitted(slow: nnburst.Session) -> None:
    execution = slow.bind()
    with stopped(slow.service.pid):
        future = execution.submit()
        with pytest.raises(nnburst.BadState, match="execution is running"):
            execution.run()
        with pytest.raises(nnburst.BadState, match="execution is running"):
            execution.submit().result(PATIENCE)
    assert future.result(PATIENCE) is execution
    execution.run()


def test_run_that_finds_others_in_flight_moves_to_another_burst(slow: nnburst.Session, go_on: Path) -> None:
    first, second = slow.burst.bind(), slow.bind()
    first.inputs["x"][:] = 60
    future = first.submit()
    second.run()
    assert not future.done()
    go_on.touch()
    future.result(PATIENCE)


def test_future_of_a_burst_in_which_a_thread_waits_moves_to_another_one_if_it_may(
    slow: nnburst.Session, go_on: Path
) -> None:
    waited, stays, moves = slow.burst.bind(), slow.burst.bind(), slow.bind()
    waited.inputs["x"][:] = moves.inputs["x"][:] = 60
    run = Background(waited.run)
    until(lambda: not slow.burst.controller.is_free)
    refused, moved = stays.submit(), moves.submit()
    assert not moved.done()
    with pytest.raises(nnburst.BadState, match="a burst runs one at a time"):
        refused.result(PATIENCE)
    go_on.touch()
    assert moved.result(PATIENCE).controller is not slow.burst.controller
    assert run.result() is None


def test_future_behind_a_run_that_was_given_up_has_a_time_limit_of_its_own(slow: nnburst.Session, go_on: Path) -> None:
    late, waited = slow.bind(), slow.burst.bind()
    late.inputs["x"][:] = 60
    with pytest.raises(nnburst.MissedDeadline):
        late.run(0.05)
    run = Background(waited.run)
    until(lambda: not slow.burst.controller.is_free)
    threading.Timer(0.1, go_on.touch).start()
    assert late.submit(PATIENCE).result(PATIENCE) is late
    assert run.result() is None


def test_failure_of_one_future_has_its_reason_and_leaves_the_others_alone(slow: nnburst.Session) -> None:
    executions = [slow.burst.bind() for _ in range(5)]
    executions[2].inputs["x"][1] = -3
    futures = [execution.submit() for execution in executions]
    errors = [future.exception(PATIENCE) for future in futures]
    assert [error is None for error in errors] == [True, True, False, True, True]
    assert isinstance(errors[2], nnburst.GeneralFailure)
    assert "refused -3" in str(errors[2])


@pytest.mark.check
def test_future_has_the_time_limit_of_its_execution(mortal: nnburst.Session) -> None:
    in_time, late, queued = (mortal.burst.bind(timeout=seconds) for seconds in (PATIENCE, 0.05, 0.05))
    for execution in (in_time, late, queued):
        execution.inputs["x"][:] = 0
    assert in_time.submit().result(PATIENCE) is in_time
    with stopped(mortal.service.pid):  # it answers nothing
        futures = [execution.submit() for execution in (late, queued)]
        for future in futures:
            with pytest.raises(nnburst.MissedDeadline):
                future.result(PATIENCE)
        with pytest.raises(nnburst.BadState):
            late.submit().result(PATIENCE)
    until(lambda: not late.is_in_flight and not queued.is_in_flight)
    late.timeout = PATIENCE
    assert late.submit().result(PATIENCE) is late


def test_death_of_the_service_ends_every_future(mortal: nnburst.Session) -> None:
    executions = [mortal.burst.bind() for _ in range(5)]
    executions[0].inputs["x"][:] = 60
    futures = [execution.submit() for execution in executions]
    os.kill(mortal.service.pid, signal.SIGKILL)
    for future in futures:
        assert isinstance(future.exception(PATIENCE), nnburst.DeadObject)


@pytest.mark.check
def test_closing_the_session_ends_every_future(slow: nnburst.Session) -> None:
    executions = [slow.burst.bind() for _ in range(5)]
    executions[0].inputs["x"][:] = 60
    futures = [execution.submit() for execution in executions]
    slow.close()
    for future in futures:
        assert isinstance(future.exception(PATIENCE), nnburst.BadState)
    with pytest.raises(nnburst.BadState):
        executions[0].submit().result(PATIENCE)


# ---- many inputs -----------------------------------------------------------------------------------------------------


def test_many_inputs_come_out_in_order(session: nnburst.Session) -> None:
    assert [int(y[0]) for (y,) in session.run_many(filled(i) for i in range(50))] == list(range(50))
    assert list(session.run_many([])) == []
    with pytest.raises(nnburst.InvalidArgument, match="symbolic first dimension"):
        list(session.run_many([filled(0)], batch=4))
    with pytest.raises(nnburst.InvalidArgument, match="batch=0"):
        session.run_many([], batch=0)


def test_inputs_are_taken_while_the_service_runs_those_before(slow: nnburst.Session) -> None:
    taken: list[float] = []

    def inputs() -> Iterator[dict[str, np.ndarray]]:
        for i in range(6):
            taken.append(i)
            yield filled(0.01)

    outputs = slow.run_many(inputs())
    next(outputs)
    assert taken == [0, 1, 2, 3]
    assert len(list(outputs)) == 5


def ring_of(session: nnburst.Session) -> Ring:
    """The executions that it keeps for the next `run_many`."""
    (ring,) = session._pool._rings.values()
    return ring


def test_generator_that_is_dropped_leaves_nothing_in_flight(slow: nnburst.Session) -> None:
    outputs = slow.run_many([filled(0.01)] * 8)
    next(outputs)
    outputs.close()
    assert not any(execution.is_in_flight for execution in ring_of(slow)._executions)
    assert ring_of(slow).is_idle


def test_interrupt_gives_up_all_that_is_in_flight_at_once(slow: nnburst.Session) -> None:
    """Nothing waits for a service that does not answer, and the next call is right."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    assert len(list(slow.run_many([filled(0)] * 5))) == 5
    ring = ring_of(slow)
    with handling(signal.SIGUSR1, stop), stopped(slow.service.pid):
        outputs = slow.run_many([filled(0)] * 8)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            next(outputs)
        timer.join()
        assert not any(execution.is_in_flight for execution in ring._executions)
        with pytest.raises(KeyboardInterrupt), nnburst.BurstExecutor(slow) as executor:
            futures = [executor.submit(slow.run, None, filled(0)) for _ in range(20)]
            raise KeyboardInterrupt
        assert futures[-1].cancelled()
    assert [
        int(y[1]) for (y,) in slow.run_many(filled(0) | {"x": np.array([0, i, 0, 0], np.float32)} for i in range(9))
    ] == list(range(9))
    assert ring_of(slow) is ring


def test_session_that_is_dropped_after_many_runs_lets_go_of_all(service: nnburst.Service) -> None:
    session = service.session(relu())
    list(session.run_many([filled(1)] * 4))
    pool = weakref.ref(session._pool)
    del session
    until(lambda: pool() is None)


def test_dead_service_ends_many_runs(mortal: nnburst.Session) -> None:
    outputs = mortal.run_many(filled(0) for _ in range(20))
    next(outputs)
    os.kill(mortal.service.pid, signal.SIGKILL)
    with pytest.raises(nnburst.DeadObject):
        list(outputs)


def test_threads_that_run_find_another_burst_than_that_of_many_runs(
    slow: nnburst.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, others = BurstPool._ring, []

    def ring(pool: BurstPool, *args: Any) -> Ring:
        made = make(pool, *args)
        others.append(Background(lambda: len(slow.run(None, filled(0.3)))))  # before anything of the ring is in flight
        controllers = slow.burst.controller, made._controller
        until(lambda: not all(one.is_free for one in controllers) or others[-1].is_over)
        return made

    monkeypatch.setattr(BurstPool, "_ring", ring)
    for _ in range(2):
        assert [y.tolist() for (y,) in slow.run_many([filled(0.0)] * 3)] == [[0.0] * 4] * 3
    assert [other.result() for other in others] == [1]  # what was made is kept


@pytest.mark.check
def test_many_runs_at_once_have_a_burst_each_which_is_given_back() -> None:
    with (
        nnburst.launch(devices=["nnburst-reference"], quotas={"bursts": 4}) as service,
        service.session(relu(), concurrency=1) as session,
    ):
        for peak in (1, 2):
            at_once = zip(*(session.run_many([filled(1)] * 3) for _ in range(3)), strict=True)
            assert [[int(y[0]) for (y,) in each] for each in at_once] == [[1] * 3] * 3
            with service.session(relu()) as other:
                assert len(list(other.run_many([filled(1)] * 3))) == 3
                assert session.stats.received == 9 * peak


def test_arrays_that_are_given_back_while_the_session_is_being_closed_are_not_kept(service: nnburst.Service) -> None:
    with service.session(relu()) as session, session._lend_ring(4, {}) as ring:
        next(ring.run((True, i) for i in range(4)))
        session.compilation.close()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 40, 41])
def test_many_inputs_run_in_batches_where_the_model_takes_them(service: nnburst.Service, count: int) -> None:
    with service.session(relu((0, 4))) as session:
        inputs = [{"x": np.full((1 + i % 3, 4), i, np.float32)} for i in range(count)]
        outputs = list(session.run_many(iter(inputs), batch=8))
        assert [y.shape for (y,) in outputs] == [arrays["x"].shape for arrays in inputs]
        assert [int(y[0, 0]) for (y,) in outputs] == list(range(count))
        if count > 8:
            assert session.stats.sent < count


def test_many_inputs_are_copied_as_they_are_taken(service: nnburst.Service) -> None:
    with service.session(relu((0, 4))) as session:
        array = np.empty((1, 4), np.float32)

        def refilled() -> Iterator[dict[str, np.ndarray]]:
            for i in range(21):
                array[:] = i
                yield {"x": array}

        assert [int(y[0, 0]) for (y,) in session.run_many(refilled(), batch=8)] == list(range(21))
        rows = [1] * 10 + [3, 2, 8, 1]
        together = [{"x": np.full((count, 4), i, np.float32)} for i, count in enumerate(rows)]
        outputs = [y for (y,) in session.run_many(together, batch=8)]
        assert [(len(y), int(y[0, 0])) for y in outputs] == [(count, i) for i, count in enumerate(rows)]
        good = together[:9]
        for wrong in (
            {"x": np.zeros((1, 4))},
            {"x": np.zeros((1, 5), np.float32)},
            {"x": np.zeros((9, 4), np.float32)},
            {"z": good[0]["x"]},
            {},
        ):
            with pytest.raises(nnburst.InvalidArgument, match="input"):
                list(session.run_many([*good, wrong, *good], batch=8))


@pytest.mark.parametrize("service", ["child"], indirect=True)
def test_many_inputs_run_again_in_what_is_bound_already(service: nnburst.Service) -> None:
    def fetched() -> int:
        return sum(row.counters["slot_misses"] for page in find_services(service.pid) for row in look(page).rows)

    with service.session(relu()) as session:

        def run(value: float) -> int:
            before = fetched()
            assert [y.tolist() for (y,) in session.run_many([filled(value)] * 3)] == [[value] * 4] * 3
            return fetched() - before

        assert run(1) > 0
        assert run(2) == 0
        inputs = iter([filled(3)] * 30 + [{"x": np.zeros(5, np.float32)}])
        with pytest.raises(nnburst.InvalidArgument, match="shape"):
            list(session.run_many(inputs))
        taken = session.run_many(filled(4) for _ in range(50))
        assert next(taken)[0][0] == 4
        del taken  # with others in flight
        assert run(5) == 0


def test_many_inputs_at_once_in_one_session_do_not_share_arrays(session: nnburst.Session) -> None:
    def values(first: int) -> Iterator[dict[str, np.ndarray]]:
        for i in range(first, first + 40):
            if first == 0:
                assert [int(y[0]) for (y,) in session.run_many(map(filled, range(100, 120)))] == list(range(100, 120))
            yield filled(i)

    for _ in range(2):
        assert [int(y[0]) for (y,) in session.run_many(values(0))] == list(range(40))


def test_rest_of_many_inputs_can_be_given_up(session: nnburst.Session) -> None:
    with contextlib.closing(session.run_many(map(filled, range(40)))) as outputs:
        assert int(next(outputs)[0][0]) == 0
    with pytest.raises(StopIteration):
        next(outputs)
    bursts = len(session._pool._of_rings)
    assert [int(y[0]) for (y,) in session.run_many(map(filled, range(40)))] == list(range(40))
    assert len(session._pool._of_rings) == bursts


def test_forked_child_leaves_the_inputs_of_its_parent_alone(session: nnburst.Session) -> None:
    session.run(None, filled(1))
    list(session.run_many([filled(1)] * 20))
    ring = weakref.ref(ring_of(session))
    executions = [*session._runs.permits.idle[-1:], ring_of(session)._executions[0]]
    inputs = [getattr(each, "execution", each).inputs["x"] for each in executions]

    def is_refused() -> None:
        for run in (lambda: session.run(None, filled(7)), lambda: list(session.run_many([filled(7)] * 3))):
            with pytest.raises(nnburst.BadState, match=r"fork\(\)"):
                run()

    in_forked_child(is_refused)
    assert [each.tolist() for each in inputs] == [[1.0] * 4] * 2
    assert session.run(None, filled(2))[0].tolist() == [2.0] * 4
    assert [y.tolist() for (y,) in session.run_many([filled(3)] * 3)] == [[3.0] * 4] * 3
    assert ring() is ring_of(session)  # whose burst the child has not ended


def test_forked_child_waits_for_no_thread_of_its_parent(service: nnburst.Service) -> None:
    with service.session(relu()) as session, session.bind() as execution, nnburst.BurstExecutor(session) as executor:
        executor.submit(session.run, None, filled(1)).result(PATIENCE)  # so it has a thread
        permits = [session._runs.permits.take(Deadline.after(0)) for _ in range(session._runs.permits.number)]
        locks = [session._pool.first.controller._lock, execution._lock, session._pool._lock, service._reviving]
        held = Held()

        def hold() -> None:
            with contextlib.ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                held()

        def in_child() -> None:
            signal.alarm(int(PATIENCE))
            uses = [lambda: session.run(None, filled(1)), execution.run, session.bind, service.kill]
            for use in (*uses, lambda: executor.submit(session.run, None, filled(1)).result()):
                with pytest.raises(nnburst.BadState):
                    use()
            assert session.stats.sent == 1
            Memory.ashmem(64).close()
            for thing in (execution, session, service):
                thing.close()

        holding = Background(hold)
        assert held.entered.wait(PATIENCE)
        try:
            in_forked_child(in_child)
        finally:
            held.go_on.set()
        assert holding.result() is None
        for permit in permits:
            session._runs.permits.put_back(permit)
        assert session.run(None, filled(2))[0].tolist() == [2.0] * 4


# ---- executor --------------------------------------------------------------------------------------------------------


def test_executor_runs_the_session_and_nothing_else(session: nnburst.Session) -> None:
    with nnburst.BurstExecutor(session) as executor:
        with pytest.raises(nnburst.InvalidArgument, match=r"inputs \['x'\] are missing"):
            executor.submit(session.run, None).result(PATIENCE)
        results = executor.map(session.run, itertools.repeat(None), [filled(i) for i in range(20)])
        assert [int(y[0]) for (y,) in results] == list(range(20))
        with pytest.raises(nnburst.InvalidArgument, match="its session's run"):
            executor.submit(print)
        assert isinstance(executor.submit(session.run, None, {"z": 1}).exception(PATIENCE), nnburst.InvalidArgument)
        assert int(executor.submit(session.run, ["y"], filled(9)).result(PATIENCE)[0][0]) == 9


def test_dead_service_breaks_the_executor(mortal: nnburst.Session) -> None:
    executor = nnburst.BurstExecutor(mortal)
    futures = [executor.submit(mortal.run, None, filled(60)) for _ in range(50)]
    os.kill(mortal.service.pid, signal.SIGKILL)
    for future in futures:
        assert isinstance(future.exception(PATIENCE), concurrent.futures.BrokenExecutor)
    with pytest.raises(concurrent.futures.BrokenExecutor):
        executor.submit(mortal.run, None, filled(0))
    executor.shutdown()
