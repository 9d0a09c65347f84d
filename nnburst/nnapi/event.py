"""Events, which report the end of a started execution."""

from __future__ import annotations

from collections.abc import Callable

from .._core.leaving import process_lock
from .._core.threads import start_daemon
from ..devices.fence import Fence, FenceSignal, FenceState
from ..errors import GeneralFailure, InvalidArgument, MissedDeadline


class Event:
    """The end of a started execution, returned by `Execution.start_compute` and similar methods.

    An event has a file descriptor, for ``select`` or ``loop.add_reader``, that becomes readable when the execution
    ends. In the service, other executions can wait for the event (see `Execution.start_compute_with_dependencies`).
    Only `wait` copies outputs to the caller's arrays and raises the execution's error.

    Attributes:
        fence: Fence that is signalled at the end, with an error if the execution failed. The event owns the fence.

    Example:
        >>> x, y = np.ones((1, 4), np.float32), np.empty((1, 4), np.float32)
        >>> with nnburst.launch() as service, nnburst.nnapi.Compilation(model, service) as compilation:
        ...     compilation.finish()
        ...     execution = nnburst.nnapi.Execution(compilation)
        ...     execution.set_input(0, x)
        ...     execution.set_output(0, y)
        ...     execution.start_compute().wait()
        >>> y
        array([[1., 1., 1., 1.]], dtype=float32)
    """

    def __init__(self, fence: Fence, settle: Callable[[], None]) -> None:
        """Use `Execution.start_compute` or `Event.from_fd` instead.

        `wait` calls `settle` once, after the end. `settle` raises the execution's error, if any.
        """
        self.fence = fence
        self._settle = settle
        self._settled = False
        self._error: Exception | None = None
        self._lock = process_lock()

    @classmethod
    def start(cls, work: Callable[[], None]) -> Event:
        """Call a function in a new thread, and return an event that reports the end of the call.

        Args:
            work: Function to call. `wait` raises its error, if any.

        Raises:
            ResourceExhausted: No thread can be started.
        """
        signal = FenceSignal()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                work()
                signal.set()
            except BaseException as error:  # `wait` raises it.
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
        """Return an event for another library's descriptor. The event ends when the descriptor becomes readable.

        Args:
            fd: A socket, pipe, eventfd, timerfd, pidfd or ``sync_file``. The caller closes it.

        Raises:
            InvalidArgument: The descriptor has another kind, or is not open.
        """
        if not isinstance(fd, int) or isinstance(fd, bool) or fd <= 0:
            raise InvalidArgument(f"{fd!r} is not the descriptor of a fence")
        fence = Fence(fd)
        return cls(fence, lambda: fence.wait(0))

    def fileno(self) -> int:
        """Return the descriptor, which becomes readable when the execution ends. Poll it; never read from it."""
        return self.fence.fileno()

    def get_sync_fence_fd(self) -> int:
        """Return a duplicate of the descriptor, for the caller to close."""
        return self.fence.detach_copy()

    @property
    def done(self) -> bool:
        """True if the execution has ended."""
        return self._settled or self.fence.state is not FenceState.ACTIVE

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the execution, and copy its outputs.

        Args:
            timeout: Seconds; None for no limit, 0 for no waiting.

        Raises:
            MissedDeadline: The timeout has passed; the execution continues.
            NNBurstError: The execution failed; see the status.
        """
        if not self._settled:
            try:
                self.fence.wait(timeout)
            except GeneralFailure:  # `settle` raises a more precise error.
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
