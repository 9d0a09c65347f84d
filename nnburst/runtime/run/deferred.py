"""Jobs that may block, off the event loop and off the thread that lands runs: one lazy thread for each burst."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..._core.deadline import Deadline
from ..._core.leaving import ProcessLock, abandon_when_forked
from ..._core.log import warn
from ..._core.threads import start_daemon
from ...errors import ResourceExhausted

if TYPE_CHECKING:
    from ...burst import InFlightRuns

_LINGER = 1.0
"""Seconds that an idle thread stays for the next job."""


class JobThread:
    """Runs jobs one after the other, each not before its time. The thread goes a second after the last."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.abandon()
        abandon_when_forked(self)

    def abandon(self) -> None:
        """In a forked child: the thread and its jobs are the parent's."""
        self._changed = threading.Condition()  # of an RLock: a signal handler may come while it is held
        self._jobs: dict[int, tuple[int, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], None], due: Deadline = Deadline.never) -> Callable[[], None]:
        """Have a job done, here and now if the system has no thread for it and it is not for later.

        Args:
            job: Raises nothing.
            due: When; never: as soon as may be.

        Returns:
            What takes it back if it has not begun.
        """
        number = next(self._numbers)
        with self._changed:
            self._jobs[number] = due.at_ns, job
            if self._thread is not None and self._thread.is_alive():
                self._changed.notify()
                return lambda: self._take_back(number)
            try:
                self._thread = start_daemon(self._run, name="nnburst-jobs", what="what a run came to")
                return lambda: self._take_back(number)
            except ResourceExhausted as error:
                del self._jobs[number]
                if due.at_ns:
                    warn("nnburst.runtime", "a time limit does not hold: %s", error)
        if not due.at_ns:
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
        end = Deadline.after(_LINGER)
        with self._changed:
            while True:
                number = min(self._jobs, key=lambda number: self._jobs[number][0], default=None)
                left = end.left() if number is None else Deadline(self._jobs[number][0]).left()
                if left:
                    self._changed.wait(min(left, _LINGER))  # what is taken back wakes nobody
                elif number is None:
                    self._thread = None
                    return None
                else:
                    return self._jobs.pop(number)[1]


_homes = ProcessLock()
_threads: weakref.WeakKeyDictionary[InFlightRuns, JobThread] = weakref.WeakKeyDictionary()


def jobs_of(flights: InFlightRuns) -> JobThread:
    """Return that of the burst."""
    with _homes.lock:
        found = _threads.get(flights)
        if found is None:
            found = _threads[flights] = JobThread()
        return found
