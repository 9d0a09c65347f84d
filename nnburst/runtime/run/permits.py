"""Which threads may run a session now, and which wait."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..._core.leaving import abandon_when_forked

if TYPE_CHECKING:
    from ..execution import Execution


class Lane:
    """Leave to run, with the executions of earlier runs: the last one used, and others for other shapes.

    A lane that is dropped, because a signal handler raised between two steps, goes back to where it came from.

    Attributes:
        loop_thread: The thread whose event loop has to go on before it comes back; 0: none has.
    """

    __slots__ = ("__weakref__", "_home", "execution", "loop_thread", "others")

    def __init__(self, home: Lanes) -> None:
        self._home = weakref.ref(home)
        self.execution: Execution | None = None
        self.others: list[Execution] = []
        self.loop_thread = 0
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


class Lanes:
    """A fixed number of lanes. The one that was given back last is taken first, as its burst still polls.

    Nothing here takes a lock: a signal handler or a finaliser may come between any two steps.

    Attributes:
        idle: Those that are free; `take` and `give` in full, for callers that count nanoseconds, are
            ``idle.pop()``, and ``idle.append(lane)`` followed by ``if waiting: hand_over()``.
        waiting: What takes the next one, in order.
        all: Those that are idle and those that are not.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.all: list[weakref.ref[Lane]] = []
        self.idle = [Lane(self) for _ in range(number)]
        self.waiting: deque[Callable[[Lane], bool]] = deque()
        abandon_when_forked(self)

    def abandon(self) -> None:
        """In a forked child: have no executions, whose inputs the parent's runs read, too, and wait for no thread."""
        for lane in self.idle:
            lane.execution, lane.others = None, []
        self.idle.extend(Lane(self) for _ in range(self.number - len(self.idle)))
        self.waiting.clear()

    def take(self, timeout: float | None) -> Lane | None:
        """Return a lane, or None if there was none within so many seconds (None: no limit)."""
        try:
            return self.idle.pop()
        except IndexError:
            return None if timeout == 0 else self._wait(timeout)

    def give(self, lane: Lane) -> None:
        """Give a lane back."""
        self.idle.append(lane)
        if self.waiting:
            self.hand_over()

    def awaited_in(self, thread: int) -> int:
        """How many come back only when the event loop of a thread goes on."""
        return sum(lane is not None and lane.loop_thread == thread for lane in (ref() for ref in self.all))

    def replace(self) -> None:
        """Give another lane for one that was lost."""
        self.give(Lane(self))

    def forget(self) -> None:
        """Let go of the executions of all idle lanes."""
        for lane in self.idle:
            lane.forget()

    def call_soon(self, taker: Callable[[Lane], bool]) -> None:
        """Have `taker` called with the next lane that is free, perhaps at once, in the thread that gives it.

        If it returns False the lane goes to the next one.
        """
        self.waiting.append(taker)
        self.hand_over()  # one may have come back before it waited

    def hand_over(self) -> None:
        """Give what is idle to those who wait."""
        while self.waiting and self.idle:
            try:
                taker = self.waiting.popleft()
            except IndexError:  # another thread was faster
                continue
            try:
                lane = self.idle.pop()
            except IndexError:
                self.waiting.appendleft(taker)
                continue
            if not taker(lane):
                self.idle.append(lane)

    def _wait(self, timeout: float | None) -> Lane | None:
        thread = _Waiter()
        try:
            self.call_soon(thread.offer)
            thread.arrival.acquire(timeout=-1 if timeout is None else timeout)
            if not thread.give_up():
                return thread.lane
            with contextlib.suppress(ValueError):  # it was just about to be asked, and will refuse
                self.waiting.remove(thread.offer)
            return None
        except BaseException:
            if not thread.give_up() and thread.lane is not None:
                self.give(thread.lane)
            raise


class _Waiter:
    """A thread that waits. Either it gives up or it is offered a lane: one of the two takes the only token."""

    def __init__(self) -> None:
        self.arrival = threading.Lock()
        self.arrival.acquire()
        self.lane: Lane | None = None
        self._token = [None]

    def offer(self, lane: Lane) -> bool:
        self.lane = lane
        if not self._decides():
            self.lane = None
            return False
        self.arrival.release()
        return True

    def give_up(self) -> bool:
        return self._decides()

    def _decides(self) -> bool:
        try:
            self._token.pop()
        except IndexError:
            return False
        return True
