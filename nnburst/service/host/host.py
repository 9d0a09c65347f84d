"""The devices of a service, the service's clients, and the clients' objects."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..._core.deadline import Deadline
from ..._core.fds import FdSet
from ..._core.leaving import LEAVING
from ...burst.server.group import ListenerGroup
from ...devices.deadline import call_at
from ...devices.interfaces import Device
from ...devices.resilient import check_device
from ...errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    GeneralFailure,
    InvalidArgument,
    NNBurstError,
    ResourceExhausted,
)
from ...memory.staging import check_pools
from ...model.types import Model, Priority, Request
from ...watch.page import Page, Row, make_private_row
from ...watch.stats import RowKind
from ..connection.transport import Connection
from ..process.discovery import Peer, peer_of
from ..wire import protocol as calls
from ..wire.marshal import close_all, model_from_wire, request_from_wire, total_size
from ..wire.packets import FdBundle
from ..wire.protocol import Message, Sandbox, WireMemory, WireModel, WireRequest
from . import handlers
from .handlers import HostedFenced, HostedModel
from .object_table import ObjectTable
from .quotas import PER_USER, UNLIMITED, Charge, Ledger, Quotas

if TYPE_CHECKING:
    from ...burst.interfaces import BurstContext
    from .faults import FaultPoints

_log = logging.getLogger(__name__)
_LAST_WORDS = 0.1
"""Seconds to tell clients why the service ends."""


class ServiceHost:
    """A server of devices for any number of connections.

    Args:
        devices: Devices that clients see, in this order. The host closes them.
        quotas: Limits of one connection.
        user_quotas: Limits of all connections of one user.
        page: The statistics page, closed by the host; None for no statistics.
        workers: Maximum number of computing calls that one connection runs at once. Other calls have an equal limit.
        listeners: Threads for the bursts of all connections, closed by the host; None for a thread for each burst.
        max_run: Seconds that one run may take; None for no limit.
        max_compile: Seconds that reading and compiling a client's model may take. If they take longer, this process
            ends. None for no limit.
        faults: The faults that a test has ordered for this service; None outside tests.
        sandbox: The sandbox of this process, for clients to see.
        apart: Devices that run only named models in this process. Clients' own models use another process.
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
        max_compile: float | None = None,
        faults: FaultPoints | None = None,
        sandbox: Sandbox = Sandbox("off"),
        apart: Collection[Device] = (),
    ) -> None:
        usable = tuple(filter(_is_usable, devices))
        self.devices, self.page, self.sandbox, self.faults = usable, page, sandbox, faults
        self.max_run, self.max_compile = max_run, max_compile
        self.apart = frozenset(number for number, device in enumerate(usable) if device in apart)
        self.listeners = listeners
        self.quotas = quotas or Quotas()
        self._user_quotas = user_quotas
        self._users: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()
        self._workers = workers
        self._lock = threading.Lock()
        self._connections: set[Client] = set()
        self._ending: list[Client] = []  # they are released, but their reader threads still run
        self._closed = False
        self._last_words = ""

    def serve(
        self,
        sock: socket.socket,
        *,
        peer_pidfd: int | None = None,
        on_end: Callable[[], None] = lambda: None,
        is_broker: bool = False,
    ) -> Client:
        """Start threads that serve one client until it disconnects.

        Args:
            sock: A connected SOCK_SEQPACKET socket; the host owns it.
            peer_pidfd: A pidfd of the client's process, to notice its death; the host owns the pidfd.
            on_end: Called when the client has disconnected and its objects are released.
            is_broker: True if the client is the broker, which hands over other clients and has no quotas.

        Raises:
            BadState: The host is closed.
            ResourceExhausted: The system cannot start a thread.
        """
        pidfd = FdSet(() if peer_pidfd is None else (peer_pidfd,))  # a failure closes it, too
        with self._lock:
            if self._closed:
                raise BadState("the service host is closed")
            peer = peer_of(sock)
            user = self._users.setdefault(peer.uid, Ledger(self._user_quotas, f"user {peer.uid}"))
            page = None if is_broker else self.page
            row = None if page is None else page.open(RowKind.CLIENT, "", client=(peer.pid, peer.uid))
            ledger = Ledger(UNLIMITED) if is_broker else Ledger(self.quotas, above=user, row=row)
            try:
                hosted = Client(self, sock, peer, pidfd, self._workers, ledger, on_end, is_broker)
            except BaseException:
                ledger.close()
                raise
            self._connections.add(hosted)
            try:
                hosted.connection.start()
                return hosted
            except ResourceExhausted as error:
                failure = error
        hosted.connection.close()
        raise failure

    @property
    def connections(self) -> tuple[Client, ...]:
        with self._lock:
            return tuple(self._connections)

    def end_process(self, reason: str) -> None:
        """Tell the clients the reason, then end this process, even if it is busy. Does not return."""
        _log.error("%s", reason)
        self._last_words = reason
        for is_broker in (True, False):  # the broker is told first, so that it hands over no more clients
            for hosted in self.connections:
                if hosted.is_broker is is_broker:
                    hosted.connection.hang_up(calls.EndNotice(reason=reason))
            time.sleep(_LAST_WORDS)
        os._exit(1)

    def remove(self, hosted: Client) -> None:
        """Remove a connection that has ended. Called in that connection's owner thread."""
        with self._lock:
            self._connections.discard(hosted)
            self._ending = [other for other in self._ending if not other.connection.wait_ended(0)]
            self._ending.append(hosted)

    def close(self, reason: str = "") -> None:
        """End all connections, release their objects, and close the devices. Idempotent.

        Args:
            reason: Reason for the clients. It is sent once the running executions have finished, or at the time limit
                of closing. Without a reason, nothing is sent, and an execution of several steps stops after its current
                step.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            all_connections = [*self._connections, *self._ending]
        reason = self._last_words or reason
        if reason:
            for hosted in all_connections:
                hosted.objects.hang_up()
            Deadline.after(LEAVING).call(self._finish, all_connections)
        for hosted in all_connections:
            hosted.connection.hang_up(calls.EndNotice(reason=reason) if reason else None)
        for hosted in all_connections:
            hosted.connection.close()
        if self.listeners is not None:
            Deadline.after(LEAVING).call(self.listeners.close)
        for device in self.devices:
            device.close()
        if self.page is not None:
            self.page.close()

    @staticmethod
    def _finish(connections: list[Client]) -> None:
        """Wait for the running executions of all clients."""
        for hosted in connections:
            hosted.objects.close()


class Client:
    """A client of the service, with its connection, rights and objects.

    The methods and functions named ``on_*`` serve calls, in worker threads.

    Attributes:
        flow: The account of the client's processor time; None once the client has disconnected, or if each burst has
            its own thread.
        buffer_ids: Ids of the client's buffers. The client may use no other buffers.
        bursts: The client's open bursts.
        fenced: Fenced executions that have not ended.
        peer: The client's process id (0 if in another pid namespace) and user.
        is_broker: True for the broker of this worker process.
    """

    def __init__(
        self,
        host: ServiceHost,
        sock: socket.socket,
        peer: Peer,
        peer_pidfd: FdSet,
        workers: int,
        ledger: Ledger,
        on_end: Callable[[], None],
        is_broker: bool,
    ) -> None:
        self.host, self.ledger, self.is_broker = host, ledger, is_broker
        self.flow = None if host.listeners is None else host.listeners.flow()
        self.objects = ObjectTable(self.account)
        self.buffer_ids: set[int] = set()
        self.fenced: set[HostedFenced] = set()
        self.bursts: set[BurstContext] = set()
        self.peer = peer.pid, peer.uid
        self.same_user = peer.uid == os.geteuid()
        self._on_end = on_end
        self._greeted = False
        self.connection = Connection(
            sock,
            calls.Side.SERVICE,
            self,
            peer_pidfd=peer_pidfd,
            workers=workers,
            on_end=self._release_all,
            name="nnburst-service",
            peer=str(peer),
        )

    def _release_all(self) -> None:
        self.objects.detach_client()
        self.objects.close()
        for hosted in self.fenced.copy():
            hosted.cancel()
        self.connection.linger()
        self.ledger.close()
        self.flow = None
        self.host.remove(self)
        self._on_end()

    # -- what its calls ask for ----------------------------------------------------------------------------------------

    def account(self, nbytes: int, n_fds: int = 0) -> Callable[[], None]:
        """Charge working memory, and return a function that releases the charge.

        If the quota would be exceeded, first free memory that is kept for later runs.
        """
        try:
            return self.ledger.charge(working_bytes=nbytes, fds=n_fds).release
        except ResourceExhausted:
            for context in tuple(self.bursts):
                context.forget_plans()
            return self.ledger.charge(working_bytes=nbytes, fds=n_fds).release

    charge_answer = account

    def charge_for(self, pools: Sequence[WireMemory], fds: FdBundle, **more: int) -> Charge:
        return self.ledger.charge(mapped_bytes=total_size(pools), fds=len(fds), **more)

    def model(self, stack: contextlib.ExitStack, wire: WireModel, fds: FdBundle, **more: int) -> Model:
        """Return the model of a message. The stack closes the model's pools."""
        stack.enter_context(self.charge_for(wire.pools, fds, **more))
        model = model_from_wire(wire, fds, self.same_user)
        stack.callback(close_all, model.pools)
        return model

    def request(self, stack: contextlib.ExitStack, wire: WireRequest, fds: FdBundle) -> Request:
        """Return the request of a message. The stack closes the request's memories."""
        stack.enter_context(self.charge_for(wire.pools, fds))
        request = request_from_wire(wire, fds, self.buffer_ids, self.same_user)
        stack.callback(close_all, request.pools)
        check_pools(request.pools, "request")
        return request

    def limit_compile_time(self) -> contextlib.AbstractContextManager[None]:
        """Limit the time of reading and compiling a model. The operator's models, from the broker, have no limit."""
        if self.host.max_compile is None or self.is_broker:
            return contextlib.nullcontext()
        return call_at(Deadline.after(self.host.max_compile).at_ns, self.end_overdue)

    def require_broker(self) -> None:
        if not self.is_broker:
            raise InvalidArgument("only the broker of a service may ask that of its workers")

    def device(self, number: int) -> Device:
        if number >= len(self.host.devices):
            raise DeviceUnavailable(f"there is no device {number}: this service has {len(self.host.devices)}")
        if number in self.host.apart and not self.is_broker:
            raise DeviceUnavailable(
                f"{self.host.devices[number].name} runs models of a client's own in a process of its user's: run the "
                "same nnburst on both sides"
            )
        return self.host.devices[number]

    def open_row(self, kind: RowKind, label: str = "", parent: Row | None = None) -> Row:
        """Return a row of the statistics page, or a private row if the page is full."""
        page = self.host.page
        return (page and page.open(kind, label, parent or page.service, self.peer)) or make_private_row()

    # -- serving -------------------------------------------------------------------------------------------------------

    def admit(self, call: calls.Call) -> None:
        """Refuse a call that comes before `Hello`. Cause the faults that a test has ordered for the call."""
        if not self._greeted and call.request is not calls.Hello:
            raise calls.Malformed(f"{call.name} before hello")
        if self.host.faults is not None:
            self.host.faults.admit(call)

    def rank(self, message: Message) -> int:
        """Return the rank of a waiting call: calls without a priority rank first, others by priority."""
        if isinstance(message, calls.PrepareModel):
            return message.job.priority
        if isinstance(message, calls.PrepareModelFromCache):
            return message.cache.priority
        if isinstance(message, calls.Execute):
            model = self.objects.find(message.prepared_model, HostedModel)
            return Priority.LOW if model is None else model.priority
        return Priority.HIGH + 1

    def on_hello(self, message: calls.Hello, fds: FdBundle) -> calls.HelloReply:
        if message.version != calls.VERSION:
            raise GeneralFailure(
                f"the client speaks version {calls.dotted(message.version)} of the control protocol and the service "
                f"{calls.dotted(calls.VERSION)}: run the same nnburst on both sides"
            )
        self._greeted = True
        return calls.HelloReply(version=calls.VERSION, pid=os.getpid(), sandbox=self.host.sandbox)

    def on_take_client(self, message: calls.TakeClient, fds: FdBundle) -> calls.Done:
        """Serve another client. Tell the broker when the client disconnects, or why it is refused."""
        self.require_broker()
        tell = partial(self._report_gone, message.number)
        number, *pidfd = fds.take(1 + message.has_pidfd)
        sock = socket.socket(fileno=number)
        try:
            self.host.serve(sock, peer_pidfd=next(iter(pidfd), None), on_end=tell)
        except NNBurstError as error:
            sock.close()
            tell(str(error))
        return calls.Done()

    def _report_gone(self, number: int, reason: str = "") -> None:
        self.connection.call_without_answer(calls.ClientGone(number, calls.sendable(reason)))

    def end_overdue(self) -> None:
        self.host.end_process(
            f"a model of process {self.peer[0]} took longer than {self.host.max_compile:g} s to compile, and only "
            "the end of its process ends that (nnburst serve --max-compile, launch(max_compile=...))"
        )

    def on_release(self, message: calls.Release, fds: FdBundle) -> calls.Done:
        self.objects.remove(message.object)
        return calls.Done()

    def on_goodbye(self, message: calls.Goodbye, fds: FdBundle) -> calls.Done:
        """Release everything that the client owns."""
        self.objects.hang_up(DeadObject)  # later calls are still answered
        self.objects.close()
        return calls.Done()


for _call in calls.CALLS:
    if _function := getattr(handlers, _call.handler, None):
        setattr(Client, _call.handler, _function)


def _is_usable(device: Device) -> bool:
    try:
        check_device(device)
    except NNBurstError as error:
        _log.warning("a device is not offered: %s", error)
        return False
    return True
