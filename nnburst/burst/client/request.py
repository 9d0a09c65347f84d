"""A request that is bound to a burst, and the outcomes of its runs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from ..._core._nnburst import Runnable, ffi, lib
from ..._core.deadline import Deadline, check_timeout, limit_ns
from ..._core.errno import check
from ..._core.leaving import OneProcess
from ...errors import BadState, DeadObject, ErrorStatus, GeneralFailure, MissedDeadline, NNBurstError, error_for
from ...memory.staging import check_open
from ...model.running import ExecutionResult, Failure, consistent_result, reason_of
from ...model.types import NO_TIMING
from ..endpoint import c_request, python_result

if TYPE_CHECKING:
    from ...errors import OutputShape
    from ...model.types import Request, Timing
    from .controller import ExecutionBurstController
    from .in_flight import InFlight

_RESTART = -errno.ERESTART
_NO_ROOM = -errno.ENOBUFS
_DIED = -errno.EPIPE
_NOT_BEGUN = frozenset((-errno.EBUSY, -errno.ESTALE, -errno.ENOTCONN, -errno.ESHUTDOWN))
"""Errnos of a run that was not sent: the burst is busy or has ended, or the request belongs to another burst."""
_LEFT = -errno.ESTALE
_LONGEST_ASKING = 1.0
"""Seconds to wait for the reason of a failure."""
_MOST_WINDOWS = 64
"""Maximum number of polling windows in a run. A run of fewer steps than this polls for one window per step."""
_REMEDY = "Give more time (timeout=), or end a model that hangs: session.service.kill()"
_REFUSALS = {
    ErrorStatus.INVALID_ARGUMENT: (
        "the service refused the request (INVALID_ARGUMENT): an argument contradicts the model, or a memory it uses "
        "was freed"
    ),
    ErrorStatus.MISSED_DEADLINE_TRANSIENT: ("no answer {in_time}: the service dropped or ended the run. " + _REMEDY),
    ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: "an output region is too small; .output_shapes of the error tells the sizes",
}
INHERITED = "the session was inherited through fork() and belongs to the parent process; open a session in the child"


def fork_error() -> BadState:
    return BadState(INHERITED)


def in_time(limit: float | None) -> str:
    return "in time" if limit is None else f"within {limit:.3g} s"


def check_result(result: ExecutionResult, limit: float | None) -> None:
    """Raise the error of an execution that has failed.

    Args:
        limit: The execution's timeout in seconds.
    """
    status, shapes, _ = result
    if status is ErrorStatus.NONE:
        return
    refusal = "the execution failed; launch(log_level='info') logs why"
    message = _REFUSALS.get(status, refusal).format(in_time=in_time(limit))
    reason = reason_of(result)
    if reason and status is not ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        message = f"the execution failed: {reason}"
    raise error_for(status, message, shapes)


class BoundRequest(Runnable, OneProcess):
    """A request bound to a burst for any number of runs, from `ExecutionBurstController.bind`.

    Args:
        controller: The burst.
        requests: One request, or two that alternate and differ only in their buffers.
        measure: True if results carry `Timing`.
        answer_length: Datums of the longest result. None reserves the whole result channel, so that no other run can
            be in flight.

    Raises:
        BadState, InvalidArgument: See `ExecutionBurstController.bind`.
    """

    def __init__(
        self,
        controller: ExecutionBurstController,
        requests: tuple[Request, ...],
        *,
        measure: bool,
        answer_length: int | None = None,
    ) -> None:
        self._measure, self._answer_length = measure, answer_length
        self._elsewhere: ExecutionResult | None = None  # result of the last run, if it did not use the channel
        self._timeout: float | None = None
        self._allowed: float | None = None  # timeout in seconds for the next run
        self._concluding = False  # true while a thread concludes a run; see `runtime.run.event_loop`
        self._closed = False
        self._bind_to(controller, requests)

    def _bind_to(self, controller: ExecutionBurstController, requests: tuple[Request, ...], turn: int = 0) -> None:
        """Serialise the requests for a burst. `turn` is the index of the request that the next run sends."""
        out = ffi.new("nnb_execution **")
        for i, request in enumerate(requests):
            check_open(request)
            raw, keep_alive = c_request(request, controller.slots_for(request.pools), measure=self._measure)  # type: ignore[arg-type]
            if i == 0:
                check(lib.nnb_execution_create(out, controller.endpoint, raw), "bind", {errno.ECHILD: fork_error()})
                pointer = ffi.gc(out[0], lib.nnb_execution_destroy)
                if self._answer_length is not None:
                    lib.nnb_execution_set_answer(pointer, self._answer_length)
                if request.steps is not None:
                    lib.nnb_execution_set_windows(pointer, min(request.steps.count, _MOST_WINDOWS))
            else:
                check(lib.nnb_execution_alternate(pointer, raw), "bind")
            del keep_alive
        if turn:
            lib.nnb_execution_ran_elsewhere(pointer, 0)
        self.controller, self._requests = controller, requests
        self._attach(pointer, int(ffi.cast("uintptr_t", pointer)))
        self._allow(self._allowed)

    def _check_not_closed(self) -> None:
        if self._closed:
            raise BadState("the execution is closed; make another one")

    def _refuse(self) -> None:
        self._closed = True
        self._attach(self.pointer, 0)

    @property
    def turn(self) -> int:
        """Index of the request that the next run sends. It changes after each run that succeeds."""
        return lib.nnb_execution_turn(self.pointer)

    # ---- running ---------------------------------------------------------------------------------------------

    def _run_at_length(self, timeout: Any = ..., inputs: Any = ...) -> None:
        """Handle calls of `run` with an argument, and calls on a closed object. C handles all other calls."""
        limit = timeout if inputs is ... else inputs
        self._allow(self._timeout if limit is ... else check_timeout(limit))
        try:
            self._conclude()
        finally:
            self._allow(self._timeout)

    def execute(self) -> ExecutionResult:
        """Run, and return (status, output shapes, timing) instead of raising an error status."""
        self._conclude(raises=False)
        return self._explain(self.result)

    def _conclude(self, status: int | None = None, *, raises: bool = True) -> None:
        """Wait for the end of a run; if necessary, repeat the run on another burst. If the run fails, raise its error.

        Args:
            status: Status of the run from the C core or from `InFlight`; None to start the run.
            raises: True to raise the error of an error status. Errors of the C core are always raised.
        """
        if status is None:
            self._check_not_closed()
        try:
            if status is None:
                status = lib.nnb_execution_run(self.pointer)
            repeats, deadline = 0, None  # both are set once the run has moved to another burst
            while status < 0:
                if status == _RESTART:  # signal handlers run between two calls
                    status = lib.nnb_execution_resume(self.pointer)
                elif status == _NO_ROOM:
                    result = self.controller.run_without_burst(self._request, self._measure, self._allowed)
                    self._elsewhere = consistent_result(*result, reason_of(result))
                    status = int(self._elsewhere[0])
                    lib.nnb_execution_ran_elsewhere(self.pointer, status)
                elif status in _NOT_BEGUN or (status == _DIED and repeats < self._retries):
                    repeats += status == _DIED
                    begun = self._deadline if status == _DIED else Deadline.after(self._allowed)
                    if (deadline := self._rebind(-status, deadline or begun)) is None:
                        break
                    self._limit(deadline.left())
                    try:
                        status = lib.nnb_execution_run(self.pointer)
                    finally:
                        self._limit(self._allowed)
                else:
                    break
        except BaseException:
            # This has an effect only if a signal handler raised an error before the answer came.
            lib.nnb_execution_abandon(self.pointer)
            raise
        if status < 0:
            self._raise(-status)
        if status and raises:
            self._check_ended_well(status)

    @property
    def _request(self) -> Request:
        return self._requests[self.turn]

    _retries = 0
    """Number of times that a run is repeated after the death of the service."""
    _restarts = False
    """True if a run restarts a service that has died."""

    def _rebind(self, number: int, deadline: Deadline) -> Deadline | None:
        """Bind this request to another burst, after a run that failed with errno `number`.

        Returns:
            The run's deadline, postponed by the time that the move took; None if there is no other burst.
        """
        return None

    def _start(self, *, look_until: int = 0) -> InFlight:
        """Start a run without waiting. `_conclude` raises the run's error. See `InFlightRuns.start`.

        Raises:
            BadState: The request is closed.
            GeneralFailure: The server of this burst takes one request at a time.
        """
        self._check_not_closed()
        while (flight := self.controller.flights.start(self, look_until=look_until)).status == _LEFT:
            pass  # another thread has moved the request to another burst
        return flight

    @property
    def is_in_flight(self) -> bool:
        """True from the start of a run until its result is taken."""
        return bool(lib.nnb_execution_flies(self.pointer))

    # ---- how it ended ----------------------------------------------------------------------------------------

    def _check_ended_well(self, status: int) -> None:
        for request in self._requests:
            check_open(request)  # the service cannot fetch memory that was closed before the first run
        result = self.result
        if result[0] != status:  # this result belongs to a run by another thread or a signal handler
            result = ErrorStatus(status), (), NO_TIMING
        check_result(self._explain(result), self._allowed)

    def _explain(self, result: ExecutionResult) -> ExecutionResult:
        """Ask the server for the reason of a failed run, and add it to the result."""
        status, shapes, _ = result
        if status in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE) or result is self._elsewhere:
            return result
        limit = _LONGEST_ASKING if self._allowed is None else min(self._allowed, _LONGEST_ASKING)
        try:
            return Failure(status, Deadline.after(limit).call(self.controller.failure_reason), shapes)
        except NNBurstError:  # without a reason, only the status is reported
            return result

    def _raise(self, number: int) -> int:
        self._elsewhere = None
        special = {number: _FAILURES[number](self)} if number in _FAILURES else None
        return check(-number, "run", special)

    def _burst_error(self, meanwhile: str) -> NNBurstError:
        """Return the exception for a burst that has ended. If this side closed it, the message is `meanwhile`."""
        controller = self.controller
        if controller.closed:
            return BadState(meanwhile)
        if controller.end_reason:
            return DeadObject(
                f"the service has ended the burst: {controller.end_reason}; a session's next run opens another one"
            )
        how = controller.ending.reason or "the other process has ended"
        then = "the next run opens the session again" if self._restarts else "open another session"
        return controller.ending.error(f"the service that holds the model is gone: {how}; {then}")

    @property
    def result(self) -> ExecutionResult:
        """Status, output shapes and timing of the last run. Read them only while no other thread runs the request.

        Raises:
            BadState: There was no run, or the last run gave no answer.
        """
        raw = lib.nnb_execution_result(self.pointer)
        if raw.status >= 0:
            return python_result(raw)
        if self._elsewhere is None:
            raise BadState("the execution has not run yet, or its last run gave no answer")
        return self._elsewhere

    @property
    def output_shapes(self) -> tuple[OutputShape, ...]:
        """Output shapes of the last run; empty if all outputs are fully specified."""
        return self.result[1]

    @property
    def timing(self) -> Timing:
        """Durations of the last run, in microseconds, if the request was bound with ``measure=True``."""
        return self.result[2] if self._measure else NO_TIMING

    def _deadline_error(self) -> MissedDeadline:
        return MissedDeadline(f"no answer {in_time(self._allowed)}; a late one will be dropped. {_REMEDY}")

    @contextlib.contextmanager
    def _use_timeout(self, timeout: float | EllipsisType | None) -> Iterator[None]:
        """Set the timeout of runs that start in the ``with`` block; ``...`` stands for the property `timeout`."""
        if timeout is ...:
            yield
            return
        self._allow(check_timeout(timeout))
        try:
            yield
        finally:
            self._allow(self._timeout)

    @property
    def timeout(self) -> float | None:
        """Default timeout of a run in seconds; None for no limit."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._timeout = check_timeout(seconds)
        self._allow(self._timeout)

    @property
    def _deadline(self) -> Deadline:
        return Deadline(lib.nnb_execution_deadline(self.pointer))

    def _allow(self, seconds: float | None) -> None:
        self._allowed = seconds
        self._limit(seconds)

    def _limit(self, seconds: float | None) -> None:
        lib.nnb_execution_set_timeout(self.pointer, limit_ns(seconds))


_CLOSED = "the burst is closed; open another session"
_FAILURES: dict[int, Callable[[BoundRequest], NNBurstError]] = {
    errno.ETIMEDOUT: BoundRequest._deadline_error,
    errno.ECANCELED: lambda bound: MissedDeadline(
        f"not started {in_time(bound._allowed)}: the service has not come yet to the runs that were given up before. "
        + _REMEDY
    ),
    errno.EPIPE: lambda bound: bound._burst_error("the burst was closed while this execution ran"),
    errno.ENOTCONN: lambda bound: bound._burst_error(_CLOSED),
    errno.EBUSY: lambda bound: BadState(
        "the burst is running another execution; a burst runs one at a time, open one per thread"
    ),
    errno.EALREADY: lambda bound: BadState(
        "the execution is running, or a run that was given up has not landed; bind one for each thread"
    ),
    errno.ESHUTDOWN: lambda bound: BadState(_CLOSED),
    errno.ECHILD: lambda bound: fork_error(),
    errno.EBADMSG: lambda bound: GeneralFailure(
        "the service corrupted the channel; the burst is dead, open another session"
    ),
}
"""Functions that return the error of a failed run, by errno of the C core."""
