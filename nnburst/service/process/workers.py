"""The worker processes of a shared service: one for all clients, others for single users or connections."""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._core.backoff import Backoff
from ..._core.errno import system
from ..._core.fds import FdSet, close_fds, wait_readable
from ..._core.leaving import LEAVING
from ..._core.threads import start_daemon
from ...cache.files import default_state_directory, make_directories
from ...cache.reasons import CacheRejected
from ...errors import DeviceUnavailable, NNBurstError, ResourceExhausted
from ...watch.page import Page, Row
from ...watch.reader import name_of_worker
from ...watch.stats import RowKind
from ...watch.usage import usage_of
from ..client.connection import ServiceConnection
from ..host.quotas import NO_LIMIT, PER_USER, Charge
from ..wire import protocol as calls
from ..wire.packets import Kind, Outgoing
from .cgroup import Group, own_groups
from .discovery import Peer, peer_pidfd
from .launch import is_of_functions
from .limited_log import forward_output

if TYPE_CHECKING:
    from .broker import Broker

_log = logging.getLogger(__name__)
_LOOK = 1.0
"""Seconds between two checks of the workers' use of resources."""
_ENDING = 0.1
"""Seconds between two checks whether a process has ended."""
_IDLE = 10.0
"""Seconds that a user's worker without connections waits for the next connection."""


@dataclass(eq=False)
class AcceptedClient:
    """An accepted connection. The broker keeps a copy of the socket, to tell the client that the worker has ended."""

    number: int
    sock: socket.socket
    peer: Peer
    charge: Charge
    worker: Worker | None = None
    is_dismissed: bool = False
    """True once the last message to the client has been sent."""
    until: float = 0.0
    """The time by which the client must have sent hello or, if dismissed, disconnected."""

    @property
    def has_gone(self) -> bool:
        """True if the peer has closed its end."""
        return bool(wait_readable([self.sock.fileno()], 0, events=0))

    def close(self) -> None:
        """Disconnect the client. Another thread closes the socket, because a close with unread messages may block."""
        self.charge.release()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if self.sock.fileno() >= 0:
            close_fds([self.sock.detach()])

    def send_last(self, message: calls.Message, kind: Kind = Kind.REQUEST, number: int = 0) -> None:
        """Send the last message, and stay connected: a close now could hide the message from the client."""
        self.is_dismissed = True
        with contextlib.suppress(OSError, NNBurstError):
            Outgoing(kind, number, calls.encode(message)).try_send(self.sock)


Key = int | AcceptedClient | None
"""The owner of a worker's models: a user, a connection, or None for the models that all clients share."""


class Worker:
    """A process that runs models.

    Only the broker's main thread calls methods, except `launch`, `remove_client` and `stop_accepting`.

    Attributes:
        uid: User whose models the process runs; None for the shared worker.
        what: Name of the process in messages.
        service: The connection to the process, once the process has started.
        group: Control group of the process, if any.
        clients: By number, the clients of the process. Before the process has started, they wait.
        born: The time when the process was started.
        idle_since: The time when the last client disconnected.
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
        """Start the process, and copy its log to the broker's log. Any thread may call it.

        Raises:
            NNBurstError: The process does not start, or the system has no free thread or descriptor.
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
            self.group = None if groups is None else groups.add_worker(service.pid, self.uid, quotas)
            self._row = self._pool.page.open(RowKind.PROCESS, "", client=(service.pid, self.uid or 0))
            limits = {"threads": quotas.process_threads, "fds": quotas.process_fds, "bytes": quotas.process_bytes}
            for name, most in {**limits, "processors": quotas.processors}.items() if self.uid is not None else ():
                self._count(f"most_{name}", most if most < NO_LIMIT else 0)
            self._count("most_log_lines", quotas.log_lines)
            log.add(system(os.pidfd_open, service.pid))
            arguments = log, self.what, quotas.log_lines, partial(self._count, "log_lines")
            self._log = start_daemon(forward_output, *arguments, name="nnburst-log", what="the log of a worker")
        except BaseException:
            self.hide()
            service.close()
            raise
        return service

    def _count(self, name: str, n: int = 1) -> None:
        if self._row is not None:
            self._row.count(name, n)

    def hide(self) -> None:
        """Remove the ending worker from the statistics. Idempotent."""
        if self._row is not None:
            self._row.close()

    # -- calls of the process --------------------------------------------------------------------------------------

    def remove_client(self, number: int, reason: str, end: Callable[[AcceptedClient, str], None] | None = None) -> None:
        """Record that a client has disconnected, or why it is not served. A second call is ignored."""
        self.idle_since = time.monotonic()
        if (client := self.clients.pop(number, None)) is not None:
            self._broker.post(partial(end or self._broker.end_client, client, reason) if reason else client.close)

    def stop_accepting(self) -> None:
        """Record that the process takes no more clients."""
        self._broker.post(partial(self._pool.retire, self))

    # -- the main thread -------------------------------------------------------------------------------------------

    def add_client(self, client: AcceptedClient) -> None:
        """Hand a client over to the process, or keep the client until the process has started."""
        self.clients[client.number] = client
        client.worker = self
        if self.service is not None:
            self._hand(self.service, client)

    def on_start(self, service: ServiceConnection) -> None:
        """Hand the waiting clients over to the started process."""
        self.service = service
        self.born = time.monotonic()
        service.link_to_death(lambda: self._broker.post(partial(self._pool.on_end, self)))
        for client in list(self.clients.values()):
            self._hand(service, client)

    def _hand(self, service: ServiceConnection, client: AcceptedClient) -> None:
        def failed(error: NNBurstError) -> None:
            if isinstance(error, ResourceExhausted):  # otherwise the process has ended, and `on_end` reports that
                self.remove_client(client.number, str(error), self._broker.refuse)

        pidfd = peer_pidfd(client.sock)
        fds = [client.sock.fileno(), *(() if pidfd is None else (pidfd,))]
        try:
            service.connection.call_without_answer(calls.TakeClient(client.number, pidfd is not None), fds, failed)
        except ResourceExhausted as error:
            failed(error)
        finally:
            close_fds(fds[1:])

    @property
    def counts_threads(self) -> bool:
        """True if the broker, not the kernel, limits the number of the process's threads."""
        return self.uid is not None and (self.group is None or "pids" not in self.group.held)

    def exceeded_limit(self) -> str:
        """Return a sentence about the limit that the process exceeds, or "".

        The number of threads comes from the kernel, because a hostile process would not report itself.
        """
        usage = None if self.service is None else usage_of(self.service.pid)
        most = self._pool.quotas.process_threads
        if usage is None or usage.threads <= most:  # it is None if the process ended or no descriptor is free
            return ""
        return (
            f"{self.what} has {usage.threads} threads, and may have {most} (nnburst serve --quota "
            "user.process_threads=N)"
        )

    def how_ended(self) -> str:
        assert self.service is not None
        ending = self.service.connection.ending
        why = "" if self.group is None else self.group.why_killed()
        if not why and ending.signal == signal.SIGKILL and (self.group is None or "memory" not in self.group.held):
            why = "if no program did it, the kernel did, for want of memory: see its log (dmesg)"
        return f"{self.what}: {ending.reason}" + (f"; {why}" if why else "")

    def wait_log(self) -> None:
        """Wait until the log of the ended process has been read."""
        if self._log is not None:
            self._log.join(LEAVING)


class Isolation(enum.Enum):
    """The rule by which clients that bring models share processes."""

    USER = "user"
    CONNECTION = "connection"
    NONE = "none"


class WorkerPool:
    """The workers of a service: one for all clients, and others for users or connections, started as needed.

    Only the broker's main thread uses it.

    Args:
        broker: The service's broker.
        start: Function that starts a worker: `start_child` with the options of all workers.
        name: Name of the service.
        devices: Names of devices. Function devices run only the operator's functions; others run clients' models,
            too.
        named: True if the shared worker serves named models.
        prepare: Function that publishes the named models in a shared worker that has started.
        isolation: The rule by which clients that bring models share processes.
        user_quotas: Quotas of a user that differ from `PER_USER`. In each worker, the user's connections share them.

    Raises:
        NNBurstError: The shared worker does not start, or a model cannot be published.

    Attributes:
        shared: The connection to the worker for all clients, which is restarted if it dies.
        runs_own: True if clients may bring models.
        groups: Control groups of the workers; None if the broker itself counts resources.
        quotas: Quotas of a user.
        page: Statistics page that lists the workers.
    """

    def __init__(
        self,
        broker: Broker,
        start: Callable[..., ServiceConnection],
        name: str,
        devices: Sequence[str],
        named: bool = False,
        prepare: Callable[[ServiceConnection], None] = lambda service: None,
        isolation: Isolation = Isolation.USER,
        user_quotas: Mapping[str, int] = {},
    ) -> None:
        self.broker, self.start, self._name, self._devices = broker, start, name, devices
        self._for_own = [device for device in devices if not is_of_functions(device)]
        self.runs_own = bool(self._for_own)
        self._named, self._prepare, self._isolation = named, prepare, isolation
        self.quotas = PER_USER.replace(user_quotas, of_user=True)
        self._user_quotas = dict(user_quotas)
        self.groups = own_groups()
        if "processors" in user_quotas and (self.groups is None or "cpu" not in self.groups.held):
            raise DeviceUnavailable(
                "--quota user.processors: the kernel limits that, and this service has no control group with the "
                "controller cpu; give it one (Delegate=yes in a systemd unit), or leave the quota out"
            )
        self.page = Page(name)
        self._next_look = 0.0
        self._pauses: dict[int | None, Backoff] = {}
        """The pause before the next start of a worker, by user."""
        shared = Worker(self, None)
        self._all: dict[Key, Worker] = {None: shared}
        self.shared = self._start(shared)
        shared.on_start(self.shared)

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._all.values()))

    def add_client(self, client: AcceptedClient, *, own: bool = False) -> None:
        """Hand a client to a worker, and start the worker if needed.

        If `own`, the client goes to the worker that `isolation` gives it; otherwise, to the shared worker.
        """
        key: Key = None
        if own and self._isolation is not Isolation.NONE:
            key = client.peer.uid if self._isolation is Isolation.USER else client
        if key not in self._all:
            self._start_later(key)
        self._all[key].add_client(client)

    def look(self) -> float:
        """End workers that are idle or exceed their limits. Return the time of the next check."""
        now, moments = time.monotonic(), [math.inf]
        is_time = now >= self._next_look
        if is_time:
            self._next_look = now + _LOOK
        for worker in self:
            if worker.counts_threads:
                moments.append(self._next_look)
                if is_time and (reason := worker.exceeded_limit()):
                    _log.error("%s", reason)
                    self.kill(worker, reason)
            if worker.key is not None and worker.service is not None and not worker.clients:
                is_of_connection = isinstance(worker.key, AcceptedClient)
                moments.append(worker.idle_since + (0.0 if is_of_connection else _IDLE))
                if now >= moments[-1] and self._remove(worker):
                    if not is_of_connection:  # its end says nothing about the user's other workers
                        self._pauses.pop(worker.uid, None)
                    worker.service.connection.hang_up(calls.Goodbye())
        if self.groups is not None and self.groups.sweep({worker.group for worker in self}):
            moments.append(now + _ENDING)
        return min(moments)

    def _start_later(self, key: Key) -> None:
        worker = self._all[key] = Worker(self, key)
        pause = self._pauses[worker.uid].left if worker.uid in self._pauses else 0.0

        def begin() -> None:
            try:
                time.sleep(pause)
                service = self._start(worker)
            except NNBurstError as error:
                self.broker.post(partial(self._on_start_failure, worker, str(error)))
            else:
                self.broker.post(partial(self._has_started, worker, service))

        try:
            start_daemon(begin, name="nnburst-worker", what="a worker")
        except ResourceExhausted as error:
            self.broker.post(partial(self._on_start_failure, worker, str(error)))

    def _start(self, worker: Worker) -> ServiceConnection:
        options: dict[str, Any] = {"user_quotas": self._user_quotas}
        if worker.uid is not None:
            state = None if worker.uid == os.geteuid() else _state_of(worker.uid)
            options |= {"own": True, "worker": name_of_worker(self._name, worker.uid), "state": state}
            return worker.launch(self._for_own, options)
        apart = () if self._isolation is Isolation.NONE else tuple(self._for_own)
        options |= {"worker": self._name, "named": self._named, "apart": apart}
        service = worker.launch(self._devices, options)
        try:
            self._prepare(service)
        except BaseException:
            service.close()
            raise
        return service

    def _has_started(self, worker: Worker, service: ServiceConnection) -> None:
        if worker.key is None:
            self.shared = service
            if self._named:
                self.broker.reload_models()  # files may have changed while the worker read them
        worker.on_start(service)

    def _on_start_failure(self, worker: Worker, reason: str) -> None:
        _log.error("%s: %s", worker.what, reason)
        self._part(worker, reason)

    def on_end(self, worker: Worker) -> None:
        """Tell a worker's clients that the worker has ended, unless the broker has ended it."""
        if self._all.get(worker.key) is worker or worker.clients:
            reason = worker.how_ended()
            _log.error("%s", reason)
            self._part(worker, reason)

    def kill(self, worker: Worker, reason: str = "") -> None:
        """End a worker, and tell its clients the reason. Do nothing to a worker that is still starting."""
        if worker.service is not None:
            self._part(worker, reason)
            worker.service.kill()

    def _part(self, worker: Worker, reason: str) -> None:
        self.retire(worker)
        for number in list(worker.clients):
            if (client := worker.clients.pop(number, None)) is not None:
                self.broker.end_client(client, reason)

    def retire(self, worker: Worker) -> None:
        """Hand no more clients to a worker. If it is the shared worker, start another."""
        if self._remove(worker):
            self._pauses.setdefault(worker.uid, Backoff()).begin_pause(time.monotonic() - worker.born)
            if worker.key is None:
                self._start_later(None)

    def _remove(self, worker: Worker) -> bool:
        """Remove a worker. Return True if it was in the pool."""
        if self._all.get(worker.key) is not worker:
            return False
        del self._all[worker.key]
        worker.hide()
        return True

    def close(self) -> None:
        """End the workers. They finish their runs, and tell their clients that the service was stopped. Idempotent."""
        workers = list(self)
        self._all.clear()
        services = [worker.service for worker in workers if worker.service is not None]
        for worker in workers:
            worker.hide()
        for service in services:
            service.connection.hang_up(calls.Goodbye())
        for service in services:
            service.connection.wait_ended()
            service.close()
        for worker in workers:
            worker.wait_log()
            for client in list(worker.clients.values()):
                client.close()
        if self.groups is not None:
            self.groups.sweep(set())
        self.page.close()


def _state_of(uid: int) -> str:
    """Create and return a separate state directory for another user's models."""
    try:
        directory = f"{os.path.abspath(default_state_directory())}-user-{uid}"
        make_directories(directory)
        return directory
    except (OSError, CacheRejected) as error:
        _log.warning("nothing is cached for user %d: %s", uid, error)
        return os.devnull
