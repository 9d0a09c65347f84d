"""What a session does when its service has died."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct

from ..._core.deadline import Deadline
from ..._core.leaving import LEAVING, ProcessLock
from ...errors import BadState, DeadObject, Ending, MissedDeadline, ResourceExhausted

_log = logging.getLogger("nnburst.runtime")


class Restart(Struct, frozen=True):
    """A service that died and was started, or connected to, again.

    Attributes:
        reason: How it ended, in words.
        signal: As in `DeadObject`.
        exit_status: Likewise.
        cache: What caching did when the model was compiled again: the name of a `CacheOutcome`.
        seconds: From the first call that needed it until it was there.
    """

    reason: str
    signal: int | None
    exit_status: int | None
    cache: str
    seconds: float


class _Attempt(threading.Thread):
    """Opens the model again, in a thread of its own: those that wait for it may have less time than it takes."""

    def __init__(self, open_again: Callable[[], None]) -> None:
        super().__init__(name="nnburst-restart", daemon=True)
        self._open_again = open_again
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._open_again()
        except Exception as error:  # raised where it is waited for
            self.error = error


class Recovery:
    """Has a model opened again after each death, once, however many threads ask.

    Args:
        open_again: Does it, and returns the outcome of caching.
        timeout: Seconds that it may take; None for no limit.
    """

    def __init__(self, open_again: Callable[[], str], timeout: float | None) -> None:
        self._open_again = open_again
        self._timeout = timeout
        self._lock = ProcessLock()  # a signal handler may come while it is held; nothing is waited for below it
        self._attempt: _Attempt | None = None
        self._refuses = False
        self.restarts: tuple[Restart, ...] = ()

    def wait(self, is_dead: Callable[[], bool], ending: Ending) -> None:
        """Return when the model is open again.

        Args:
            is_dead: Whether it is not yet.
            ending: How the service ended.

        Raises:
            DeadObject: It could not be opened again; the next call tries once more.
            MissedDeadline: It takes longer than the caller may wait, and goes on.
            BadState: The session is closed.
        """
        with self._lock.lock:
            if self._refuses:
                raise BadState("the session is closed; open another one")
            if not is_dead():
                return
            attempt = self._attempt
            if attempt is None or not attempt.is_alive():
                attempt = self._attempt = _Attempt(partial(self._begin_again, ending))
                try:
                    attempt.start()
                except RuntimeError as error:
                    self._attempt = None
                    raise ResourceExhausted(f"a service that is started again needs a thread: {error}") from error
        attempt.join(Deadline.after().left())
        if attempt.error is not None:
            failure = f"the service is gone ({ending.reason}) and does not come back: {attempt.error}"
            raise DeadObject(failure, signal=ending.signal, exit_status=ending.exit_status) from attempt.error
        if attempt.is_alive():
            raise MissedDeadline(f"the service is gone ({ending.reason}) and is still being started again; come later")

    def _begin_again(self, how: Ending) -> None:
        begin = time.monotonic()
        cache = Deadline.after(self._timeout).call(self._opened)
        restart = Restart(how.reason, how.signal, how.exit_status, cache, time.monotonic() - begin)
        self.restarts += (restart,)
        _log.warning("a service died (%s); after %.2f s another one runs its model", how.reason, restart.seconds)

    def _opened(self) -> str:
        try:
            return self._open_again()
        except DeadObject:  # what killed the service may have hit the next one, too
            return self._open_again()

    def refuse(self) -> None:
        """Open nothing any more."""
        self._refuses = True

    def close(self) -> None:
        """Wait for what goes on, as long as leaving may take."""
        attempt = self._attempt
        if attempt is not None and attempt.ident is not None:
            attempt.join(Deadline.after(LEAVING).left())
