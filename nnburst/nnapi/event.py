"""Events, which report the end of a started execution."""

from __future__ import annotations

from collections.abc import Callable

from .._core.leaving import process_lock
from .._core.threads import start_daemon
from ..devices.fence import Fence, FenceSignal, FenceState
from ..errors import GeneralFailure, InvalidArgument, MissedDeadline


class Event:
    """The end of a started execution, as `Execution.start_compute` and similar methods return it.

    An event has a file descriptor that becomes readable at the end, for ``select``, ``loop.add_reader``, or another
    process. Other executions can wait for it without this process (`Execution.start_compute_with_dependencies`). Only
    `wait` copies outputs to the caller's arrays and raises the execution's error.

    Args:
        fence: Fence that is signalled at the end, in error if the execution failed. The event owns it.
        settle: Function that the first `wait` after the end calls; it raises the execution's error.
    """

    def __init__(self, fence: Fence, settle: Callable[[], None]) -> None:
        self.fence = fence
        self._settle = settle
        self._settled = False
        self._error: Exception | None = None
        self._lock = process_lock()

    @classmethod
    def start(cls, work: Callable[[], None]) -> Event:
        """Call a function in a new thread and return an event of its end. Raises `ResourceExhausted`."""
        signal = FenceSignal()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                work()
                signal.set()
            except BaseException as error:  # `wait` raises it again.
                failures.append(error)
                signal.fail()

        def settle() -> None:
            thread.join()
            if failures:
                raise failures[0]

        thread = start_daemon(run, name="nnburst-compute", what="an execution in the background")
        return cls(signal.fence, settle)

    @classmethod
    def from_fd(cls, fd: int) -> Event:
        """Return an event for another library's descriptor that becomes readable at the end.

        Args:
            fd: A socket, pipe, eventfd, timerfd, pidfd or ``sync_file``; the caller keeps and closes it.

        Raises:
            InvalidArgument: The descriptor has another kind, or is not open.
        """
        if not isinstance(fd, int) or isinstance(fd, bool) or fd <= 0:
            raise InvalidArgument(f"{fd!r} is not the descriptor of a fence")
        fence = Fence(fd)
        return cls(fence, lambda: fence.wait(0))

    def fileno(self) -> int:
        """Return the event's descriptor, which becomes readable at the end. Poll it, do not read from it."""
        return self.fence.fileno()

    def get_sync_fence_fd(self) -> int:
        """Return a duplicate of the descriptor, for the caller to close."""
        return self.fence.detach_copy()

    @property
    def done(self) -> bool:
        """Return True if `wait` would return or raise at once."""
        return self._settled or self.fence.state is not FenceState.ACTIVE

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the execution, and copy its outputs.

        Args:
            timeout: Seconds; None for no limit, 0 to ask without waiting. The execution continues after a timeout.

        Raises:
            MissedDeadline: The execution has not ended in time.
            NNBurstError: The execution failed; the status says how.
        """
        if not self._settled:
            try:
                self.fence.wait(timeout)
            except GeneralFailure:  # The outcome is more precise.
                pass
            except MissedDeadline:
                raise MissedDeadline("the execution has not ended in time; wait longer, it goes on") from None
            with self._lock:
                if not self._settled:
                    try:
                        self._settle()
                    except Exception as error:
                        self._error = error
                    self._settled = True
        if self._error is not None:
            raise self._error
