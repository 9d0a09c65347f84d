"""The queue of messages that a connection has still to send."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from ..._core.fds import close_fds
from ...errors import NNBurstError, ResourceExhausted
from ..wire.packets import Kind, Outgoing, unread_bytes

_log = logging.getLogger(__name__)
_FIRST_LOOK = 0.001
"""Seconds until the first check whether an answer was received. Each later pause is twice the previous one."""
_LAST_LOOK = 0.5
_RETRY = 0.05
"""Seconds until the next try to send a message that the kernel has refused."""


class Outbox:
    """A queue of messages that the socket cannot take yet. Only the connection's owner uses it (see `mailbox`).

    The only method for other threads is `send_now`: worker threads send answers with it, because answers may have any
    order. The main thread never sends: an exception from a signal handler could hide whether a call was sent. A lock
    keeps the socket open during `send_now`.

    The kernel limits each user's descriptors in flight, but charges the memory behind them to no user. So the owner
    sends one answer with descriptors at a time, and charges it to the client until the client has received it. A
    received answer no longer counts in `unread_bytes`.

    Args:
        sock: A non-blocking socket, closed by `close`.
        send_timeout: See `Connection`.

    Attributes:
        is_full: True while the socket is full.
    """

    def __init__(self, sock: socket.socket, send_timeout: float) -> None:
        self._sock = sock
        self._messages: deque[Outgoing] = deque()
        self._sent = 0
        self._unread: tuple[Outgoing, int, float] | None = None
        """(answer, number of bytes sent before it, time when it was sent) for the last answer with descriptors."""
        self.is_full = False
        self._full_since = self._refused_since = math.inf
        self._sending = threading.Lock()
        self._ended = False
        self.send_timeout = send_timeout

    def send_now(self, message: Outgoing) -> bool:
        """Send an answer that has no descriptors. Any thread may call this. Return False if the owner must send it."""
        with self._sending:
            if self._ended or self._messages:
                return False
            try:
                message.try_send(self._sock)
            except (OSError, NNBurstError):  # the owner handles it, for example a full socket
                return False
            self._sent += message.size
        return True

    # -- the owner -----------------------------------------------------------------------------------------------------

    def put(self, message: Outgoing) -> None:
        """Queue a message, or drop it if the connection has ended."""
        if self._ended:
            message.close()
        else:
            self._messages.append(message)

    def put_first(self, message: Outgoing) -> None:
        self._messages.appendleft(message)

    def remove(self, message: Outgoing) -> None:
        with contextlib.suppress(ValueError):
            self._messages.remove(message)

    def send(self) -> tuple[Outgoing, NNBurstError] | None:
        """Send as many messages as the socket takes.

        If a message can never be sent, return it and its error. The caller then calls `send` again.
        """
        self.is_full = False
        self._check_received()
        while self._messages and not (self._messages[0].n_fds and self._unread):
            message = self._messages[0]
            try:
                self._post(message)
            except BlockingIOError:
                self.is_full = True
                self._full_since = min(self._full_since, time.monotonic())
                return None
            except NNBurstError as error:
                if isinstance(error, ResourceExhausted) and self._may_retry(error):
                    return None
                return self._messages.popleft(), error
            self._full_since = self._refused_since = math.inf
            self._messages.popleft()
        if not self._messages:
            self._full_since = self._refused_since = math.inf
        return None

    def _post(self, message: Outgoing) -> None:
        with self._sending:  # `send_now` must not count bytes between these steps
            message.try_send(self._sock)
            if message.n_fds and message.release is not None:
                self._unread = message, self._sent, time.monotonic()
            else:
                message.close()
            self._sent += message.size

    def _may_retry(self, error: ResourceExhausted) -> bool:
        """Return True if a new try makes sense: other processes may have freed kernel memory by then."""
        now = time.monotonic()
        if self._refused_since == math.inf:
            self._refused_since = now
            _log.warning("it is tried again for %g s: %s", self.send_timeout, error)
        return now < self._refused_since + self.send_timeout

    def _check_received(self) -> None:
        if self._unread is not None:
            message, before, _ = self._unread
            since = self._sent - before  # it is read before the kernel's count: bytes sent in between do not count
            if unread_bytes(self._sock) < since:
                message.close()
                self._unread = None

    @property
    def answers(self) -> int:
        return sum(message.kind is not Kind.REQUEST for message in self._messages)

    @property
    def gives_up_at(self) -> float:
        """The time to disconnect a peer that does not read answers.

        Unread requests are no reason to disconnect the peer: they have their own deadlines.
        """
        full_since = self._full_since if self.answers else math.inf
        return min(full_since, self._unread[2] if self._unread else math.inf) + self.send_timeout

    @property
    def next_look(self) -> float:
        """The time by which the owner calls `send` and checks `gives_up_at` again, even without an event."""
        now = time.monotonic()
        looks = now + max(_FIRST_LOOK, now - self._unread[2]) if self._unread else math.inf
        return min(looks, self.gives_up_at, math.inf if self._refused_since == math.inf else now + _RETRY)

    def end(self) -> None:
        self._ended = True
        self.clear()

    def linger(self, is_closed: Callable[[], bool]) -> None:
        """Wait until the peer has received the last answer with a descriptor, or has closed its end.

        Args:
            is_closed: Function that returns True once this side is closed, which ends the wait.
        """
        pause = _FIRST_LOOK
        while self._unread is not None and not is_closed():
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)
            self._check_received()

    def clear(self) -> None:
        while self._messages:
            self._messages.popleft().close()

    def close(self) -> None:
        """Close the socket. If unread messages contain sockets, the kernel closes those, too."""
        if self._unread is not None:
            self._unread[0].close()
        with self._sending:
            if self._sock.fileno() >= 0:
                close_fds([self._sock.detach()])
