"""What an event loop, or a thread that lands others' runs, must not wait for: one thread for each burst does it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..._core.leaving import ProcessLock, abandon_when_forked

if TYPE_CHECKING:
    from ...burst import InFlightRuns

_log = logging.getLogger("nnburst.runtime")
_LINGER = 1.0
"""Seconds that an idle thread stays for the next job."""


class Aside:
    """Does jobs in a thread of its own, one after the other, each not before its time. The thread goes a second after
    the last.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.abandon()
        abandon_when_forked(self)

    def abandon(self) -> None:
        """In a forked child: the thread and its jobs are the parent's."""
        self._changed = threading.Condition()  # of an RLock: a signal handler may come while it is held
        self._jobs: dict[int, tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], None], moment: float = 0.0) -> Callable[[], None]:
        """Have a job done, here and now if the system has no thread for it and it is not for later.

        Args:
            job: Raises nothing.
            moment: When, in seconds of `time.monotonic`.

        Returns:
            What takes it back if it has not begun.
        """
        number = next(self._numbers)
        with self._changed:
            self._jobs[number] = moment, job
            if self._thread is not None and self._thread.is_alive():
                self._changed.notify()
                return lambda: self._take_back(number)
            self._thread = threading.Thread(target=self._run, name="nnburst-aside", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                if moment:
                    _log.warning("no thread for a time limit: %s", error)
            else:
                return lambda: self._take_back(number)
            del self._jobs[number]
        if not moment:
            job()
        return lambda: None

    def _take_back(self, number: int) -> None:
        with self._changed:
            self._jobs.pop(number, None)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # what it holds must not stay until the next one

    def _next(self) -> Callable[[], None] | None:
        """Wait for a job that is due; None if there has been none for long."""
        end = time.monotonic() + _LINGER
        with self._changed:
            while True:
                now = time.monotonic()
                number = min(self._jobs, key=lambda number: self._jobs[number][0], default=None)
                moment = end if number is None else self._jobs[number][0]
                if moment > now:
                    self._changed.wait(min(moment - now, _LINGER))  # what is taken back wakes nobody
                elif number is None:
                    self._thread = None
                    return None
                else:
                    return self._jobs.pop(number)[1]


_homes = ProcessLock()
_asides: weakref.WeakKeyDictionary[InFlightRuns, Aside] = weakref.WeakKeyDictionary()


def aside_of(flights: InFlightRuns) -> Aside:
    """Return that of a burst."""
    with _homes.lock:
        found = _asides.get(flights)
        if found is None:
            found = _asides[flights] = Aside()
        return found
