"""Growing pauses before a process is started again."""

from __future__ import annotations

import time

LONGEST = 5.0
"""Longest pause in seconds. If a process lived for longer than this, the next pause is 0.1 s."""
_FIRST = 0.1


class Backoff:
    """The pauses between starts of a process: 0.1 s, then twice as long each time, at most 5 s."""

    def __init__(self) -> None:
        self._pause = self._not_before = 0.0

    def begin_pause(self, lived: float) -> None:
        """Begin the pause before the next start. The process has ended after `lived` seconds."""
        self._pause = _FIRST if lived > LONGEST or not self._pause else min(2 * self._pause, LONGEST)
        self._not_before = time.monotonic() + self._pause

    @property
    def left(self) -> float:
        """Seconds until the service may be started again."""
        return max(0.0, self._not_before - time.monotonic())
