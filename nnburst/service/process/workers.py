"""The processes of a shared service that run models, from the broker's side, and the clients that they have."""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..._core.backoff import Backoff
from ..._core.errno import system
from ..._core.fds import close_fds
from ..._core.threads import start
from ...cache import CacheRejected, default_state_directory
from ...cache.files import make_directories
from ...errors import DeviceUnavailable, InvalidArgument, NNBurstError, ResourceExhausted
from ...watch import Page, RowKind, name_of_worker
from ..client.connection import ServiceConnection
from ..host.quotas import PER_USER, Charge
from ..wire import protocol as calls
from ..wire.packets import EndOfStream, Kind, Outgoing, receive_number
from .account import Account
from .cgroup import own_groups
from .discovery import Peer, peer_pidfd
from .launch import is_of_functions

_log = logging.getLogger(__name__)
_ENDING = 0.1
"""Seconds until it is looked again whether a process has ended."""
_IDLE = 10.0
"""Seconds that the worker of a user without connections waits for the next one."""


class Isolation(enum.Enum):
    """Which clients share a process for the models that they bring."""

    USER = "user"
    CONNECTION = "connection"
    NONE = "none"


class _Broker(Protocol):
    """What workers ask of their broker."""

    def post(self, job: Callable[[], None]) -> None:
        """Have the main thread do something. Any thread."""

    def end_client(self, client: AcceptedClient, reason: str) -> None:
        """Tell a client why, and disconnect it."""

    def refuse(self, client: AcceptedClient, reason: str) -> None:
        """Answer a client's hello with the reason."""

    def kick(self, pid: int, reason: str, uid: int | None) -> int:
        """End the connections of a process or a user; return how many there were."""

    def change_models(self, name: str, unload: bool) -> None:
        """Load a named model again, or unload it. Any thread but the main one."""

    def reload_models(self) -> None:
        """Load all named models again whose files have changed. Any thread; does not wait."""


@dataclass(eq=False)
class AcceptedClient:
    """A connection that was accepted. The broker keeps its copy of the socket, to say what became of a worker."""

    number: int
    sock: socket.socket
    peer: Peer
    charge: Charge
    worker: Worker | None = None
    refusal: str = ""
    is_told: bool = False
    """Whether it knows of its end."""
    until: float = 0.0
    """When it must have said hello, to be answered with the refusal or handed to a worker; or have gone."""

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

    def notify(self, reason: str) -> None:
        """Tell it why it is disconnected. It then closes its end, which is awaited: else it might find that first."""
        self.is_told = True
        notice = Outgoing(Kind.REQUEST, 0, calls.encode(calls.EndNotice(reason=calls.sendable(reason))))
        with contextlib.suppress(OSError, NNBurstError):
            notice.try_send(self.sock)
        notice.close()

    def refuse(self) -> None:
        """Answer its hello with the refusal."""
        try:
            answer = Outgoing(
                Kind.ERROR,
                receive_number(self.sock),
                calls.encode(calls.error_reply(DeviceUnavailable(self.refusal))),
            )
            try:
                answer.try_send(self.sock)
            finally:
                answer.close()
        except (NNBurstError, calls.Malformed, EndOfStream, OSError):
            pass  # it is disconnected without an answer
        self.close()


_Key = int | AcceptedClient | None
"""Whose models a worker runs: those of a user, of a connection, or the named ones and functions, for all."""


class Worker:
    """A process that runs models, from the broker's side. The main thread alone touches it, but for `gone` and `kick`.

    Attributes:
        service: The process, once it has started.
        account: Of the process.
        clients: Those that were handed to it, or wait until it has started, by number.
        born: When it was started.
        idle_since: When the last of them went.
    """

    def __init__(self, workers: WorkerPool, key: _Key) -> None:
        self.key = key
        self.service: ServiceConnection | None = None
        self.clients: dict[int, AcceptedClient] = {}
        self.account: Account | None = None
        self.born, self.idle_since = math.inf, time.monotonic()
        self._reports: dict[int, str] = {}
        """What it has said of each client: the last, however fast it talks."""
        self._is_posted = False
        self._workers, self._broker = workers, workers.broker

    @property
    def uid(self) -> int | None:
        """Whose models it runs; None for those of the operator."""
        return self.key.peer.uid if isinstance(self.key, AcceptedClient) else self.key

    # -- calls of the process --------------------------------------------------------------------------------------

    def gone(self, number: int, reason: str) -> None:
        if number in self.clients:
            self._reports[number] = reason
            if not self._is_posted:
                self._is_posted = True
                self._broker.post(self._read)

    def _read(self) -> None:
        self._is_posted = False  # before: what is said from now on is posted again
        for number in list(self._reports):
            self._gone(number, self._reports.pop(number))

    def _gone(self, number: int, reason: str) -> None:
        client = self.clients.pop(number, None)
        self.idle_since = time.monotonic()
        if client is not None and reason:
            self._broker.end_client(client, reason)
        elif client is not None:
            client.close()

    def leaving(self) -> None:
        self._broker.post(partial(self._workers.bury, self))

    def kick(self, pid: int, reason: str, uid: int | None) -> int:
        if self.key is not None:  # a model of a client's own may have taken it over
            return 0
        found: Future[int] = Future()
        self._broker.post(lambda: found.set_result(self._broker.kick(pid, reason, uid)))
        return found.result()

    def load(self, name: str, unload: bool) -> None:
        if self.key is not None:
            raise InvalidArgument("only the worker of named models orders some")
        self._broker.change_models(name, unload)

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
        service.link_to_death(lambda: self._broker.post(partial(self._workers.ended, self)))
        for client in list(self.clients.values()):
            self._hand(service, client)

    def _hand(self, service: ServiceConnection, client: AcceptedClient) -> None:
        def failed(error: NNBurstError) -> None:
            if isinstance(error, ResourceExhausted):  # else the process has ended, which is told otherwise
                self._broker.post(partial(self._not_handed, client, str(error)))

        pidfd = peer_pidfd(client.sock)
        fds = [client.sock.fileno(), *(() if pidfd is None else (pidfd,))]
        try:
            service.connection.forget(calls.TakeClient(client.number, pidfd is not None), fds, failed)
        except ResourceExhausted as error:
            failed(error)
        finally:
            close_fds(fds[1:])

    def _not_handed(self, client: AcceptedClient, reason: str) -> None:
        if self.clients.pop(client.number, None) is not None:
            self.idle_since = time.monotonic()
            _log.warning("%s is refused: %s", client.peer, reason)
            self._broker.refuse(client, reason)


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
    """

    def __init__(
        self,
        broker: _Broker,
        start: Callable[..., ServiceConnection],
        name: str,
        devices: Sequence[str],
        named: bool,
        prepare: Callable[[ServiceConnection], None],
        isolation: Isolation,
        user_quotas: Mapping[str, int],
    ) -> None:
        self.broker, self._start, self._name, self._devices = broker, start, name, devices
        self._for_own = [device for device in devices if not is_of_functions(device)]
        self.runs_own = bool(self._for_own)
        self._named, self._prepare, self._isolation = named, prepare, isolation
        self._user_quotas = PER_USER.changed(user_quotas, of_user=True)
        self._options = [f"--user-quota={name}={number}" for name, number in user_quotas.items()]
        self.groups, self._are_ending = own_groups(), False
        if "processors" in user_quotas and (self.groups is None or "cpu" not in self.groups.held):
            raise DeviceUnavailable(
                "--quota user.processors: the kernel limits that, and this service has no control group with the "
                "controller cpu; give it one (Delegate=yes in a systemd unit), or leave the quota out"
            )
        self._page = Page(name)
        self._all: dict[_Key, Worker] = {}
        self._pauses: dict[int | None, Backoff] = {}
        """By user."""
        shared = self._all[None] = Worker(self, None)
        self.shared = self._started(shared)
        shared.started(self.shared)

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._all.values()))

    def take(self, client: AcceptedClient, *, own: bool = False) -> None:
        """Hand a client to the worker for all, or to the one for its own models."""
        key = client.peer.uid if self._isolation is Isolation.USER else client
        self._worker(key if own and self._isolation is not Isolation.NONE else None).take(client)

    @property
    def next_moment(self) -> float:
        """When `look` has something to do."""
        moments = [worker.idle_since + _IDLE for worker in self if self._is_idle(worker)]
        moments += [worker.account.next_look for worker in self if worker.account is not None]
        if self._are_ending:
            moments.append(time.monotonic() + _ENDING)
        return min(moments, default=math.inf)

    def look(self) -> None:
        """End those that take more than they may, and those that nobody needs."""
        self._end_greedy()
        self._end_idle()
        self._are_ending = self.groups is not None and self.groups.sweep()

    def _worker(self, key: _Key) -> Worker:
        """Return the worker for a key, which is started if need be."""
        worker = self._all.get(key)
        if worker is None:
            worker = self._all[key] = Worker(self, key)
            self._start_later(worker)
        return worker

    def _start_later(self, worker: Worker) -> None:
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
            start(threading.Thread(target=begin, name="nnburst-worker", daemon=True), "a worker")
        except ResourceExhausted as error:
            self._not_started(worker, str(error))

    def _started(self, worker: Worker) -> ServiceConnection:
        """Start the process of a worker."""
        uid = worker.uid
        if uid is not None:
            own = ["--own", f"--worker={name_of_worker(self._name, uid)}"]
            if uid != os.geteuid():
                own.append(f"--state={_state_of(uid)}")
            return self._process(worker, self._for_own, own)
        apart = [] if self._isolation is Isolation.NONE else [f"--apart={device}" for device in self._for_own]
        named = [f"--worker={self._name}", *["--named"] * self._named, *apart]
        service = self._process(worker, self._devices, named)
        try:
            self._prepare(service)
        except BaseException:
            service.close()
            raise
        return service

    def _process(self, worker: Worker, devices: Sequence[str], options: Sequence[str]) -> ServiceConnection:
        """Start a process whose log comes through this one."""
        reading, writing = system(os.pipe2, os.O_CLOEXEC)
        try:
            log = f"/proc/self/fd/{writing}"
            service = self._start(devices, more=[*self._options, *options], broker=worker, log=log)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        try:
            what = f"{self._what(worker)} (process {service.pid})"
            row = self._page.open(RowKind.PROCESS, "", client=(service.pid, worker.uid or 0))
            pid, uid, quotas = service.pid, worker.uid, self._user_quotas
            group = None if self.groups is None else self.groups.enter(pid, uid, quotas)
            worker.account = Account(pid, what, quotas, reading, row, has_limits=uid is not None, group=group)
        except BaseException:
            service.close()
            raise
        return service

    def _has_started(self, worker: Worker, service: ServiceConnection) -> None:
        if worker.key is None:
            self.shared = service
            if self._named:
                self.broker.reload_models()  # files may have changed while it read them
        worker.service = service
        worker.started(service)

    def _not_started(self, worker: Worker, reason: str) -> None:
        _log.error("%s: %s", self._what(worker), reason)
        self.bury(worker)
        for client in worker.clients.values():
            self.broker.refuse(client, reason)

    def ended(self, worker: Worker) -> None:
        """Tell its clients, if it is not this side that has ended it."""
        assert worker.service is not None
        if self._all.get(worker.key) is worker or worker.clients:
            reason = f"{self._what(worker)} (process {worker.service.pid}): {_how_ended(worker)}"
            _log.error("%s", reason)
            self.bury(worker)
            for client in worker.clients.values():
                self.broker.end_client(client, reason)

    def bury(self, worker: Worker) -> None:
        """Hand no more clients to a worker; the one that all share is started again."""
        if self._all.get(worker.key) is not worker:
            return
        del self._all[worker.key]
        if worker.account is not None:
            worker.account.close()
        self._pauses.setdefault(worker.uid, Backoff()).ended(time.monotonic() - worker.born)
        if worker.key is None:
            successor = self._all[None] = Worker(self, None)
            self._start_later(successor)

    def kill(self, worker: Worker) -> None:
        """End a worker whose clients know. One that is starting has run nothing of theirs, and ends when it is idle."""
        if worker.service is not None:
            self.bury(worker)
            worker.service.kill()

    def _end_greedy(self) -> None:
        for worker in self:
            if worker.account is not None and (reason := worker.account.look()):
                _log.error("%s", reason)
                for client in worker.clients.values():
                    self.broker.end_client(client, reason)
                worker.clients.clear()
                self.kill(worker)

    def _is_idle(self, worker: Worker) -> bool:
        return worker.key is not None and worker.service is not None and not worker.clients

    def _end_idle(self) -> None:
        now = time.monotonic()
        for worker in [each for each in self if self._is_idle(each)]:
            is_of_connection = isinstance(worker.key, AcceptedClient)
            if is_of_connection or now >= worker.idle_since + _IDLE:
                assert worker.service is not None
                assert worker.account is not None
                del self._all[worker.key]
                if not is_of_connection:  # whose end says nothing of the user's others
                    self._pauses.pop(worker.uid, None)
                worker.account.close()
                worker.service.connection.hang_up(calls.Goodbye())

    def close(self) -> None:
        """End them, which lets what runs finish and tell their clients. Idempotent."""
        workers = list(self)
        self._all.clear()
        services = [worker.service for worker in workers if worker.service is not None]
        accounts = [worker.account for worker in workers if worker.account is not None]
        for account in accounts:
            account.close()
        for service in services:
            service.connection.hang_up(calls.Goodbye())
        for service in services:
            service.connection.wait_ended()
            service.close()
        for account in accounts:
            account.close(wait=True)
        if self.groups is not None:
            self.groups.sweep()
        self._page.close()
        for worker in workers:
            for client in worker.clients.values():
                client.close()

    def _what(self, worker: Worker) -> str:
        return "the worker of all users" if worker.uid is None else f"the worker of user {worker.uid}"


def _how_ended(worker: Worker) -> str:
    """Say how one ended that this side has not."""
    assert worker.service is not None
    ending = worker.service.connection.ending
    group = None if worker.account is None else worker.account.group
    why = "" if group is None else group.why_killed()
    if not why and ending.signal == signal.SIGKILL and (group is None or "memory" not in group.held):
        why = "if no program did it, the kernel did, for want of memory: see its log (dmesg)"
    return f"{ending.reason}; {why}" if why else ending.reason


def _state_of(uid: int) -> str:
    """Make a trust store for the models of another user: beside this one's, since neither may reach the other's."""
    try:
        directory = f"{os.path.abspath(default_state_directory())}-user-{uid}"
        make_directories(directory)
        return directory
    except (OSError, CacheRejected) as error:
        _log.warning("nothing is cached for user %d: %s", uid, error)
        return os.devnull
