"""Fenced executions, which wait for fences before a run and signal a fence at its end.

Each execution has its own thread, so a fence that is never signalled delays no other execution. The thread sleeps in
``poll`` until all fences are signalled or the deadline passes, then runs the request. A quota of the service limits
the number of fenced executions.
"""

from __future__ import annotations

import abc
import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from .._core.fds import FdSet
from .._core.threads import start_daemon
from ..errors import ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline
from ..model.running import ExecutionResult, RunOptions, failure_of, reason_of
from ..model.types import NO_TIMING, MeasureTiming, Timing
from .deadline import earlier, is_limit
from .fence import LONGEST_MS, Fence, FenceSignal, FenceState, state_of_events


class FencedInfo(Struct, frozen=True):
    """The outcome of a fenced execution.

    Attributes:
        status: The status of the run, or of the wait for fences if the wait failed.
        launched: Timing of the run. Its ``time_in_driver`` counts from the launch. Empty unless requested.
        fenced: Timing of the run. Its ``time_in_driver`` counts from the signal of the last fence. Empty unless
            requested.
        reason: A sentence about the failure, or empty.
    """

    status: ErrorStatus
    launched: Timing = NO_TIMING
    fenced: Timing = NO_TIMING
    reason: str = ""


class FencedExecution(abc.ABC):
    """An execution that `PreparedModel.execute_fenced` has launched. It continues if this object is deleted.

    Attributes:
        fence: A fence, signalled when the outputs are complete, and in error after a failure. The caller closes it.
    """

    fence: Fence

    @abc.abstractmethod
    def info(self) -> FencedInfo:
        """Return the outcome. Raises `GeneralFailure` before the execution ends, `DeadObject` if its process died."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Cancel an execution that has not begun to run, and put its fence in error. Does not wait. Idempotent."""


def check_fences(wait_for: Sequence[Fence], duration_ns: int = 0) -> tuple[Fence, ...]:
    """Check the fences and the time limit of a fenced execution. Return the fences as a tuple."""
    if duration_ns < 0:
        raise InvalidArgument(f"a duration of {duration_ns} ns: give nanoseconds, 0 for no limit")
    for position, fence in enumerate(wait_for):
        if not isinstance(fence, Fence):
            raise InvalidArgument(f"wait_for[{position}] is {type(fence).__name__}; give a Fence")
        if fence.state is FenceState.ERROR:
            raise InvalidArgument(f"wait_for[{position}] is in error: what it stands for has failed")
    return tuple(wait_for)


class LocalFenced(FencedExecution):
    """A fenced execution in this process.

    Args:
        execute: Function that runs the request with the given options.
        wait_for: Checked fences, which the caller keeps and closes.
        options: Options of the run. The deadline also limits the wait for fences.
        duration_ns: Time limit in nanoseconds after the signal of the last fence; 0 for none.

    Raises:
        ResourceExhausted: The process has too many open files.
    """

    def __init__(
        self,
        execute: Callable[[RunOptions], ExecutionResult],
        wait_for: Sequence[Fence],
        options: RunOptions,
        duration_ns: int,
    ) -> None:
        self._execute = execute
        self._options = options
        self._duration_ns = duration_ns
        self._launched = time.monotonic_ns()
        self._fences = FdSet.duplicate(fence.fileno() for fence in wait_for)
        self._cancelled = FdSet.create(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signal = FenceSignal()
        self.fence = self._signal.fence
        self._info: FencedInfo | None = None

    def start(self, on_end: Callable[[], None] = lambda: None) -> LocalFenced:
        """Start the thread, which waits, runs, calls `on_end` and signals the fence. To be called once."""
        start_daemon(partial(self._run_to_end, on_end), name="nnburst-fenced", what="a fenced execution")
        return self

    def info(self) -> FencedInfo:
        if self._info is None:
            raise GeneralFailure("the execution has not ended; wait for its fence")
        return self._info

    def cancel(self) -> None:
        cancelled = self._cancelled  # This reference keeps the descriptor open.
        if self._info is None:
            os.eventfd_write(cancelled.fds[0], 1)

    def _run_to_end(self, on_end: Callable[[], None]) -> None:
        try:
            info = self._outcome()
        except BaseException as error:  # A function may raise SystemExit.
            failure = failure_of(error)
            info = FencedInfo(failure[0], reason=failure.reason)
        self._info = info
        self._fences.close()
        try:
            on_end()
        except Exception:
            import logging

            logging.getLogger(__name__).exception("the end of a fenced execution could not be told")
        if info.status is ErrorStatus.NONE:
            self._signal.set()
        else:
            self._signal.fail()

    def _outcome(self) -> FencedInfo:
        self._wait()
        fenced = time.monotonic_ns()
        deadline = earlier(self._options.deadline_ns, fenced + self._duration_ns if self._duration_ns else 0)
        result = self._execute(replace(self._options, deadline_ns=deadline))
        ended = time.monotonic_ns()
        status, _, timing = result
        if status is not ErrorStatus.NONE or self._options.measure != MeasureTiming.YES:
            return FencedInfo(status, reason=reason_of(result))
        launched = Timing(timing.time_on_device, (ended - self._launched) // 1000)
        return FencedInfo(status, launched, Timing(timing.time_on_device, (ended - fenced) // 1000))

    def _wait(self) -> None:
        """Wait for all fences. Raises `MissedDeadline`, or `GeneralFailure` for a fence in error or after `cancel`."""
        (cancelled,) = self._cancelled.fds
        poll, left = select.poll(), dict(zip(self._fences.fds, range(len(self._fences)), strict=True))
        for fd in (*left, cancelled):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, events in poll.poll(0 if not left else self._milliseconds()):
                if fd == cancelled:
                    raise GeneralFailure("the execution was cancelled before it began")
                state = state_of_events(fd, events)
                if state is FenceState.ERROR:
                    raise GeneralFailure(f"wait_for[{left[fd]}] went into error: what it stands for has failed")
                if state is FenceState.SIGNALLED:
                    poll.unregister(fd)
                    del left[fd]
            if not left:
                return
            if self._milliseconds() == 0:
                waited = ", ".join(f"wait_for[{position}]" for position in left.values())
                raise MissedDeadline(f"the deadline passed before {waited} was signalled; give it more time")

    def _milliseconds(self) -> int | None:
        deadline = self._options.deadline_ns
        if not is_limit(deadline):
            return None
        return min(max(0, -(-(deadline - time.monotonic_ns()) // 1_000_000)), LONGEST_MS)
