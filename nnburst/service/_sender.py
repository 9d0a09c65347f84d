"""The sending side of a connection."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from ..errors import NNBurstError
from ._packets import Kind, Outgoing, wait_writable
from ._pending import PendingCall, PendingCalls
from ._protocol import CALL_BY_REQUEST, Message, encode

__all__ = ["Sender"]

_MOST_UNATTENDED = 64
"""Calls under way when one is added whose answer nobody waits for: other callers are to find room."""


class Sender:
    """Sends messages as single datagrams, one at a time. Its lock is never held while the socket is full.

    Args:
        sock: Non-blocking; closed with `close`.
        calls: Where requests of `later` are entered.
        timeout: Seconds after which a peer that does not read is given up.
    """

    def __init__(self, sock: socket.socket, calls: PendingCalls, timeout: float) -> None:
        self.timeout = timeout
        self._sock = sock
        self._calls = calls
        self._lock = threading.RLock()  # a signal handler may call over a call
        self._later: deque[Message] = deque()

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
        with self._lock:
            try:
                self._send_later()
                message.try_send(self._sock)
                return True
            except BlockingIOError:
                return False

    def later(self, message: Message) -> None:
        """Queue a short request whose answer nobody wants. For finalisers: takes no lock."""
        self._later.append(message)

    def flush(self) -> bool:
        """Send what is queued, as far as may be; to be called again with each answer. False if the socket is full."""
        if not self._later:
            return True
        with self._lock:
            try:
                self._send_later()
            except BlockingIOError:
                return False
            except (NNBurstError, ConnectionError):
                self._later.clear()  # the connection is about to end
        return True

    def _send_later(self) -> None:
        """With the lock held. What would be too many at once stays."""
        while self._later:
            message = self._later.popleft()
            pending = PendingCall(CALL_BY_REQUEST[type(message)], is_long=False)
            if not self._calls.try_enter(pending, _MOST_UNATTENDED):
                self._later.appendleft(message)
                return
            try:
                with Outgoing(Kind.REQUEST, pending.number, encode(message)) as pending.message:
                    pending.message.try_send(self._sock)
            except Exception as error:  # not KeyboardInterrupt, which may come after it was sent
                self._calls.remove(pending)
                if isinstance(error, BlockingIOError):
                    self._later.appendleft(message)
                raise

    def close(self) -> None:
        """Close the socket, between two datagrams."""
        with self._lock:
            self._sock.close()
