"""Awaiting executions, in asyncio or Trio: the event loop watches the bell of each burst that is awaited.

A run that is answered within the polling window does not suspend its task, but for one turn of the loop now and then:
other tasks wait no longer than a window. A run that is cancelled is given up: one that the service has not seen is
taken back, another lands later, and until then its arrays are in use. A thread sees to that, as the loop may end first:
one for each burst, which goes a second after the last of them has landed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .._core._fds import FdSet
from ..errors import BadState, ErrorStatus, MissedDeadline, ResourceExhausted
from ._aside import aside_of
from ._futures import attend_to

if TYPE_CHECKING:
    from ..burst import BoundRequest, Flight, Flights
    from ._lanes import Lane, Lanes

T = TypeVar("T")

_LONGEST_TURN = 50e-6
"""Seconds that runs without a wait may keep the loop from its other tasks."""


class Loop(Protocol):
    """What is needed of an event loop that runs in this thread."""

    def attend(self, flights: Flights) -> None:
        """Watch the bell of a burst that has something in flight."""

    def event(self) -> tuple[Callable[[], None], Callable[[float | None], Awaitable[bool]]]:
        """Return what sets it, from any thread, perhaps twice, and what waits: False if the time was over first."""

    def pause(self) -> Awaitable[None] | None:
        """Let other tasks run if none has for `_LONGEST_TURN`; None: not necessary."""


def current_loop() -> Loop:
    """Return the loop that runs the calling task.

    Raises:
        BadState: There is none.
    """
    sniffio = sys.modules.get("sniffio")  # Trio has imported it
    name = "asyncio"
    if sniffio is not None:
        with contextlib.suppress(sniffio.AsyncLibraryNotFoundError):
            name = sniffio.current_async_library()
    if name == "trio":
        return _TrioLoop()
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise BadState("there is no event loop here; await this in asyncio or Trio, or use run()") from None
    found = _loops.get(loop)
    if found is None:
        found = _loops[loop] = _AsyncioLoop(loop)
    return found


async def run(execution: BoundRequest, late: Callable[[], None] | None = None) -> None:
    """Run an execution as `BoundRequest.run` does, without blocking the event loop.

    Args:
        execution: Bound to a burst.
        late: Called when a run that was given up has landed, or will not be made, in the thread that finds it.

    Raises:
        NNBurstError: As `BoundRequest.run`; `BadState` also if it is in flight.
    """
    loop = current_loop()
    if execution in _concluding:
        raise BadState("the execution is running: what a run came to that was given up is still being looked at")
    flight = execution.start(look=True)
    if flight.status is None:
        flights = execution.flights
        landed, wait = loop.event()
        flight.when_landed(lambda flight: landed())
        if flights.arm():
            loop.attend(flights)
        try:
            in_time = await wait(execution.timeout)
        except BaseException:
            _give_up(flight, flights, late)
            raise
        if not in_time:
            _give_up(flight, flights, late)
            raise MissedDeadline(f"no answer within {execution.timeout} s; a late one will be dropped")
    else:
        pause = loop.pause()
        if pause is not None:
            await pause
    if not flight.status or flight.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:  # nothing has to be asked for
        execution.conclude(flight.status or 0)
        return
    _concluding.add(execution)

    def conclude() -> None:
        try:
            execution.conclude(flight.status or 0)
        finally:
            _concluding.discard(execution)

    _, error = await aside(execution.flights, conclude, late)
    if error is not None:
        raise error


_concluding: weakref.WeakSet[BoundRequest] = weakref.WeakSet()
"""Those whose failure a thread looks at."""


def is_busy(execution: BoundRequest) -> bool:
    """Whether a run of an execution that was given up has not come to its end."""
    return execution.is_in_flight or execution in _concluding


async def aside(
    flights: Flights, step: Callable[[], T], late: Callable[[], None] | None = None
) -> tuple[T | None, BaseException | None]:
    """Take a step that may wait for the service, or for another one, in the burst's thread for such steps.

    Args:
        flights: Of the burst.
        step: Goes on if the task is cancelled.
        late: Called at its end in some thread, if the task was cancelled and so does not get the outcome.

    Returns:
        What the step has returned, and raised.
    """
    finished, wait = current_loop().event()
    outcome: list[tuple[T | None, BaseException | None]] = []
    awaited = [None]  # taken by the task, or by the thread
    context = contextvars.copy_context()

    def job() -> None:
        try:
            outcome.append((context.run(step), None))
        except BaseException as error:
            outcome.append((None, error))
        finished()
        try:
            awaited.pop()
        except IndexError:  # cancelled
            if late is not None:
                late()

    aside_of(flights).do(job)
    try:
        await wait(None)
    except BaseException:
        try:
            awaited.pop()
        except IndexError:  # it is over
            if late is not None:
                late()
        raise
    return outcome.pop()


def _give_up(flight: Flight, flights: Flights, late: Callable[[], None] | None) -> None:
    once = [late] if late is not None else []

    def landed(flight: Flight) -> None:
        with contextlib.suppress(IndexError):
            once.pop()()

    flight.when_landed(landed)
    if not flights.give_up(flight):
        with contextlib.suppress(ResourceExhausted):  # then the loop alone, as long as it runs
            attend_to(flights, flight)


async def take_lane(lanes: Lanes, timeout: float | None) -> Lane | None:
    """Return a lane, or None if there was none within so many seconds (None: no limit)."""
    if lanes.idle:
        with contextlib.suppress(IndexError):  # another thread was faster
            return lanes.idle.pop()
    loop = current_loop()
    landed, wait = loop.event()
    offered: list[Lane] = []
    open_to_offers = [None]

    def offer(lane: Lane) -> bool:
        offered.append(lane)
        try:
            open_to_offers.pop()
        except IndexError:  # given up
            return False
        landed()
        return True

    taken = False
    lanes.call_soon(offer)
    try:
        taken = await wait(timeout)
    finally:
        if not taken:
            try:
                open_to_offers.pop()
            except IndexError:  # offered at the last moment
                lanes.give(offered[-1])
            else:
                with contextlib.suppress(ValueError):
                    lanes.waiting.remove(offer)
    return offered[-1] if taken else None


# ---- asyncio ---------------------------------------------------------------------------------------------------------


class _AsyncioLoop:
    """A loop of asyncio: it has one reader for each burst that is awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._thread = threading.get_ident()
        self._watched: weakref.WeakKeyDictionary[Flights, FdSet] = weakref.WeakKeyDictionary()
        self._since = 0.0
        self._ticking = False

    def attend(self, flights: Flights) -> None:
        loop = self._loop()
        if loop is None or flights in self._watched or flights.closed:
            return
        fd = self._watched[flights] = FdSet.duplicate([flights.fileno()])
        loop.add_reader(fd.fds[0], self._rung, weakref.ref(flights), fd)

    def _rung(self, reference: weakref.ref[Flights], fd: FdSet) -> None:
        flights = reference()
        if flights is not None:
            flights.attend()
            if not flights.closed:
                return
            self._watched.pop(flights, None)
        loop = self._loop()
        if loop is not None:
            loop.remove_reader(fd.fds[0])
        fd.close()

    def event(self) -> tuple[Callable[[], None], Callable[[float | None], Awaitable[bool]]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()

        def finish() -> None:
            if not future.done():
                future.set_result(True)

        def landed() -> None:
            if threading.get_ident() == self._thread:
                finish()
            else:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(finish)

        async def wait(timeout: float | None) -> bool:
            timer = None if timeout is None else loop.call_later(timeout, self._expire, future)
            try:
                return await future
            finally:
                if timer is not None:
                    timer.cancel()

        return landed, wait

    @staticmethod
    def _expire(future: asyncio.Future[bool]) -> None:
        if not future.done():
            future.set_result(False)

    def pause(self) -> Awaitable[None] | None:
        now = time.monotonic()
        if self._ticking:
            return asyncio.sleep(0) if now - self._since > _LONGEST_TURN else None
        self._ticking, self._since = True, now
        asyncio.get_running_loop().call_soon(self._tick)
        return None

    def _tick(self) -> None:
        self._ticking = False


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _AsyncioLoop] = weakref.WeakKeyDictionary()


# ---- Trio ------------------------------------------------------------------------------------------------------------


class _TrioLoop:
    """Trio: a system task for each burst that is awaited. Every run is a checkpoint, as Trio's own functions are."""

    def __init__(self) -> None:
        import trio

        self._trio: Any = trio

    def attend(self, flights: Flights) -> None:
        runner = self._trio.lowlevel.current_trio_token()
        watched = _trio_watched.setdefault(runner, weakref.WeakSet())
        if flights not in watched and not flights.closed:
            watched.add(flights)
            self._trio.lowlevel.spawn_system_task(self._watch, flights, watched)

    async def _watch(self, flights: Flights, watched: weakref.WeakSet[Flights]) -> None:
        fd = FdSet.duplicate([flights.fileno()])
        try:
            while flights.attend():
                await self._trio.lowlevel.wait_readable(fd.fds[0])
        finally:
            watched.discard(flights)
            fd.close()

    def event(self) -> tuple[Callable[[], None], Callable[[float | None], Awaitable[bool]]]:
        event = self._trio.Event()
        token, thread = self._trio.lowlevel.current_trio_token(), threading.get_ident()

        def landed() -> None:
            if threading.get_ident() == thread:
                event.set()
            else:
                with contextlib.suppress(self._trio.RunFinishedError):
                    token.run_sync_soon(event.set)

        async def wait(timeout: float | None) -> bool:
            with self._trio.move_on_after(float("inf") if timeout is None else timeout):
                await event.wait()
            return bool(event.is_set())

        return landed, wait

    def pause(self) -> Awaitable[None] | None:
        checkpoint: Awaitable[None] = self._trio.lowlevel.checkpoint()
        return checkpoint


_trio_watched: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Flights]] = weakref.WeakKeyDictionary()
