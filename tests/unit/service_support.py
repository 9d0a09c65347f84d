"""What the tests of the control plane share: handlers, pairs of connections, a device with hooks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from patience import PATIENCE

from nnburst.burst import BurstCallback, BurstContext
from nnburst.devices import Device, PreparedModel
from nnburst.errors import ErrorStatus
from nnburst.model import NO_TIMING, Capabilities, Model, ModelBuilder, OperandType, Request
from nnburst.service import ServiceConnection, ServiceHost
from nnburst.service.connection.transport import Connection
from nnburst.service.wire.packets import FdBundle, Kind, Outgoing
from nnburst.service.wire.protocol import Done, Side
from nnburst.service.wire.values import Message

WATCHDOG = PATIENCE


def stop(pid: int) -> None:
    """Stop a child process, and wait until none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a child process stand still in the block."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


class Answers:
    """Serves any call with the functions given by handler name; others are `Done`."""

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
    """A started client and service end over one socketpair."""
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
            assert end.close(WATCHDOG)


@contextlib.contextmanager
def raw_peer(side: Side, handler: object | None = None, **options: Any) -> Iterator[tuple[Connection, socket.socket]]:
    """One end, and the bare socket of the other."""
    a, b = socket_pair()
    end = Connection(a, side, handler or Answers(), **options)
    end.start()
    with b:
        try:
            yield end, b
        finally:
            assert end.close(WATCHDOG)


class Ended:
    """What became of the runs of a class of kernels that had a deadline."""

    def __init__(self, monkeypatch: Any, kind: Any) -> None:
        self.errors: list[BaseException | None] = []
        self.changed = threading.Condition()
        until = kind.until

        def recorded(this: Any, deadline_ns: int) -> Any:
            error = None
            try:
                return until(this, deadline_ns)
            except BaseException as raised:
                error = raised
                raise
            finally:
                with self.changed:
                    self.errors.append(error)
                    self.changed.notify()

        monkeypatch.setattr(kind, "until", recorded)

    def first(self) -> BaseException | None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.errors, WATCHDOG)
            return self.errors[0]


class FakeModel(PreparedModel):
    """Calls the device's hook; reports what becomes of it."""

    def __init__(self, device: FakeDevice, model: Model) -> None:
        self.device = device
        self.model = model
        self.closed = 0

    def execute_synchronously(self, request: Request, options: Any = None) -> Any:
        self.device.hook("execute", request)
        return ErrorStatus.NONE, (), NO_TIMING

    def configure_execution_burst(
        self, callback: BurstCallback, request_channel: Any, result_channel: Any, polling_window: float | None = None
    ) -> BurstContext:
        context = FakeContext(self.device, callback, polling_window)
        self.device.contexts.append(context)
        self.device.hook("burst", context)
        return context

    def close(self) -> None:
        self.closed += 1


class FakeContext(BurstContext):
    def __init__(self, device: FakeDevice, callback: BurstCallback, polling_window: float | None) -> None:
        self.device = device
        self.callback = callback
        self.polling_window = polling_window
        self.freed: list[int] = []
        self.log: list[str] = []
        self.gone = threading.Event()

    def free_memory(self, slot: int) -> None:
        self.freed.append(slot)

    def hang_up(self) -> None:
        self.log.append("hang_up")

    def close(self) -> None:
        self.log.append("close")
        self.gone.set()


class FakeDevice(Device):
    """Accepts everything. `hooks` maps "prepare", "execute", "supported", "burst" to functions called on the way."""

    def __init__(self, **hooks: Callable[[Any], Any]) -> None:
        self.hooks = hooks
        self.models: list[FakeModel] = []
        self.contexts: list[FakeContext] = []
        self.closed = False

    def hook(self, name: str, argument: Any) -> Any:
        return self.hooks[name](argument) if name in self.hooks else None

    @property
    def name(self) -> str:
        return "test-fake"

    @property
    def version_string(self) -> str:
        return "1"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        self.hook("supported", model)
        return (True,) * len(model.main.operations)

    def prepare_model(self, model: Model, *_: Any) -> PreparedModel:
        self.hook("prepare", model)
        self.models.append(FakeModel(self, model))
        return self.models[-1]

    def close(self) -> None:
        self.closed = True


@contextlib.contextmanager
def in_process(devices: Sequence[Device], **options: Any) -> Iterator[tuple[ServiceConnection, ServiceHost]]:
    """A client and a host in this process."""
    a, b = socket_pair()
    host = ServiceHost(devices, **options)
    host.serve(b)
    client = ServiceConnection(a)
    try:
        yield client, host
    finally:
        client.close()
        host.close()


def tiny_model(constant_bytes: int = 16) -> Model:
    """y = x + constant."""
    import numpy as np

    builder = ModelBuilder()
    n = constant_bytes // 4
    x = builder.input("x", OperandType.TENSOR_FLOAT32, (n,))
    c = builder.constant(np.arange(n, dtype=np.float32))
    builder.output("y", builder.add(x, c))
    return builder.build()


def open_fds() -> set[int]:
    """Descriptors of this process, without the one that lists them."""
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.readlink(f"/proc/self/fd/{name}")
            fds.add(int(name))
    return fds


def settled_fds(before: set[int]) -> set[int]:
    """Descriptors of this process, once threads have closed what was not there before; after a while all the same."""
    deadline = time.monotonic() + WATCHDOG
    while (now := open_fds()) - before and time.monotonic() < deadline:
        time.sleep(0.001)
    return now


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
