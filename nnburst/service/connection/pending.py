"""Calls that this side has made and that wait for their answers.

Only the connection's owner thread changes calls (see `mailbox`). The caller's thread gets the answer, unless it has
called `PendingCall.stop_waiting` before the owner called `PendingCall.finish`.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import MissedDeadline, NNBurstError
from ..wire.packets import FdBundle, Kind, Outgoing
from ..wire.protocol import CALL_BY_REQUEST, MAX_INLINE, Message

MAX_PENDING = 128
"""Maximum number of calls in flight. At twice as many, the other side ends the connection."""
_MOST_UNATTENDED = 64
"""Limit for calls without a waiting caller: they are sent only while fewer calls than this are in flight."""


class PendingCall:
    """A call, from its start until its answer.

    Args:
        message: The request.
        fds: Descriptors of the request.
        on_late: Called with the reply if no caller takes it.
        on_failure: Called with the error if no caller takes it.
    """

    def __init__(
        self,
        message: Message,
        fds: FdBundle | None = None,
        on_late: Callable[[Message], None] | None = None,
        on_failure: Callable[[NNBurstError], None] = lambda error: None,
    ) -> None:
        self.call = CALL_BY_REQUEST[type(message)]
        self.message = message
        self.fds = FdBundle() if fds is None else fds
        self.on_late = on_late
        self.on_failure = on_failure
        self.body = b""
        self.number = 0
        """The call's id; 0 until the call may be sent."""
        self.outgoing: Outgoing | None = None
        self._claim = threading.Lock()  # the first to acquire it, caller or owner, gets the answer
        self._arrival = threading.Lock()  # an Event would not do: Ctrl-C at a bad moment breaks its wait
        self._arrival.acquire()
        self._answer: tuple[Message | None, NNBurstError | None, FdBundle] = (None, None, FdBundle())

    # -- the caller ----------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> bool:
        """Wait for the answer; return False after `timeout` seconds. Call it only once."""
        return self._arrival.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))

    def stop_waiting(self) -> bool:
        """Stop waiting. Return False if the answer has already come; the caller must then take it."""
        return self._claim.acquire(blocking=False)

    def result(self) -> tuple[Any, FdBundle]:
        """Return the reply, or raise the error, after `wait` has returned True."""
        reply, error, fds = self._answer
        if error is not None:
            raise error
        return reply, fds

    def deadline_error(self, timeout: float | None) -> MissedDeadline:
        if not self.is_sent:
            return MissedDeadline(
                f"{self.call.name}: not sent in time: too many calls are under way already, or another long one; the "
                "peer does not read its socket; or the kernel has no room"
            )
        return MissedDeadline(f"{self.call.name}: no answer within {timeout:.3g} s")

    def discard(self) -> None:
        """Drop the answer: close its descriptors and release the object that it names. Idempotent."""
        (reply, error, fds), self._answer = self._answer, (None, None, FdBundle())
        fds.close()
        if reply is not None and self.on_late is not None:
            self.on_late(reply)
        if error is not None:
            self.on_failure(error)

    # -- the owner -----------------------------------------------------------------------------------------------------

    @property
    def is_sent(self) -> bool:
        return self.outgoing is not None and self.outgoing.is_sent

    @property
    def is_long(self) -> bool:
        return len(self.body) > MAX_INLINE

    def pack(self) -> Outgoing:
        """Make the datagram, which owns the descriptors from now on. Raises the same errors as `Outgoing`."""
        self.outgoing = Outgoing(Kind.REQUEST, self.number, self.body, self.fds)
        return self.outgoing

    def finish(self, reply: Message | None, error: NNBurstError | None, fds: FdBundle) -> None:
        """Store the answer and wake the caller, or drop the answer if the caller has given up."""
        self._answer = reply, error, fds
        if self._claim.acquire(blocking=False):
            self._arrival.release()
        else:
            self.discard()

    def fail(self, error: NNBurstError) -> None:
        self.fds.close()
        self.finish(None, error, FdBundle())


class PendingCalls:
    """The calls that have not been answered."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._by_number: dict[int, PendingCall] = {}
        self._long: PendingCall | None = None
        self._attended: deque[PendingCall] = deque()
        self._unattended: deque[PendingCall] = deque()

    def add(self, pending: PendingCall, *, is_attended: bool) -> None:
        """Queue a call that is not sent yet. `is_attended`: True if a caller waits for the answer."""
        (self._attended if is_attended else self._unattended).append(pending)

    def admit(self) -> Iterator[PendingCall]:
        """Yield the queued calls that may be sent now. Each gets its number first."""
        waiting: list[PendingCall] = []
        while self._attended and len(self._by_number) < MAX_PENDING:
            pending = self._attended.popleft()
            if pending.is_long and self._long is not None:
                waiting.append(pending)
            else:
                yield self._enter(pending)
        self._attended.extendleft(reversed(waiting))
        while self._unattended and len(self._by_number) < _MOST_UNATTENDED:
            yield self._enter(self._unattended.popleft())

    def _enter(self, pending: PendingCall) -> PendingCall:
        while not pending.number or pending.number in self._by_number:  # the id 0 means that no answer is wanted
            pending.number = next(self._numbers) % 2**32
        self._by_number[pending.number] = pending
        if pending.is_long:
            self._long = pending
        return pending

    def find(self, number: int) -> PendingCall | None:
        return self._by_number.get(number)

    def remove(self, pending: PendingCall) -> None:
        """Remove a call, so that another call can be sent."""
        self._by_number.pop(pending.number, None)
        if self._long is pending:
            self._long = None
        for queue in (self._attended, self._unattended):
            if not pending.number and pending in queue:
                queue.remove(pending)

    def end(self, failure: Callable[[PendingCall], NNBurstError]) -> None:
        every = [*self._by_number.values(), *self._attended, *self._unattended]
        for held in (self._by_number, self._attended, self._unattended):
            held.clear()
        for pending in every:
            pending.fail(failure(pending))
