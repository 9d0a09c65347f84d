"""The processes of a shared service that run models: one for all, and those of users or connections."""

from __future__ import annotations

import enum
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._core.backoff import Backoff
from ..._core.threads import start_daemon
from ...cache import CacheRejected, default_state_directory
from ...cache.files import make_directories
from ...errors import DeviceUnavailable, NNBurstError, ResourceExhausted
from ...watch import Page, name_of_worker
from ..client.connection import ServiceConnection
from ..host.quotas import PER_USER
from ..wire import protocol as calls
from .cgroup import own_groups
from .launch import is_of_functions
from .worker import AcceptedClient, Key, Worker

if TYPE_CHECKING:
    from .broker import Broker

_log = logging.getLogger(__name__)
_LOOK = 1.0
"""Seconds from one look at what workers take to the next."""
_ENDING = 0.1
"""Seconds until it is looked again whether a process has ended."""
_IDLE = 10.0
"""Seconds that the worker of a user without connections waits for the next one."""


class Isolation(enum.Enum):
    """Which clients share a process for the models that they bring."""

    USER = "user"
    CONNECTION = "connection"
    NONE = "none"


class WorkerPool:
    """The processes of a service: one for all, and those of users or connections, started and ended as they are needed.

    The main thread of the broker alone calls it.

    Args:
        broker: Is told of what ends.
        start: Starts one: `start_child` with all but the options that differ from one to another.
        name: Of the service.
        devices: By name. Those of functions run what the operator has named; the others also models of clients.
        named: Names of models; see `prepare`.
        prepare: Called with the worker that all clients share, whenever one has started, to publish the models.
        isolation: Of models that clients bring.
        user_quotas: What is other than in `PER_USER` for all connections of a user together, in each worker.

    Attributes:
        shared: The worker that all clients share; another one if it has died.
        runs_own: Whether clients may bring models.
        groups: Where the kernel counts what they take; None if the broker does.
        quotas: Of a user.
        page: Where others see what they are.
    """

    def __init__(
        self,
        broker: Broker,
        start: Callable[..., ServiceConnection],
        name: str,
        devices: Sequence[str],
        named: bool,
        prepare: Callable[[ServiceConnection], None],
        isolation: Isolation,
        user_quotas: Mapping[str, int],
    ) -> None:
        self.broker, self.start, self._name, self._devices = broker, start, name, devices
        self._for_own = [device for device in devices if not is_of_functions(device)]
        self.runs_own = bool(self._for_own)
        self._named, self._prepare, self._isolation = named, prepare, isolation
        self.quotas = PER_USER.changed(user_quotas, of_user=True)
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
        """By user."""
        shared = Worker(self, None)
        self._all: dict[Key, Worker] = {None: shared}
        self.shared = self._started(shared)
        shared.started(self.shared)

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._all.values()))

    def take(self, client: AcceptedClient, *, own: bool = False) -> None:
        """Hand a client to the worker for all, or to the one for its own models, which is started if need be."""
        key: Key = None
        if own and self._isolation is not Isolation.NONE:
            key = client.peer.uid if self._isolation is Isolation.USER else client
        if key not in self._all:
            self._start_later(key)
        self._all[key].take(client)

    def look(self) -> float:
        """End those that take more than they may, and those that nobody needs. Returns when to look again."""
        now, moments = time.monotonic(), [math.inf]
        is_time = now >= self._next_look
        if is_time:
            self._next_look = now + _LOOK
        for worker in self:
            if worker.counts_threads:
                moments.append(self._next_look)
                if is_time and (reason := worker.excess()):
                    _log.error("%s", reason)
                    self.kill(worker, reason)
            if worker.key is not None and worker.service is not None and not worker.clients:
                is_of_connection = isinstance(worker.key, AcceptedClient)
                moments.append(worker.idle_since + (0.0 if is_of_connection else _IDLE))
                if now >= moments[-1] and self._remove(worker):
                    if not is_of_connection:  # whose end says nothing of the user's others
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
                service = self._started(worker)
            except NNBurstError as error:
                self.broker.post(partial(self._not_started, worker, str(error)))
            else:
                self.broker.post(partial(self._has_started, worker, service))

        try:
            start_daemon(begin, name="nnburst-worker", what="a worker")
        except ResourceExhausted as error:
            self.broker.post(partial(self._not_started, worker, str(error)))

    def _started(self, worker: Worker) -> ServiceConnection:
        """Start the process of a worker."""
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
                self.broker.reload_models()  # files may have changed while it read them
        worker.started(service)

    def _not_started(self, worker: Worker, reason: str) -> None:
        _log.error("%s: %s", worker.what, reason)
        self._part(worker, reason)

    def ended(self, worker: Worker) -> None:
        """Tell its clients, if it is not this side that has ended it."""
        if self._all.get(worker.key) is worker or worker.clients:
            reason = worker.how_ended()
            _log.error("%s", reason)
            self._part(worker, reason)

    def kill(self, worker: Worker, reason: str = "") -> None:
        """End a worker, and tell its clients why. One that starts has run nothing, and ends when it is idle."""
        if worker.service is not None:
            self._part(worker, reason)
            worker.service.kill()

    def _part(self, worker: Worker, reason: str) -> None:
        self.bury(worker)
        for number in list(worker.clients):
            if (client := worker.clients.pop(number, None)) is not None:  # it has not gone meanwhile
                self.broker.end_client(client, reason)

    def bury(self, worker: Worker) -> None:
        """Hand no more clients to a worker; the one that all share is started again."""
        if self._remove(worker):
            self._pauses.setdefault(worker.uid, Backoff()).ended(time.monotonic() - worker.born)
            if worker.key is None:
                self._start_later(None)

    def _remove(self, worker: Worker) -> bool:
        """Have it no more. Returns whether it was there."""
        if self._all.get(worker.key) is not worker:
            return False
        del self._all[worker.key]
        worker.hide()
        return True

    def close(self) -> None:
        """End them, which lets what runs finish and tell their clients. Idempotent."""
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
    """Make a trust store for the models of another user: beside this one's, since neither may reach the other's."""
    try:
        directory = f"{os.path.abspath(default_state_directory())}-user-{uid}"
        make_directories(directory)
        return directory
    except (OSError, CacheRejected) as error:
        _log.warning("nothing is cached for user %d: %s", uid, error)
        return os.devnull
