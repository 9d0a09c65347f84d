"""The calls that are under way: those that this side makes and those that it serves.

A signal handler may run between any two steps of a call, and raise, or make calls of its own and wait for answers. So
no lock is held here that the reader thread needs, and nothing is lost if a step is the last: what must not happen twice
is claimed by one operation of a list or a dictionary, which the interpreter does not divide.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from ..errors import MissedDeadline, NNBurstError
from ._packets import FdBundle, Outgoing
from ._protocol import Call, Malformed, Message

__all__ = ["MAX_PENDING", "PendingCall", "PendingCalls", "ServedCalls"]

MAX_PENDING = 128
"""Calls that one side may have under way; the other side tolerates twice as many, then drops the connection."""
_MAX_QUEUED_FDS = 2048


class PendingCall:
    """A call that waits for its reply.

    Args:
        call: Its row.
        is_long: Whether its request does not fit into one datagram; one such is under way at a time.
    """

    __slots__ = ("_arrival", "_claim", "call", "error", "fds", "is_long", "message", "number", "on_late", "reply")

    def __init__(self, call: Call, is_long: bool) -> None:
        self.call = call
        self.is_long = is_long
        self.number = 0
        self.message: Outgoing | None = None
        self._claim = [self]
        self._arrival = threading.Lock()  # an Event would not do: its wait does not survive Ctrl-C at every moment
        self._arrival.acquire()
        self.reply: Message | None = None
        self.fds = FdBundle()
        self.error: NNBurstError | None = None
        self.on_late: Callable[[Message], None] | None = None

    def wait(self, timeout: float | None) -> bool:
        """Wait for the answer; to be called once. Returns False after `timeout` seconds."""
        return self._arrival.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))

    def _claimed(self) -> bool:
        """Decide what becomes of the answer: whoever comes first does. Once True."""
        try:
            self._claim.pop()
            return True
        except IndexError:
            return False

    def finish(self, reply: Message | None, error: NNBurstError | None, fds: FdBundle) -> None:
        """The answer is there: wake the waiting thread or, if that gave up, let go of what came."""
        self.reply, self.error, self.fds = reply, error, fds
        if self._claimed():
            self._arrival.release()
        else:
            self.discard()

    def give_up(self, on_late: Callable[[Message], None] | None) -> bool:
        """Stop to wait; False if the answer is there already."""
        self.on_late = on_late or _ignore
        return self._claimed()

    def discard(self) -> None:
        """Nobody wants the answer: close its descriptors and let go of the object that it names. Idempotent."""
        fds, reply, self.reply = self.fds, self.reply, None
        fds.close()
        if reply is not None and self.on_late is not None:
            self.on_late(reply)


class PendingCalls:
    """All calls that were made and not answered, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        self._long: dict[None, PendingCall] = {}
        self._waiting: deque[threading.Lock] = deque()
        self._ended: Callable[[Call], NNBurstError] | None = None

    def enter(self, pending: PendingCall, timeout: float | None) -> None:
        """Give a call its number, once there is room for it.

        Raises:
            MissedDeadline: Too many calls are under way, or another long one, for all of `timeout`.
            NNBurstError: `end` was called.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._try_enter(pending, MAX_PENDING):
            room = threading.Lock()
            room.acquire()
            self._waiting.append(room)
            if self._try_enter(pending, MAX_PENDING):  # whoever left meanwhile has not seen that somebody waits
                return
            left = -1 if deadline is None else deadline - time.monotonic()
            if deadline is not None and left <= 0:
                raise MissedDeadline(f"{pending.call.name}: {len(self._calls)} calls are under way already")
            room.acquire(timeout=min(left, threading.TIMEOUT_MAX))

    def try_enter(self, pending: PendingCall, most: int) -> bool:
        """Enter a call for whose answer nobody waits, unless `most` calls are under way. Raises if `end` was called."""
        pending.give_up(None)
        return self._try_enter(pending, most)

    def _try_enter(self, pending: PendingCall, most: int) -> bool:
        self._check_open(pending)
        if len(self._calls) >= most or (pending.is_long and self._long.setdefault(None, pending) is not pending):
            return False
        while True:
            pending.number = next(self._numbers) % 2**32  # 0 means that no answer is wanted
            if pending.number and self._calls.setdefault(pending.number, pending) is pending:
                break
        try:
            self._check_open(pending)
        except NNBurstError:
            if self._calls.pop(pending.number, None) is not None:  # else `end` has found it
                raise
        return True

    def _check_open(self, pending: PendingCall) -> None:
        if self._ended is not None:
            raise self._ended(pending.call)

    def find(self, number: int) -> PendingCall | None:
        """Return a call that is under way."""
        return self._calls.get(number)

    def answer(self, pending: PendingCall, reply: Message | None, error: NNBurstError | None, fds: FdBundle) -> None:
        """A call's reply is there."""
        self.remove(pending)
        pending.finish(reply, error, fds)

    def give_up(self, pending: PendingCall, on_late: Callable[[Message], None] | None) -> bool:
        """Stop to wait. The call keeps its place until it is answered, unless it was never sent.

        Returns:
            False if the answer was there already.
        """
        given_up = pending.give_up(on_late)
        if pending.message is None or not pending.message.may_be_sent:
            self.remove(pending)
        return given_up

    def remove(self, pending: PendingCall) -> None:
        """A call is not under way any more: there is room."""
        if self._calls.get(pending.number) is pending:
            self._calls.pop(pending.number, None)
        if self._long.get(None) is pending:
            self._long.clear()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.popleft().release()

    def end(self, failure: Callable[[Call], NNBurstError]) -> None:
        """Fail all calls, now and from now on."""
        self._ended = failure
        with contextlib.suppress(KeyError):
            while True:
                _, pending = self._calls.popitem()
                pending.finish(None, failure(pending.call), FdBundle())
        self._wake()


def _ignore(reply: Message) -> None:
    """What happens to a reply that nobody waits for and that names no object."""


class ServedCalls:
    """What the peer has under way here: bounded, so that it cannot fill this process with messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._fds = 0
        self._has_long = False

    def enter(self, n_fds: int, is_long: bool) -> None:
        """Count a request that came.

        Raises:
            Malformed: No correct peer has that much under way.
        """
        with self._lock:
            if self._count >= 2 * MAX_PENDING or self._fds + n_fds > _MAX_QUEUED_FDS:
                raise Malformed("too many calls at once")
            if is_long and self._has_long:
                raise Malformed("two long calls at once")
            self._count += 1
            self._fds += n_fds
            self._has_long = self._has_long or is_long

    def leave(self, n_fds: int, is_long: bool) -> None:
        """Its descriptors are closed and it is about to be answered."""
        with self._lock:
            self._count -= 1
            self._fds -= n_fds
            self._has_long = self._has_long and not is_long
