"""The sending side of a connection.

No locks, for the reason that `_pending` gives: a datagram is sent whole by one system call.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..errors import NNBurstError
from ._packets import Kind, Outgoing, wait_writable
from ._pending import PendingCall, PendingCalls
from ._protocol import CALL_BY_REQUEST, Message, encode

__all__ = ["Sender"]

_MOST_UNATTENDED = 64
"""Calls under way when one is added whose answer nobody waits for: other callers are to find room."""


class Sender:
    """Sends messages as single datagrams, from any thread.

    Args:
        sock: Non-blocking; closed with `close`.
        calls: Where requests of `later` are entered.
        timeout: Seconds after which a peer that does not read is given up.
        wake: Has the reader thread call `flush`.
    """

    def __init__(self, sock: socket.socket, calls: PendingCalls, timeout: float, wake: Callable[[], None]) -> None:
        self.timeout = timeout
        self._wake = wake
        self._sock = sock
        self._calls = calls
        self._later: deque[Message] = deque()
        self._sending: dict[object, None] = {}
        """One entry for each thread that may be inside a system call on the socket."""
        self._closed = False

    def send(
        self,
        kind: Kind,
        number: int,
        body: bytes,
        fds: Sequence[int] = (),
        deadline: float | None = None,
        pending: PendingCall | None = None,
    ) -> None:
        """Send a message, after those of `later`, and wait for room if need be.

        Args:
            kind, number, body, fds: As `Outgoing`.
            deadline: `time.monotonic` moment; None for the timeout alone.
            pending: The call whose request it is.

        Raises:
            MissedDeadline: The peer does not read.
            ConnectionError: It is gone, or the socket is closed.
            NNBurstError: As `Outgoing`.
        """
        give_up = time.monotonic() + self.timeout
        deadline = give_up if deadline is None else min(deadline, give_up)
        with Outgoing(kind, number, body, fds) as message:
            if pending is not None:
                pending.message = message
            while not self._try_send(message):
                wait_writable(self._sock, deadline)

    def _try_send(self, message: Outgoing) -> bool:
        try:
            self._send_later()
            self._send_now(message)
            return True
        except BlockingIOError:
            return False
        finally:
            if self._later:  # the reader may have looked when it was not there
                self._wake()

    def _send_now(self, message: Outgoing) -> None:
        """The socket is not closed meanwhile: its number could be another file's by the time of the call."""
        me = object()
        try:
            self._sending[me] = None
            if self._closed:
                raise BrokenPipeError(errno.EPIPE, "the connection is closed")
            message.try_send(self._sock)
        finally:
            self._sending.pop(me, None)
            if self._closed:
                self.close()

    def later(self, message: Message) -> None:
        """Queue a short request whose answer nobody wants. For finalisers: takes no lock."""
        self._later.append(message)
        self._wake()

    def flush(self) -> bool:
        """Send what is queued, as far as may be; to be called again with each answer. False if the socket is full."""
        try:
            self._send_later()
        except BlockingIOError:
            return False
        except (NNBurstError, ConnectionError):
            pass  # the connection is about to end, or there is no memory for the message; the rest is tried again
        return True

    def _send_later(self) -> None:
        """What would be too many at once stays."""
        while self._later:
            try:
                message = self._later.popleft()
            except IndexError:  # another thread was faster
                return
            pending = PendingCall(CALL_BY_REQUEST[type(message)], is_long=False)
            if not self._calls.try_enter(pending, _MOST_UNATTENDED):
                self._later.appendleft(message)
                return
            try:
                with Outgoing(Kind.REQUEST, pending.number, encode(message)) as pending.message:
                    self._send_now(pending.message)
            except Exception as error:  # not KeyboardInterrupt, which may come after it was sent
                self._calls.remove(pending)
                if isinstance(error, BlockingIOError):
                    self._later.appendleft(message)
                raise

    def close(self) -> None:
        """Close the socket; if a thread is sending, that does it. Idempotent."""
        self._closed = True
        if not self._sending:
            self._sock.close()
