"""Injected faults: crashes, delays and stops of a service at chosen points."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from .._core.errno import as_int, is_real, one_of
from ..errors import BadState, InvalidArgument
from ..service.host.faults import Point

if TYPE_CHECKING:
    from ..runtime.service import Service
    from ..service.client.connection import ServiceConnection

Freeze = Literal["process", "call", "interpreter"]

_FREEZES = {"process": "stop", "call": "block", "interpreter": "spin"}
_PATIENCE = 30.0
_LONGEST_POLL = 1e6


class Fault:
    """A fault injected into a service. As a context manager, it withdraws the fault at the end of the block.

    Deleting this object does not withdraw the fault.

    Attributes:
        service: The service with the fault.

    Example:
        >>> from nnburst.testing import inject
        >>> with nnburst.launch(faults=True) as service, service.session(model) as session:
        ...     with inject(service, delay=0.01) as fault:
        ...         _ = session.run(None, {"x": np.ones((1, 4), np.float32)})
        ...         fault.wait(10)
        ...         fault.times
        1
    """

    def __init__(self, service: Service | ServiceConnection, order: bytes, *, stops: bool) -> None:
        """Use `inject` instead."""
        self.service = service
        self._stops = stops
        self._times = 0
        self._lock = threading.Lock()  # one thread at a time reads and counts reports
        faults = service.faults
        if faults is None or faults.fileno() < 0:
            raise BadState("the service has no fault points, or has ended; start it with launch(faults=True)")
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            with theirs:
                socket.send_fds(faults, [order], [theirs.fileno()])
        except OSError as error:
            self._ours.close()
            raise BadState(f"the service takes no orders: {error.strerror}") from error

    @property
    def times(self) -> int:
        """The number of times that the fault has happened, even after it has killed the service."""
        while self._take():
            pass
        return self._times

    def wait(self, timeout: float = _PATIENCE) -> None:
        """Wait until the fault happens. If the fault freezes a process, wait until the process has stopped.

        A fault that has already happened ends the wait at once, unless an earlier `wait` or `times` has counted it.

        Args:
            timeout: Seconds to wait.

        Raises:
            BadState: The fault was withdrawn.
            TimeoutError: The fault has not happened within `timeout` seconds, or can no longer happen.
        """
        if self._ours.fileno() < 0:
            raise BadState("the fault is withdrawn and will not happen")
        end = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        while not (news := self._take()):
            left = end - time.monotonic()
            if news is not None:
                raise TimeoutError("the fault cannot happen any more: it has happened before, or the service has ended")
            if left <= 0:
                raise TimeoutError(f"the fault has not happened within {timeout:g} s")
            poll.poll(math.ceil(min(left, _LONGEST_POLL) * 1000))
        while self._stops and not _is_stopped(self.service.pid):
            if time.monotonic() > end:
                raise TimeoutError("the process has not stopped")
            time.sleep(0.001)

    def withdraw(self) -> None:
        """Withdraw the fault. Frozen calls continue, unless they keep the interpreter lock. Idempotent."""
        while self._take():
            pass
        with self._lock, contextlib.suppress(OSError):  # the service has ended, or `withdraw` was called
            self._ours.send(b"w", socket.MSG_NOSIGNAL)
        self._ours.close()
        if self._stops and self.service.faults is not None and self.service.faults.fileno() >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.service.pid, signal.SIGCONT)

    def _take(self) -> bytes | None:
        """Read and count a report: ``b"!"`` for a fault, ``b""`` if no more can happen, None for no report."""
        with self._lock:
            try:
                news = self._ours.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:  # the service ended before it read the order, or `withdraw` was called
                return b""
            self._times += news == b"!"
            return news

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, *error: object) -> None:
        self.withdraw()

    def __del__(self) -> None:
        if hasattr(self, "_ours"):
            self._ours.close()


def inject(
    service: Service | ServiceConnection,
    *,
    at: Point = "run",
    after: int = 0,
    crash_on: int | None = None,
    crash_with: int = signal.SIGKILL,
    exit_on: int | None = None,
    exit_status: int = 1,
    delay: float | None = None,
    freeze: bool | Freeze = False,
) -> Fault:
    """Inject a fault into a service, and return the fault, which affects all later calls to the service.

    If several faults are due in one call, they happen in the order in which they were injected.

    Args:
        service: A service launched with ``faults=True``.
        at: The point in the service: ``"run"`` (every execution, with or without a burst), ``"prepare"``,
            ``"restore"`` (from cache files), ``"supported"``, or ``"burst"`` (opening a burst).
        after: Number of calls that pass the point before the fault is active.
        crash_on: Number of the call at which a signal kills the process; 1 for the next call.
        crash_with: The signal of `crash_on`.
        exit_on: Number of the call at which the process exits.
        exit_status: The exit status of `exit_on`.
        delay: Seconds by which each call is delayed.
        freeze: The part that stops at the next call: ``"process"`` (or True) for the whole process, ``"call"`` for the
            call only, ``"interpreter"`` to keep the interpreter lock forever.

    Raises:
        BadState: The service has no fault points, or has ended.
        InvalidArgument: `service` is not a service, no fault or more than one is given, or an argument is invalid.

    Example:
        >>> from nnburst.testing import inject
        >>> with nnburst.launch(faults=True) as service, service.session(model) as session:
        ...     with inject(service, crash_on=1):
        ...         try:
        ...             session.run(None, {"x": np.ones((1, 4), np.float32)})
        ...         except nnburst.DeadObject as death:
        ...             death.signal
        9
    """
    if not hasattr(service, "faults"):
        raise InvalidArgument(f"expected a service, got {service!r}; give what launch(faults=True) returns")
    if as_int(after, "after") < 0:
        raise InvalidArgument(f"after={after}; give a count")
    faults: list[tuple[str, float]] = []
    skip = after
    for death, n, how_dead, name in (
        ("kill", crash_on, crash_with, "crash_with"),
        ("exit", exit_on, exit_status, "exit_status"),
    ):
        if n is not None:
            if as_int(n, "the passage") < 1:
                raise InvalidArgument(f"the passage is {n}; 1 is the next one")
            skip = after + n - 1
            faults.append((death, as_int(how_dead, name)))
    if delay is not None:
        if not is_real(delay) or not 0 <= delay < math.inf:
            raise InvalidArgument(f"delay={delay!r}; give seconds")
        faults.append(("delay", delay))
    if freeze:
        faults.append((_FREEZES[one_of("process" if freeze is True else freeze, "freeze", _FREEZES)], 0))
    if len(faults) != 1:
        raise InvalidArgument(f"{len(faults)} faults are given; give one, and call inject again for another")
    one_of(at, "at", get_args(Point))
    ((act, number),) = faults
    order = msgspec.json.encode({"point": at, "act": act, "skip": skip, "number": float(number)})
    return Fault(service, order, stops=act == "stop")


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] in "Tt"
