"""A process of a shared service that runs models, from the broker's side, and the clients that it has."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._core.errno import system
from ..._core.fds import FdSet, close_fds
from ..._core.leaving import LEAVING
from ..._core.threads import start_daemon
from ...errors import NNBurstError, ResourceExhausted
from ...watch import Row, RowKind, usage_of
from ..host.quotas import NO_LIMIT, Charge
from ..wire import protocol as calls
from ..wire.packets import Kind, Outgoing
from .discovery import Peer, peer_pidfd
from .limited_log import hand_on

if TYPE_CHECKING:
    from ..client.connection import ServiceConnection
    from .cgroup import Group
    from .workers import WorkerPool


@dataclass(eq=False)
class AcceptedClient:
    """A connection that was accepted. The broker keeps its copy of the socket, to say what became of a worker."""

    number: int
    sock: socket.socket
    peer: Peer
    charge: Charge
    worker: Worker | None = None
    is_told: bool = False
    """Whether it knows of its end."""
    until: float = 0.0
    """When it must have said hello, to be handed to a worker; or have gone."""

    @property
    def has_gone(self) -> bool:
        """Whether its peer has closed its end."""
        poll = select.poll()
        poll.register(self.sock, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Disconnect it, not in place: what it has sent may linger, and ends with it."""
        self.charge.release()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if self.sock.fileno() >= 0:
            close_fds([self.sock.detach()])

    def tell(self, message: calls.Message, kind: Kind = Kind.REQUEST, number: int = 0) -> None:
        """Send it the last message. It then closes its end, which is awaited: else it might find that first."""
        self.is_told = True
        with contextlib.suppress(OSError, NNBurstError):
            Outgoing(kind, number, calls.encode(message)).try_send(self.sock)


Key = int | AcceptedClient | None
"""Whose models a worker runs: those of a user, of a connection, or the named ones and functions, for all."""


class Worker:
    """A process that runs models. The main thread alone touches it, but for `start` and what the process calls.

    Attributes:
        uid: Whose models it runs; None for those of the operator.
        what: It is, for people.
        service: The process, once it has started.
        group: Where the kernel counts what it takes, if anywhere.
        clients: Those that were handed to it, or wait until it has started, by number.
        born: When it was started.
        idle_since: When the last of them went.
    """

    def __init__(self, pool: WorkerPool, key: Key) -> None:
        self.key = key
        self.uid = key.peer.uid if isinstance(key, AcceptedClient) else key
        self.what = "the worker of all users" if self.uid is None else f"the worker of user {self.uid}"
        self.service: ServiceConnection | None = None
        self.group: Group | None = None
        self.clients: dict[int, AcceptedClient] = {}
        self.born, self.idle_since = math.inf, time.monotonic()
        self._row: Row | None = None
        self._log: threading.Thread | None = None
        self._pool, self._broker = pool, pool.broker

    def launch(self, devices: Sequence[str], options: Mapping[str, Any]) -> ServiceConnection:
        """Start the process, whose log comes through this one. In any thread.

        Raises:
            NNBurstError: It does not start, or there is no thread or descriptor for it.
        """
        quotas, groups = self._pool.quotas, self._pool.groups
        reading, writing = system(os.pipe2, os.O_CLOEXEC)
        log = FdSet((reading,))
        try:
            service = self._pool.start(devices, more=options, broker=self, log=f"/proc/self/fd/{writing}")
        finally:
            os.close(writing)
        try:
            self.what += f" (process {service.pid})"
            self.group = None if groups is None else groups.enter(service.pid, self.uid, quotas)
            self._row = self._pool.page.open(RowKind.PROCESS, "", client=(service.pid, self.uid or 0))
            limits = {"threads": quotas.process_threads, "fds": quotas.process_fds, "bytes": quotas.process_bytes}
            for name, most in {**limits, "processors": quotas.processors}.items() if self.uid is not None else ():
                self._count(f"most_{name}", most if most < NO_LIMIT else 0)
            self._count("most_log_lines", quotas.log_lines)
            log.add(system(os.pidfd_open, service.pid))
            arguments = log, self.what, quotas.log_lines, partial(self._count, "log_lines")
            self._log = start_daemon(hand_on, *arguments, name="nnburst-log", what="the log of a worker")
        except BaseException:
            self.hide()
            service.close()
            raise
        return service

    def _count(self, name: str, n: int = 1) -> None:
        if self._row is not None:
            self._row.count(name, n)

    def hide(self) -> None:
        """Show it to others no more, which ends. Idempotent."""
        if self._row is not None:
            self._row.close()

    # -- calls of the process --------------------------------------------------------------------------------------

    def gone(self, number: int, reason: str, end: Callable[[AcceptedClient, str], None] | None = None) -> None:
        """A client that was handed over has gone, or is not served for a reason. What it says again counts no more."""
        self.idle_since = time.monotonic()
        if (client := self.clients.pop(number, None)) is not None:
            self._broker.post(partial(end or self._broker.end_client, client, reason) if reason else client.close)

    def leaving(self) -> None:
        """It takes no more clients."""
        self._broker.post(partial(self._pool.bury, self))

    # -- the main thread -------------------------------------------------------------------------------------------

    def take(self, client: AcceptedClient) -> None:
        """Hand a client over, or have it wait."""
        self.clients[client.number] = client
        client.worker = self
        if self.service is not None:
            self._hand(self.service, client)

    def started(self, service: ServiceConnection) -> None:
        """Hand over those that wait."""
        self.service = service
        self.born = time.monotonic()
        service.link_to_death(lambda: self._broker.post(partial(self._pool.ended, self)))
        for client in list(self.clients.values()):
            self._hand(service, client)

    def _hand(self, service: ServiceConnection, client: AcceptedClient) -> None:
        def failed(error: NNBurstError) -> None:
            if isinstance(error, ResourceExhausted):  # else the process has ended, which is told otherwise
                self.gone(client.number, str(error), self._broker.refuse)

        pidfd = peer_pidfd(client.sock)
        fds = [client.sock.fileno(), *(() if pidfd is None else (pidfd,))]
        try:
            service.connection.forget(calls.TakeClient(client.number, pidfd is not None), fds, failed)
        except ResourceExhausted as error:
            failed(error)
        finally:
            close_fds(fds[1:])

    @property
    def counts_threads(self) -> bool:
        """Whether its threads have a limit that the kernel does not keep."""
        return self.uid is not None and (self.group is None or "pids" not in self.group.held)

    def excess(self) -> str:
        """Return why the process is to be ended, or nothing.

        What the kernel counts: a worker that a model has taken over would not count itself.
        """
        usage = None if self.service is None else usage_of(self.service.pid)
        most = self._pool.quotas.process_threads
        if usage is None or usage.threads <= most:  # or it has gone, or there are no descriptors to look with
            return ""
        return (
            f"{self.what} has {usage.threads} threads, and may have {most} (nnburst serve --quota "
            "user.process_threads=N)"
        )

    def how_ended(self) -> str:
        """Say how the process ended that this side has not."""
        assert self.service is not None
        ending = self.service.connection.ending
        why = "" if self.group is None else self.group.why_killed()
        if not why and ending.signal == signal.SIGKILL and (self.group is None or "memory" not in self.group.held):
            why = "if no program did it, the kernel did, for want of memory: see its log (dmesg)"
        return f"{self.what}: {ending.reason}" + (f"; {why}" if why else "")

    def wait_log(self) -> None:
        """Wait for the last words of the process, which has ended."""
        if self._log is not None:
            self._log.join(LEAVING)
