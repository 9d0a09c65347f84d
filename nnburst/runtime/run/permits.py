"""Permits of a session, which limit the number of runs at the same time."""

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
"""Seconds after which a waiting caller checks for a permit, even if no other caller wakes it."""


class Permit:
    """Permission to run. Keeps executions for reuse, one for each combination of ranks and omitted inputs.

    Attributes:
        thread: Id of the thread whose run uses the permit; 0 if the permit is idle or its run is abandoned.
    """

    __slots__ = ("__weakref__", "execution", "executions", "thread")

    def __init__(self) -> None:
        self.execution: Execution | None = None
        self.executions: dict[Hashable, Execution] = {}  # the most recently used one is last
        self.thread = 0

    def forget(self) -> None:
        for execution in list(self.executions.values()):
            execution.forget()
        self.execution, self.executions = None, {}


class Permits:
    """A fixed number of permits. The permit that was returned last is taken first, because its burst still polls.

    Waiting callers are woken in order, and then take an idle permit: a wake-up reserves nothing. A woken caller may be
    unable to run, for example because a signal handler has interrupted the caller and itself waits for a permit. Each
    waiting caller therefore also checks every tenth of a second, and replaces permits that were lost through an
    exception.

    Attributes:
        idle: Free permits. A hot loop replaces `take` by ``idle.pop()`` while `waiting` is empty, and `put_back` by
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
        """Create new permits in a forked child. The old permits keep executions, which only the parent may use."""
        self.waiting.clear()
        self.idle.clear()
        self._all: list[weakref.ref[Permit]] = []
        self._completing = threading.RLock()
        self._complete()

    def _complete(self) -> None:
        """Replace permits that were dropped without being returned, and wake callers if permits are idle."""
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
                with contextlib.suppress(IndexError):  # another caller took it
                    return self.idle.pop()
            return None
        finally:
            self.waiting.remove(arrival.put)  # this step is atomic: an interrupt comes before or after it
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
                arrival = current_loop().waiter()  # a permit that comes back after the check wakes it
                with contextlib.suppress(IndexError):
                    return self.idle.pop()
                self._complete()
            return None
        finally:
            self.waiting.remove(wake)
            self.wake()

    def put_back(self, permit: Permit) -> None:
        self.idle.append(permit)
        if self.waiting:
            self.wake()

    def wake(self) -> None:
        """Wake as many waiting callers as there are idle permits."""
        with contextlib.suppress(IndexError):  # a waiting caller has left
            for place in range(min(len(self.idle), len(self.waiting))):
                self.waiting[place](None)

    def count_awaited(self, thread: int) -> int:
        """Count the permits that only the given thread can give back."""
        return sum(permit is not None and permit.thread == thread for permit in (ref() for ref in self._all))

    def forget(self) -> None:
        for permit in self.idle:
            permit.forget()
