"""A `concurrent.futures.Executor` over a session."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Executor, Future
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

from .._core.deadline import checked_timeout
from .._core.leaving import ProcessLock
from ..errors import BadState, DeadObject, InvalidArgument, OutputInsufficientSize
from .request.node_args import checked_inputs
from .run.burst import DEEPEST
from .run.pipeline import fill
from .session import Session

if TYPE_CHECKING:
    from .execution import Execution

T = TypeVar("T")


class _Call:
    """What was submitted.

    Attributes:
        has_place: Whether it holds one of the executor's places: its execution, or None in place of one.
    """

    __slots__ = ("arguments", "execution", "future", "has_place", "limit", "wanted")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.future: Future[Any] = Future()
        self.arguments = args, kwargs
        self.has_place = False
        self.execution: Execution | None = None
        self.wanted: list[int] | None = None
        self.limit: float | EllipsisType | None = ...


class BrokenBurst(DeadObject, BrokenExecutor):
    """The service of a `BurstExecutor` has ended."""


class BurstExecutor(Executor):
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

    Example:
        >>> with nnburst.Session(model) as session, nnburst.BurstExecutor(session) as executor:
        ...     executor.submit(session.run, None, {"x": np.ones((1, 4), np.float32)}).result()
        [array([[1., 1., 1., 1.]], dtype=float32)]
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
        self._waiting: deque[_Call] = deque()
        self._timeout = session.timeout if timeout is ... else checked_timeout(timeout)
        self._shapes = shapes or {}
        self._takes_any = shapes is None and any(
            node.is_open or node.is_optional for node in session.compilation.inputs
        )
        self._idle: list[Execution | None] = [None] * depth  # None: not bound yet
        if not self._takes_any:
            self._idle = [session._opening().call(self._bound, self._shapes) for _ in range(depth)]
        self._depth = depth
        self._pending: set[Future[Any]] = set()
        self._broken: BrokenBurst | None = None
        self._closed = False
        self._starting: set[int] = set()  # threads

    def __repr__(self) -> str:
        state = "shut down" if self._closed else "broken" if self._broken else f"{len(self._pending)} pending"
        return f"<BurstExecutor of {self._depth} at once, {state}, over {self._session!r}>"

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start ``session.run(*args, **kwargs)``.

        Args:
            fn: ``session.run``.
            args, kwargs: Its arguments.

        Returns:
            What has its outputs, or its exception.

        Raises:
            InvalidArgument: It is another function.
            BadState: The executor is shut down.
            BrokenBurst: The service has ended; a `BrokenExecutor`, as the exception of futures that it leaves.
        """
        if fn != self._session.run:
            raise InvalidArgument(f"a BurstExecutor runs its session's run(), not {fn!r}")
        call = _Call(args, kwargs)
        with self._lock.lock:
            if self._closed:
                raise BadState("the executor is shut down")
            if self._broken is not None:
                raise self._broken
            self._waiting.append(call)
            call.future.add_done_callback(self._forget)
            self._pending.add(call.future)
        self._start()
        return call.future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock.lock:
            self._pending.discard(future)

    # A signal handler may raise between any two steps. So a call leaves the queue, and a place the list of idle ones,
    # only below a `try` that ends the call.

    def _start(self) -> None:
        me = threading.get_ident()
        while self._waiting and self._idle and me not in self._starting:  # else called back: it goes on where it is
            try:
                self._starting.add(me)
                while self._start_next():
                    pass
            finally:
                self._starting.discard(me)

    def _start_next(self) -> bool:
        """Whether there was one that could be."""
        call: _Call | None = None
        try:
            with self._lock.lock:
                if not self._waiting or not self._idle:
                    return False
                call = self._waiting[0]
                self._waiting.popleft()
                if not call.future.set_running_or_notify_cancel():
                    return True
                call.execution, call.has_place = self._idle[-1], True
                self._idle.pop()
            self._begin(call)
        except BaseException as error:  # of a signal handler
            if call is not None and call not in self._waiting:
                call.execution = None  # it may be in flight
                self._end(call, error)
            raise
        return True

    def _begin(self, call: _Call) -> None:
        args, kwargs = call.arguments
        try:
            names, arrays, call.limit = run(*args, **kwargs)
            call.wanted = None if names is None else self._session._checked_outputs(names)
            call.execution = self._filled(call.execution, arrays)
            self._launch(call)
        except Exception as error:
            self._end(call, error)

    def _launch(self, call: _Call) -> None:
        assert call.execution is not None
        call.execution.submit(call.limit).add_done_callback(lambda done: self._landed(done, call))

    def _bound(self, shapes: Mapping[str, int | Sequence[int]]) -> Execution:
        return self._session.burst.bind(shapes=shapes, timeout=self._timeout, rooms=self._session._runs.rooms)

    def _filled(self, execution: Execution | None, inputs: Any) -> Execution:
        """Return this execution filled, or one for the shapes of the inputs in its place."""
        if not self._takes_any:
            execution = execution or self._bound(self._shapes)
            fill(execution, inputs)
            return execution
        if execution is not None and execution._feed(inputs):
            return execution
        arrays = checked_inputs(self._session.compilation.inputs, inputs)
        with self._lock.lock:
            for place, other in enumerate(self._idle):
                if other is not None and other._fits(arrays):
                    self._idle[place] = execution
                    found = other
                    break
            else:
                found = None
        if found is None:
            found = self._bound({name: array.shape for name, array in arrays.items()})
            if execution is not None:
                execution.forget()
        found._fill(arrays)
        return found

    def _landed(self, done: Future[Any], call: _Call) -> None:
        error, outputs, execution = done.exception(), None, call.execution
        if execution is None:
            return  # it was interrupted, and has ended
        try:
            if isinstance(error, OutputInsufficientSize):
                call.execution = self._session._runs.with_more_room(execution, error, self._bound)
                return self._launch(call)
            if error is None:
                outputs = execution._copied()
                outputs = outputs if call.wanted is None else [outputs[i] for i in call.wanted]
        except Exception as failure:
            error = failure
        self._end(call, error, outputs)
        self._start()

    def _end(self, call: _Call, error: BaseException | None, outputs: object = None) -> None:
        """Give its place back and tell its future, each unless it was done before an interrupt."""
        if isinstance(error, DeadObject):
            broken = BrokenBurst(str(error))
            broken.__cause__ = error
            with self._lock.lock:
                self._broken = self._broken or broken
            error = broken
        with self._lock.lock:
            if call.has_place:
                call.has_place = False
                self._idle.append(call.execution)
        with contextlib.suppress(futures.InvalidStateError):
            if error is not None:
                call.future.set_exception(error)
            else:
                call.future.set_result(outputs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more, as any `concurrent.futures.Executor`.

        Args:
            wait: Return when what was submitted has ended.
            cancel_futures: Cancel what has not begun.
        """
        with self._lock.lock:
            self._closed = True
            left = list(self._pending)
        if cancel_futures:
            for future in left:
                future.cancel()
        self._start()  # what an interrupted submit has left
        if wait:
            futures.wait(left)
            for execution in filter(None, self._idle):
                execution.forget()


def run(output_names: Any, inputs: Any, timeout: Any = ...) -> tuple[Any, Any, Any]:
    """Name what `Session.run` is called with; errors of Python's name it, too."""
    return output_names, inputs, timeout
