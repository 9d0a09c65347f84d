"""Time that a test lets pass."""

from __future__ import annotations

import math
import threading
import time

from .._core import lib
from .._core.errno import is_real
from .._core.leaving import Closing
from ..errors import BadState, InvalidArgument
from ._inject import Fault

_LONGEST = 1e9
_STEP = 0.01
"""Seconds between looks at a fault, whose news another thread may take from its socket first."""


class FakeClock(Closing):
    """Lets the time limits of runs pass at once, so that tests of late answers do not wait for them. Context manager.

    It is the clock of ``timeout=`` for the runs of this process through bursts: also for those that wait already, which
    notice it within a tenth of a second. All else goes on by the real one: how long a service may take to start, waits
    for a free lane, tasks that await a run.

    Example:
        >>> from nnburst.testing import FakeClock
        >>> with FakeClock() as clock:
        ...     before = clock.monotonic()
        ...     clock.advance(3600)
        ...     clock.monotonic() - before >= 3600
        True
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def monotonic(self) -> float:
        """Return the time by this clock, in seconds: for programs that measure how late they are.

        `time.monotonic` plus the time that was let pass.
        """
        return time.monotonic() + self._ahead

    def advance(self, seconds: float, *, when: Fault | None = None) -> None:
        """Let time pass: a run whose ``timeout`` is over then raises `MissedDeadline`.

        Args:
            seconds: How much.
            when: Not now but as soon as this fault has happened, for a run that the test itself is about to wait for;
                never if the fault is withdrawn or its service ends before.

        Raises:
            InvalidArgument: The time is negative or endless.
            BadState: The clock is closed, or the fault is withdrawn.
        """
        if not is_real(seconds) or not 0 <= seconds < _LONGEST:
            raise InvalidArgument(f"advance({seconds!r}): give seconds, 0 or more")
        if self._closed.is_set():
            raise BadState("the clock has stopped: its with block is over")
        if when is None:
            self._pass(seconds)
            return
        if when.fileno() < 0:
            raise BadState("the fault is withdrawn and will not happen")
        waiting = (when, when._counted(), seconds)
        thread = threading.Thread(target=self._wait, args=waiting, name="nnburst-fake-clock", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self, fault: Fault, times: int, seconds: float) -> None:
        news = None
        while news is None and not self._closed.wait(_STEP):
            news = fault._look(times)
        if news:
            self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        with self._lock:
            lib.nnb_skip_time(math.ceil(seconds * 1e9))
            self._ahead += seconds

    def close(self) -> None:
        """Let no more time pass. Idempotent."""
        self._closed.set()
        for thread in self._threads:
            thread.join()
