"""A `concurrent.futures.Executor` over a session."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import TYPE_CHECKING, Any, TypeVar

from .._core._known_names import KnownNames
from .._core._leaving import ProcessLock
from ..errors import BadState, DeadObject, InvalidArgument
from ._burst import DEEPEST
from ._pipeline import fill
from ._session import Session

if TYPE_CHECKING:
    from ._execution import Execution

T = TypeVar("T")


class BrokenBurst(DeadObject, BrokenExecutor):
    """The service of a `BurstExecutor` has ended."""


class BurstExecutor(KnownNames, Executor):
    """Runs ``session.run`` in the background, ``depth`` at a time on one burst; no thread but the one that completes.

    For programs that are written for executors: ``executor.submit(session.run, None, {"x": x})``, ``executor.map``,
    ``loop.run_in_executor``. The model's shapes must be known.

    Args:
        session: Must outlive the executor.
        depth: How many runs are in flight at once, 1 to 64; others wait in the executor, where they can be cancelled.

    Raises:
        InvalidArgument: `session` is no `Session`, the depth is not 1 to 64, or the model has open shapes.
    """

    def __init__(self, session: Session, depth: int = 16) -> None:
        if not isinstance(session, Session):
            raise InvalidArgument(f"a BurstExecutor needs a Session, got {session!r}")
        if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= DEEPEST:
            raise InvalidArgument(f"depth={depth!r}; give a number from 1 to {DEEPEST}")
        self._session = session
        self._lock = ProcessLock()
        self._waiting: deque[tuple[Future[Any], Any, Any]] = deque()
        burst = session.burst
        self._idle: list[Execution] = [burst.bind(timeout=session._timeout, rooms=session._rooms) for _ in range(depth)]
        self._executions = tuple(self._idle)
        self._pending: set[Future[Any]] = set()
        self._broken: BrokenBurst | None = None
        self._closed = False
        self._starts = False

    def __repr__(self) -> str:
        state = "shut down" if self._closed else "broken" if self._broken else f"{len(self._pending)} pending"
        return f"<BurstExecutor of {len(self._executions)} at once, {state}, over {self._session!r}>"

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start ``fn(*args, **kwargs)``, where `fn` is the session's `run`.

        Raises:
            InvalidArgument: It is another function.
            BadState: The executor is shut down.
            BrokenBurst: The service has ended; a `BrokenExecutor`, as the exception of futures that it leaves.
        """
        if fn != self._session.run:
            raise InvalidArgument(f"a BurstExecutor runs its session's run(), not {fn!r}")
        future: Future[T] = Future()
        with self._lock.lock:
            if self._closed:
                raise BadState("the executor is shut down")
            if self._broken is not None:
                raise self._broken
            self._pending.add(future)
            future.add_done_callback(self._forget)
            self._waiting.append((future, args, kwargs))
        self._start()
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock.lock:
            self._pending.discard(future)

    def _start(self) -> None:
        with self._lock.lock:
            if self._starts:  # perhaps this very thread, which was called back: it goes on where it is
                return
            self._starts = True
        try:
            self._start_waiting()
        except BaseException:  # an interrupt
            self._starts = False
            raise

    def _start_waiting(self) -> None:
        while True:
            with self._lock.lock:
                if not self._waiting or not self._idle:
                    self._starts = False
                    return
                future, args, kwargs = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                execution = self._idle.pop()
            try:
                names, arrays = run(*args, **kwargs)
                wanted = None if names is None else self._session._checked_outputs(names)
                fill(execution, arrays)
                inner = execution.submit()
            except BaseException as error:
                self._end(future, execution, error, None)
                continue
            inner.add_done_callback(
                lambda done, f=future, e=execution, w=wanted: self._landed(done, f, e, w)  # type: ignore[misc]
            )

    def _landed(self, done: Future[Any], future: Future[Any], execution: Execution, wanted: list[int] | None) -> None:
        error = done.exception()
        outputs = None
        if error is None:
            try:
                outputs = execution.copied()
                outputs = outputs if wanted is None else [outputs[i] for i in wanted]
            except BaseException as failure:
                error = failure
        self._end(future, execution, error, outputs)
        self._start()

    def _end(self, future: Future[Any], execution: Execution, error: BaseException | None, outputs: object) -> None:
        if isinstance(error, DeadObject):
            broken = BrokenBurst(str(error))
            broken.__cause__ = error
            with self._lock.lock:
                self._broken = self._broken or broken
            error = broken
        with self._lock.lock:
            self._idle.append(execution)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(outputs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; see `concurrent.futures.Executor.shutdown`."""
        with self._lock.lock:
            self._closed = True
            left = list(self._pending)
        if cancel_futures:
            for future in left:
                future.cancel()
        if wait:
            futures.wait(left)
            for execution in self._executions:
                execution.forget()


def run(output_names: Any, inputs: Any) -> tuple[Any, Any]:
    """Name what `Session.run` is called with; errors of Python's name it, too."""
    return output_names, inputs
