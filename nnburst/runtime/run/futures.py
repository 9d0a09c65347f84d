"""Started executions as `concurrent.futures.Future`s, and the one thread per burst that completes them."""

from __future__ import annotations

import contextlib
import errno
import select
import threading
import weakref
from typing import TYPE_CHECKING, TypeVar

from ..._core.deadline import Deadline
from ..._core.fds import FdSet
from ..._core.leaving import process_lock
from ..._core.threads import start_daemon
from ...errors import BadState, ResourceExhausted

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ...burst import BoundRequest, InFlight, InFlightRuns

    E = TypeVar("E", bound=BoundRequest)


def submit(execution: E) -> Future[E]:
    """Start an execution. The future's result is the execution itself, whose outputs are then those of the run."""
    from concurrent.futures import Future  # which most clients never need

    future: Future[E] = Future()
    deadline = Deadline.after(execution._allowed)
    while (flight := execution._start()).status == -errno.EBUSY:  # a thread waits in its burst
        if execution._again(errno.EBUSY, deadline) is None:
            break  # it has no other one
    flights = execution.controller.flights
    try:
        attend_to(flights, flight)
    except ResourceExhausted:
        flights.give_up(flight)
        raise
    future.set_running_or_notify_cancel()
    once, due, missed = threading.Lock(), execution._deadline, execution._missed()

    def landed(flight: InFlight) -> None:
        if not once.acquire(blocking=False):  # another thread has found it landed, too, or its time was over
            return
        take_back()
        try:
            execution._conclude(flight.status or 0)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(execution)

    def expire() -> None:
        if not flights.give_up(flight) and once.acquire(blocking=False):  # else it has landed
            future.set_exception(missed)

    is_limited = due.at_ns and flight.status is None
    take_back = flights.jobs.do(expire, due) if is_limited else lambda: None
    flight.when_landed(landed)
    return future


_attendants = process_lock()


def attend_to(flights: InFlightRuns, flight: InFlight) -> None:
    """See to it that a thread attends to these flights until this one has landed."""
    if flight.status is not None:
        return
    with _attendants:
        if flights.attendant is None or not flights.attendant.is_alive():
            what = "what is in flight"
            flights.attendant = start_daemon(_attend, weakref.ref(flights), name="nnburst-attendant", what=what)
    flights.arm()  # the thread may be waiting since nothing was in flight


def _attend(reference: weakref.ref[InFlightRuns]) -> None:
    """Land what flies, as long as there is the burst."""
    flights = reference()
    if flights is None:
        return
    try:
        fd = FdSet.duplicate([flights.fileno()])
    except BadState:  # closed: all has landed
        return
    poll = select.poll()
    poll.register(fd.fds[0], select.POLLIN)
    with contextlib.closing(fd):
        while flights is not None:
            flights.attend(fd.fds[0])
            if flights.closed:
                return
            del flights  # which may go meanwhile
            poll.poll()
            flights = reference()
