"""A client's connection to a service."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._core.deadline import Deadline
from ..._core.fds import wait_readable
from ..._core.leaving import LEAVING, Closing, OneProcess, process_lock
from ...devices.common import device_of
from ...devices.interfaces import Device
from ...errors import BadState, DeadObject, DeviceUnavailable, MissedDeadline
from ...model.extensions import ImportedModel
from ..connection.callbacks import CallbackRegistry
from ..connection.transport import TOLD, Connection
from ..process import forked
from ..process.discovery import dial
from ..wire import protocol as calls
from ..wire.marshal import model_to_wire
from ..wire.packets import EndOfStream, Kind, Outgoing, receive
from ..wire.protocol import Sandbox
from .proxies import Place, RemoteDevice

if TYPE_CHECKING:
    from ..process.launch import Child
    from ..process.workers import Worker

_open: dict[int, Connection] = {}


class _Link:
    """The owner of a connection. The connection ends when the `ServiceConnection` and all its proxies are dropped."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._finalizer = weakref.finalize(self, connection.hang_up, calls.Goodbye())
        self._finalizer.atexit = False  # `_end_all` ends the connections at exit

    def close(self) -> None:
        """Send `Goodbye`, and wait until the connection has ended. Idempotent."""
        self.connection.close(farewell=calls.Goodbye())
        self._finalizer.detach()


@atexit.register
def _end_all() -> None:
    """End all connections at the same time, so that the waits for silent peers overlap."""
    left = list(_open.values())
    for connection in left:
        connection.hang_up(calls.Goodbye())
    for connection in left:
        connection.close()
    forked.end()


class _Apart:
    """The connection over which a client sends its own models. Models that the service names use another connection.

    The first use opens the connection. If that connection has ended, the next use opens another.

    Args:
        first: The connection that lists the devices.
        dial: Function that opens another connection.
    """

    def __init__(self, first: Connection, dial: Callable[[], ServiceConnection]) -> None:
        self._first = first
        self._dial = dial
        self._lock = process_lock()
        self._own: ServiceConnection | None = None
        self._closed = False

    def place(self, name: str) -> Place:
        """Return the connection and number of a device. Raises `NNBurstError` if the device cannot be reached."""
        with self._lock:
            self._first.check_usable()
            if self._own is None or not self._own.alive:
                self._own = self._dial()
                if self._closed:  # another thread closed it while this one connected
                    self._own.close()
            for device in self._own.devices:
                if device.name == name:
                    assert isinstance(device, RemoteDevice)
                    return device.place()
        raise DeviceUnavailable(f"the service has no device {name} for models of a client's own any more")

    def close(self) -> None:
        self._closed = True
        if self._own is not None:
            self._own.close()


def _same(place: Place) -> Place:
    return place


class ServiceConnection(OneProcess, Closing):
    """A client's connection to a service, with proxies of the service's devices. Context manager.

    Args:
        sock: A connected SOCK_SEQPACKET socket whose other end a `ServiceHost` serves. This object closes it.
        child: The service's process, if this object is to start it; None if the service runs already.
        timeout: Seconds that the service may take to answer the first message.
        broker: Handler of the calls that the service makes, if the service is a worker and this process is its broker.
        own: True for models that the client brings. A shared service runs them in a separate process.
        dial_own: Function that opens another connection to the service, with ``own=True``.

    Raises:
        DeadObject: The other side closed the socket or died.
        MissedDeadline: The service did not answer in time.
        GeneralFailure: The service speaks another protocol version.
        Exception: The service's process could not be started.
    """

    devices: tuple[Device, ...]
    """Proxies of the service's devices, valid until the connection is closed."""
    pid: int
    """Process id of the service."""
    sandbox: Sandbox | None
    """The service's sandbox; None if the service reports none."""
    faults: socket.socket | None
    """Socket for orders to the service's fault points; None if the service has no fault points."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        child: Child | None = None,
        timeout: float | None = 30.0,
        broker: Worker | None = None,
        own: bool = False,
        dial_own: Callable[[], ServiceConnection] | None = None,
    ) -> None:
        callbacks = CallbackRegistry(lambda reason: connection.stop(TOLD + reason), broker)

        try:
            connection: Connection = Connection(
                sock,
                calls.Side.CLIENT,
                callbacks,
                child=child,
                workers=2,
                on_end=lambda: _open.pop(id(connection), None),
                name="nnburst-client",
            )
        except BaseException:  # no connection exists that would close the socket
            sock.close()
            raise
        try:
            _open[id(connection)] = connection
            connection.start()
            hello: calls.HelloReply
            hello, _ = connection.call(calls.Hello(version=calls.VERSION, pid=os.getpid(), own=own), timeout=timeout)
            listed, _ = connection.call(calls.ListDevices(), timeout=timeout)
        except BaseException:
            connection.close()
            raise
        self._child = child
        self.faults = None
        self._link = _Link(connection)
        self.connection = connection
        self.pid = hello.pid
        self.sandbox = hello.sandbox
        self._apart = None if dial_own is None else _Apart(connection, dial_own)
        here = [Place(connection, callbacks, self._link, number) for number in range(len(listed.devices))]
        self.devices = tuple(
            RemoteDevice(info, partial(_same, place))
            if place.number not in listed.apart or self._apart is None
            else RemoteDevice(info, partial(self._apart.place, info.name))
            for info, place in zip(listed.devices, here, strict=True)
        )

    @property
    def alive(self) -> bool:
        """True until the service ends or the connection is closed; always False in a forked child."""
        return self.connection.alive

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        """Call `on_death` in a thread of the connection when the connection ends, or at once if it has ended.

        Returns:
            A function that cancels the call.

        Raises:
            BadState: This is a forked child.
        """
        return self.connection.link_to_death(on_death)

    def kill(self) -> None:
        """Kill the service, even if it is busy, and wait until its process has ended.

        Raises:
            BadState: This process did not start the service.
        """
        with contextlib.suppress(DeadObject):
            self.connection.check_usable()
        if self._child is None:
            raise BadState(f"process {self.pid} serves other programs, too; `nnburst stop --kill` ends it for all")
        self._child.kill()
        self.connection.wait_ended(LEAVING)

    def device(self, name: str) -> Device:
        """Return a device by name. Raises `DeviceUnavailable` if there is none."""
        return device_of(self.devices, name)

    def list_models(self, timeout: float | None = None) -> dict[str, str]:
        """Return the models that any client may open, as {name: SHA-256 of the model's files}.

        The SHA-256 is empty for a model without files.
        """
        reply: calls.ListModelsReply
        reply, _ = self.connection.call(calls.ListModels(), timeout=timeout)
        return dict(zip(reply.names, reply.digests, strict=False))

    def withdraw(self, name: str) -> None:
        """Ask a worker to stop serving a named model."""
        self.connection.call(calls.WithdrawModel(name))

    def publish(
        self,
        name: str,
        device: Device,
        imported: ImportedModel,
        digest: str = "",
        batch: int = 1,
        batch_wait: float = 0.0,
    ) -> None:
        """Ask a worker to compile a model and serve it by name to all clients.

        Args:
            name: Name, not empty. Open sessions keep the previous model of this name.
            device: A device of this connection.
            imported: The model as the device read it. The pools are the model's files.
            digest: SHA-256 of the files.
            batch: Maximum number of rows in a run that joins several requests.
            batch_wait: Seconds that a request waits for others to join, if its session's preference allows waiting.

        Raises:
            NNBurstError: See `Device.prepare_model`; the previous model of this name is still served.
        """
        assert isinstance(device, RemoteDevice)
        wire, fds = model_to_wire(imported.model)
        number = device.place().number
        arguments = imported.input_shapes, imported.output_shapes, imported.optional_inputs
        message = calls.PublishModel(name, number, wire, *arguments, digest, batch, batch_wait)
        self.connection.call(message, fds)

    def close(self) -> None:
        """End the connection and release its objects in the service. A child service ends, too. Idempotent.

        In a forked child, only the copies of the descriptors are closed.
        """
        if self._apart is not None:
            self._apart.close()
        self._link.close()

    def __repr__(self) -> str:
        return f"<ServiceConnection pid={self.pid} {'alive' if self.alive else 'ended'}>"


def connect_to(
    address: str, *, timeout: float | None = 10.0, trust_uid: int | Collection[int] = ()
) -> ServiceConnection:
    """Connect to a running service.

    Args:
        address: The service's name, or ``unix:`` and the path of its socket.
        timeout: Seconds that the service may take to answer; None for no limit.
        trust_uid: Users whose services are trusted, besides this process's user and root.

    Raises:
        DeviceUnavailable: No service runs there, the service does not serve this user, or the service's user is not
            trusted.
        InvalidArgument: The address is malformed.
        MissedDeadline: The service did not answer in time.
    """

    def connect(own: bool = False) -> ServiceConnection:
        sock = dial(address, None, trust_uid)
        try:
            # There is no pidfd: a service manager may have made the socket that the service's process serves.
            return ServiceConnection(sock, timeout=None, own=own, dial_own=None if own else dial_own)
        except DeadObject as error:
            why = str(error).partition(TOLD)[2] or "it closed the connection before it served"
            raise DeviceUnavailable(f"the service at {address!r} does not serve this process: {why}") from error

    def dial_own() -> ServiceConnection:
        return Deadline.after(timeout).call(connect, own=True)

    return Deadline.after(timeout).call(connect)


def send_order(
    address: str,
    message: calls.EndClients | calls.LoadModel,
    *,
    timeout: float | None = None,
    trust_uid: int | Collection[int] = (),
) -> Any:
    """Send an order to the broker of a shared service, and return the reply.

    Only the service's user and root may send orders.

    Args:
        address, trust_uid: See `connect_to`.
        message: The order. The service answers `EndClients` before it closes the clients' connections.
        timeout: Seconds until the answer; None for no limit.

    Raises:
        DeviceUnavailable: No service runs there, or the service ended.
        InvalidArgument: This process's user is neither the service's user nor root, or the service has no files of
            the model.
        MissedDeadline: The service did not answer in time.
        NNBurstError: The model cannot be compiled; the previous model is still served.
    """
    call, deadline = calls.CALL_BY_REQUEST[type(message)], Deadline.after(timeout)
    with dial(address, deadline.left(), trust_uid) as sock:
        Outgoing(Kind.REQUEST, 1, calls.encode_request(message)).try_send(sock)
        if not wait_readable([sock.fileno()], deadline.left()):
            raise MissedDeadline(f"{call.name}: the service at {address!r} has not answered within {timeout:.3g} s")
        try:
            answer = receive(sock)
        except EndOfStream as error:
            raise DeviceUnavailable(f"the service at {address!r} ended before it answered") from error
    if answer.kind is Kind.ERROR:
        raise calls.error_of(calls.decode_error(answer.body))
    if answer.kind is Kind.REQUEST:  # it says why the service refuses this process
        notice = calls.decode_request(answer.body, calls.Side.CLIENT)[1]
        raise DeviceUnavailable(getattr(notice, "reason", f"the service at {address!r} does not serve this process"))
    return calls.decode_reply(call, answer.body)
