"""Two sessions of a model on a service each, so that the death of one costs its callers little."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from .._core.deadline import Deadline
from .._core.threads import start_daemon
from ..errors import BadState, DeadObject, MissedDeadline
from ..runtime import Session

T = TypeVar("T")

_MOST_REPEATS = 2
"""Of a request: it may have met the deaths of both."""
OPENING = 60.0
"""Seconds that what has died has to come back: a session, or a shared service."""


class Pair:
    """A session in use, and a standby that takes its place once its service has died.

    Both are kept as futures. A death moves the standby up, also one that is still being opened, and has another standby
    opened behind it, in a thread. `in_use` alone says which is in use; it changes below a lock, where nothing is waited
    for. A session that has died is not closed but let go of: it ends with the last request that holds it, so that each
    of them gets `DeadObject` from it.

    Args:
        open_session: Opens a session that stays dead when its service dies.
        retry: Whether a request that met a death is repeated, twice at most, if need be when a session has been opened.
        timeout: Seconds that a request may wait for that, its first run included; None for as long as it takes.

    Raises:
        NNBurstError: One of the two cannot be opened.
    """

    def __init__(
        self, open_session: Callable[[], Session], *, retry: bool = False, timeout: float | None = None
    ) -> None:
        self._open = open_session
        self._retry = retry
        self._timeout = timeout
        self._changing = threading.Lock()
        self._closed = False
        self._in_use: Future[Session] = Future()
        self._in_use.set_result(open_session())
        self._standby = self._opening(self._in_use)
        try:
            self._standby.result()
        except BaseException:
            self.close()
            raise

    def _opening(self, earlier: Future[Session]) -> Future[Session]:
        """Open a session, after `earlier` has been: two starts at once would each take twice as long."""
        opening: Future[Session] = Future()
        opening.set_running_or_notify_cancel()  # a task that waits for it may be cancelled, and it must not be

        def open_it() -> None:
            wait([earlier])
            try:
                if self._closed:
                    raise BadState("the sessions are closed; open others")
                opening.set_result(Deadline.after(OPENING).call(self._open))
            except Exception as error:  # raised where it is waited for
                opening.set_exception(error)

        start_daemon(open_it, name="nnburst-standby", what="a session that stands by")
        return opening

    def in_use(self, dead: Future[Session] | None = None) -> Future[Session]:
        """Return the session for the next request, or the one that is being opened if no other is left.

        Args:
            dead: One that a request has found dead, perhaps before others can know.

        Raises:
            BadState: They are closed.
            ResourceExhausted: There is no thread to open another standby in.
        """
        with self._changing:
            if self._closed:
                raise BadState("the sessions are closed; open others")
            for _ in range(2):  # the standby may be dead, too; the one behind it is being opened
                if _is_dead(self._in_use) or self._in_use is dead:
                    self._in_use, self._standby = self._standby, self._opening(self._standby)
            return self._in_use

    @property
    def session(self) -> Session:
        """The session in use.

        Raises:
            DeadObject: None is open now.
            NNBurstError: As `in_use`.
        """
        return _at_once(self.in_use())

    def run(self, call: Callable[[Session], T]) -> T:
        """Return what `call` returns for the session in use.

        Raises:
            DeadObject: Its service died meanwhile, or no session is open; with `retry`: no other can be opened, or the
                services of three died below it.
            MissedDeadline: No other was open in time.
            NNBurstError: As `call` and `in_use`.
        """
        deadline, opening = Deadline.after(self._timeout), self.in_use()
        repeats = _MOST_REPEATS if self._retry else 0
        while True:
            if self._retry and not opening.done():
                wait([opening], deadline.left())
            session = _opened(opening) if self._retry else _at_once(opening)
            try:
                return call(session)
            except DeadObject:
                opening = self.in_use(opening)
                if not repeats:
                    raise
                repeats -= 1

    async def arun(self, call: Callable[[Session], Awaitable[T]]) -> T:
        """As `run`, awaited in asyncio."""
        deadline, opening = Deadline.after(self._timeout), self.in_use()
        repeats = _MOST_REPEATS if self._retry else 0
        while True:
            if self._retry and not opening.done():
                with contextlib.suppress(Exception):  # looked at below
                    await asyncio.wait_for(asyncio.wrap_future(opening), deadline.left())
            session = _opened(opening) if self._retry else _at_once(opening)
            try:
                return await call(session)
            except DeadObject:
                opening = self.in_use(opening)
                if not repeats:
                    raise
                repeats -= 1

    def check(self) -> None:
        """Have sessions opened in place of those that have died; return when both are open.

        Raises:
            NNBurstError: One cannot be opened; the next call, or request, tries again.
        """
        first = self.in_use()
        with self._changing:
            if _is_dead(self._standby) and not self._closed:
                self._standby = self._opening(first)
            both = self._in_use, self._standby
        for opening in both:
            opening.result()

    def close(self) -> None:
        """Close both; one that is still being opened, when it is. Idempotent."""
        with self._changing:
            self._closed = True
        for opening in (self._in_use, self._standby):
            opening.add_done_callback(_close)


def _is_dead(opening: Future[Session]) -> bool:
    return opening.done() and (opening.exception() is not None or not opening.result().service.alive)


def _at_once(opening: Future[Session]) -> Session:
    if not opening.done():
        raise DeadObject(
            "the service and its standby are gone, and another one is still being started: come later, or have "
            "requests wait for it with retry=True"
        )
    return _opened(opening)


def _opened(opening: Future[Session]) -> Session:
    if not opening.done():
        raise MissedDeadline(
            "the service and its standby are gone, and another one was not started in time: come later"
        )
    error = opening.exception()
    if error is not None:
        raise DeadObject(f"the service and its standby are gone, and no other can be started: {error}") from error
    return opening.result()


def _close(opening: Future[Session]) -> None:
    if opening.exception() is None:
        opening.result().close()
