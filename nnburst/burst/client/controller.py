"""The client of a burst: slots, executions, fallback and death."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol

from ..._core._nnburst import ffi, lib
from ..._core.deadline import Deadline, checked_timeout, limit_ns
from ..._core.errno import check, system
from ..._core.leaving import Leaving, ProcessLock
from ..._core.one_process import OneProcess
from ...errors import (
    BadState,
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    error_for,
)
from ...fmq import Layout, MessageQueue
from ...memory import check_open
from ...model import NO_TIMING, ExecutionResult, Failure, MeasureTiming, Named, RunOptions, consistent_result, reason_of
from ...watch import Latency, private_row, row_stats
from ..endpoint import c_request, open_channel, python_result
from ..polling import CHANNEL_LENGTH, DATUM, loop_timeout_ns, window_ns
from ..stats import BurstStats, client_stats
from .in_flight import Bell, Flight, Flights
from .slots import SlotTable

if TYPE_CHECKING:
    from types import TracebackType

    from ..._core._nnburst import CData
    from ...errors import Ending
    from ...fmq import MQDescriptor
    from ...memory import Memory
    from ...model import ExecutionResult, OutputShape, Request, RunOptions, Steps, Timing
    from ..interfaces import BurstCallback, BurstContext

_RESTART = -errno.ERESTART
_NO_ROOM = -errno.ENOBUFS
_DIED = -errno.EPIPE
_NOT_BEGUN = frozenset((-errno.EBUSY, -errno.ESTALE, -errno.ENOTCONN, -errno.ESHUTDOWN))
"""The burst is busy, no longer this execution's, or ended before anything was sent: another burst may run it."""
_LEFT = -errno.ESTALE
_LONGEST_ASKING = 1.0
"""Seconds to wait for the reason of a failure."""
_MOST_WINDOWS = 64
"""A run is polled for a window for each of its steps, but for no more than these."""


class BurstCapable(Protocol):
    """What a controller needs of a prepared model, local or remote."""

    def configure_execution_burst(
        self,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        polling_window: float | None = None,
    ) -> BurstContext: ...

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult: ...

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]: ...

    @property
    def ending(self) -> Ending: ...


class ExecutionBurstController(OneProcess):
    """One burst on a prepared model: one execution at a time, each one packet there and one back.

    Thread-safe in that a second concurrent execution gets `BadState`. Context manager.
    """

    @classmethod
    def create(
        cls,
        prepared_model: BurstCapable,
        *,
        polling_window: float | None = None,
        loop_timeout: float | None = None,
        channel_length: int = CHANNEL_LENGTH,
        result_channel_length: int | None = None,
    ) -> ExecutionBurstController:
        """Make the two channels and have the prepared model serve them.

        Args:
            prepared_model: Kept alive by the burst.
            polling_window: Seconds that both ends poll before they sleep; None for the default of the two ends' CPUs, 0
                to never poll. A service in another process polls 10 ms at most.
            loop_timeout: Seconds that each WHILE of a run may take; None for the default.
            channel_length: Datums in the request channel, 4 to 65,536. A request needs 2 + inputs + outputs + pools +
                given dimensions; what does not fit runs without the burst.
            result_channel_length: Datums in the result channel; None for the same.

        Raises:
            InvalidArgument: A length, the window or the time of a loop is out of range.
            NNBurstError: The model cannot serve a burst; the error's status says why.
        """
        window_ns(polling_window, ())  # a wrong one is refused before anything is made
        loop_ns = loop_timeout_ns(loop_timeout)
        lengths = (channel_length, channel_length if result_channel_length is None else result_channel_length)
        least, most = lib.NNB_MIN_CHANNEL, lib.NNB_MAX_CHANNEL
        if not all(least <= length <= most for length in lengths):
            raise InvalidArgument(f"a burst channel has {least} to {most} datums, not {lengths}")
        bell = Bell()
        slots = SlotTable(bell.rung.fds[0], loop_ns)
        with contextlib.ExitStack() as stack, contextlib.closing(bell.rung):
            failing = stack.enter_context(contextlib.ExitStack())
            failing.callback(bell.watched.close)  # not when the error is collected, which may be kept
            queues = [stack.enter_context(MessageQueue(DATUM, length, layout=Layout.STAMPED)) for length in lengths]
            request, result = [stack.enter_context(queue.descriptor) for queue in queues]
            context = prepared_model.configure_execution_burst(slots, request, result, polling_window)
            try:
                # The server has attached and emptied the queues; only from now on may anything be written.
                window = window_ns(polling_window, context.cpus)
                endpoint = _open_client(request, result, window)
                flights = None
                if context.pipelined:
                    lib.nnb_client_set_pipelined(endpoint, system(os.dup, bell.rung.fds[0]))
                    flights = Flights(endpoint, bell.watched, polls=window > 0)
            except BaseException:
                context.close()
                raise
            failing.pop_all()
        return cls(prepared_model, context, slots, endpoint, flights)

    def __init__(
        self,
        prepared_model: BurstCapable,
        context: BurstContext,
        slots: SlotTable,
        endpoint: CData,
        flights: Flights | None,
    ) -> None:
        """Use `create`."""
        self._flights = flights
        self._prepared_model = prepared_model
        self._context = context
        self._slots = slots
        self._row = private_row()
        lib.nnb_client_watch(endpoint, self._row.pointer)
        self._endpoint = endpoint
        self._lock = ProcessLock()  # a signal handler may close a burst whose counters are just being read
        self._closed = False
        self._fallbacks = 0
        self._dropped: deque[tuple[Memory | Named, bool]] = deque()
        self._uses: weakref.WeakValueDictionary[Memory | Steps, MemoryUse] = weakref.WeakValueDictionary()
        self._adrift: list[CData] = []
        self._final_stats: BurstStats | None = None
        self._leaving: Leaving | None = None
        # Weakly: listeners are kept until the connection ends, and a controller that is just dropped must not be.
        this = weakref.ref(self)

        def hang_up() -> None:
            controller = this()
            if controller is not None:
                lib.nnb_client_hang_up(controller._endpoint)

        self._unlink = prepared_model.link_to_death(hang_up)
        _CONTROLLERS[id(self)] = self

    def record(self, trace: CData, every: int) -> None:
        """Note at least one run of so many in an ``nnb_trace``, from now on; while nothing runs."""
        self._trace = trace
        lib.nnb_client_trace(self._endpoint, trace, every)

    # ---- executions ------------------------------------------------------------------------------------------

    def bind(self, request: Request, *, measure: bool = False) -> BoundRequest:
        """Serialise a request once, to be run many times.

        Args:
            request: Its pools get a slot each, which they keep until `free_memory` or `close`.
            measure: Whether results carry `Timing`.

        Raises:
            BadState: The burst is closed, or a memory.
            InvalidArgument: A number does not fit the wire format.
        """
        bound = BoundRequest()
        bound.bind_to(self, (request,), measure=measure)
        return bound

    @property
    def flights(self) -> Flights:
        """The executions that were started and are not waited for.

        Raises:
            GeneralFailure: The server of this burst takes one request at a time.
        """
        if self._flights is None:
            raise GeneralFailure(
                "the service takes one request at a time (it is older, or has a server of its own); use run()"
            )
        return self._flights

    def slots_for(self, pools: Sequence[Memory | Named]) -> list[int]:
        """Return the slots of memories, giving each a slot that has none; raises as `bind`."""
        if self._closed:
            raise BadState("the burst is closed; open another one")
        with self._lock.lock:  # a memory that is used again from now on is not among the dropped ones
            self.forget_dropped()
            return self._slots.slots_for(pools)

    def compute(self, request: Request, *, measure: bool = False, timeout: float | None = None) -> ExecutionResult:
        """Run a request once.

        Returns:
            (status, output shapes, timing); an error of the request or of the execution is a status.

        Raises:
            MissedDeadline, DeadObject, BadState: as `BoundRequest.run`.
        """
        bound = self.bind(request, measure=measure)
        bound.timeout = timeout
        return bound.execute()

    def _run_without_burst(self, request: Request, measure: bool, timeout: float | None) -> ExecutionResult:
        self._fallbacks += 1
        flag = MeasureTiming.YES if measure else MeasureTiming.NO
        return self._prepared_model.execute_synchronously(request, RunOptions(flag, Deadline.after(timeout).at_ns))

    # ---- memory and life -------------------------------------------------------------------------------------

    def free_memory(self, memory: Memory | Named) -> bool:
        """Forget a memory on both sides. Executions bound to it fail with INVALID_ARGUMENT from now on.

        Returns:
            Whether the burst knew it.
        """
        slot = self._slots.free(memory)
        if slot is None:
            return False
        try:
            self._context.free_memory(slot)
        except (BadState, DeadObject, MissedDeadline):  # a service that has ended holds nothing
            pass
        except NNBurstError:
            if not self._closed:  # meanwhile, by another thread or a signal handler
                raise
        return True

    def forget(self, memory: Memory | Named) -> None:
        """As `free_memory`, but do not wait for the service."""
        slot = self._slots.free(memory)
        if slot is not None:
            with contextlib.suppress(NNBurstError):
                self._context.forget_memory(slot)

    def forget_soon(self, memory: Memory | Named, *, close: bool = True) -> None:
        """For a finaliser, which may take no lock: forget, and close, a memory when the next request is bound."""
        if not self._closed:
            self._dropped.append((memory, close))

    def use(self, memory: Memory | Steps) -> MemoryUse:
        """Return what stands for the uses of what is not one request's alone. It is forgotten with the last use."""
        with self._lock.lock:
            use = self._uses.get(memory)
            if use is None:
                use = self._uses[memory] = MemoryUse()
                weakref.finalize(use, _unused, weakref.ref(self), memory).atexit = False
            return use

    def forget_dropped(self) -> None:
        """Do what `forget_soon` and `give_up` have put off."""
        with self._lock.lock:
            adrift, self._adrift = self._adrift, []
            self.give_up(adrift)
            while self._dropped:
                memory, close = self._dropped.popleft()
                if not close and memory in self._uses:  # again
                    continue
                self.forget(memory)
                if close and not isinstance(memory, Named):
                    memory.close()

    @property
    def stats(self) -> BurstStats:
        """Counters of the client's end."""
        with self._lock.lock:
            return self._final_stats or client_stats(self._endpoint, self._fallbacks)

    def latency(self) -> Latency:
        """Say how long the runs took."""
        row = row_stats(self._row.pointer)
        assert row is not None
        return Latency(row.round_trip, row.queue_wait, row.execution)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def is_free(self) -> bool:
        """Whether it runs nothing now. It may be otherwise a moment later."""
        return bool(lib.nnb_client_is_free(self._endpoint))

    @property
    def is_sound(self) -> bool:
        """Whether it may be used again: it is not closed, and the service has not corrupted its channels."""
        return lib.nnb_client_is_sound(self._endpoint) == 1

    @property
    def ending(self) -> Ending:
        """How the process of the server ended."""
        return self._prepared_model.ending

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that the server may use."""
        return self._context.cpus

    def close(self) -> None:
        """End the burst; an execution in flight gets `BadState`, though the service finishes it. Idempotent."""
        self.refuse()
        self._leaving = self._leaving or Leaving(
            self._keep_stats,
            self._unlink,
            self._context.leave,
            self._context.close,
            self._close_endpoint,
            self._forget_all,
        )
        self._leaving()

    def _keep_stats(self) -> None:
        with self._lock.lock:
            self._final_stats = self._final_stats or client_stats(self._endpoint, self._fallbacks)

    def _close_endpoint(self) -> None:
        # EDEADLK: this is a signal handler over the execution in flight, which finds the burst closed when it goes on.
        while lib.nnb_client_close(self._endpoint) == -errno.EBUSY:
            time.sleep(0.001)  # the execution in flight has been told to stop; the lock is free for it here

    def _forget_all(self) -> None:
        if self._flights is not None:
            self._flights.close()
        self._slots.clear()
        self._dropped.clear()

    def give_up(self, executions: Sequence[CData]) -> None:
        """Await none of those of this burst that are in flight, for they are going to be dropped. Waits for nothing.

        Any thread, also in a finaliser.
        """
        for execution in filter(lib.nnb_execution_flies, executions):
            if lib.nnb_execution_advance(ffi.NULL, execution) == -errno.EBUSY:
                self._adrift.append(execution)  # another thread waits in the burst, and will receive their answers
            lib.nnb_execution_abandon(execution)

    def refuse(self) -> None:
        """The first half of `close`: nothing is run any more, and an execution in flight gets `BadState`."""
        self._closed = True
        lib.nnb_client_hang_up(self._endpoint)

    def hang_up(self) -> None:
        """End the burst without waiting, from any thread, also in a finaliser; `close` may follow."""
        with contextlib.suppress(NNBurstError):
            self._unlink()
            self._context.leave()
            self._context.hang_up()

    def __enter__(self) -> ExecutionBurstController:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemoryUse:
    """That a request of a burst names a memory; see `ExecutionBurstController.use`."""

    __slots__ = ("__weakref__",)


def _unused(burst: weakref.ref[ExecutionBurstController], memory: Memory | Steps) -> None:
    this = burst()
    if this is not None:
        this.forget_soon(memory, close=False)


_CONTROLLERS: weakref.WeakValueDictionary[int, ExecutionBurstController] = weakref.WeakValueDictionary()


def _hang_up_all() -> None:
    """At interpreter exit servers end; an execution that still runs afterwards must not wait for one."""
    for controller in filter(None, (ref() for ref in _CONTROLLERS.valuerefs())):
        lib.nnb_client_hang_up(controller._endpoint)


atexit.register(_hang_up_all)


def _open_client(request: MQDescriptor, result: MQDescriptor, window: int) -> CData:
    c_request_queue = open_channel(request, "request channel", reset=False)
    try:
        c_result_queue = open_channel(result, "result channel", reset=False)
    except BaseException:
        lib.nnb_mq_close(c_request_queue)
        raise
    out = ffi.new("nnb_client **")
    check(lib.nnb_client_create(out, c_request_queue, c_result_queue, window), "burst channels")
    return ffi.gc(out[0], lib.nnb_client_destroy)


_REMEDY = "Give more time (timeout=) or look at what the service is doing"
_REFUSALS = {
    ErrorStatus.INVALID_ARGUMENT: (
        "the service refused the request (INVALID_ARGUMENT): an argument contradicts the model, or a memory it uses "
        "was freed"
    ),
    ErrorStatus.MISSED_DEADLINE_TRANSIENT: ("no answer {in_time}: the service dropped or ended the run. " + _REMEDY),
    ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: "an output region is too small; .output_shapes of the error tells the sizes",
}


def _inherited() -> BadState:
    return BadState(
        "the burst was inherited through fork() and belongs to the parent process; open a session, on a service of its "
        "own, in the child"
    )


def _not_bound(pointer: object) -> int:
    raise BadState("the execution is not bound to a burst; use compute() or burst_compute()")


class BoundRequest(OneProcess):
    """A request that is bound to a burst; `run` as often as you like. Made by `ExecutionBurstController.bind`."""

    __slots__ = ("_burst", "_elsewhere", "_measure", "_pointer", "_run", "_timeout", "concluding", "limit", "requests")

    def __init__(self) -> None:
        """Bound to nothing yet; see `bind_to`."""
        self._run: Callable[[CData], int] = _not_bound
        self._pointer: CData = ffi.NULL
        self._burst: ExecutionBurstController | None = None
        self._elsewhere: ExecutionResult | None = None  # of the last run, if that did not go through the channel
        self._timeout: float | None = None
        self.limit: float | None = None  # seconds that a run which begins now may take
        self._measure = False
        self.concluding = False  # a thread looks at what a run came to, see `runtime._async`
        self.requests: tuple[Request, ...] = ()

    def bind_to(
        self,
        burst: ExecutionBurstController,
        requests: tuple[Request, ...],
        *,
        measure: bool,
        answer_length: int | None = None,
    ) -> None:
        """Serialise one request, or two that take turns (`turn`), for a burst.

        Args:
            burst: The burst.
            requests: One, or two of the same form.
            measure: Whether results carry `Timing`.
            answer_length: How many datums a result may have, so that others may be in flight beside it; None if that is
                not known.

        Raises:
            BadState: The burst is closed, or a memory.
            InvalidArgument: A number does not fit the wire format.
        """
        out, turn = ffi.new("nnb_execution **"), self.turn
        for i, request in enumerate(requests):
            check_open(request)
            raw, keep_alive = c_request(request, burst.slots_for(request.pools), measure=measure)  # type: ignore[arg-type]
            if i == 0:
                check(lib.nnb_execution_create(out, burst._endpoint, raw), "bind", {errno.ECHILD: _inherited()})
                pointer = ffi.gc(out[0], lib.nnb_execution_destroy)
                if answer_length is not None:
                    lib.nnb_execution_set_answer(pointer, answer_length)
                if request.steps is not None:
                    lib.nnb_execution_set_windows(pointer, min(request.steps.count, _MOST_WINDOWS))
            else:
                check(lib.nnb_execution_alternate(pointer, raw), "bind")
            del keep_alive
        if turn:
            lib.nnb_execution_ran_elsewhere(pointer, 0)
        self.requests, self._measure, self._burst, self._pointer = requests, measure, burst, pointer
        self._allow(self.limit)
        self._run = lib.nnb_execution_run

    def _find_way(self, number: int, deadline: Deadline) -> Deadline | None:
        """Find another burst when a run could not begin, for that errno.

        Returns:
            The deadline of the run from now on: what is set up meanwhile is not the run's time. None if there is none.
        """
        return None

    @property
    def repeats(self) -> int:
        """How often a run is repeated that the death of the service has ended."""
        return 0

    @property
    def comes_back(self) -> bool:
        """Whether a run starts the service again that has died before it."""
        return False

    @property
    def turn(self) -> int:
        """Index of the request that the next run sends. A run that ends with NONE passes the turn."""
        return lib.nnb_execution_turn(self._pointer) if self._burst is not None else 0

    def run(self, timeout: float | EllipsisType | None = ...) -> None:
        """Run once and wait for the end; the outputs are then in their memory, until the next run writes there.

        Args:
            timeout: Seconds that this run may take; None for no limit. By default those that it was bound with.

        Raises:
            DeadObject: The service died, or the burst was closed meanwhile.
            MissedDeadline: The time was over. The service may still be writing outputs.
            BadState: The burst is closed, or runs another execution now.
            OutputInsufficientSize: An output region is too small.
            NNBurstError: The service answered another error status.
        """
        if timeout is not ...:
            with self.limited(timeout):
                return self.run()
        try:
            status = self._run(self._pointer)
            if status:
                self._settle(status)
        except BadState:  # not run at all, perhaps because this very execution is in flight below a signal handler
            raise
        except BaseException:
            # Does nothing, unless a signal handler raised while the answer was still on its way.
            lib.nnb_execution_abandon(self._pointer)
            raise

    def start(self, *, look_until: int = 0) -> Flight:
        """Start a run that is not waited for here; `look_until` as for `Flights.start`. `conclude` tells how it ended.

        Raises:
            BadState: It is closed, or not bound to a burst.
            GeneralFailure: The server of this burst takes one request at a time.
        """
        if self._run is not lib.nnb_execution_run:
            self._run(self._pointer)
        while (flight := self.flights.start(self, look_until=look_until)).status == _LEFT:
            pass  # another thread has moved it to another burst
        return flight

    def conclude(self, status: int) -> None:
        """Raise what `run` would have raised.

        Args:
            status: Of a `Flight` of this execution that has landed, or what the C core returned for it.
        """
        try:
            if status:
                self._settle(status)
        except BadState:
            raise
        except BaseException:
            lib.nnb_execution_abandon(self._pointer)
            raise

    @property
    def pointer(self) -> CData:
        """The execution in the C core."""
        return self._pointer

    @property
    def controller(self) -> ExecutionBurstController:
        """This end of its burst.

        Raises:
            BadState: It is bound to none.
        """
        if self._burst is None:
            _not_bound(None)
        assert self._burst is not None
        return self._burst

    @property
    def flights(self) -> Flights:
        """Those of its burst.

        Raises:
            BadState: It is bound to none.
            GeneralFailure: The server of the burst takes one request at a time.
        """
        return self.controller.flights

    @property
    def burst_is_free(self) -> bool:
        """Whether its burst runs nothing now. It may be otherwise a moment later."""
        return self._burst is not None and self._burst.is_free

    @property
    def is_in_flight(self) -> bool:
        """Whether it was started and its end was not told."""
        return bool(lib.nnb_execution_flies(self._pointer)) if self._burst is not None else False

    def execute(self) -> ExecutionResult:
        """As `run`, but return (status, output shapes, timing) instead of raising for an error status."""
        try:
            self._wait(self._run(self._pointer))
        except BadState:
            raise
        except BaseException:
            lib.nnb_execution_abandon(self._pointer)
            raise
        return self._explained(self.result)

    def _wait(self, status: int) -> int:
        """Wait for the end and return the status, or raise."""
        repeats, deadline = 0, None
        while status < 0:
            if status == _RESTART:  # signal handlers run between two calls
                status = lib.nnb_execution_resume(self._pointer)
            elif status == _NO_ROOM:
                assert self._burst is not None
                request = self.requests[self.turn]
                return self._ran_elsewhere(self._burst._run_without_burst(request, self._measure, self.limit))
            elif status in _NOT_BEGUN or (status == _DIED and repeats < self.repeats):
                repeats += status == _DIED
                begun = self.deadline if status == _DIED else Deadline.after(self.limit)
                deadline = self._find_way(-status, deadline or begun)
                if deadline is None:
                    self._fail(-status)
                else:
                    status = self._run_until(deadline)
            else:
                self._fail(-status)
        return status

    def _run_until(self, deadline: Deadline) -> int:
        """Go on with a run that could not begin, or that is repeated."""
        try:
            self._limit(deadline.left())
            return self._run(self._pointer)
        finally:
            self._limit(self.limit)

    def _ran_elsewhere(self, result: ExecutionResult) -> int:
        """Take the result of a run that did not go through the channel for that of the last run."""
        self._elsewhere = result = consistent_result(*result, reason_of(result))
        if self._burst is not None:
            lib.nnb_execution_ran_elsewhere(self._pointer, int(result[0]))
        return int(result[0])

    def _settle(self, status: int) -> None:
        if self._wait(status):
            for request in self.requests:
                check_open(request)  # the service could not fetch what was closed before the first run
            result = self._explained(self.result)
            final, shapes, _ = result
            reason = reason_of(result)
            refusal = "the execution failed with {name}; launch(log_level='info') logs why"
            message = _REFUSALS.get(final, refusal).format(name=final.name, in_time=self.in_time)
            if reason and final is not ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
                message = f"the execution failed with {final.name}: {reason}"
            raise error_for(final, message, shapes)

    def _explained(self, result: ExecutionResult) -> ExecutionResult:
        """Ask the server why an execution failed: a packet has no room for a sentence."""
        status, shapes, _ = result
        told = status in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE) or result is self._elsewhere
        if told or self._burst is None:
            return result
        limit = _LONGEST_ASKING if self.limit is None else min(self.limit, _LONGEST_ASKING)
        try:
            return Failure(status, Deadline.after(limit).call(self._burst._context.failure_reason), shapes)
        except NNBurstError:  # the status has to do
            return result

    def _fail(self, number: int) -> None:
        self._elsewhere = None
        assert self._burst is not None
        ending = self._burst._prepared_model.ending
        how = ending.reason or "the other process has ended"
        then = "the next run opens the session again" if self.comes_back else "open another session"
        gone = ending.error(f"the service that holds the model is gone: {how}; {then}")
        closed = BadState("the burst is closed; open another session")
        special = {
            errno.ETIMEDOUT: self.missed(),
            errno.ECANCELED: MissedDeadline(
                f"not started {self.in_time}: the service has not come yet to the runs that were given up before. "
                f"{_REMEDY}"
            ),
            errno.EPIPE: BadState("the burst was closed while this execution ran") if self._burst.closed else gone,
            errno.ENOTCONN: closed if self._burst.closed else gone,
            errno.EBUSY: BadState(
                "the burst is running another execution; a burst runs one at a time, open one per thread"
            ),
            errno.EALREADY: BadState(
                "the execution is running, or a run that was given up has not landed; bind one for each thread"
            ),
            errno.ESHUTDOWN: closed,
            errno.ECHILD: _inherited(),
            errno.EBADMSG: GeneralFailure("the service corrupted the channel; the burst is dead, open another session"),
        }
        check(-number, "run", special)

    @property
    def result(self) -> ExecutionResult:
        """(status, output shapes, timing) of the last run. Not to be read while another thread runs it.

        Raises:
            BadState: There was none.
        """
        raw = lib.nnb_execution_result(self._pointer) if self._burst is not None else None
        if raw is not None and raw.status >= 0:
            return python_result(raw)
        if self._elsewhere is None:
            raise BadState("the execution has not run yet, or its last run gave no answer")
        return self._elsewhere

    @property
    def output_shapes(self) -> tuple[OutputShape, ...]:
        """Shapes of the last run; empty if the service had none to tell (all outputs are fully specified)."""
        return self.result[1]

    @property
    def timing(self) -> Timing:
        """Durations of the last run, in microseconds, if it was bound with ``measure=True``."""
        return self.result[2] if self._measure else NO_TIMING

    @property
    def in_time(self) -> str:
        """How long a run may take that begins now, in words."""
        return "in time" if self.limit is None else f"within {self.limit:.3g} s"

    def missed(self) -> MissedDeadline:
        """Return the exception for a run that has not ended in time."""
        return MissedDeadline(f"no answer {self.in_time}; a late one will be dropped. {_REMEDY}")

    @contextlib.contextmanager
    def limited(self, timeout: float | EllipsisType | None) -> Iterator[None]:
        """Let runs that begin meanwhile take so many seconds; ``...`` for `timeout`."""
        if timeout is ...:
            yield
            return
        self._allow(checked_timeout(timeout))
        try:
            yield
        finally:
            self._allow(self._timeout)

    @property
    def timeout(self) -> float | None:
        """Seconds that a run may take which is given no others; None for no limit."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._timeout = checked_timeout(seconds)
        self._allow(self._timeout)

    @property
    def deadline(self) -> Deadline:
        """Of the run that was started last."""
        return Deadline(lib.nnb_execution_deadline(self._pointer) if self._burst is not None else 0)

    def _allow(self, seconds: float | None) -> None:
        self.limit = seconds
        self._limit(seconds)

    def _limit(self, seconds: float | None) -> None:
        if self._burst is not None:
            lib.nnb_execution_set_timeout(self._pointer, limit_ns(seconds))
