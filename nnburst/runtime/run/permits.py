"""Which callers may run a session now, and which wait."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..._core.leaving import abandon_when_forked
from ..._core.once import Once
from .event_loop import current_loop

if TYPE_CHECKING:
    from ..execution import Execution


class Permit:
    """Leave to run, with the executions of earlier runs: the last one used, and others for other shapes.

    A permit that is dropped, because a signal handler raised between two steps, goes back to where it came from.

    Attributes:
        thread: The thread that has to go on before it comes back; 0: none.
    """

    __slots__ = ("__weakref__", "_home", "execution", "others", "thread")

    def __init__(self, home: Permits) -> None:
        self._home = weakref.ref(home)
        self.execution: Execution | None = None
        self.others: list[Execution] = []
        self.thread = 0
        home.all.append(weakref.ref(self, home.all.remove))

    def forget(self) -> None:
        """Let go of its executions."""
        for execution in filter(None, (self.execution, *self.others)):
            execution.forget()
        self.execution, self.others = None, []

    def __del__(self) -> None:
        home = self._home()
        if home is not None:
            home.replace()


class _Waiter:
    """A caller that waits: it is either given a permit or withdrawn, which the token decides."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.open = Once()
        self.permit: Permit | None = None

    def grant(self, permit: Permit) -> bool:
        """Give it a permit; False if it does not take it. It may be called again after an interrupt."""
        if self.permit is None:
            self.permit = permit
        if not self.open.take() and self.permit is permit:  # withdrawn
            return False
        with contextlib.suppress(RuntimeError):  # it was woken before an interrupt
            self._wake()
        return self.permit is permit


class Permits:
    """A fixed number of permits. The one that was given back last is taken first, as its burst still polls.

    Nothing here takes a lock: a signal handler or a finaliser may come between any two steps.

    Attributes:
        idle: Those that are free; `take` and `give` in full, for callers that count nanoseconds, are
            ``idle.pop()``, and ``idle.append(permit)`` followed by ``if waiting: hand_over()``.
        waiting: Who takes the next one, in order.
        all: Those that are idle and those that are not.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.all: list[weakref.ref[Permit]] = []
        self.waiting: deque[_Waiter] = deque()
        self.idle: list[Permit] = []
        self.idle.extend(Permit(self) for _ in range(number))  # one that is dropped meanwhile comes back to it
        abandon_when_forked(self)

    def abandon(self) -> None:
        """In a forked child: have no executions, whose inputs the parent's runs read, too, and wait for no thread."""
        for permit in self.idle:
            permit.execution, permit.others = None, []
        self.idle.extend(Permit(self) for _ in range(self.number - len(self.idle)))
        self.waiting.clear()

    def take(self, timeout: float | None) -> Permit | None:
        """Return a permit, or None if there was none within so many seconds (None: no limit)."""
        with contextlib.suppress(IndexError):
            return self.idle.pop()
        if timeout == 0:
            return None
        arrival = threading.Lock()
        arrival.acquire()
        waiter = _Waiter(arrival.release)
        try:
            self._ask(waiter)
            arrival.acquire(timeout=-1 if timeout is None else timeout)
        except BaseException:
            self._give_up(waiter)
            raise
        return self._end(waiter)

    async def atake(self, timeout: float | None) -> Permit | None:
        with contextlib.suppress(IndexError):
            return self.idle.pop()
        arrival = current_loop().waiter()
        waiter = _Waiter(arrival.set)
        try:
            self._ask(waiter)
            await arrival.wait(timeout)
        except BaseException:
            self._give_up(waiter)
            raise
        return self._end(waiter)

    def _ask(self, waiter: _Waiter) -> None:
        """Have one wait, or give it a permit that is idle."""
        self.waiting.append(waiter)
        self.hand_over()

    def _end(self, waiter: _Waiter) -> Permit | None:
        """Return what a waiter was given, perhaps at the last moment; else withdraw it."""
        if not waiter.open.take():
            return waiter.permit
        with contextlib.suppress(ValueError):  # it is just about to be given one, and will refuse
            self.waiting.remove(waiter)
        return None

    def _give_up(self, waiter: _Waiter) -> None:
        if (permit := self._end(waiter)) is not None:
            self.give(permit)

    def give(self, permit: Permit) -> None:
        self.idle.append(permit)
        if self.waiting:
            self.hand_over()

    def hand_over(self) -> None:
        """Give what is idle to those who wait."""
        while self.waiting and self.idle:
            waiter: _Waiter | None = None
            permit: Permit | None = None
            try:
                waiter = self.waiting.popleft()
                permit = self.idle.pop()
                if not waiter.grant(permit):
                    self.idle.append(permit)
            except BaseException as error:
                if waiter is not None:
                    self.waiting.appendleft(waiter)
                    if permit is not None and waiter.permit is not permit:
                        self.idle.append(permit)
                if permit is not None or not isinstance(error, IndexError):  # else another thread was faster
                    raise  # what a signal handler has raised

    def awaited_in(self, thread: int) -> int:
        """How many come back only when a thread goes on."""
        return sum(permit is not None and permit.thread == thread for permit in (ref() for ref in self.all))

    def replace(self) -> None:
        """Give another permit for one that was lost."""
        self.give(Permit(self))

    def forget(self) -> None:
        """Let go of the executions of all idle permits."""
        for permit in self.idle:
            permit.forget()
