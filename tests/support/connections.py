"""Both ends of the control socket, with handlers that a test provides."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnburst.service.connection.transport import Connection
from nnburst.service.wire.packets import FdBundle, Kind, Outgoing
from nnburst.service.wire.protocol import Done, Message, Side
from support.waiting import PATIENCE


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


class Answers:
    """A handler of calls. `handlers` has functions by name (``on_…``) that answer calls; other calls get `Done`."""

    def __init__(self, **handlers: Callable[[Any, FdBundle], Any]) -> None:
        self.handlers = handlers
        self.seen: list[Message] = []

    def __getattr__(self, name: str) -> Callable[[Any, FdBundle], Any]:
        if not name.startswith("on_"):
            raise AttributeError(name)

        def serve(message: Message, fds: FdBundle) -> Any:
            self.seen.append(message)
            return self.handlers[name](message, fds) if name in self.handlers else Done()

        return serve


@contextlib.contextmanager
def connected(
    client: object | None = None, service: object | None = None, **options: Any
) -> Iterator[tuple[Connection, Connection]]:
    """Yield the started client end and service end of one socket pair."""
    a, b = socket_pair()
    ends = (
        Connection(a, Side.CLIENT, client or Answers(), **options),
        Connection(b, Side.SERVICE, service or Answers(), **options),
    )
    for end in ends:
        end.start()
    try:
        yield ends
    finally:
        for end in ends:
            assert end.close(PATIENCE)


@contextlib.contextmanager
def raw_peer(side: Side, handler: object | None = None, **options: Any) -> Iterator[tuple[Connection, socket.socket]]:
    """Yield a started connection, and the socket at its other end."""
    a, b = socket_pair()
    end = Connection(a, side, handler or Answers(), **options)
    end.start()
    with b:
        try:
            yield end, b
        finally:
            assert end.close(PATIENCE)


def send(
    sock: socket.socket, kind: Kind, call_id: int, body: bytes, fds: Sequence[int], deadline: float | None
) -> None:
    """Send one message, as a `Connection` does.

    Raises:
        TimeoutError: The other end does not read.
    """
    message = Outgoing(kind, call_id, body, FdBundle.duplicate(fds))
    try:
        while True:
            try:
                return message.try_send(sock)
            except BlockingIOError:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not select.select([], [sock], [], left)[1]:
                    raise TimeoutError from None
    finally:
        message.close()
