"""A client's connection to a service: what `start_child` returns."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Collection

from ..._core.deadline import Deadline
from ..._core.leaving import LEAVING, Closing
from ..._core.one_process import OneProcess
from ...devices import Device
from ...errors import BadState, DeadObject, DeviceUnavailable, GeneralFailure
from ..connection.callbacks import CallbackRegistry
from ..connection.transport import Connection
from ..process import forked
from ..process.discovery import dial
from ..wire import protocol as calls
from ..wire.values import Sandbox
from .proxies import RemoteDevice

_open: dict[int, Connection] = {}


class _Link:
    """The connection, shared by the `ServiceConnection` and its proxies; ends when none of them is left."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._finalizer = weakref.finalize(self, connection.hang_up, calls.Goodbye())
        self._finalizer.atexit = False  # _end_all does it

    def close(self) -> None:
        """Say goodbye and wait for the end. Idempotent."""
        self.connection.close(farewell=calls.Goodbye())
        self._finalizer.detach()


@atexit.register
def _end_all() -> None:
    """All at once, so that those that do not answer are waited for together."""
    left = list(_open.values())
    for connection in left:
        connection.hang_up(calls.Goodbye())
    for connection in left:
        connection.close()
    forked.end()


class ServiceConnection(OneProcess, Closing):
    """A service, seen from a client. Usable as a context manager, which closes it.

    Args:
        sock: A connected SOCK_SEQPACKET socket whose other end a `ServiceHost` serves; owned from now on.
        launch: Starts the service and returns its pidfd; see `Connection`.
        timeout: Seconds that the service may take to say hello.
        exit_status: As for `Connection`.
        on_end: Called once when the connection has ended, from either side, after the death listeners, with the
            seconds that it may take.
        kill: Kills the service with SIGKILL, if this process may decide that.

    Raises:
        DeadObject: The other side closed the socket or died.
        MissedDeadline: It did not say hello in time.
        GeneralFailure: It speaks another version.
        Exception: What `launch` raises.
    """

    faults: socket.socket | None
    """Where a service with fault points takes orders."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        launch: Callable[[], int] | None = None,
        timeout: float | None = 30.0,
        exit_status: Callable[[], int | None] = lambda: None,
        on_end: Callable[[float], None] | None = None,
        kill: Callable[[], None] | None = None,
    ) -> None:
        callbacks = CallbackRegistry(lambda reason: connection.stop(f"the service ended: {reason}"))

        def ended(seconds: float) -> None:
            _open.pop(id(connection), None)
            if on_end is not None:
                on_end(seconds)

        try:
            connection: Connection = Connection(
                sock,
                calls.Side.CLIENT,
                callbacks,
                launch=launch,
                workers=2,
                exit_status=exit_status,
                on_end=ended,
                name="nnburst-client",
            )
        except BaseException:  # there is no connection that could end
            sock.close()
            if on_end is not None:
                on_end(LEAVING)
            raise
        try:
            _open[id(connection)] = connection
            connection.start()
            hello: calls.HelloReply
            hello, _ = connection.call(calls.Hello(version=calls.VERSION, pid=os.getpid()), timeout=timeout)
            if hello.version[0] != calls.VERSION[0]:
                raise GeneralFailure(
                    f"the service speaks version {hello.version[0]} of the protocol, not {calls.VERSION[0]}"
                )
            connection.greet(hello.version)
            listed, _ = connection.call(calls.ListDevices(), timeout=timeout)
        except BaseException:
            connection.close()
            raise
        self._kill = kill
        self.faults = None
        self._link = _Link(connection)
        self._connection = connection
        self._pid = hello.pid
        self._sandbox = hello.sandbox
        self._devices = tuple(
            RemoteDevice(connection, callbacks, self._link, index, info) for index, info in enumerate(listed.devices)
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """Proxies of the service's devices, in its order. They stay valid until the connection is closed."""
        return self._devices

    @property
    def pid(self) -> int:
        """Process id of the service."""
        return self._pid

    @property
    def sandbox(self) -> Sandbox | None:
        """What keeps the service in; None if it is too old to say."""
        return self._sandbox

    @property
    def alive(self) -> bool:
        """False once the service is gone, the connection is closed, or this is a forked child."""
        return self._connection.alive

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        """Call `on_death` once when the connection ends, at once if it has ended. Returns a function that unlinks.

        It runs in a thread of the connection and is held strongly until it was called or unlinked.

        Raises:
            BadState: In a forked child.
        """
        return self._connection.link_to_death(on_death)

    def kill(self) -> None:
        """Kill the service, whatever it is doing, and wait until it is gone.

        Raises:
            BadState: It was not started by this process.
        """
        with contextlib.suppress(DeadObject):
            self._connection.check_usable()
        if self._kill is None:
            raise BadState(f"process {self._pid} serves other programs, too; `nnburst stop --kill` ends it for all")
        self._kill()
        self._connection.wait_ended(LEAVING)

    def end_clients(self, pid: int, timeout: float | None = None) -> int:
        """End all connections that a process has to the service, and what runs for them. Does not wait for their end.

        Args:
            pid: Of the process.
            timeout: Seconds that the service may take to answer; None for no limit.

        Returns:
            How many it had.

        Raises:
            InvalidArgument: The service is another user's, and this process is not root's.
            GeneralFailure: The service is of a version that cannot do this.
        """
        if self._connection.peer_version < (2, 3):
            raise GeneralFailure(f"process {self._pid} serves with an older nnburst, which cannot end a client alone")
        reply: calls.EndClientsReply
        reply, _ = self._connection.call(calls.EndClients(pid), timeout=timeout)
        return reply.connections

    def close(self) -> None:
        """End the connection in order: everything that it owns in the service is released, threads and descriptors go.

        A child service ends and is reaped. Idempotent. In a forked child only the copies of the descriptors are closed.
        """
        self._link.close()

    def __repr__(self) -> str:
        return f"<ServiceConnection pid={self._pid} {'alive' if self.alive else 'ended'}>"


def connect_to(
    address: str, *, timeout: float | None = 10.0, trust_uid: int | Collection[int] = ()
) -> ServiceConnection:
    """Connect to a service that is running.

    Args:
        address: Its name, or ``unix:`` and the path of its socket.
        timeout: Seconds that it may take to answer; None for no limit.
        trust_uid: Users whose services are used, beside this one and root.

    Raises:
        DeviceUnavailable: No service runs there, it does not serve this user, or is one of a user who is not trusted.
        InvalidArgument: The address is malformed.
        MissedDeadline: It did not answer in time.
    """

    def connect() -> ServiceConnection:
        sock = dial(address, None, trust_uid)
        try:
            # No pidfd: with a service manager the socket was made by another process than the one that serves it.
            return ServiceConnection(sock, timeout=None)
        except DeadObject as error:
            raise DeviceUnavailable(f"the service at {address!r} closed the connection before it served") from error

    return Deadline.after(timeout).call(connect)
