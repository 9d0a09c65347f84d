"""Sessions that get over the death of their service, and what is said of it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import BadState, DeadObject, InvalidArgument, MissedDeadline, OperandType
from nnburst._core.deadline import Deadline
from nnburst._core.leaving import process_lock
from nnburst.burst.server import server as burst_server
from nnburst.errors import Ending
from nnburst.runtime.run.burst_pool import BurstPool
from nnburst.runtime.session import Options
from support.models import counter, relu
from support.processes import workers_of
from support.services import Shared
from support.waiting import PATIENCE, Background, until

pytestmark = pytest.mark.check

F = OperandType.TENSOR_FLOAT32
ONE = np.ones(4, np.float32)
FUNCTIONS = """
import os, signal, time
from pathlib import Path
from nnburst.devices.function import Needs, Tensor, declare

here = Path(__file__).parent
while (here / "slow").exists():
    time.sleep(0.01)
if (here / "broken").exists():
    raise RuntimeError("broken on purpose")
size = 5 if (here / "other").exists() else 4

@declare(
    inputs=[Tensor("x", "float32", (size,))], outputs=[Tensor("y", "float32", (size,))], needs=Needs(write=[str(here)])
)
def fragile(x):
    with open(here / "runs", "a") as file:
        print(float(x[0]), file=file)
    if x[0] == 666 and not (here / "safe").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if x[0] == 3:
        os._exit(3)
    if x[0] == 4:
        (here / "safe").touch()
        os._exit(0)
    if x[0] == 6 and not (here / "died").exists():
        (here / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while x[0] == 5:
        time.sleep(1)
    return x + 1
"""


def full(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.full(4, value, np.float32)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the functions are, and files that say how they behave."""
    (tmp_path / "fragile_functions.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("fragile_functions", None)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a service is started again; test_accounts.py is about them."""
    monkeypatch.setattr("nnburst.runtime.service._wait", lambda seconds: None)


@pytest.fixture
def service(place: Path) -> Iterator[nnburst.Service]:
    device = "nnburst-function:call=fragile_functions:fragile"
    with nnburst.launch(devices=[device, "nnburst-reference"]) as service:
        yield service


def runs(place: Path) -> list[float]:
    return [float(line) for line in (place / "runs").read_text().split()]


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_death_tells_its_signal_or_status(service: nnburst.Service) -> None:
    with service.session("fragile") as session:
        with pytest.raises(DeadObject, match="open another session") as caught:
            session.run(None, full(666))
    assert (caught.value.signal, caught.value.exit_status) == (signal.SIGKILL, None)
    service._revive()
    with service.session("fragile") as session:
        with pytest.raises(DeadObject) as caught:
            session.run(None, full(3))
        assert (caught.value.signal, caught.value.exit_status) == (None, 3)
        with pytest.raises(DeadObject) as caught:  # also of what had not begun, and of calls
            session.run(None, full(1))
        assert caught.value.exit_status == 3
        with pytest.raises(DeadObject) as caught:
            session.device.import_model("name:fragile")
        assert caught.value.exit_status == 3


def test_kill_ends_a_run_that_nothing_else_can_stop(service: nnburst.Service, place: Path) -> None:
    with service.session("fragile", on_death="restart") as session:
        run = Background(lambda: session.run(None, full(5)))
        until((place / "runs").exists)
        service.kill()
        death = run.result()
        assert isinstance(death, DeadObject)
        assert "the next run opens the session again" in str(death)
        assert not service.alive
        service.kill()  # harmless
        assert session.run(None, full(1))[0].tolist() == [2] * 4
        assert service.alive
    service.close()
    with pytest.raises(BadState, match="closed"):
        service.kill()


@pytest.mark.representative
def test_kill_of_what_is_not_a_child_says_what_to_do() -> None:
    with nnburst.in_process(devices=["nnburst-reference"]) as service, pytest.raises(BadState, match="this process"):
        service.kill()


def test_wrong_wishes_are_refused(service: nnburst.Service) -> None:
    for wishes in ({"on_death": "revive"}, {"retry": 1}, {"on_death": "restart", "retry": -1}, {"concurrency": 0}):
        with pytest.raises(InvalidArgument):
            service.session("fragile", **wishes)  # type: ignore[arg-type]


# ---- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.representative
def test_session_and_bound_executions_go_on_with_their_arrays(service: nnburst.Service) -> None:
    with service.session("fragile", on_death="restart", timeout=PATIENCE) as session, session.bind() as execution:
        inputs, outputs = execution.inputs["x"], execution.outputs["y"]
        for round in range(3):
            inputs[:] = round
            execution.run()
            assert outputs.tolist() == [round + 1] * 4
            assert session.run(None, full(round))[0].tolist() == [round + 1] * 4
            service.kill()
        assert execution.inputs["x"] is inputs
        assert execution.outputs["y"] is outputs
        assert [restart.signal for restart in session.restarts] == [signal.SIGKILL] * 2
        assert session.compilation is execution.compilation
        assert execution.timeout == PATIENCE


def test_service_of_a_sessions_own_is_started_again(place: Path) -> None:
    with nnburst.Session(counter(), on_death="restart") as session:
        os.kill(session.service.pid, signal.SIGKILL)
        until(lambda: not session.service.alive)  # until then a run may still be sent
        assert session.run(None, {"t": ONE})[0].tolist() == [2] * 4
        assert session.service.alive


def test_run_that_was_under_way_is_not_repeated(service: nnburst.Service, place: Path) -> None:
    with service.session("fragile", on_death="restart") as session, session.bind() as execution:
        for run in (lambda: session.run(None, full(666)), execution.run):
            execution.inputs["x"][:] = 666
            with pytest.raises(DeadObject, match="SIGKILL"):
                run()
        assert runs(place) == [666, 666]
        assert session.run(None, full(1))[0].tolist() == [2] * 4
        assert len(session.restarts) == 2


def test_retry_repeats_as_often_as_it_says(service: nnburst.Service, place: Path) -> None:
    with service.session("fragile", on_death="restart", retry=2) as session, session.bind() as execution:
        with pytest.raises(DeadObject):
            session.run(None, full(3))
        assert runs(place) == [3] * 3
        execution.inputs["x"][:] = 3
        with pytest.raises(DeadObject) as caught:
            execution.run()
        assert caught.value.exit_status == 3
        assert runs(place) == [3] * 6
        assert len(session.restarts) == 5


def test_retry_answers_when_the_next_try_works(service: nnburst.Service, place: Path) -> None:
    with service.session("fragile", on_death="restart", retry=1, timeout=PATIENCE) as session:
        assert session.run(None, full(6))[0].tolist() == [7] * 4
        assert runs(place) == [6] * 2


def test_state_that_is_lost_is_said_and_another_one_can_be_bound() -> None:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        with service.session(counter(), on_death="restart", retry=3) as session:
            with session.bind(state={"t_out": "t"}, initial_state={"t": 10 * ONE}) as execution:
                execution.run()
                service.kill()
                for use in (execution.run, execution.run, execution.reset_state, execution.get_state):
                    with pytest.raises(DeadObject, match="the state 't'") as caught:
                        use()
                    assert caught.value.signal == signal.SIGKILL
            with session.bind(state={"t_out": "t"}, initial_state={"t": 10 * ONE}) as execution:
                execution.run()
                assert execution.get_state()["t"].tolist() == [11] * 4


@pytest.mark.parametrize("what", ["run_many", "state"])
def test_what_is_bound_after_a_death_is_bound_to_a_service_that_lives(what: str) -> None:
    with (
        nnburst.launch(devices=["nnburst-reference"]) as service,
        service.session(counter(), on_death="restart") as session,
    ):
        service.kill()
        until(lambda: not service.alive)
        if what == "run_many":
            outputs = [y.tolist() for (y,) in session.run_many([{"t": ONE}] * 3)]
            assert outputs == [[2.0] * 4] * 3
        else:
            with session.bind(state={"t_out": "t"}) as bound:
                bound.run()
                assert bound.get_state()["t"].tolist() == [1.0] * 4
        assert len(session.restarts) == 1


def test_caller_with_little_time_does_not_wait_for_the_start(service: nnburst.Service, place: Path) -> None:
    with service.session("fragile", on_death="restart") as session:
        session.run(None, full(1))
        (place / "slow").touch()
        service.kill()
        for _ in range(3):
            with pytest.raises(MissedDeadline, match="started again"):
                session.run(None, full(1), 0.05)
        (place / "slow").unlink()
        until(lambda: session.restarts, "the service is not started again")
        assert session.run(None, full(1))[0].tolist() == [2] * 4
        assert len(session.restarts) == 1


def test_service_that_does_not_come_back_is_tried_again_by_the_next_call(service: nnburst.Service, place: Path) -> None:
    with service.session("fragile", on_death="restart") as session:
        (place / "broken").touch()
        service.kill()
        for _ in range(2):
            with pytest.raises(DeadObject, match=r"(?s)does not come back: .*broken on purpose") as caught:
                session.run(None, full(1))
            assert caught.value.signal == signal.SIGKILL
        (place / "broken").unlink()
        assert session.run(None, full(1))[0].tolist() == [2] * 4


def test_service_that_dies_while_it_comes_back_is_started_once_more(service: nnburst.Service) -> None:
    start: Any = service._again
    pids = []

    def start_and_kill() -> Any:
        fresh = start()
        pids.append(fresh.pid)
        if len(pids) == 1:
            os.kill(fresh.pid, signal.SIGKILL)
        return fresh

    service._again = start_and_kill
    with service.session("fragile", on_death="restart") as session:
        service.kill()
        until(lambda: not service.alive)
        assert session.run(None, full(1))[0].tolist() == [2] * 4
        assert service.pid == pids[1]
        assert len(session.restarts) == 1


def test_model_that_comes_back_as_another_one_is_refused(service: nnburst.Service, place: Path) -> None:
    with service.session("fragile", on_death="restart") as session:
        (place / "other").touch()
        service.kill()
        with pytest.raises(DeadObject, match="other inputs or outputs"):
            session.run(None, full(1))


def test_sessions_of_one_service_start_it_once(service: nnburst.Service) -> None:
    with service.session("fragile", on_death="restart") as one, service.session(counter(), on_death="restart") as two:
        service.kill()
        threads = [Background(lambda: one.run(None, full(1))) for _ in range(4)]
        threads += [Background(lambda: two.run(None, {"t": ONE})) for _ in range(4)]
        assert [thread.result()[0].tolist() for thread in threads] == [[2] * 4] * 8
        assert len(one.restarts) == len(two.restarts) == 1
        assert one.device.name != two.device.name


def test_session_is_closed_while_its_service_starts_again(service: nnburst.Service, place: Path) -> None:
    session = service.session("fragile", on_death="restart", timeout=0.01)
    (place / "slow").touch()
    service.kill()
    with pytest.raises(MissedDeadline):
        session.run(None, full(1))
    threading.Timer(0.05, (place / "slow").unlink).start()
    session.close()
    with pytest.raises(BadState, match="closed"):
        session.run(None, full(1))


# ---- a service that others run ---------------------------------------------------------------------------------------


def kill(shared: Shared) -> None:
    shared.process.kill()
    shared.process.wait()


def test_session_on_a_shared_service_connects_again(start: Callable[..., Shared]) -> None:
    first = start()
    with nnburst.connect(first.address) as service:
        with pytest.raises(BadState, match="nnburst stop --kill"):
            service.kill()
        with service.session(counter(), on_death="restart", retry=1, open_timeout=PATIENCE) as session:
            session.run(None, {"t": ONE})
            kill(first)
            until(lambda: not service.alive)
            run = Background(lambda: session.run(None, {"t": ONE}))  # waits until there is one
            second = start()
            assert run.result()[0].tolist() == [2] * 4
            assert service.pid in workers_of(second.pid)
            assert len(session.restarts) == 1


def test_session_opened_on_a_shared_service_that_has_died_connects_again(start: Callable[..., Shared]) -> None:
    first = start()
    with nnburst.connect(first.address) as service:
        kill(first)
        until(lambda: not service.alive)
        with pytest.raises(DeadObject):
            service.session(counter())
        second = start()
        with service.session(counter(), on_death="restart") as session:
            assert session.run(None, {"t": ONE})[0].tolist() == [2] * 4
            assert service.pid in workers_of(second.pid)
        with service.session(counter()) as session:
            assert session.run(None, {"t": ONE})[0].tolist() == [2] * 4


@pytest.mark.parametrize("deaths", [1, 2])
def test_service_that_dies_while_a_session_opens_is_restarted_once(
    service: nnburst.Service, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, pids = nnburst.nnapi.Compilation.finish, list[int]()

    def kill_and_finish(compilation: nnburst.nnapi.Compilation, *args: Any) -> None:
        pids.append(service.pid)
        if len(pids) <= deaths:
            service.kill()
        finish(compilation, *args)

    monkeypatch.setattr(nnburst.nnapi.Compilation, "finish", kill_and_finish)
    with pytest.raises(DeadObject):
        service.session(counter())
    pids.clear()
    with pytest.raises(DeadObject) if deaths > 1 else nullcontext():
        with service.session(counter(), on_death="restart") as session:
            assert session.run(None, {"t": ONE})[0].tolist() == [2] * 4
    assert len(set(pids)) == 2


def test_shared_service_that_stays_away_is_given_up_in_time(start: Callable[..., Shared]) -> None:
    shared = start()
    with nnburst.connect(shared.address) as service:
        with service.session(counter(), on_death="restart", retry=1, open_timeout=5) as session:
            kill(shared)
            until(lambda: not service.alive)
            # The attempt and the caller have the same five seconds: either may end first.
            said = "does not come back|is still being started again"
            with pytest.raises((DeadObject, MissedDeadline), match=said):
                session.run(None, {"t": ONE})


@pytest.mark.representative
@pytest.mark.parametrize("on_death", ["raise", "restart"])
def test_burst_that_the_service_has_ended_is_replaced_and_the_service_goes_on(
    on_death: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, first, ending = burst_server.serve, [-errno.ENOBUFS], threading.Event()

    def serve_all_but_the_first(*given: Any) -> int:
        if not first:
            return serve(*given)
        number = first.pop()
        ending.wait(PATIENCE)
        return number

    monkeypatch.setattr(burst_server, "serve", serve_all_but_the_first)
    with (
        nnburst.in_process() as service,
        service.session(relu((4,)), on_death=on_death) as session,
        session.bind() as execution,
    ):
        ending.set()
        until(lambda: not session.burst.controller.is_sound, "the burst did not end")
        execution.inputs["x"][:] = ONE
        execution.run()
        assert session.run(None, {"x": ONE})[0].tolist() == execution.outputs["y"].tolist() == ONE.tolist()
        assert session.restarts == ()


def test_signal_handler_may_wait_for_a_restart_wherever_it_interrupts_one_who_waits() -> None:
    interrupted = True
    line = 0
    while interrupted:
        line += 1
        interrupted = recovered_with_a_handler_at(line)
    assert line > 10


def recovered_with_a_handler_at(wanted: int) -> bool:
    """Interrupt a wait for a restart at one of its lines; whether it has so many."""
    go = threading.Event()
    pool = object.__new__(BurstPool)
    dead = SimpleNamespace(controller=SimpleNamespace(ending=Ending("gone"), end_reason=""))
    pool._bursts, pool._refusal, pool._attempt, pool.restarts = [dead], "", None, ()  # type: ignore[list-item]
    pool._lock, pool.options = process_lock(), Options(on_death="restart")

    def open_again() -> str:
        assert go.wait(PATIENCE)
        pool._bursts = []
        return "DISABLED"

    pool._open_again = open_again
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        if event == "line" and frame.f_code is not pool.recover.__code__ and pool._attempt is not None:
            lines += 1
            if lines == wanted:
                sys.settrace(None)
                go.set()
                assert Deadline.after(PATIENCE).call(pool.recover, dead)  # type: ignore[arg-type]
        return trace

    def profile(frame: Any, event: str, argument: Any) -> None:
        """Where the wait itself begins, in C, there is no such line before it."""
        if event == "c_call" and frame.f_code.co_filename == threading.__file__ and pool._attempt is not None:
            if argument.__name__ in ("acquire", "join"):
                go.set()

    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        assert pool.recover(dead)  # type: ignore[arg-type]
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return lines >= wanted
