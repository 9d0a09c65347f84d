"""Futures of started executions, and the threads that complete them."""

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
    """Start an execution. The future's result is the execution, with the run's outputs."""
    from concurrent.futures import Future  # most clients need no futures

    future: Future[E] = Future()
    deadline = Deadline.after(execution._allowed)
    while (flight := execution._start()).status == -errno.EBUSY:  # another thread uses this burst
        if execution._rebind(errno.EBUSY, deadline) is None:
            break  # there is no other burst
    flights = execution.controller.flights
    try:
        complete_in_thread(flights, flight)
    except ResourceExhausted:
        flights.withdraw(flight)
        raise
    future.set_running_or_notify_cancel()
    once, due, missed = threading.Lock(), execution._deadline, execution._deadline_error()

    def complete(flight: InFlight) -> None:
        if not once.acquire(blocking=False):  # another thread was first, or the timeout has passed
            return
        take_back()
        try:
            execution._conclude(flight.status or 0)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(execution)

    def expire() -> None:
        if not flights.withdraw(flight) and once.acquire(blocking=False):  # the run has not ended
            future.set_exception(missed)

    is_limited = due.at_ns and flight.status is None
    take_back = flights.jobs.do(expire, due) if is_limited else lambda: None
    flight.set_end_listener(complete)
    return future


_attendants = process_lock()


def complete_in_thread(flights: InFlightRuns, flight: InFlight) -> None:
    """Make a thread complete a burst's executions until `flight` has ended."""
    if flight.status is not None:
        return
    with _attendants:
        if flights.attendant is None or not flights.attendant.is_alive():
            what = "what is in flight"
            flights.attendant = start_daemon(_attend, weakref.ref(flights), name="nnburst-attendant", what=what)
    flights.arm()  # this wakes the thread


def _attend(reference: weakref.ref[InFlightRuns]) -> None:
    """Complete the futures of executions that have ended, as long as the burst exists."""
    flights = reference()
    if flights is None:
        return
    try:
        fd = flights.copy_bell()
    except BadState:
        return
    poll = select.poll()
    poll.register(fd.fds[0], select.POLLIN)
    with contextlib.closing(fd):
        while flights is not None:
            flights.collect(fd.fds[0])
            if flights.closed:
                return
            del flights  # the burst can be dropped meanwhile
            poll.poll()
            flights = reference()
