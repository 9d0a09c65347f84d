"""A `concurrent.futures.Executor` over a session."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Executor, Future
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

from .._core.deadline import checked_timeout
from .._core.known_names import KnownNames
from .._core.leaving import ProcessLock
from ..errors import BadState, DeadObject, InvalidArgument, OutputInsufficientSize
from .request.node_args import checked_inputs
from .run.burst import DEEPEST
from .run.pipeline import fill
from .session import Session

if TYPE_CHECKING:
    from .execution import Execution

T = TypeVar("T")


class BrokenBurst(DeadObject, BrokenExecutor):
    """The service of a `BurstExecutor` has ended."""


class BurstExecutor(KnownNames, Executor):
    """Runs ``session.run`` in the background, ``depth`` at a time on one burst; no thread but the one that completes.

    For programs that are written for executors: ``executor.submit(session.run, None, {"x": x})``, ``executor.map``,
    ``loop.run_in_executor``.

    Args:
        session: Must outlive the executor.
        depth: How many runs are in flight at once, 1 to 64; others wait in the executor, where they can be cancelled.
        shapes: What the model leaves open, as for `Session.bind`. None: inputs may have any shapes that it takes;
            arrays are made for each kind, and those of `depth` runs are kept.
        timeout: Seconds that a run may take once it was started, if it is given no other one; by default those of the
            session.

    Raises:
        InvalidArgument: `session` is no `Session`, the depth is not 1 to 64, or the shapes contradict the model.
    """

    def __init__(
        self,
        session: Session,
        depth: int = 16,
        *,
        shapes: Mapping[str, int | Sequence[int]] | None = None,
        timeout: float | EllipsisType | None = ...,
    ) -> None:
        if not isinstance(session, Session):
            raise InvalidArgument(f"a BurstExecutor needs a Session, got {session!r}")
        if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= DEEPEST:
            raise InvalidArgument(f"depth={depth!r}; give a number from 1 to {DEEPEST}")
        self._session = session
        self._lock = ProcessLock()
        self._waiting: deque[tuple[Future[Any], Any, Any]] = deque()
        self._timeout = session.timeout if timeout is ... else checked_timeout(timeout)
        self._takes_any = shapes is None and any(node.is_open for node in session.get_inputs())
        self._idle: list[Execution | None] = [None] * depth  # None: with no arrays yet
        if not self._takes_any:
            self._idle = [session._opening().call(self._bound, shapes or {}) for _ in range(depth)]
        self._depth = depth
        self._pending: set[Future[Any]] = set()
        self._broken: BrokenBurst | None = None
        self._closed = False
        self._starts = False

    def __repr__(self) -> str:
        state = "shut down" if self._closed else "broken" if self._broken else f"{len(self._pending)} pending"
        return f"<BurstExecutor of {self._depth} at once, {state}, over {self._session!r}>"

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
                names, arrays, limit = run(*args, **kwargs)
                wanted = None if names is None else self._session._checked_outputs(names)
                execution = self._filled(execution, arrays)
                self._launch(future, execution, wanted, limit)
            except BaseException as error:
                self._end(future, execution, error, None)

    def _launch(
        self,
        future: Future[Any],
        execution: Execution,
        wanted: list[int] | None,
        limit: float | EllipsisType | None,
    ) -> None:
        execution.submit(limit).add_done_callback(lambda done: self._landed(done, future, execution, wanted, limit))

    def _bound(self, shapes: Mapping[str, int | Sequence[int]]) -> Execution:
        return self._session.burst.bind(shapes=shapes, timeout=self._timeout, rooms=self._session._runs.rooms)

    def _filled(self, execution: Execution | None, inputs: Any) -> Execution:
        """Return this execution filled, or one for the shapes of the inputs in its place."""
        if not self._takes_any:
            assert execution is not None
            fill(execution, inputs)
            return execution
        if execution is not None and execution.feed(inputs):
            return execution
        arrays = checked_inputs(self._session.get_inputs(), inputs)
        with self._lock.lock:
            for place, other in enumerate(self._idle):
                if other is not None and all(other.inputs[name].shape == array.shape for name, array in arrays.items()):
                    self._idle[place] = execution
                    found = other
                    break
            else:
                found = None
        if found is None:
            found = self._bound({name: array.shape for name, array in arrays.items()})
            if execution is not None:
                execution.forget()
        for name, array in arrays.items():
            found.inputs[name][...] = array
        return found

    def _landed(
        self,
        done: Future[Any],
        future: Future[Any],
        execution: Execution,
        wanted: list[int] | None,
        limit: float | EllipsisType | None,
    ) -> None:
        error = done.exception()
        outputs = None
        if isinstance(error, OutputInsufficientSize):
            try:
                execution = self._session._runs.with_more_room(execution, error, self._bound)
                return self._launch(future, execution, wanted, limit)
            except BaseException as failure:
                error = failure
        if error is None:
            try:
                outputs = execution.copied()
                outputs = outputs if wanted is None else [outputs[i] for i in wanted]
            except BaseException as failure:
                error = failure
        self._end(future, execution, error, outputs)
        self._start()

    def _end(
        self, future: Future[Any], execution: Execution | None, error: BaseException | None, outputs: object
    ) -> None:
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
            for execution in filter(None, self._idle):
                execution.forget()


def run(output_names: Any, inputs: Any, timeout: Any = ...) -> tuple[Any, Any, Any]:
    """Name what `Session.run` is called with; errors of Python's name it, too."""
    return output_names, inputs, timeout
