"""Which callers may run a session now, and which wait."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ..._core.leaving import abandon_when_forked
from .event_loop import current_loop

if TYPE_CHECKING:
    from ..._core.deadline import Deadline
    from ..execution import Execution

_LONGEST_WAIT = 0.1
"""Seconds until one that waits looks for itself."""


class Permit:
    """Leave to run, with the executions of earlier runs: the last one used, and one for each form of the arguments.

    Attributes:
        thread: The thread that has to go on before it comes back; 0: none.
    """

    __slots__ = ("__weakref__", "execution", "executions", "thread")

    def __init__(self) -> None:
        self.execution: Execution | None = None
        self.executions: dict[Hashable, Execution] = {}  # the one used last comes last
        self.thread = 0

    def forget(self) -> None:
        """Let go of its executions."""
        for execution in list(self.executions.values()):
            execution.forget()
        self.execution, self.executions = None, {}


class Permits:
    """A fixed number of permits. The one that was given back last is taken first, as its burst still polls.

    Callers that wait are woken in order and take what is idle: to wake one gives nothing away, and may be done twice.
    One that nobody wakes looks for itself every tenth of a second: those before it may be unable to run, below its
    signal handler or in its event loop. A permit that is dropped, because an exception came between two steps, is
    replaced when another caller waits.

    Attributes:
        idle: Those that are free. For callers that count nanoseconds, `take` is ``idle.pop()`` while nobody waits, and
            `give` is ``idle.append(permit)`` followed by ``if waiting: wake()``.
        waiting: What wakes those that wait, in order.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: deque[Callable[[None], object]] = deque()
        self.idle: list[Permit] = []
        self.abandon()
        abandon_when_forked(self)

    def abandon(self) -> None:
        """Make the permits; in a forked child others, without executions, whose inputs the parent's runs read, too."""
        self.waiting.clear()
        self.idle.clear()
        self._all: list[weakref.ref[Permit]] = []
        self._completing = threading.RLock()
        self._complete()

    def _complete(self) -> None:
        """Have as many permits as there are to be, and wake those that may take one."""
        with self._completing:
            while len(self._all) < self.number:
                permit = Permit()
                self._all.append(weakref.ref(permit, self._all.remove))
                self.idle.append(permit)
        self.wake()

    def take(self, deadline: Deadline) -> Permit | None:
        """Return a permit, or None if there is none in time."""
        with contextlib.suppress(IndexError):
            if not self.waiting:
                return self.idle.pop()
        arrival: SimpleQueue[None] = SimpleQueue()
        try:
            self.waiting.append(arrival.put)
            self._complete()
            while (left := deadline.left()) != 0:
                try:
                    arrival.get(timeout=min(left or _LONGEST_WAIT, _LONGEST_WAIT))
                except Empty:
                    self._complete()
                with contextlib.suppress(IndexError):  # a newcomer was faster
                    return self.idle.pop()
            return None
        finally:
            self.waiting.remove(arrival.put)  # one step: an interrupt comes before or after it
            self.wake()

    async def atake(self, deadline: Deadline) -> Permit | None:
        with contextlib.suppress(IndexError):
            if not self.waiting:
                return self.idle.pop()
        arrival = current_loop().waiter()

        def wake(_: None) -> None:
            arrival.set()

        try:
            self.waiting.append(wake)
            self._complete()
            while (left := deadline.left()) != 0:
                await arrival.wait(min(left or _LONGEST_WAIT, _LONGEST_WAIT))
                arrival = current_loop().waiter()  # before the look: whoever wakes this task has given a permit back
                with contextlib.suppress(IndexError):
                    return self.idle.pop()
                self._complete()
            return None
        finally:
            self.waiting.remove(wake)
            self.wake()

    def give(self, permit: Permit) -> None:
        self.idle.append(permit)
        if self.waiting:
            self.wake()

    def wake(self) -> None:
        """Wake as many of those that wait as there are idle permits."""
        with contextlib.suppress(IndexError):  # one has left
            for place in range(min(len(self.idle), len(self.waiting))):
                self.waiting[place](None)

    def awaited_in(self, thread: int) -> int:
        """How many come back only when a thread goes on."""
        return sum(permit is not None and permit.thread == thread for permit in (ref() for ref in self._all))

    def forget(self) -> None:
        """Let go of the executions of all idle permits."""
        for permit in self.idle:
            permit.forget()
