"""Fault points: failures of a service that is launched with them, on the order of its client.

The client writes orders (`Order`) to a socket, each with one end of a socket of its own. Each thread that passes a
point first reads the orders that have come, so an order holds for every later call, and needs no thread of its own. A
fault says on its socket that it is reached before it does anything; one byte from the client withdraws it.

Nothing of this is loaded by a service without fault points.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from ..._core.fds import ready
from ...devices.interfaces import PreparedModel
from ...devices.wrapped import WrappedModel
from ...model.running import ExecutionResult, RunOptions
from ...model.types import Request
from ..wire.protocol import Call, ConfigureBurst, GetSupportedOperations, Message, PrepareModel, PrepareModelFromCache

_log = logging.getLogger("nnburst.faults")

Point = Literal["supported", "prepare", "restore", "burst", "run"]
Act = Literal["exit", "kill", "delay", "stop", "block", "spin"]

_PATIENCE = 30.0
"""Seconds in which a signal that is delivered to the process ends it."""


class Order(msgspec.Struct, frozen=True):
    """A fault to cause, and when.

    Attributes:
        skip: Passages of the point before it happens.
        number: Seconds of a delay, an exit status, or a signal.
    """

    point: Point
    act: Act
    skip: int = 0
    number: float = 0.0


_orders = msgspec.json.Decoder(Order)


class _Armed:
    """An order, and the socket of its client."""

    def __init__(self, order: Order, sock: socket.socket) -> None:
        self.order = order
        self.skip = order.skip
        self._sock = sock

    def report(self) -> None:
        """Report that the fault happens now."""
        with contextlib.suppress(OSError):  # the client no longer listens for the fault
            self._sock.send(b"!", socket.MSG_NOSIGNAL)

    def withdrawn(self) -> bool:
        """Return True if the client has withdrawn the order; closing the socket is not enough."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except OSError:
            return False

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the order is withdrawn, at most so long."""
        end = None if seconds is None else time.monotonic() + seconds
        ready([self._sock.fileno()], seconds)
        if not self.withdrawn():
            threading.Event().wait(None if end is None else max(0.0, end - time.monotonic()))

    def __del__(self) -> None:
        self._sock.close()


class FaultPoints:
    """The orders of a client.

    Args:
        sock: Brings the orders; owned from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._lock = threading.Lock()
        self._armed: list[_Armed] = []

    def admit(self, call: Call) -> None:
        """Pass the point, if any, of a call that a service is about to serve."""
        point = _CALLS.get(call.request)
        if point is not None:
            self.reach(point)

    def wrap(self, prepared: PreparedModel) -> PreparedModel:
        """Wrap a model in one that passes the point "run"."""
        return FaultyModel(prepared, self)

    def reach(self, point: Point) -> None:
        """Carry out the orders for a point."""
        with self._lock:
            self._receive()
            due = [armed for armed in tuple(self._armed) if armed.order.point == point and self._is_due(armed)]
        for armed in due:
            armed.report()
            _log.warning("a fault is injected at %s: %s", point, armed.order.act)
            _ACTS[armed.order.act](armed)

    def _is_due(self, armed: _Armed) -> bool:
        if armed.withdrawn():
            self._armed.remove(armed)
            return False
        armed.skip -= 1
        if armed.skip < 0 and armed.order.act != "delay":  # which lasts
            self._armed.remove(armed)
        return armed.skip < 0

    def _receive(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 4096, 1)
            except BlockingIOError:
                return
            if not data:
                return
            order = _orders.decode(data)
            self._armed.append(_Armed(order, socket.socket(fileno=fds[0])))
            _log.info("a fault is ordered at %s: %s", order.point, order.act)


_CALLS: Mapping[type[Message], Point] = {
    GetSupportedOperations: "supported",
    PrepareModel: "prepare",
    PrepareModelFromCache: "restore",
    ConfigureBurst: "burst",
}
"""Executions pass a point of their own, when they run."""


# ---- the faults ---------------------------------------------------------------------------------------------


def _kill(armed: _Armed) -> None:
    number = int(armed.order.number)
    signal.pthread_kill(threading.get_ident(), number)  # as what the processor raises: in this very thread
    time.sleep(_PATIENCE)


_ACTS: Mapping[Act, Callable[[_Armed], object]] = {
    "exit": lambda armed: os._exit(int(armed.order.number)),
    "kill": _kill,
    "delay": lambda armed: armed.wait(armed.order.number),
    "stop": lambda _: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),  # os.kill may stop it a little later
    "block": lambda armed: armed.wait(),
    "spin": lambda _: sum(range(10**15)),  # one call into C that never lets go of the interpreter lock
}


# ---- executions ------------------------------------------------------------------------------------------------------


class FaultyModel(WrappedModel):
    """Another model, as a service with fault points runs it: each run passes the point "run", and is bound anew."""

    def __init__(self, inner: PreparedModel, points: FaultPoints) -> None:
        super().__init__(inner)
        self._points = points

    burst_executor = PreparedModel.burst_executor
    execute_fenced = PreparedModel.execute_fenced
    configure_execution_burst = PreparedModel.configure_execution_burst

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        self._points.reach("run")
        return self.inner.execute_synchronously(request, options)

    def bind_fenced(self, request: Request, options: RunOptions) -> Callable[[RunOptions], ExecutionResult]:
        bound = self.inner.bind_fenced(request, options)

        def run(final: RunOptions) -> ExecutionResult:
            self._points.reach("run")
            return bound(final)

        return run
