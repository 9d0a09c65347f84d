"""Calls functions at deadlines, for runs that only another thread can end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator

from .._core.leaving import abandon_when_forked
from .._core.threads import start_daemon

_log = logging.getLogger(__name__)

_LONGEST = 3600.0
"""Seconds that the thread sleeps at a time."""


class AlarmClock:
    """One thread for all deadlines of the process. It starts with the first one, and sleeps without a timer while there
    is none. A deadline later than the one it waits for does not wake it.
    """

    def __init__(self) -> None:
        self.abandon()
        abandon_when_forked(self)

    def abandon(self) -> None:
        """Begin anew; in a forked child, which has not the thread."""
        self._changed = threading.Condition()
        self._alarms: dict[int, tuple[int, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._sleeps_until = 0  # nanoseconds; 0: until something changes
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def at(self, deadline_ns: int, call: Callable[[], None]) -> Iterator[None]:
        """Call a function at a time of CLOCK_MONOTONIC, unless the with block has been left before.

        It may still be called just after the block.

        Raises:
            ResourceExhausted: The system has no thread for it.
        """
        with self._changed:
            number = next(self._numbers)
            self._alarms[number] = deadline_ns, call
            if self._thread is None:
                try:
                    self._thread = start_daemon(self._run, name="nnburst-alarm", what="a deadline")
                except BaseException:
                    del self._alarms[number]
                    raise
            elif not 0 < self._sleeps_until <= deadline_ns:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._alarms.pop(number, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic_ns()
                due = [number for number, (deadline_ns, _) in self._alarms.items() if deadline_ns <= now]
                for number in due:
                    _, call = self._alarms.pop(number)
                    try:
                        call()
                    except BaseException:  # also SystemExit: the other deadlines hold
                        _log.exception("ending a run at its deadline failed")
                self._sleeps_until = min((deadline_ns for deadline_ns, _ in self._alarms.values()), default=0)
                self._changed.wait(min((self._sleeps_until - now) / 1e9, _LONGEST) if self._sleeps_until else None)


ALARM_CLOCK = AlarmClock()
