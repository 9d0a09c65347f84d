"""The calls that are under way: those that this side makes and those that it serves.

Nothing here is lost to Ctrl-C: a signal handler may raise after any call, so what has to be undone is in the table
before it is done, and locks are taken by ``with`` only.
"""

from __future__ import annotations

import itertools
import threading
import time
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

    __slots__ = (
        "_arrival",
        "call",
        "error",
        "fds",
        "is_answered",
        "is_long",
        "message",
        "number",
        "on_late",
        "reply",
    )

    def __init__(self, call: Call, is_long: bool) -> None:
        self.call = call
        self.is_long = is_long
        self.number = 0
        self.message: Outgoing | None = None
        self.is_answered = False
        self._arrival = threading.Lock()  # an Event would not do: its wait does not survive Ctrl-C at every moment
        self._arrival.acquire()
        self.reply: Message | None = None
        self.fds = FdBundle()
        self.error: NNBurstError | None = None
        self.on_late: Callable[[Message], None] | None = None

    def wait(self, timeout: float | None) -> bool:
        """Wait for the answer; to be called once. Returns False after `timeout` seconds."""
        return self._arrival.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))

    def finish(self, reply: Message | None, error: NNBurstError | None, fds: FdBundle) -> None:
        """Note the answer and wake the waiting thread."""
        self.reply, self.error, self.fds = reply, error, fds
        self.is_answered = True
        self._arrival.release()

    def discard(self) -> None:
        """Nobody wants the answer: close its descriptors and let go of the object that it names. Idempotent."""
        fds, reply, self.reply = self.fds, self.reply, None
        fds.close()
        if reply is not None and self.on_late is not None:
            self.on_late(reply)


class PendingCalls:
    """All calls that were made and not answered, by number."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over an RLock: a signal handler may call over a call
        self._numbers = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        self._ended: Callable[[Call], NNBurstError] | None = None

    def enter(self, pending: PendingCall, timeout: float | None) -> None:
        """Give a call its number, once there is room for it.

        Raises:
            MissedDeadline: Too many calls are under way, or another long one, for all of `timeout`.
            NNBurstError: `end` was called.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._ended is None and self._is_full(pending):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise MissedDeadline(f"{pending.call.name}: {len(self._calls)} calls are under way already")
                self._changed.wait(left)
            if self._ended is not None:
                raise self._ended(pending.call)
            self._enter(pending)

    def _enter(self, pending: PendingCall) -> None:
        number = next(self._numbers) % 2**32
        while not number or number in self._calls:  # 0 means that no answer is wanted
            number = next(self._numbers) % 2**32
        pending.number = number
        self._calls[number] = pending

    def _is_full(self, pending: PendingCall) -> bool:
        if len(self._calls) >= MAX_PENDING:
            return True
        return pending.is_long and any(other.is_long for other in self._calls.values())

    def try_enter(self, pending: PendingCall, most: int) -> bool:
        """Give a call its number that nobody waits for, unless `most` calls are under way or it is too late."""
        pending.on_late = _ignore
        with self._changed:
            if self._ended is not None or len(self._calls) >= most:
                return False
            self._enter(pending)
            return True

    def remove(self, pending: PendingCall) -> None:
        """It was not sent."""
        with self._changed:
            self._remove(pending)

    def find(self, number: int) -> PendingCall | None:
        """Return a call that is under way."""
        with self._changed:
            return self._calls.get(number)

    def answer(self, pending: PendingCall, reply: Message | None, error: NNBurstError | None, fds: FdBundle) -> None:
        """A call's reply is there: hand it to the thread that waits or, if that gave up, to `on_late`."""
        with self._changed:
            self._remove(pending)
            pending.finish(reply, error, fds)
            is_late = pending.on_late is not None
        if is_late:
            pending.discard()

    def give_up(self, pending: PendingCall, on_late: Callable[[Message], None] | None) -> bool:
        """Stop to wait. The call keeps its place until it is answered, unless it was never sent.

        Returns:
            False if the answer was there already.
        """
        with self._changed:
            pending.on_late = on_late or _ignore
            if pending.message is None or not pending.message.may_be_sent:
                self._remove(pending)
            return not pending.is_answered

    def _remove(self, pending: PendingCall) -> None:
        if self._calls.get(pending.number) is pending:
            del self._calls[pending.number]
            self._changed.notify_all()

    def end(self, failure: Callable[[Call], NNBurstError]) -> None:
        """Fail all calls, now and from now on."""
        with self._changed:
            self._ended = failure
            calls, self._calls = list(self._calls.values()), {}
            self._changed.notify_all()
            for pending in calls:
                pending.finish(None, failure(pending.call), FdBundle())


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
