"""The service's side of the control plane: devices, and the objects of each connection."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..._core.deadline import Deadline
from ..._core.fds import FdSet
from ..._core.leaving import LEAVING
from ...burst import ListenerGroup
from ...devices import Device, check_device
from ...errors import BadState, GeneralFailure, InvalidArgument, NNBurstError, ResourceExhausted
from ...model import Priority
from ...watch import Page
from ..connection.transport import Connection
from ..process.discovery import Peer, peer_of
from ..wire import cache_messages as caching
from ..wire import protocol as calls
from ..wire.packets import FdBundle
from ..wire.values import Message, Sandbox
from . import buffers, bursts, fenced, models
from .client import Client, Offer
from .hosted import HostedModel
from .quotas import PER_USER, Charge, Ledger, Quotas

if TYPE_CHECKING:
    from .faults import FaultPoints

_log = logging.getLogger(__name__)


class ServiceHost:
    """Serves devices to any number of connections.

    Args:
        devices: What clients see, in this order. The host closes them.
        quotas: What one connection may own.
        user_quotas: What all connections of one user may own.
        page: Where it counts what it does; closed by the host. None: nowhere.
        workers: Calls of one connection that are served at the same time, of those that compute and of the others.
        listeners: Serve the bursts of all connections, which the host closes; None for a thread for each burst.
        max_run: Seconds that a run may take; None for no limit.
        faults: What its client may order; None for nothing.
        sandbox: What keeps this process in, which clients are told.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        quotas: Quotas | None = None,
        user_quotas: Quotas = PER_USER,
        page: Page | None = None,
        workers: int = 8,
        listeners: ListenerGroup | None = None,
        max_run: float | None = None,
        faults: FaultPoints | None = None,
        sandbox: Sandbox = Sandbox("off"),
    ) -> None:
        self.offer = Offer(tuple(filter(_is_usable, devices)), page, max_run, faults, sandbox)
        self.listeners = listeners
        self.quotas = quotas or Quotas()
        self._user_quotas = user_quotas
        self._users: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()
        self._workers = workers
        self._lock = threading.Lock()
        self._idle_listeners: set[Callable[[], None]] = set()
        self._connections: set[HostedConnection] = set()
        self._ending: list[HostedConnection] = []  # released, but their reader thread has not returned yet
        self._closed = False

    def serve(
        self, sock: socket.socket, *, peer_pidfd: int | None = None, hello_timeout: float | None = None
    ) -> HostedConnection:
        """Serve one client, in threads of their own, until it goes.

        Args:
            sock: A connected SOCK_SEQPACKET socket; the host owns it.
            peer_pidfd: pidfd of the client's process, to notice its death for sure; the host owns it.
            hello_timeout: Seconds that the client has to say hello; None for no limit.

        Raises:
            BadState: The host is closed.
            ResourceExhausted: The system has no thread for another client.
        """
        pidfd = FdSet(() if peer_pidfd is None else (peer_pidfd,))  # owned also if this fails
        with self._lock:
            if self._closed:
                raise BadState("the service host is closed")
            peer = peer_of(sock)
            user = self._users.setdefault(peer.uid, Ledger(self._user_quotas, f"user {peer.uid}"))
            charge = user.charge(connections=1)
            ledger = Ledger(self.quotas, above=user)
            try:
                hosted = HostedConnection(self, sock, peer, pidfd, self._workers, ledger, charge, hello_timeout)
            except BaseException:
                charge.release()
                raise
            self._connections.add(hosted)
            try:
                hosted.connection.start()
                return hosted
            except ResourceExhausted as error:
                failure = error
        hosted.close()
        raise failure

    @property
    def connections(self) -> tuple[HostedConnection, ...]:
        """The connections that have not ended."""
        with self._lock:
            return tuple(self._connections)

    def end_clients(self, pid: int, reason: str) -> int:
        """End the connections of a process and what runs for it, as if it had gone. Does not wait.

        Args:
            pid: Of the process.
            reason: What it is told.

        Returns:
            How many connections it has.
        """
        found = [hosted for hosted in self.connections if hosted.client_pid == pid]
        for hosted in found:
            hosted.end(reason)
        return len(found)

    def when_idle(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, in some thread, each time that the last connection has ended. Returns what unlinks it."""
        with self._lock:
            self._idle_listeners.add(listener)
        return lambda: self._idle_listeners.discard(listener)

    def forget(self, hosted: HostedConnection) -> None:
        """Called by a connection that has ended, in its reader thread."""
        with self._lock:
            self._connections.discard(hosted)
            to_tell = () if self._connections else tuple(self._idle_listeners)
            self._ending = [other for other in self._ending if not other.wait_ended(0)]
            self._ending.append(hosted)
        for listener in to_tell:
            listener()

    def close(self, reason: str = "") -> None:
        """End all connections, release what they own, close the devices. Idempotent.

        Args:
            reason: What clients are told once their executions that run are finished, as far as the time of leaving
                allows; empty for nothing: executions of several steps end between two of them then.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            all_connections = [*self._connections, *self._ending]
        if reason:
            for hosted in all_connections:
                hosted.objects.hang_up()
            Deadline.after(LEAVING).call(self._finish, all_connections)
        for hosted in all_connections:
            hosted.connection.hang_up(calls.EndNotice(reason=reason) if reason else None)
        for hosted in all_connections:
            hosted.close()
        if self.listeners is not None:
            Deadline.after(LEAVING).call(self.listeners.close)
        for device in self.offer.devices:
            device.close()
        if self.offer.page is not None:
            self.offer.page.close()

    @staticmethod
    def _finish(connections: list[HostedConnection]) -> None:
        """What runs is finished before its client hears of the end. The time that there is, is that of all clients."""
        for hosted in connections:
            hosted.objects.close()


class HostedConnection(Client):
    """The connection of one client. A worker thread serves each call by its ``on_*``, the function of its subject."""

    def __init__(
        self,
        host: ServiceHost,
        sock: socket.socket,
        peer: Peer,
        peer_pidfd: FdSet,
        workers: int,
        ledger: Ledger,
        charge: Charge,
        hello_timeout: float | None,
    ) -> None:
        super().__init__(host.offer, ledger, None if host.listeners is None else host.listeners.flow(), peer)
        self._host = host
        self._charge = charge
        self._greeted = False
        self.connection = Connection(
            sock,
            calls.Side.SERVICE,
            self,
            peer_pidfd=peer_pidfd,
            workers=workers,
            hello_timeout=hello_timeout,
            on_end=lambda seconds: self._release_all(),
            name="nnburst-service",
        )

    @property
    def client_pid(self) -> int:
        """Process id of the client; 0 if it is in another pid namespace."""
        return self.peer[0]

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the client is gone and its objects are released."""
        return self.connection.wait_ended(timeout)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.connection.close()

    def end(self, reason: str) -> None:
        """Have the connection end, and what runs for its client; waits for neither."""
        self.objects.hang_up()
        self.objects.leave()
        self.connection.hang_up(calls.EndNotice(reason=reason))

    def _release_all(self) -> None:
        self.objects.leave()
        self.objects.close()
        for hosted in self.fenced.copy():
            hosted.cancel()
        self._charge.release()
        self.flow = None
        self._host.forget(self)

    # -- serving -------------------------------------------------------------------------------------------------------

    def admit(self, call: calls.Call) -> None:
        """Nothing is served before hello; a fault that was ordered happens first."""
        if not self._greeted and call.request is not calls.Hello:
            raise calls.Malformed(f"{call.name} before hello")
        if self.offer.faults is not None:
            self.offer.faults.admit(call)

    def rank(self, message: Message) -> int:
        """Compilations and executions that wait for a thread get it by priority; calls that have none come first."""
        if isinstance(message, caching.PrepareModel):
            return message.job.priority
        if isinstance(message, caching.PrepareModelFromCache):
            return message.cache.priority
        if isinstance(message, calls.Execute):
            model = self.objects.find(message.prepared_model, HostedModel)
            return Priority.LOW if model is None else model.priority
        return Priority.HIGH + 1

    def on_hello(self, message: calls.Hello, fds: FdBundle) -> calls.HelloReply:
        """Compare versions."""
        if message.version[0] != calls.VERSION[0]:
            raise GeneralFailure(
                f"the client speaks version {_dotted(message.version)} of the control protocol and the service "
                f"{_dotted(calls.VERSION)}: run the same nnburst on both sides"
            )
        self._greeted = True
        self.connection.greet(message.version)
        box = self.offer.sandbox if message.version >= (2, 5) else None
        return calls.HelloReply(version=calls.VERSION, pid=os.getpid(), sandbox=box)

    def on_end_clients(self, message: calls.EndClients, fds: FdBundle) -> calls.EndClientsReply:
        """End another client, for who may end the service, too."""
        uid = self.peer[1]
        if uid not in (0, os.geteuid()):
            raise InvalidArgument(
                f"user {uid} may not end clients of this service: user {os.geteuid()}, who runs it, may, and root"
            )
        reason = f"for process {message.pid} alone, by order of user {uid} (nnburst kick)"
        return calls.EndClientsReply(self._host.end_clients(message.pid, reason))

    def on_release(self, message: calls.Release, fds: FdBundle) -> calls.Done:
        """Let go of an object."""
        self.objects.remove(message.object)
        return calls.Done()

    def on_goodbye(self, message: calls.Goodbye, fds: FdBundle) -> calls.Done:
        """Release everything before the client closes its end."""
        self.objects.close()
        return calls.Done()


for _call, _subject in itertools.product(calls.CALLS, (models, bursts, buffers, fenced)):
    if _function := getattr(_subject, _call.handler, None):
        setattr(HostedConnection, _call.handler, _function)


def _is_usable(device: Device) -> bool:
    """Whether a device may be offered; one that is not is left out, the others are not affected."""
    try:
        check_device(device)
    except NNBurstError as error:
        _log.warning("a device is not offered: %s", error)
        return False
    return True


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
