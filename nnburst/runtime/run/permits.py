"""Permits of a session, which decide which callers may run and which wait."""

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
"""Seconds until a waiting caller checks for a permit without being woken."""


class Permit:
    """Permission to run, which keeps executions of earlier runs: one for each form of the arguments.

    Attributes:
        thread: Id of the thread that has to continue before the permit comes back; 0 for none.
    """

    __slots__ = ("__weakref__", "execution", "executions", "thread")

    def __init__(self) -> None:
        self.execution: Execution | None = None
        self.executions: dict[Hashable, Execution] = {}  # in order of use, the most recent last
        self.thread = 0

    def forget(self) -> None:
        """Drop the executions of the permit."""
        for execution in list(self.executions.values()):
            execution.forget()
        self.execution, self.executions = None, {}


class Permits:
    """A fixed number of permits. The permit that was given back last is taken first, as its burst still polls.

    Waiting callers are woken in order and take an idle permit: waking a caller reserves nothing, and may happen twice.
        A caller that is not woken checks every tenth of a second: callers before it may be unable to run,
        interrupted by its signal handler or in its own event loop. A permit that is dropped, because an exception came
        between two steps, is replaced when another caller waits.

    Attributes:
        idle: Free permits. In a hot loop, `take` is ``idle.pop()`` while `waiting` is empty, and `give` is
            ``idle.append(permit)`` followed by ``if waiting: wake()``.
        waiting: Functions that wake the waiting callers, in order.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: deque[Callable[[None], object]] = deque()
        self.idle: list[Permit] = []
        self.abandon()
        abandon_when_forked(self)

    def abandon(self) -> None:
        """Create new permits in a forked child. Old executions are dropped: the parent's runs read their inputs."""
        self.waiting.clear()
        self.idle.clear()
        self._all: list[weakref.ref[Permit]] = []
        self._completing = threading.RLock()
        self._complete()

    def _complete(self) -> None:
        """Replace dropped permits, and wake callers for the idle ones."""
        with self._completing:
            while len(self._all) < self.number:
                permit = Permit()
                self._all.append(weakref.ref(permit, self._all.remove))
                self.idle.append(permit)
        self.wake()

    def take(self, deadline: Deadline) -> Permit | None:
        """Return a permit; None if none is free in time."""
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
                with contextlib.suppress(IndexError):  # another caller has taken it
                    return self.idle.pop()
            return None
        finally:
            self.waiting.remove(arrival.put)  # atomic, so that an interrupt comes before or after it
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
                arrival = current_loop().waiter()  # created before the check, so that no permit is missed
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
        """Wake as many waiting callers as there are idle permits."""
        with contextlib.suppress(IndexError):  # a waiting caller has given up
            for place in range(min(len(self.idle), len(self.waiting))):
                self.waiting[place](None)

    def awaited_in(self, thread: int) -> int:
        """Return the number of permits that come back only when the given thread continues."""
        return sum(permit is not None and permit.thread == thread for permit in (ref() for ref in self._all))

    def forget(self) -> None:
        """Drop the executions of all idle permits."""
        for permit in self.idle:
            permit.forget()
