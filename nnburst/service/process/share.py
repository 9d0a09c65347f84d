"""Shares of the processors: by priority, and more for users who compute little beside one who computes much.

A run of a millisecond that begins while others keep all processors busy waits for the kernel's next tick, or is
interrupted by one, several ticks long. A process that has computed all the time has no claim to that tick.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Collection

from ...model import Priority
from ...watch import processor_ns
from .cgroup import Group

_NICE = {Priority.LOW: 10, Priority.MEDIUM: 0, Priority.HIGH: 0}
"""Of all threads of a process together, by the highest priority of its clients' models. Weights that are further apart
share worse: at 28 : 1 the kernel gave the lighter one two fifths."""
_WEIGHTS = {Priority.LOW: 30, Priority.MEDIUM: 100, Priority.HIGH: 300}
"""The same in a group."""
_NICER, _DIVISOR = 9, 8
"""Added to the one, and what divides the other, while it gives way."""
_LOOK, _SOONEST = 1.0, 0.1
"""Seconds from one look at what processes compute to the next, and from what the kernel is told to the next."""
_BUSY, _AWAKE = 0.5, 0.01
"""Processors of a user who has others wait, and of one who computes anything."""
_UNKNOWN = -1


class Share:
    """Of one process.

    Args:
        pid: Of the process, which has a session of its own.
        user: Whose processes are judged together.
        group: Of the process, which the kernel weighs; None if it weighs sessions only (sched(7), autogroup). Either
            has one weight however many threads are busy, and may be raised again.
        may_go_first: Whether others give way to it.
        may_give_way: Whether it does to others.

    Attributes:
        priority: The highest of its clients' models.
        load: Processors that it kept busy, lately.
    """

    def __init__(
        self,
        pid: int,
        user: object,
        group: Group | None = None,
        *,
        may_go_first: bool = True,
        may_give_way: bool = True,
    ) -> None:
        self.priority, self.load = Priority.MEDIUM, 0.0
        self.user, self._pid, self._group = user, pid, group
        self._may_go_first, self._may_give_way = may_go_first, may_give_way
        self._told = 0 if group is None else _UNKNOWN
        self._used_ns = 0
        self.measure(math.inf)

    @property
    def goes_first(self) -> bool:
        """Whether it needs a processor for which others are to give way."""
        return self._may_go_first and self.priority > Priority.LOW and self.load > _AWAKE

    def _wanted(self, *, gives_way: bool) -> int:
        gives_way = gives_way and self._may_give_way
        if self._group is None:
            return _NICE[self.priority] + _NICER * gives_way
        return _WEIGHTS[self.priority] // (_DIVISOR if gives_way else 1)

    def measure(self, seconds: float) -> None:
        """Set the load, of so many seconds."""
        before = self._used_ns
        with contextlib.suppress(OSError):  # it has gone
            self._used_ns = processor_ns(self._pid)
        self.load = (self._used_ns - before) / 1e9 / seconds

    def tell(self, *, gives_way: bool) -> bool:
        """Tell the kernel, unless it knows. Returns whether it took that: it takes one in 0.1 s, for all sessions."""
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
        self.next_look = self._told_at = 0.0
        self._measured_at = time.monotonic()
        self._giving_way: set[object] = set()

    def look_soon(self) -> None:
        """Note that there is another process, or a priority has changed."""
        self.next_look = min(self.next_look, self._told_at + _SOONEST)

    def look(self, shares: Collection[Share], *, is_shared: bool) -> None:
        """Have users who compute much give way to those who compute little.

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
            self._judge(shares)
        have_heard = [share.tell(gives_way=share.user in self._giving_way) for share in shares]
        self._told_at = now
        moments = [now + _SOONEST] if not all(have_heard) else []
        if is_shared or self._giving_way:
            moments.append(self._measured_at + _LOOK)
        self.next_look = min(moments, default=math.inf)

    def _judge(self, shares: Collection[Share]) -> None:
        """Decide who gives way. Who does already is compared with others who do: it computes less because it does."""
        loads: defaultdict[object, float] = defaultdict(float)
        for share in shares:
            loads[share.user] += share.load
        most = max(loads.values(), default=0.0)
        of_these = max((loads[user] for user in self._giving_way & loads.keys()), default=0.0)
        little = {user for user in loads if loads[user] < (of_these if user in self._giving_way else most) / 2}
        is_needed = most > _BUSY and any(share.goes_first for share in shares if share.user in little)
        self._giving_way = loads.keys() - little if is_needed else set()
