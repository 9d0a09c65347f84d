"""What a service needs done outside of its sandbox: by a process beside it, which runs no models."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from ...errors import NNBurstError, error_for
from ...service import Claim, tell_manager

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LONGEST = 65536


class Beside(Struct, frozen=True):
    """What runs beside a service.

    Attributes:
        said: What is known of it, for the line of the service.
        renew: Called when the service has new models.
    """

    said: dict[str, Any]
    renew: Callable[[], None]


class Keeper:
    """Forks a process that starts what runs beside a service, starts it again, and ends it with the service.

    It also tells the service manager that the service is ready, and removes the name of one that ends in order. It
    does nothing else for who asks.

    Args:
        start: Runs in that process: starts what runs there, and has the stack end it.
        claim: The name of the service, if it has one.

    Attributes:
        said: What `start` has said.

    Raises:
        NNBurstError: What `start` raises.
    """

    def __init__(self, start: Callable[[contextlib.ExitStack], Beside], claim: Claim | None) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid == 0:
            try:
                self._sock.close()
                _keep(theirs, start, claim)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        try:
            answer = json.loads(self._sock.recv(_LONGEST) or b'{"error": [2, "it ended; see what it wrote above"]}')
        except BaseException:
            os.kill(pid, signal.SIGTERM)
            self.close()
            raise
        if "error" in answer:
            self._sock.close()
            status, text = answer["error"]
            raise error_for(status, text)
        self.said: dict[str, Any] = answer

    def renew(self) -> None:
        """Say that there are new models."""
        self._order(b"r")

    def tell_ready(self) -> None:
        """Have it tell the service manager that the service is ready."""
        self._order(b"y")

    def close(self) -> None:
        """End it, and wait for that. Idempotent."""
        with self._sock:
            self._order(b"e")
            with contextlib.suppress(OSError):
                self._sock.recv(1)

    def _order(self, order: bytes) -> None:
        try:
            self._sock.send(order)
        except OSError as error:
            if error.errno != errno.EBADF:  # closed
                _log.warning("the keeper of this service has ended: no metrics, no gateway, and its socket stays")


def _keep(sock: socket.socket, start: Callable[[contextlib.ExitStack], Beside], claim: Claim | None) -> None:
    """Live as long as the service does. A signal ends it while it starts; then the service alone does."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS[:2])
    if claim is not None:
        claim.abandon()
    with contextlib.ExitStack() as stack:
        try:
            beside = start(stack)
        except NNBurstError as error:
            sock.send(json.dumps({"error": [int(error.status), str(error)]}).encode())
            return
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        sock.send(json.dumps(beside.said).encode())
        orders = {b"r": beside.renew, b"y": tell_manager}
        while (order := sock.recv(1)) in orders:
            orders[order]()
        stack.close()
        if order and claim is not None:  # else it was killed, and the next owner of the name finds out
            claim.remove()
