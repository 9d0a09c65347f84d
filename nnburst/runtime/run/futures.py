"""Started executions as `concurrent.futures.Future`s, and the one thread per burst that completes them."""

from __future__ import annotations

import contextlib
import select
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from ..._core.fds import FdSet
from ..._core.leaving import ProcessLock
from ...errors import BadState, ResourceExhausted
from .deferred import aside_of

if TYPE_CHECKING:
    from ...burst import BoundRequest, InFlight, InFlightRuns

    E = TypeVar("E", bound=BoundRequest)

_LINGER = 1.0
"""Seconds that an idle thread stays for the next execution."""


def submit(execution: E) -> Future[E]:
    """Start an execution. The future's result is the execution itself, whose outputs are then those of the run.

    Raises:
        ResourceExhausted: The system has no thread for the first one of a burst.
        NNBurstError: As `BoundRequest.start`.
    """
    future: Future[E] = Future()
    flight = execution.start()
    flights = execution.flights
    try:
        attend_to(flights, flight)
    except ResourceExhausted:
        flights.give_up(flight)
        raise
    future.set_running_or_notify_cancel()
    once = [future]
    limits: list[Callable[[], None]] = []

    def landed(flight: InFlight) -> None:
        with contextlib.suppress(IndexError):  # another thread has found it landed, too, or its time was over
            future = once.pop()
            for forget in limits:
                forget()
            try:
                execution.conclude(flight.status or 0)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(execution)

    def expire() -> None:
        if flights.give_up(flight):  # then it has landed
            return
        with contextlib.suppress(IndexError):
            future = once.pop()
            future.set_exception(missed)

    left, missed = execution.deadline.left(), execution.missed()
    if left is not None and flight.status is None:
        limits.append(aside_of(flights).do(expire, time.monotonic() + left))
    flight.when_landed(landed)
    flights.arm()
    return future


_attendants = ProcessLock()
_threads: weakref.WeakKeyDictionary[InFlightRuns, threading.Thread] = weakref.WeakKeyDictionary()


def attend_to(flights: InFlightRuns, flight: InFlight) -> None:
    """See to it that a thread attends to these flights until this one has landed.

    Raises:
        ResourceExhausted: The system has no thread for it.
    """
    if not flights.leave_to_thread(flight):
        return
    with _attendants.lock:
        thread = _threads.get(flights)
        if thread is not None and thread.is_alive():
            return
        try:
            fd = FdSet.duplicate([flights.fileno()])
        except BadState:  # closed: all has landed
            return
        thread = threading.Thread(
            target=_attend, args=(weakref.ref(flights), fd), name="nnburst-attendant", daemon=True
        )
        _threads[flights] = thread
        try:
            thread.start()
        except RuntimeError as error:
            del _threads[flights]
            raise ResourceExhausted(f"what is in flight needs a thread: {error}") from error


def _attend(reference: weakref.ref[InFlightRuns], fd: FdSet) -> None:
    poll = select.poll()
    poll.register(fd.fds[0], select.POLLIN)
    end = 0.0  # of lingering; 0: it is needed
    try:
        while True:
            flights = reference()
            if flights is None:
                return
            flights.attend()
            if flights.closed:
                return
            if flights.need_thread:
                end = 0.0
                poll.poll()
            else:
                del flights
                end = end or time.monotonic() + _LINGER
                left = end - time.monotonic()
                if (left <= 0 or not poll.poll(left * 1000)) and _leave(reference):
                    return
    finally:
        fd.close()


def _leave(reference: weakref.ref[InFlightRuns]) -> bool:
    """Whether the thread of these flights may end: then it is not theirs any more."""
    with _attendants.lock:
        flights = reference()
        if flights is None:
            return True
        if flights.need_thread:
            return False
        _threads.pop(flights, None)
        return True
