"""Shares of the processors: by priority, and more for a process that computes little beside one that computes much.

A run of a millisecond that begins while others keep all processors busy waits for the kernel's next tick, or is
interrupted by one, several ticks long. That is fair to those others only if their user has not had more all the time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection

from ...model import Priority
from ...watch import processor_ns
from .cgroup import Group

_NICE = {Priority.LOW: 10, Priority.MEDIUM: 0, Priority.HIGH: 0}
"""Of all threads of a process together, by the highest priority of its clients' models. Weights that are further apart
share worse: at 28 : 1 the kernel gave the lighter one two fifths."""
_WEIGHTS = {Priority.LOW: 30, Priority.MEDIUM: 100, Priority.HIGH: 300}
"""The same in a group."""
_WAY, _PART = 9, 8
"""Added to the one, and by what the other is divided, while it gives way to others."""
_LOOK, _SOONEST = 1.0, 0.1
"""Seconds from one look at what processes compute to the next, and from what the kernel is told to the next."""
_BUSY, _AWAKE = 0.5, 0.01
"""Processors that one keeps busy which others need not wait for, and one that does anything."""


class Share:
    """Of one process.

    Args:
        pid: Of the process, which has a session of its own.
        group: Of the process, which the kernel weighs; None if it weighs sessions only (sched(7), autogroup). Either
            has one weight however many threads are busy, and may be raised again.

    Attributes:
        priority: The highest of its clients' models.
        load: Processors that it kept busy, lately.
    """

    def __init__(self, pid: int, group: Group | None = None) -> None:
        self.priority, self.load = Priority.MEDIUM, 0.0
        self._pid, self._group = pid, group
        self._told = self._wanted(gives_way=False)
        self._used_ns = 0
        self.measure(math.inf)

    def _wanted(self, *, gives_way: bool) -> int:
        if self._group is None:
            return _NICE[self.priority] + _WAY * gives_way
        return _WEIGHTS[self.priority] // (_PART if gives_way else 1)

    def measure(self, seconds: float) -> None:
        """Set the load, of so many seconds."""
        before = self._used_ns
        with contextlib.suppress(OSError):  # it has gone
            self._used_ns = processor_ns(self._pid)
        self.load = (self._used_ns - before) / 1e9 / seconds

    def tell(self, *, gives_way: bool) -> bool:
        """Tell the kernel, unless it knows. Returns whether it listened: to one session in 0.1 s, of all together."""
        wanted = self._wanted(gives_way=gives_way)
        try:
            if wanted != self._told:
                self._set(wanted)
        except BlockingIOError:
            return False
        except OSError:  # it knows no sessions, or the process has gone
            pass
        self._told = wanted
        return True

    def _set(self, wanted: int) -> None:
        if self._group is not None:
            self._group.weigh(self._pid, wanted)
            return
        with open(f"/proc/{self._pid}/autogroup", "w", encoding="ascii") as session:
            session.write(str(wanted))


class Balance:
    """Of the shares of a service's processes. One thread.

    Attributes:
        next_look: When `look` has something to do.
    """

    def __init__(self) -> None:
        self.next_look = math.inf
        self._told_at = 0.0
        self._measured_at = time.monotonic()
        self._first: set[Share] = set()

    def change(self) -> None:
        """Note that a priority has changed."""
        self.next_look = min(self.next_look, self._told_at + _SOONEST)

    def look(self, shares: Collection[Share], *, is_shared: bool) -> None:
        """Have those that compute little go before the others, while one of these computes much.

        Args:
            shares: Of the processes there are.
            is_shared: Whether they are several users'.
        """
        now = time.monotonic()
        seconds = now - self._measured_at
        if seconds < _LOOK and now < self.next_look:
            return
        if seconds >= _LOOK:
            self._measured_at = now
            for share in shares:
                share.measure(seconds)
            most = max((share.load for share in shares), default=0.0)
            self._first = {each for each in shares if each.priority > Priority.LOW and _AWAKE < each.load < most / 2}
            if most < _BUSY:
                self._first.clear()
        have_heard = [share.tell(gives_way=bool(self._first) and share not in self._first) for share in shares]
        self._told_at = now
        moments = [now + _SOONEST] if not all(have_heard) else []
        if is_shared or self._first:
            moments.append(self._measured_at + _LOOK)
        self.next_look = min(moments, default=math.inf)
