"""Executions that block no caller. An event loop, or one thread for all executions of a burst, waits for answers.

The bell of a burst is a socket. If `InFlightRuns.collect` or `arm` finds no answer, the service makes the bell readable
at the next answer. Several threads may watch the bell. When it is readable, every watching thread calls `collect`, and
one thread takes the answers.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..._core._nnburst import lib
from ..._core.errno import system
from ..._core.fds import FdSet
from ..._core.threads import JobThread

if TYPE_CHECKING:
    from ..._core._nnburst import CData
    from .request import BoundRequest

_AGAIN = -errno.EAGAIN
_BUSY = -errno.EBUSY
_DIED = -errno.EPIPE
_NOT_FLYING = -errno.EINVAL
_CLOSED = -errno.ESHUTDOWN
_RESTART = -errno.ERESTART


def make_bell() -> tuple[FdSet, FdSet]:
    """Return connected sockets: one to watch, one for the service to write to."""
    import _socket  # with `socket.socketpair`, an interrupt could lose a descriptor

    watched, rung = system(_socket.socketpair, _socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
    return FdSet.create(watched.detach), FdSet.create(rung.detach)


class InFlight:
    """A started execution.

    Attributes:
        request: The request, kept alive until its answer comes, because the service writes to its outputs.
        status: Status of the result, or a negative errno; None until the run has ended.
        may_look: True if `InFlightRuns.look` should continue polling.
    """

    __slots__ = ("_then", "may_look", "request", "status", "tag")

    def __init__(self, request: BoundRequest, tag: int) -> None:
        self.request = request
        self.tag = tag
        self.status: int | None = None
        self.may_look = False
        self._then: Callable[[InFlight], None] | None = None

    def set_end_listener(self, then: Callable[[InFlight], None]) -> None:
        """Call `then` when the run ends, or at once if it has already ended. A further call replaces `then`.

        The thread that takes the answer calls `then`, possibly twice. `then` must not wait.
        """
        self._then = then
        if self.status is not None:
            then(self)


class InFlightRuns:
    """The started executions of one burst. Safe to use from any thread.

    Attributes:
        polls: True if the burst has a polling window.
        jobs: A thread for calls that may block.
        attendant: The thread that waits for answers, if any.
    """

    def __init__(self, endpoint: CData, watched: FdSet, *, polls: bool) -> None:
        self._endpoint = endpoint
        self._watched = watched
        self.polls = polls
        self._tags = itertools.count(1)
        self._flying: dict[int, InFlight] = {}
        self.jobs = JobThread()
        self.attendant: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        return self._watched.closed

    def copy_bell(self) -> FdSet:
        """Return a descriptor that is readable when `collect` must be called. Raises `BadState` if closed."""
        return self._watched.copy()

    def start(self, request: BoundRequest, *, look_until: int = 0) -> InFlight:
        """Start an execution. If its answer does not come at once, call `look`, `arm` or `collect` afterwards.

        Args:
            request: A request that is bound to this burst and not in flight.
            look_until: End of polling for the answer (CLOCK_MONOTONIC nanoseconds); 0 for no polling. Polling lasts
                for the polling window at most, and does not begin while another execution is in flight.
        """
        tag = next(self._tags)
        flight = self._flying[tag] = InFlight(request, tag)
        status = lib.nnb_execution_launch(request.pointer, tag, look_until if len(self._flying) == 1 else 0)
        if status == _RESTART:
            flight.may_look = True
        elif status != _AGAIN:
            self._flying.pop(tag, None)  # another thread may have closed the burst
            flight.status = status
        return flight

    def look(self, flight: InFlight, until: int) -> None:
        """Continue polling for the answer of a started execution. `until` means the same as `look_until` in `start`."""
        flight.may_look = False
        if flight.status is not None or len(self._flying) > 1:
            return
        status = lib.nnb_execution_watch(flight.request.pointer, flight.tag, until)
        if status == _RESTART:
            flight.may_look = True
        elif status not in (_AGAIN, _BUSY, _NOT_FLYING):
            self._complete(flight.tag, status)

    def withdraw(self, flight: InFlight) -> bool:
        """Withdraw an execution that was not sent. Return False if the execution was sent and will be answered."""
        if flight.status is not None:  # a task may be dropped long after its burst has closed
            return True
        if lib.nnb_execution_withdraw(flight.request.pointer) < 0:
            return False
        self._complete(flight.tag, -errno.ECANCELED)
        return True

    def _complete(self, tag: int, status: int) -> None:
        flight = self._flying.pop(tag, None)
        if flight is not None:
            flight.status = status
            if flight._then is not None:
                flight._then(flight)

    def _take_answers(self) -> None:
        tag, flying = _AGAIN, self._flying
        while flying and (tag := lib.nnb_client_land(self._endpoint)) >= 0:
            flight = flying.get(tag)
            if flight is not None:
                self._complete(tag, lib.nnb_execution_status(flight.request.pointer))
        if tag < 0 and tag not in (_AGAIN, _BUSY):
            for left, flight in list(self._flying.items()):
                lib.nnb_execution_withdraw(flight.request.pointer)
                self._complete(left, _DIED if tag == _CLOSED else tag)  # the execution may have run

    def arm(self) -> bool:
        """Ask the service to make the bell (a socket) readable at the next answer. Return False if none is awaited."""
        while self._flying:
            if lib.nnb_client_arm(self._endpoint) <= 0:  # a negative result means that a waiting thread rings the bell
                return True
            self._take_answers()
        return False

    def collect(self, watched: int) -> bool:
        """Take the answers that have come, and `arm` the bell for the next one. Return False if nothing is in flight.

        Args:
            watched: The copy of the bell's descriptor that the event loop watches.
        """
        lib.nnb_bell_hush(watched)
        self._take_answers()
        return self.arm()

    def close(self) -> None:
        self._take_answers()
        self._watched.close()
