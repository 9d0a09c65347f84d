"""The end of an execution that was started, as something to wait for and to poll."""

from __future__ import annotations

from collections.abc import Callable

from .._core.leaving import process_lock
from .._core.threads import start_daemon
from ..devices import Fence, FenceSignal, FenceState
from ..errors import GeneralFailure, InvalidArgument, MissedDeadline


class Event:
    """The end of an execution that was started; `Execution.start_compute` and its like return one.

    It has a file descriptor that becomes readable at the end, so it can be awaited with ``select``, with
    ``loop.add_reader``, or in another process; other executions can wait for it without this process
    (`Execution.start_compute_with_dependencies`). Only `wait` copies outputs to the caller's arrays and tells how it
    ended.

    Args:
        fence: Signalled at the end, in error if it failed. The event's from now on, and its attribute.
        settle: Called once after the end, by the first `wait`; raises what the execution raised.
    """

    def __init__(self, fence: Fence, settle: Callable[[], None]) -> None:
        self.fence = fence
        self._settle = settle
        self._settled = False
        self._error: Exception | None = None
        self._lock = process_lock()

    @classmethod
    def start(cls, work: Callable[[], None]) -> Event:
        """Do something in a thread of its own, and return its end; `ResourceExhausted` if there is no thread for it."""
        signal = FenceSignal()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                work()
                signal.set()
            except BaseException as error:  # raised again by `wait`
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
        """Make one of another library's descriptor that becomes readable when something is over.

        Args:
            fd: A socket, a pipe, an eventfd, a timerfd, a pidfd or a ``sync_file``; stays the caller's.

        Raises:
            InvalidArgument: It is none of these, or not open.
        """
        if not isinstance(fd, int) or isinstance(fd, bool) or fd <= 0:
            raise InvalidArgument(f"{fd!r} is not the descriptor of a fence")
        fence = Fence(fd)
        return cls(fence, lambda: fence.wait(0))

    def fileno(self) -> int:
        """The descriptor, which becomes readable at the end; still the event's. Poll it, do not read from it."""
        return self.fence.fileno()

    def get_sync_fence_fd(self) -> int:
        """Return a duplicate of the descriptor that is the caller's own."""
        return self.fence.detach_copy()

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._settled or self.fence.state is not FenceState.ACTIVE

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end.

        Args:
            timeout: Seconds; None for no limit, 0 to ask only. When it passes, the execution goes on.

        Raises:
            MissedDeadline: It has not ended in time.
            NNBurstError: The execution failed; the status says how.
        """
        if not self._settled:
            try:
                self.fence.wait(timeout)
            except GeneralFailure:  # the outcome says more
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
