"""A `concurrent.futures.Executor` over a session."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from .._core.leaving import abandon_when_forked
from ..errors import DeadObject, InvalidArgument
from .session import Session

T = TypeVar("T")


class BrokenBurst(DeadObject, BrokenExecutor):
    """The service of a `BurstExecutor` has ended."""


class BurstExecutor(ThreadPoolExecutor):
    """An executor for ``session.run``, with as many threads as the session's ``concurrency``.

    Use it like any other executor: ``executor.submit(session.run, None, {"x": x})``, ``executor.map``,
    ``loop.run_in_executor``. A call that still waits for a thread can be cancelled.

    Args:
        session: The session, which must outlive the executor.

    Raises:
        InvalidArgument: `session` is not a `Session`.

    Example:
        >>> with nnburst.Session(model) as session, nnburst.BurstExecutor(session) as executor:
        ...     executor.submit(session.run, None, {"x": np.ones((1, 4), np.float32)}).result()
        [array([[1., 1., 1., 1.]], dtype=float32)]
    """

    def __init__(self, session: Session) -> None:
        if not isinstance(session, Session):
            raise InvalidArgument(f"a BurstExecutor needs a Session, got {session!r}")
        self._session = session
        self._death: BrokenBurst | None = None
        self.abandon()
        abandon_when_forked(self)

    def abandon(self) -> None:
        """Replace the thread pool by a new one, for example in a forked child, where the threads are gone."""
        super().__init__(self._session._runs.permits.number, "nnburst-executor")

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for all submitted calls. After an interrupt, cancel waiting calls and return at once."""
        interrupted = kind is not None and not issubclass(kind, Exception)
        self.shutdown(wait=not interrupted, cancel_futures=interrupted)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start ``session.run(*args, **kwargs)`` in a thread.

        Args:
            fn: ``session.run``.
            args, kwargs: Arguments of `fn`.

        Returns:
            A future with the outputs or the exception.

        Raises:
            InvalidArgument: `fn` is another function.
            BrokenBurst: The service has ended. Unfinished futures fail with this error, too.
            RuntimeError: The executor is shut down.
        """
        if fn != self._session.run:
            raise InvalidArgument(f"a BurstExecutor runs its session's run(), not {fn!r}")
        if self._death is not None:
            raise self._death
        return super().submit(self._run, *args, **kwargs)  # type: ignore[arg-type]

    def _run(self, *args: Any, **kwargs: Any) -> list[Any]:
        try:
            return self._session.run(*args, **kwargs)
        except DeadObject as error:
            self._death = BrokenBurst(str(error))
            raise self._death from error
