"""A service process that is started before it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from .._core.deadline import Deadline
from .._core.leaving import LEAVING, ProcessLock
from .._core.log import warn
from .._core.threads import start_daemon
from ..errors import BadState, MissedDeadline, ResourceExhausted

if TYPE_CHECKING:
    from concurrent.futures import Future

_PAUSE = 1.0
"""Seconds before the next one is started: what was just taken compiles its model first."""


class _Process(Protocol):
    @property
    def alive(self) -> bool: ...
    def close(self) -> None: ...


B = TypeVar("B", bound=_Process)


class Spare(Generic[B]):
    """Starts service processes, each but the first before it is taken.

    Args:
        start: Starts one; its argument says whether it is to load what models will need.
    """

    def __init__(self, start: Callable[[bool], B]) -> None:
        self._start = start
        self._lock = ProcessLock()  # a signal handler may come while it is held
        self._hurry = threading.Event()
        self._next: Future[B] | None = None
        self._closed = False

    def __call__(self) -> B:
        """Return a process that serves: the one that stands by, or is just being started.

        Raises:
            BadState: It is closed.
            MissedDeadline: It is not there in time, and goes on starting.
            NNBurstError: None can be started.
        """
        taken = self._taken()
        if taken is None:
            if self._closed:
                raise BadState("the service is closed; launch another one")
            taken = self._start(False)
        with self._lock.lock:
            if self._next is None and not self._closed:
                self._begin()
        return taken

    def _taken(self) -> B | None:
        with self._lock.lock:
            spare, hurry = self._next, self._hurry
        if spare is None:
            return None
        from concurrent.futures import wait

        hurry.set()
        wait([spare], Deadline.after().left())
        if not spare.done():
            raise MissedDeadline("the service is gone, and another one is still being started: come later")
        with self._lock.lock:
            if self._next is not spare:  # another thread has it
                return None
            self._next = None
        if spare.cancelled() or spare.exception() is not None:
            return None
        if spare.result().alive:
            return spare.result()
        spare.result().close()
        return None

    def _begin(self) -> None:
        from concurrent.futures import Future

        spare: Future[B] = Future()
        self._next, self._hurry = spare, threading.Event()
        try:
            start_daemon(_start_later, self._start, spare, self._hurry, name="nnburst-spare", what="a spare service")
        except ResourceExhausted as error:
            _missing(spare, error)

    @property
    def state(self) -> str:
        """``ready``, ``starting``, or ``missing: `` and why."""
        spare = self._next
        if spare is None or self._closed:
            return "missing: none was asked for, or the service is closed"
        if not spare.done():
            return "starting"
        if (error := spare.exception()) is not None:
            return f"missing: {error}"
        return "ready" if spare.result().alive else "missing: it has died"

    def close(self) -> None:
        """End the one that stands by; one that is just being started, when it serves. Idempotent."""
        from concurrent.futures import wait

        with self._lock.lock:
            self._closed = True
            spare = self._next
        self._hurry.set()
        if spare is not None:
            spare.cancel()
            spare.add_done_callback(_close)
            wait([spare], Deadline.after(LEAVING).left())


def _start_later(start: Callable[[bool], B], spare: Future[B], hurry: threading.Event) -> None:
    """Knows no `Spare`: one that is dropped is not kept alive."""
    hurry.wait(_PAUSE)
    if not spare.set_running_or_notify_cancel():
        return
    try:
        spare.set_result(start(True))
    except Exception as error:
        _missing(spare, error)


def _missing(spare: Future[B], error: Exception) -> None:
    warn("nnburst.runtime", "no spare stands by, so that a restart will take longer: %s", error)
    spare.set_exception(error)


def _close(spare: Future[B]) -> None:
    if not spare.cancelled() and spare.exception() is None:
        spare.result().close()
