"""A `concurrent.futures.Executor` over a session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Executor, Future
from threading import get_ident
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

from .._core.deadline import checked_timeout
from .._core.leaving import ProcessLock
from .._core.once import Once
from ..errors import BadState, DeadObject, InvalidArgument, OutputInsufficientSize
from .run.burst import DEEPEST
from .run.permits import Permit
from .run.pipeline import fill
from .run.runs import Runs
from .session import Session

if TYPE_CHECKING:
    from .execution import Execution

T = TypeVar("T")


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
            arrays are made for each kind, and each of the `depth` keeps those of the last nine that it ran.
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
        self._timeout = session.timeout if timeout is ... else checked_timeout(timeout)
        self._runs = Runs(session._pool, session.compilation.inputs, self._timeout, depth, first_burst=True)
        self._runs.rooms = session._runs.rooms
        self._has_shapes = shapes is not None
        if shapes is not None:
            for permit in self._runs.permits.idle:
                permit.execution = session._opening().call(self._runs._bound, shapes)
        self._lock = ProcessLock()
        self._pending: set[Future[Any]] = set()
        self._starting: set[int] = set()  # threads that hand permits over, which go on with what is given back there
        self._broken: BrokenBurst | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "shut down" if self._closed else "broken" if self._broken else f"{len(self._pending)} pending"
        return f"<BurstExecutor of {self._runs.permits.number} at once, {state}, over {self._session!r}>"

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
        call = _Call(self, args, kwargs)
        try:
            with self._lock.lock:
                if self._closed:
                    raise BadState("the executor is shut down")
                if self._broken is not None:
                    raise self._broken
                self._pending.add(call.future)  # before a shutdown() that comes now looks what it waits for
            call.future.add_done_callback(self._pending.discard)
            self._runs.permits.ask(call)
        except BaseException as error:  # of a signal handler
            call.end(error)
            raise
        return call.future

    def _fill(self, permit: Permit, inputs: Any, timeout: float | EllipsisType | None) -> None:
        """Fill the execution of a permit, or another one for the shapes of the inputs."""
        if permit.execution is not None and permit.execution._feed(inputs):
            return
        if self._has_shapes and permit.execution is not None:
            fill(permit.execution, inputs)
        else:
            self._runs.fed(permit, inputs, self._timeout if timeout is ... else checked_timeout(timeout))

    def _broke(self, error: DeadObject) -> BrokenBurst:
        broken = BrokenBurst(str(error))
        broken.__cause__ = error
        self._broken = self._broken or broken
        return broken

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
        self._runs.permits.hand_over()  # to what an interrupted submit has left
        if wait:
            futures.wait(left)
            self._runs.permits.forget()


class _Call:
    """What was submitted: it waits for a permit, as a caller of `Session.run` does.

    A signal handler may raise between any two steps: the future ends then.

    Attributes:
        permit: What it has taken.
    """

    def __init__(self, executor: BurstExecutor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.future: Future[Any] = Future()
        self.permit: Permit | None = None
        self._executor = executor
        self._given = args, kwargs
        self._open = Once()
        self._first = Once()  # the start or the end of its run: the second one gives the permit back
        self._wanted: list[int] | None = None

    def grant(self, permit: Permit) -> bool:
        """Start; False if it needs no permit (any more)."""
        try:
            if not self._open.take() or not self.future.set_running_or_notify_cancel():
                return False
            args, kwargs = self._given
            names, inputs, timeout = run(*args, **kwargs)
            self._wanted = None if names is None else self._executor._session._checked_outputs(names)
            self._executor._fill(permit, inputs, timeout)
            self._executor._starting.add(get_ident())
            self.permit = permit
            self._launch(permit, timeout)
            self._executor._starting.discard(get_ident())
            return self._first.take()
        except BaseException as error:
            self._executor._starting.discard(get_ident())
            self.end(error)
            if isinstance(error, Exception):
                return False
            self.permit = permit.execution = None  # it may be in flight
            raise

    def _launch(self, permit: Permit, timeout: float | EllipsisType | None) -> None:
        execution = permit.execution
        assert execution is not None
        execution.submit(timeout).add_done_callback(lambda done: self._landed(done, execution, permit, timeout))

    def _landed(
        self, done: Future[Any], execution: Execution, permit: Permit, timeout: float | EllipsisType | None
    ) -> None:
        if self.future.done():
            return  # it was interrupted
        error, outputs, runs = done.exception(), None, self._executor._runs
        try:
            if isinstance(error, OutputInsufficientSize):
                runs.larger(permit, execution, error)
                return self._launch(permit, timeout)
            if error is None:
                outputs = execution._copied()
                outputs = outputs if self._wanted is None else [outputs[i] for i in self._wanted]
        except Exception as failure:
            error = failure
        self.end(error, outputs)
        if not self._first.take():
            runs.permits.idle.append(permit)
            if get_ident() not in self._executor._starting:  # else each start would be below the one before it
                runs.permits.hand_over()

    def end(self, error: BaseException | None, outputs: object = None) -> None:
        """Tell the future, unless that was done before an interrupt."""
        self._open.take()
        with contextlib.suppress(futures.InvalidStateError):
            if isinstance(error, DeadObject):
                self.future.set_exception(self._executor._broke(error))
            elif error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(outputs)


def run(output_names: Any, inputs: Any, timeout: Any = ...) -> tuple[Any, Any, Any]:
    """Name what `Session.run` is called with; errors of Python's name it, too."""
    return output_names, inputs, timeout
