"""A clock that tests can advance."""

from __future__ import annotations

import math
import time

from .._core import lib
from .._core.errno import is_real
from ..errors import InvalidArgument

_LONGEST = 1e9


class FakeClock:
    """Clock for the time limits of runs, which a test can advance instead of waiting.

    The clock applies to ``timeout=`` of runs through bursts in this process. Waiting runs notice a change within a
    tenth of a second. The real clock applies to all other waits, such as the start of a service or the ``await`` of a
    run.

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
        """Return the time in seconds: `time.monotonic` plus the time added by `advance`."""
        return time.monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        """Advance the clock. Runs whose ``timeout`` has passed raise `MissedDeadline`.

        Args:
            seconds: Seconds to add.

        Raises:
            InvalidArgument: The time is negative or not finite.
        """
        if not is_real(seconds) or not 0 <= seconds < _LONGEST:
            raise InvalidArgument(f"advance({seconds!r}): give seconds, 0 or more")
        lib.nnb_skip_time(math.ceil(seconds * 1e9))
        self._ahead += seconds
