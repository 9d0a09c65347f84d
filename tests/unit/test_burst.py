"""The burst room: both ends, one against the other, and each against a peer that misbehaves."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nnburst import BadState, DeadObject, InvalidArgument, Memory, MissedDeadline
from nnburst._core._nnburst import ffi, lib
from nnburst.burst import ExecutionBurstController, ExecutionBurstServer
from nnburst.burst.client import controller as _controller
from nnburst.burst.client.request import BoundRequest
from nnburst.burst.client.slots import SlotTable
from nnburst.burst.interfaces import BurstCallback
from nnburst.burst.kernel import Kernel
from nnburst.burst.polling import DATUM
from nnburst.errors import ErrorStatus, GeneralFailure, NNBurstError, OutputShape, ResourceExhausted
from nnburst.fmq import MessageQueue
from nnburst.model import Request, Timing
from nnburst.model.running import ExecutionResult
from nnburst.model.types import MeasureTiming
from support.local_burst import WINDOWS, Adder, LocalModel, adder_request, bind, bound
from support.processes import mappings
from support.users import in_forked_child
from support.waiting import PATIENCE, Held, handling, until, without_collector


@pytest.fixture
def model() -> LocalModel:
    return LocalModel()


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory.ashmem(4096) as memory:
        memory.array(np.float32, (4,))[:] = [1, 2, 3, 4]
        yield memory


@WINDOWS
def test_run_computes_and_binds_only_once(model: LocalModel, memory: Memory, window: float) -> None:
    with bound(model, memory, polling_window=window) as (controller, execution):
        for i in range(50):
            memory.array(np.float32, (4,))[:] = i
            execution.run()
            assert (memory.array(np.float32, (4,), 64) == i + 1).all()
        assert model.executor.bound == 1
        assert controller.stats.sent == controller.stats.received == 50


def test_zero_window_sleeps_for_every_answer(model: LocalModel, memory: Memory) -> None:
    with bound(model, memory, polling_window=0) as (controller, execution):

        def until_client_sleeps() -> None:
            seen = controller.stats.sleeps
            until(lambda: controller.stats.sleeps > seen)

        execution.run()
        model.executor.during = until_client_sleeps  # type: ignore[assignment]
        for _ in range(5):
            execution.run()


def test_neither_end_sleeps_within_the_polling_window(model: LocalModel, memory: Memory) -> None:
    with bound(model, memory, polling_window=60.0) as (controller, execution):
        model.executor.during = lambda: time.sleep(0.005)
        for _ in range(4):
            execution.run()
        counted = model.server._end._row.pointer.counters
        slept = controller.stats.sleeps, counted[lib.NNB_SLEEPS]
        for _ in range(3):
            time.sleep(0.005)
            execution.run()
        assert (controller.stats.sleeps, counted[lib.NNB_SLEEPS]) == slept


def test_several_bound_executions_keep_their_plans(model: LocalModel, memory: Memory) -> None:
    with ExecutionBurstController.create(model) as controller:
        executions = [bind(controller, adder_request(memory, 64 * (i + 1))) for i in range(20)]
        for _ in range(3):
            for execution in executions:
                execution.run()
        assert model.executor.bound == 20
        assert all((memory.array(np.float32, (4,), 64 * (i + 1)) == [2, 3, 4, 5]).all() for i in range(20))


def test_more_requests_than_plans_still_work(model: LocalModel, memory: Memory) -> None:
    with ExecutionBurstController.create(model) as controller, Memory.ashmem(64 * 202) as big:
        executions = [bind(controller, adder_request(big, 64 * (i + 1))) for i in range(200)]
        for _ in range(2):
            for execution in executions:
                execution.run()
        assert (big.array(np.float32, (201, 16))[1:, :4] == 1).all()


# ---- slots ------------------------------------------------------------------------------------------------------


def test_freed_memory_is_gone_on_both_sides(model: LocalModel, memory: Memory) -> None:
    with bound(model, memory) as (controller, execution):
        execution.run()
        assert controller.free_memory(memory)
        assert not controller.free_memory(memory)
        assert not model.executor.memories
        with pytest.raises(InvalidArgument, match="freed"):
            execution.run()


def test_slot_of_freed_memory_is_never_reused(model: LocalModel, memory: Memory) -> None:
    with ExecutionBurstController.create(model) as controller:
        stale = bind(controller, adder_request(memory))
        stale.run()
        controller.free_memory(memory)
        with Memory.ashmem(4096) as other:
            other.array(np.float32, (4,))[:] = 5
            bind(controller, adder_request(other)).run()
            assert model.executor.added == [0, 1]
            other.array(np.float32, (4,), 64)[:] = 0
            with pytest.raises(InvalidArgument):
                stale.run()
            assert (other.array(np.float32, (4,), 64) == 0).all()


Found = tuple[ErrorStatus, tuple[Memory, ...]]


def answering(model: LocalModel, answer: Callable[[BurstCallback, Sequence[int]], Found]) -> None:
    """Have the client answer so when it is asked for memories."""

    class Answering(BurstCallback):
        def __init__(self, inner: BurstCallback) -> None:
            self.inner = inner

        def get_memories(self, slots: Sequence[int]) -> Found:
            return answer(self.inner, slots)

    model.callback = Answering


def test_memory_freed_while_its_slot_is_fetched_is_not_kept(model: LocalModel, memory: Memory) -> None:
    def free_first(client: BurstCallback, slots: Sequence[int]) -> Any:
        found = client.get_memories(slots)
        for slot in slots:
            model.server.free_memory(slot)
        return found

    answering(model, free_first)
    with ExecutionBurstController.create(model) as controller:
        with pytest.raises(InvalidArgument):
            bind(controller, adder_request(memory)).run()
        assert not model.executor.memories


def test_memory_freed_while_a_plan_is_bound_does_not_stay_in_the_plan(memory: Memory) -> None:
    class FreesInBind(Adder):
        def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> Kernel:
            plan = super().bind(request, slots, measure)
            for slot in slots:
                model.server.free_memory(slot)
            return plan

    model = LocalModel(FreesInBind())
    with bound(model, memory) as (_, execution):
        execution.run()  # had begun before the memory was freed
        execution.run()  # must bind again: the slot is fetched again
        assert model.executor.bound == 2


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((ErrorStatus.GENERAL_FAILURE, ()), GeneralFailure),
        ((ErrorStatus.INVALID_ARGUMENT, ()), InvalidArgument),
        ((ErrorStatus.NONE, ()), GeneralFailure),
    ],
    ids=["failure", "invalid", "short"],
)
def test_request_fails_with_the_status_of_get_memories(
    model: LocalModel, memory: Memory, answer: Found, expected: type[NNBurstError]
) -> None:
    asked: list[list[int]] = []

    def refuse_once(client: BurstCallback, slots: Sequence[int]) -> Any:
        asked.append(list(slots))
        return answer if len(asked) == 1 else client.get_memories(slots)

    answering(model, refuse_once)
    with bound(model, memory) as (_, execution):
        with pytest.raises(expected):
            execution.run()
        execution.run()
    assert asked == [[0], [0]]


def test_table_has_one_slot_for_each_memory_and_answers_all_or_nothing() -> None:
    table = SlotTable()
    memories = [Memory.ashmem(64) for _ in range(3)]
    assert table.slots_for([*memories, memories[0]]) == [0, 1, 2, 0]
    assert table.get_memories([2, 0]) == (ErrorStatus.NONE, (memories[2], memories[0]))
    assert table.get_memories([0, 3]) == (ErrorStatus.INVALID_ARGUMENT, ())
    assert table.get_memories([-1]) == (ErrorStatus.INVALID_ARGUMENT, ())
    assert table.free(memories[1]) == 1
    assert table.free(memories[1]) is None
    assert table.get_memories([1])[0] is ErrorStatus.INVALID_ARGUMENT
    for each in memories:
        each.close()


def test_last_slot_number_is_used_and_none_beyond_it() -> None:
    table = SlotTable()
    table._numbers = itertools.count(2**31 - 1)
    with Memory.ashmem(64) as last, Memory.ashmem(64) as beyond:
        assert table.slots_for([last]) == [2**31 - 1]
        with pytest.raises(ResourceExhausted, match="another"):
            table.slots_for([beyond])
        assert len(table) == 1


def test_server_asks_for_all_unknown_slots_at_once_in_ascending_order(model: LocalModel, memory: Memory) -> None:
    asked: list[list[int]] = []

    def note(client: BurstCallback, slots: Sequence[int]) -> Any:
        asked.append(list(slots))
        return client.get_memories(slots)

    answering(model, note)
    with (
        ExecutionBurstController.create(model) as controller,
        Memory.ashmem(4096) as second,
        Memory.ashmem(4096) as third,
        Memory.ashmem(4096) as fourth,
    ):
        arguments = adder_request(memory)
        bind(controller, Request(arguments.inputs, arguments.outputs, (memory, second, third, fourth)))  # slots 0 to 3
        run = bind(controller, Request(arguments.inputs, arguments.outputs, (fourth, memory, third)))
        run.run()
        bind(controller, Request(arguments.inputs, arguments.outputs, (second, third, memory))).run()
    assert asked == [[0, 2, 3], [1]]


# ---- executors that fail ----------------------------------------------------------------------------------------


def _raise(error: BaseException) -> ExecutionResult | None:
    raise type(error)(*error.args)  # one that goes with the frames that it names


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidArgument("no"), InvalidArgument),
        (MissedDeadline("late"), MissedDeadline),
        (ZeroDivisionError(), GeneralFailure),
        (SystemExit(3), GeneralFailure),
        (KeyboardInterrupt(), GeneralFailure),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exception_of_an_executor_becomes_a_status(
    model: LocalModel, memory: Memory, error: BaseException, expected: type[NNBurstError]
) -> None:
    with bound(model, memory) as (_, execution):
        execution.run()
        model.executor.during = lambda: _raise(error)
        for _ in range(2):
            with pytest.raises(expected):
                execution.run()
        model.executor.during = lambda: None
        execution.run()


def test_shapes_and_timing_arrive_and_do_not_stick(model: LocalModel, memory: Memory) -> None:
    shapes = (OutputShape((2, 2)), OutputShape(()), OutputShape((7,), False))
    with ExecutionBurstController.create(model) as controller:
        execution = controller.bind(adder_request(memory), measure=True)
        model.executor.during = lambda: (ErrorStatus.NONE, shapes[:2], Timing(time_on_device=3))
        status, got, timing = execution.execute()
        assert (status, got, timing.time_on_device) == (ErrorStatus.NONE, shapes[:2], 3)
        assert timing.time_in_driver >= 3
        model.executor.during = lambda: (ErrorStatus.NONE, shapes, Timing())
        assert execution.execute() == (ErrorStatus.GENERAL_FAILURE, (), Timing())
        model.executor.during = lambda: (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes, Timing(3, 4))
        assert execution.execute() == (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes, Timing())
        model.executor.during = lambda: (ErrorStatus.GENERAL_FAILURE, shapes, Timing(3, 4))
        assert execution.execute() == (ErrorStatus.GENERAL_FAILURE, (), Timing())
        model.executor.during = lambda: (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (), Timing())
        assert execution.execute()[0] is ErrorStatus.GENERAL_FAILURE
        model.executor.during = lambda: None
        assert execution.execute() == (ErrorStatus.NONE, (), Timing())


# ---- fallback ---------------------------------------------------------------------------------------------------


def test_request_larger_than_the_channel_runs_without_the_burst(model: LocalModel, memory: Memory) -> None:
    with bound(model, memory, channel_length=4) as (controller, execution):  # 5 datums
        execution.run()
        assert execution.result == (ErrorStatus.NONE, (), Timing())
        assert model.executed == list(execution._requests)
        assert controller.stats.fallbacks == 1


@pytest.mark.parametrize("length", [0, 1, 3, 65537])
def test_channel_of_a_length_that_is_no_use_is_refused(model: LocalModel, length: int) -> None:
    with pytest.raises(InvalidArgument, match="4 to 65536 datums"):
        ExecutionBurstController.create(model, channel_length=length)


def test_server_is_closed_if_the_client_s_end_cannot_be_made(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, reset: bool) -> None:
        raise ResourceExhausted("no memory")

    monkeypatch.setattr(_controller, "open_channels", fail)
    with pytest.raises(ResourceExhausted, match="no memory"):
        ExecutionBurstController.create(model)
    assert model.server is not None
    assert not model.server.alive


# ---- deadlines and death ----------------------------------------------------------------------------------------


@WINDOWS
def test_late_result_is_never_the_answer_to_the_next_request(model: LocalModel, memory: Memory, window: float) -> None:
    go = threading.Event()
    with ExecutionBurstController.create(model, polling_window=window) as controller:
        slow, quick = bind(controller, adder_request(memory)), bind(controller, adder_request(memory, 128))
        quick.run()
        model.executor.during = lambda: (go.wait(PATIENCE), (ErrorStatus.INVALID_ARGUMENT, (), Timing()))[1]
        slow.timeout = 0.2  # the service begins the first before that
        for _ in range(2):
            with pytest.raises(MissedDeadline):
                slow.run()
        model.executor.during = lambda: None
        go.set()
        quick.run()
        assert controller.stats.dropped == 2


@contextlib.contextmanager
def running(model: LocalModel, execution: BoundRequest) -> Iterator[tuple[Future[None], threading.Event]]:
    """A run by another thread, which has begun, and what it waits for."""
    execution.run()
    held = model.executor.during = Held()
    with ThreadPoolExecutor(1) as pool:
        try:
            run = pool.submit(execution.run)
            assert held.entered.wait(PATIENCE)
            yield run, held.go_on
        finally:
            held.go_on.set()


@WINDOWS
def test_death_ends_a_wait_with_dead_object(model: LocalModel, memory: Memory, window: float) -> None:
    with bound(model, memory, polling_window=window) as (_, execution):
        with running(model, execution) as (run, _):
            model.on_death()
            with pytest.raises(DeadObject):
                run.result(PATIENCE)
        with pytest.raises(DeadObject):
            execution.run()


@WINDOWS
def test_close_during_a_run_ends_it(model: LocalModel, memory: Memory, window: float) -> None:
    controller = ExecutionBurstController.create(model, polling_window=window)
    execution = bind(controller, adder_request(memory))
    with running(model, execution) as (run, go), ThreadPoolExecutor(1) as pool:
        closing = pool.submit(controller.close)
        go.set()  # the server finishes what it runs before its end
        closing.result(PATIENCE)
        with contextlib.suppress(BadState, DeadObject):  # or it has come to its end
            run.result(PATIENCE)
    with pytest.raises(BadState, match="closed"):
        execution.run()
    with pytest.raises(BadState, match="closed"):
        controller.bind(adder_request(memory))
    controller.close()
    assert controller.stats.sent >= 1


def test_server_closed_with_full_rings_does_not_hang(model: LocalModel, memory: Memory) -> None:
    requests, results = MessageQueue(DATUM, 8), MessageQueue(DATUM, 8)
    with requests.descriptor as request, results.descriptor as result:
        server = ExecutionBurstServer.create(SlotTable(), request, result, Adder(), polling_window=0)
    requests.write(np.zeros(8, DATUM))
    results.write(np.zeros(8, DATUM))
    server.close()
    server.close()
    server.free_memory(3)
    server.hang_up()
    requests.close()
    results.close()


def test_listener_cannot_close_its_own_burst(model: LocalModel, memory: Memory) -> None:
    with bound(model, memory) as (_, execution):
        model.executor.during = lambda: model.server.close()  # type: ignore[func-returns-value]
        with pytest.raises(BadState):
            try:
                execution.run()
            except GeneralFailure as error:  # BAD_STATE never crosses the wire
                raise BadState from error
        model.executor.during = lambda: None
        execution.run()


# ---- hostile clients --------------------------------------------------------------------------------------------


class BareServer:
    """A server of a burst, with the client's ends of both channels in the hands of a test."""

    def __init__(self, window: float, result_length: int = 1024) -> None:
        self.requests, self.results = MessageQueue(DATUM, 1024), MessageQueue(DATUM, result_length)
        self.executor_closed = threading.Event()
        executor = Adder()
        executor.close = self.executor_closed.set  # type: ignore[method-assign]
        with self.requests.descriptor as request, self.results.descriptor as result:
            self.server = ExecutionBurstServer.create(SlotTable(), request, result, executor, polling_window=window)

    def ask(self) -> None:
        """Send an ill-formed packet, which is answered with two datums, and wait until the server has taken it."""
        assert self.requests.write(np.zeros(2, DATUM))
        self.requests.event_flag.wake(2)
        until(lambda: not self.server.alive or not self.requests.available_to_read)

    def has_ended(self) -> bool:
        """Whether the listener has ended and given everything back, by itself."""
        return until(lambda: not self.server.alive) and self.executor_closed.is_set()

    def __enter__(self) -> BareServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.close()
        self.requests.close()
        self.results.close()


@WINDOWS
@pytest.mark.parametrize("forged", [1, 24 * 1027, 2**63, 2**64 - 24])
@pytest.mark.parametrize("whose", ["the client's", "the server's"])
def test_request_counter_that_a_client_forges_ends_the_listener(
    window: float, whose: str, forged: int, caplog: pytest.LogCaptureFixture
) -> None:
    with BareServer(window) as bare:
        bare.ask()
        until(lambda: bare.results.available_to_read == 2)
        if whose == "the client's":
            lib.nnb_mq_write_counter(bare.requests.handle)[0] = forged
            bare.requests.event_flag.wake(2)
        else:
            lib.nnb_mq_read_counter(bare.requests.handle)[0] = forged
            bare.ask()
        assert bare.has_ended()
        assert bare.results.available_to_read == 2
    assert caplog.messages == ["burst ended: the client corrupted the shared counters"]


@WINDOWS
def test_client_that_takes_no_answers_ends_the_listener(window: float, caplog: pytest.LogCaptureFixture) -> None:
    with BareServer(window, result_length=4) as bare:
        for answers in (2, 4):
            bare.ask()
            until(lambda answers=answers: bare.results.available_to_read == answers)
            assert bare.server.alive
        bare.ask()
        assert bare.has_ended()
        assert bare.results.available_to_read == 4
    assert caplog.messages == ["burst ended: the client takes no results"]


@WINDOWS
def test_burst_that_the_server_ends_by_itself_ends_the_run_that_waits(
    model: LocalModel, memory: Memory, window: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = Held(-errno.ENOBUFS)
    monkeypatch.setattr("nnburst.burst.server.server.serve", serve)
    with ThreadPoolExecutor() as pool, ExecutionBurstController.create(model, polling_window=window) as controller:
        answer = pool.submit(controller.bind(adder_request(memory)).run)
        until(lambda: controller.stats.sent == 1)
        serve.go_on.set()
        with pytest.raises(DeadObject, match="has ended the burst: the client takes no results"):
            answer.result(PATIENCE)
        assert not controller.is_sound


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_burst_whose_listener_fails_says_so(model: LocalModel, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise SystemExit(3)

    monkeypatch.setattr("nnburst.burst.server.server.serve", fail)
    with ExecutionBurstController.create(model) as controller:
        until(lambda: not controller.is_sound)
        with pytest.raises(DeadObject, match="has ended the burst: its listener has failed"):
            controller.bind(adder_request(memory)).run()


def test_burst_that_the_server_ends_before_the_client_has_its_end_is_a_dead_object(
    model: LocalModel, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure, ended, told = model.configure_execution_burst, SlotTable.report_end, threading.Event()

    def note(self: SlotTable, reason: str) -> None:
        ended(self, reason)
        told.set()

    def wait_for_the_end(*args: Any) -> Any:
        made = configure(*args)
        assert told.wait(PATIENCE)
        return made

    monkeypatch.setattr("nnburst.burst.server.server.serve", lambda *_: -errno.ENOBUFS)
    monkeypatch.setattr(SlotTable, "report_end", note)
    monkeypatch.setattr(model, "configure_execution_burst", wait_for_the_end)
    with ExecutionBurstController.create(model) as controller:
        with pytest.raises(DeadObject, match="has ended the burst: the client takes no results"):
            controller.bind(adder_request(memory)).run()
        assert not controller.is_sound


def test_burst_that_is_closed_is_no_error_to_log(caplog: pytest.LogCaptureFixture) -> None:
    with BareServer(0.0) as bare:
        bare.ask()
    assert not bare.server.alive
    assert not caplog.messages


# ---- fork and signals -------------------------------------------------------------------------------------------


def test_forked_child_gets_bad_state_and_leaves_the_parent_alone(model: LocalModel, memory: Memory) -> None:
    with bound(model, memory) as (_, execution):
        execution.run()

        def refused() -> None:
            nonlocal execution
            with pytest.raises(BadState, match=r"fork\(\)"):
                execution.run()
            del execution

        in_forked_child(refused)
        execution.run()


@pytest.mark.parametrize("window", [0, 10], ids=["futex", "polling"])
def test_ctrl_c_interrupts_a_run_and_its_result_is_dropped(model: LocalModel, memory: Memory, window: float) -> None:
    go, main = threading.Event(), threading.main_thread().ident
    assert main is not None
    with bound(model, memory, polling_window=window) as (controller, execution):
        execution.run()
        model.executor.during = lambda: (signal.pthread_kill(main, signal.SIGINT), go.wait(PATIENCE), None)[-1]
        with pytest.raises(KeyboardInterrupt):
            execution.run()
        model.executor.during = lambda: None
        go.set()
        execution.run()
        assert controller.stats.dropped == 1


def test_signal_handler_that_raises_after_the_call_of_c_gives_the_run_up(
    model: LocalModel, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler's turn comes with the first bytecode: here before the first line of `_conclude`."""

    def interrupted(execution: BoundRequest, status: int) -> None:
        raise KeyboardInterrupt

    go = threading.Event()
    with bound(model, memory, polling_window=0) as (controller, execution):
        execution.run()
        model.executor.during = lambda: go.wait(PATIENCE) and None
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(BoundRequest, "_conclude", interrupted)
            execution.run()  # C comes back every 100 ms
        assert controller.is_free
        go.set()
        execution.run()
        assert controller.stats.dropped == 1


@pytest.mark.parametrize("run", [BoundRequest.run, lambda execution: execution.run(PATIENCE), BoundRequest.execute])
def test_signal_handler_that_runs_the_same_execution_gives_the_run_up(
    model: LocalModel, memory: Memory, run: Callable[[BoundRequest], object]
) -> None:
    go = threading.Event()
    with bound(model, memory, polling_window=0) as (controller, execution):
        execution.run()
        model.executor.during = lambda: os.kill(os.getpid(), signal.SIGUSR1) or (go.wait(PATIENCE) and None)
        with handling(signal.SIGUSR1, lambda *_: execution.run()), pytest.raises(BadState):
            run(execution)
        model.executor.during = lambda: None
        assert controller.is_free
        go.set()
        execution.run()
        assert controller.stats.dropped == 1


def test_execution_that_is_bound_anew_while_it_runs_keeps_what_it_runs(model: LocalModel, memory: Memory) -> None:
    with ExecutionBurstController.create(model, polling_window=10) as controller:
        execution, other = (bind(controller, adder_request(memory)) for _ in range(2))
        execution.run()
        address = int(ffi.cast("uintptr_t", execution.pointer))
        running = weakref.ref(execution.pointer)
        kept = []

        def during() -> None:
            execution._attach(other.pointer, 0)
            kept.append(running() is not None)
            execution._attach(running() or other.pointer, address if kept[-1] else 0)

        model.executor.during = during
        execution.run()
        assert kept == [True]


def test_signal_storm_does_not_lose_results(model: LocalModel, memory: Memory) -> None:
    hits: list[int] = []
    with handling(signal.SIGALRM, lambda number, frame: hits.append(number)):
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        with bound(model, memory, polling_window=0) as (controller, execution):
            end = time.monotonic() + 0.5
            runs = 0
            while time.monotonic() < end:
                execution.run()
                runs += 1
            assert controller.stats.received == runs
            assert controller.stats.dropped == 0
    assert hits


# ---- what is dropped --------------------------------------------------------------------------------------------


def listeners() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "nnburst-listener"}


@WINDOWS
@pytest.mark.parametrize("held", ["server", "controller", "execution"])
def test_burst_that_is_dropped_gives_everything_back(held: str, window: float) -> None:
    with without_collector():  # nothing of it is a cycle
        before, mapped = listeners(), mappings("memfd:MessageQueue")
        executor, memory = Adder(), Memory.ashmem(4096)
        closed = threading.Event()
        executor.close = closed.set  # type: ignore[method-assign]
        model = LocalModel(executor)
        gone = weakref.ref(memory)
        controller = ExecutionBurstController.create(model, polling_window=window)
        execution = bind(controller, adder_request(memory))
        execution.run()
        server = weakref.ref(model.server)
        if held == "server":  # the client's end goes on and finds the burst ended
            controller._context = None  # type: ignore[assignment]
        elif held == "controller":
            del execution, controller
        else:  # an execution keeps its burst
            del controller
            execution.run()
            del execution
        model.server = None
        assert server() is None
        until(lambda: listeners() <= before)
        assert closed.is_set()
        executor.memories.clear()
        if held == "server":
            del execution, controller
        del memory
        assert gone() is None
        assert mappings("memfd:MessageQueue") == mapped


def test_server_that_is_dropped_finishes_what_it_runs(model: LocalModel, memory: Memory) -> None:
    before = listeners()
    controller = ExecutionBurstController.create(model)
    with running(model, bind(controller, adder_request(memory))) as (run, go):
        memory.array(np.float32, (4,), 64)[:] = 0
        controller._context, model.server = None, None  # type: ignore[assignment]
        assert len(listeners() - before) == 1
        go.set()
        run.result(PATIENCE)
    assert memory.array(np.float32, (4,), 64).tolist() == [2, 3, 4, 5]
    until(lambda: listeners() <= before)


def test_controller_that_is_dropped_is_not_kept_by_its_death_listener(model: LocalModel) -> None:
    controller = ExecutionBurstController.create(model)
    gone = weakref.ref(controller)
    del controller
    gc.collect()
    assert gone() is None
    model.on_death()  # comes late, finds nobody
    assert model.server is not None
    model.server.close()
