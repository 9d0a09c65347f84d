"""How long to wait before something is started again that has ended."""

from __future__ import annotations

import time

LONGEST = 5.0
"""Seconds: of a pause, and of a life that says that all is well."""
_FIRST = 0.1


class Backoff:
    """The pauses before starts: a tenth of a second, then twice as long each time, at most five seconds."""

    def __init__(self) -> None:
        self._pause = self._not_before = 0.0

    def ended(self, lived: float) -> None:
        """Begin a pause: one that lived so many seconds has ended."""
        self._pause = _FIRST if lived > LONGEST or not self._pause else min(2 * self._pause, LONGEST)
        self._not_before = time.monotonic() + self._pause

    @property
    def left(self) -> float:
        """Seconds until another one may be started."""
        return max(0.0, self._not_before - time.monotonic())
