"""Futures of started executions, and the thread per burst that completes them."""

from __future__ import annotations

import contextlib
import errno
import select
import threading
import weakref
from typing import TYPE_CHECKING, TypeVar

from ..._core.deadline import Deadline
from ..._core.leaving import process_lock
from ..._core.threads import start_daemon
from ...errors import BadState, ResourceExhausted

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ...burst.client.in_flight import InFlight, InFlightRuns
    from ...burst.client.request import BoundRequest

    E = TypeVar("E", bound=BoundRequest)


def submit(execution: E) -> Future[E]:
    """Start an execution. The future's result is the execution itself, with the outputs of the run."""
    from concurrent.futures import Future  # most clients never need it

    future: Future[E] = Future()
    deadline = Deadline.after(execution._allowed)
    while (flight := execution._start()).status == -errno.EBUSY:  # another thread waits in this burst
        if execution._again(errno.EBUSY, deadline) is None:
            break  # there is no other burst
    flights = execution.controller.flights
    try:
        attend_to(flights, flight)
    except ResourceExhausted:
        flights.give_up(flight)
        raise
    future.set_running_or_notify_cancel()
    once, due, missed = threading.Lock(), execution._deadline, execution._missed()

    def landed(flight: InFlight) -> None:
        if not once.acquire(blocking=False):  # another thread was first, or the timeout is over
            return
        take_back()
        try:
            execution._conclude(flight.status or 0)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(execution)

    def expire() -> None:
        if not flights.give_up(flight) and once.acquire(blocking=False):  # otherwise it has ended
            future.set_exception(missed)

    is_limited = due.at_ns and flight.status is None
    take_back = flights.jobs.do(expire, due) if is_limited else lambda: None
    flight.when_landed(landed)
    return future


_attendants = process_lock()


def attend_to(flights: InFlightRuns, flight: InFlight) -> None:
    """Have a thread complete a burst's executions until this one has ended."""
    if flight.status is not None:
        return
    with _attendants:
        if flights.attendant is None or not flights.attendant.is_alive():
            what = "what is in flight"
            flights.attendant = start_daemon(_attend, weakref.ref(flights), name="nnburst-attendant", what=what)
    flights.arm()  # the thread may be asleep because nothing was in flight


def _attend(reference: weakref.ref[InFlightRuns]) -> None:
    """Complete executions as long as the burst exists."""
    flights = reference()
    if flights is None:
        return
    try:
        fd = flights.copy_bell()
    except BadState:  # closed, so nothing is in flight
        return
    poll = select.poll()
    poll.register(fd.fds[0], select.POLLIN)
    with contextlib.closing(fd):
        while flights is not None:
            flights.attend(fd.fds[0])
            if flights.closed:
                return
            del flights  # lets the burst be dropped during the wait
            poll.poll()
            flights = reference()
