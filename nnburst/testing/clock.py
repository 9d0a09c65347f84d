"""Time that a test lets pass."""

from __future__ import annotations

import math
import time

from .._core import lib
from .._core.errno import is_real
from ..errors import InvalidArgument

_LONGEST = 1e9


class FakeClock:
    """Lets the time limits of runs pass at once, so that tests of late answers do not wait for them.

    It is the clock of ``timeout=`` for the runs of this process through bursts: also for those that wait already, which
    notice it within a tenth of a second. All else goes on by the real one: how long a service may take to start, waits
    for a free lane, tasks that await a run.

    Example:
        >>> from nnburst.testing import FakeClock
        >>> clock = FakeClock()
        >>> before = clock.monotonic()
        >>> clock.advance(3600)
        >>> clock.monotonic() - before >= 3600
        True
    """

    def __init__(self) -> None:
        self._ahead = 0.0

    def monotonic(self) -> float:
        """Return the time by this clock, in seconds: for programs that measure how late they are.

        `time.monotonic` plus the time that was let pass.
        """
        return time.monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        """Let time pass: a run whose ``timeout`` is over then raises `MissedDeadline`.

        Args:
            seconds: Seconds that pass at once.

        Raises:
            InvalidArgument: The time is negative or endless.
        """
        if not is_real(seconds) or not 0 <= seconds < _LONGEST:
            raise InvalidArgument(f"advance({seconds!r}): give seconds, 0 or more")
        lib.nnb_skip_time(math.ceil(seconds * 1e9))
        self._ahead += seconds
