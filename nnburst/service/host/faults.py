"""Fault points: places in a service's code where a client can cause faults, for tests.

The client sends all `Order` objects over one socket, each with one end of a socketpair that only this order uses. A
thread that reaches a fault point first reads new orders, so an order affects every later call. The service reports a
fault over the order's socketpair before the fault happens. To withdraw an order, the client sends one byte over that
socketpair.
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

from ..._core.fds import wait_readable
from ...devices.interfaces import PreparedModel
from ...devices.wrapped import WrappedModel
from ...model.running import ExecutionResult, RunOptions
from ...model.types import Request
from ..wire.protocol import Call, ConfigureBurst, GetSupportedOperations, Message, PrepareModel, PrepareModelFromCache

_log = logging.getLogger("nnburst.faults")

Point = Literal["supported", "prepare", "restore", "burst", "run"]
Act = Literal["exit", "kill", "delay", "stop", "block", "spin"]

_PATIENCE = 30.0
"""Seconds to wait until a signal has ended the process."""


class Order(msgspec.Struct, frozen=True):
    """An order to cause a fault.

    Attributes:
        point: The fault point.
        act: What happens when a thread reaches the fault point.
        skip: Number of times that a thread reaches the fault point without a fault.
        number: Seconds of a delay, exit status, or number of a signal.
    """

    point: Point
    act: Act
    skip: int = 0
    number: float = 0.0


_orders = msgspec.json.Decoder(Order)


class _Armed:
    """An order to cause a fault, and the socket over which the fault is reported."""

    def __init__(self, order: Order, sock: socket.socket) -> None:
        self.order = order
        self.skip = order.skip
        self._sock = sock

    def report(self) -> None:
        """Report to the client that the fault is about to happen."""
        with contextlib.suppress(OSError):  # the client has closed its socket
            self._sock.send(b"!", socket.MSG_NOSIGNAL)

    def withdrawn(self) -> bool:
        """Return True if the client has withdrawn its order for a fault. Closing the socket does not withdraw it."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except OSError:
            return False

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the client withdraws this order, or `seconds` have passed; None for no limit."""
        end = None if seconds is None else time.monotonic() + seconds
        wait_readable([self._sock.fileno()], seconds)
        if not self.withdrawn():
            threading.Event().wait(None if end is None else max(0.0, end - time.monotonic()))

    def __del__(self) -> None:
        self._sock.close()


class FaultPoints:
    """The orders of a client to cause faults in this service.

    Args:
        sock: Socket from which orders are read. This object closes it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._lock = threading.Lock()
        self._armed: list[_Armed] = []

    def admit(self, call: Call) -> None:
        """Cause the faults that are ordered for a call that the service is about to serve."""
        point = _CALLS.get(call.request)
        if point is not None:
            self.reach(point)

    def wrap(self, prepared: PreparedModel) -> PreparedModel:
        """Return a model with the fault point "run" before each run of `prepared`."""
        return FaultyModel(prepared, self)

    def reach(self, point: Point) -> None:
        """Cause the faults that the client has ordered for a fault point."""
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
        if armed.skip < 0 and armed.order.act != "delay":  # a delay stays in force
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
"""Fault point of each call. Executions reach the point "run"."""


# ---- the faults ---------------------------------------------------------------------------------------------


def _kill(armed: _Armed) -> None:
    number = int(armed.order.number)
    signal.pthread_kill(threading.get_ident(), number)  # the processor would signal this thread, too
    time.sleep(_PATIENCE)


_ACTS: Mapping[Act, Callable[[_Armed], object]] = {
    "exit": lambda armed: os._exit(int(armed.order.number)),
    "kill": _kill,
    "delay": lambda armed: armed.wait(armed.order.number),
    "stop": lambda _: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),  # os.kill may act later
    "block": lambda armed: armed.wait(),
    "spin": lambda _: sum(range(10**15)),  # this call into C never releases the interpreter lock
}


# ---- executions ------------------------------------------------------------------------------------------------------


class FaultyModel(WrappedModel):
    """A model whose runs reach the fault point "run", and whose requests are bound anew for each run."""

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
