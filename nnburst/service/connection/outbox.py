"""Messages on their way into a connection's socket."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque

from ..._core.fds import close_fds
from ...errors import NNBurstError
from ..wire.packets import Kind, Outgoing


class Outbox:
    """A queue for what the socket does not take at once. It belongs to the owner of the connection (see `mailbox`).

    An answer need not wait for the owner: a worker thread sends it itself with `send_now`. That is one datagram, so it
    comes between two others whoever sends them, and answers are in no order. The main thread never does that: a signal
    handler that raises could leave it unknown whether a call was sent. A lock keeps the owner from closing the socket
    in between, as its number may be another file's at once; it is never held while anything waits.

    Args:
        sock: Non-blocking; closed by `close`.
        send_timeout: Seconds after which a peer that does not read its answers has had enough time.
    """

    def __init__(self, sock: socket.socket, send_timeout: float) -> None:
        self._sock = sock
        self._messages: deque[Outgoing] = deque()
        self._full_since = math.inf
        self._sending = threading.Lock()
        self._ended = False
        self.send_timeout = send_timeout

    def __len__(self) -> int:
        return len(self._messages)

    def send_now(self, message: Outgoing) -> bool:
        """Send an answer, for a worker thread; False if that is left to the owner."""
        with self._sending:
            if self._ended or self._messages:
                return False
            try:
                message.try_send(self._sock)
            except (OSError, NNBurstError):  # also that the socket is full: the owner will see it, too
                return False
        message.close()
        return True

    # -- the owner -----------------------------------------------------------------------------------------------------

    def put(self, message: Outgoing) -> None:
        """Queue a message; it is dropped once the connection has ended."""
        if self._ended:
            message.close()
        else:
            self._messages.append(message)

    def put_first(self, message: Outgoing) -> None:
        """Queue a message before all others."""
        self._messages.appendleft(message)

    def remove(self, message: Outgoing) -> None:
        with contextlib.suppress(ValueError):
            self._messages.remove(message)

    def send(self) -> tuple[Outgoing, NNBurstError] | None:
        """Send what the socket takes. Returns a message that cannot be sent at all; call it again then."""
        while self._messages:
            message = self._messages[0]
            try:
                message.try_send(self._sock)
            except BlockingIOError:
                self._full_since = min(self._full_since, time.monotonic())
                return None
            except NNBurstError as error:
                return self._messages.popleft(), error
            self._full_since = math.inf
            self._messages.popleft().close()
            if message.on_sent is not None:
                message.on_sent()
        self._full_since = math.inf
        return None

    @property
    def answers(self) -> int:
        return sum(message.kind is not Kind.REQUEST for message in self._messages)

    @property
    def gives_up_at(self) -> float:
        """When a peer that does not read its answers has had enough time; requests have deadlines of their own."""
        return self._full_since + self.send_timeout if self.answers else math.inf

    def end(self) -> None:
        self._ended = True
        self.clear()

    def clear(self) -> None:
        """Drop what is queued; the descriptors of a message close with it."""
        self._messages.clear()

    def close(self) -> None:
        """Close the socket, and with it what the peer has sent that was not received: sockets that linger."""
        with self._sending:
            if self._sock.fileno() >= 0:
                close_fds([self._sock.detach()])
