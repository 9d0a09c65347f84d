"""Awaitable executions for asyncio and Trio. The event loop watches the descriptor that signals answers of a burst.

If polling has helped recently, a run first polls for its answer during its polling window. All runs together poll for a
limited time in each iteration of the loop, so that other tasks run. After polling, the task is suspended until the
answer.

If the service has not begun a cancelled run, the run is withdrawn. Otherwise the run's arrays are in use until its
answer. A thread (one per open burst) waits for the answer, because the loop may end before the run.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

from ..._core.fds import FdSet
from ...errors import BadState, ErrorStatus, ResourceExhausted
from .futures import complete_in_thread

if TYPE_CHECKING:
    import asyncio
    from typing import TypeAlias

    from ...burst.client.in_flight import InFlight, InFlightRuns
    from ...burst.client.request import BoundRequest

    Loop: TypeAlias = "_AsyncioLoop | _TrioLoop"

T = TypeVar("T")

_LONGEST_TURN = 30_000
"""Nanoseconds that all runs together may poll in one iteration of an event loop. See docs/async.md."""


def _nothing() -> None:
    pass


def current_loop() -> Loop:
    """Return the loop that runs the calling task. Raises `BadState` if there is none."""
    if "trio" in sys.modules:
        sniffio = sys.modules["sniffio"]  # Trio imports it
        with contextlib.suppress(sniffio.AsyncLibraryNotFoundError):
            if sniffio.current_async_library() == "trio":
                return _trio_loop()
    import asyncio  # most clients need no loop

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise BadState("there is no event loop here; await this in asyncio or Trio, or use run()") from None
    last = _here.last
    if last is not None and last.loop() is loop:
        return last
    found = _loops.get(loop)
    if found is None:
        found = _loops[loop] = _AsyncioLoop(loop)
    _here.last = found
    return found


async def run(
    execution: BoundRequest, timeout: float | EllipsisType | None = ..., late: Callable[[], None] = _nothing
) -> None:
    """Run an execution like `BoundRequest.run`, without blocking the event loop.

    Args:
        late: Called in any thread when a cancelled run has ended or is withdrawn.

    Raises:
        NNBurstError: See `BoundRequest.run`; also `BadState` if the execution is in flight.
    """
    if timeout is not ...:
        with execution._use_timeout(timeout):
            return await run(execution, ..., late)
    loop = current_loop()
    if execution._concluding:
        raise BadState("the execution is running: what a run came to that was given up is still being looked at")
    flights = execution.controller.flights
    flight = execution._start(look_until=loop.look_until() if flights.polls else 0)
    if flight.status is not None:
        checkpoint = loop.checkpoint()
        if checkpoint is not None:
            await checkpoint
    else:
        try:
            while flight.may_look:
                await loop.yield_once()
                flights.look(flight, loop.look_until())
            if flight.status is None:
                waiter = loop.waiter()
                flight.set_end_listener(waiter.set)
                if flights.arm():
                    loop.watch(flights)
                if not await waiter.wait(execution._deadline.left()):
                    raise execution._deadline_error()
        except BaseException:
            _abandon(flight, flights, late)
            raise
    if flight.status == 0:
        return
    if flight.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:  # the service need not say why
        execution._conclude(flight.status)
        return
    execution._concluding = True

    def conclude() -> None:
        try:
            execution._conclude(flight.status or 0)
        finally:
            execution._concluding = False

    _, error = await run_in_thread(flights, conclude, late)
    if error is not None:
        raise error


async def run_in_thread(
    flights: InFlightRuns, step: Callable[[], T], late: Callable[[], None] = _nothing
) -> tuple[T | None, BaseException | None]:
    """Call a blocking function in a separate thread of the burst.

    Args:
        step: The function, which runs to completion even if the task is cancelled.
        late: Called after `step`, in any thread, if the task was cancelled.

    Returns:
        (result, None), or (None, exception) if `step` raised an exception.
    """
    waiter = current_loop().waiter()
    outcome: list[tuple[T | None, BaseException | None]] = []
    first = threading.Lock()  # task and thread acquire it; the second to come drops the outcome
    context = contextvars.copy_context()

    def job() -> None:
        try:
            outcome.append((context.run(step), None))
        except BaseException as error:
            outcome.append((None, error))
        waiter.set()
        if not first.acquire(blocking=False):  # the task was cancelled
            late()

    flights.jobs.do(job)
    try:
        await waiter.wait(None)
    except BaseException:
        if not first.acquire(blocking=False):  # the step has ended
            late()
        raise
    return outcome.pop()


def _abandon(flight: InFlight, flights: InFlightRuns, late: Callable[[], None]) -> None:
    once = threading.Lock()

    def report_end(flight: InFlight) -> None:
        if once.acquire(blocking=False):
            late()

    flight.set_end_listener(report_end)
    if not flights.withdraw(flight):
        with contextlib.suppress(ResourceExhausted):  # without a thread, only the loop waits
            complete_in_thread(flights, flight)


# ---- asyncio ---------------------------------------------------------------------------------------------------------


class _AsyncioLoop:
    """An asyncio loop, which watches each burst in use."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self._thread = threading.get_ident()
        self._watched: weakref.WeakKeyDictionary[InFlightRuns, FdSet] = weakref.WeakKeyDictionary()
        self._turn_ends = 0  # 0 if no run has polled in this iteration

    def watch(self, flights: InFlightRuns) -> None:
        """Watch for answers of a burst with executions in flight."""
        loop = self.loop()
        if loop is None or flights in self._watched or flights.closed:
            return
        own = self._watched[flights] = flights.copy_bell()
        (fd,) = own.fds
        loop.add_reader(fd, self._on_bell, weakref.ref(flights), fd, own)

    def _on_bell(self, reference: weakref.ref[InFlightRuns], fd: int, own: FdSet) -> None:
        flights = reference()
        if flights is not None:
            flights.collect(fd)
            if not flights.closed:
                return
            self._watched.pop(flights, None)
        loop = self.loop()
        if loop is not None:
            loop.remove_reader(fd)
        own.close()

    def waiter(self) -> _AsyncioWaiter:
        """Return a new object on which a task can wait."""
        loop = self.loop()
        assert loop is not None
        return _AsyncioWaiter(loop, self._thread)

    def look_until(self) -> int:
        """Return the end of polling in this iteration of the loop (CLOCK_MONOTONIC nanoseconds)."""
        if not self._turn_ends:
            loop = self.loop()
            assert loop is not None
            loop.call_soon(self._end_iteration)
            self._turn_ends = time.monotonic_ns() + _LONGEST_TURN
        return self._turn_ends

    def _end_iteration(self) -> None:
        self._turn_ends = 0

    def yield_once(self) -> Awaitable[None]:
        """Let the loop run other tasks for one iteration."""
        import asyncio

        return asyncio.sleep(0)

    def checkpoint(self) -> None:
        """Let other tasks of Trio continue after a run that did not wait. Do nothing in asyncio."""
        return None


class _AsyncioWaiter:
    __slots__ = ("_future", "_loop", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self._loop, self._thread = loop, thread
        self._future: asyncio.Future[bool] = loop.create_future()

    def set(self, flight: InFlight | None = None) -> None:
        """Wake the task. Any thread may call `set`, repeatedly."""
        if threading.get_ident() == self._thread:
            self._end(True)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end, True)

    def _end(self, in_time: bool) -> None:
        if not self._future.done() and not self._loop.is_closed():  # a closed loop runs no task
            self._future.set_result(in_time)

    def wait(self, timeout: float | None) -> Awaitable[bool]:
        """Wait for `set`. Return False after `timeout` seconds."""
        return self._future if timeout is None else self._wait_for(timeout)

    async def _wait_for(self, timeout: float) -> bool:
        timer = self._loop.call_later(timeout, self._end, False)
        try:
            return await self._future
        finally:
            timer.cancel()


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _AsyncioLoop] = weakref.WeakKeyDictionary()


class _Here(threading.local):
    last: _AsyncioLoop | None = None


_here = _Here()
"""The loop that this thread used last, for a quick look-up."""


# ---- Trio ------------------------------------------------------------------------------------------------------------


class _TrioLoop:
    """A Trio loop, with a system task for each burst in use. Every run is a checkpoint, as in Trio's functions."""

    def __init__(self, token: Any) -> None:
        import trio

        self._trio: Any = trio
        self._token = weakref.ref(token)
        self._thread = threading.get_ident()
        self._watched: weakref.WeakSet[InFlightRuns] = weakref.WeakSet()
        self._turn_ends = 0  # 0 if no run has polled in this iteration
        self._turner: Any = None

    def watch(self, flights: InFlightRuns) -> None:
        if flights in self._watched or flights.closed:
            return
        own = flights.copy_bell()  # the burst can close before the task starts
        self._watched.add(flights)
        self._trio.lowlevel.spawn_system_task(self._watch, flights, own)

    async def _watch(self, flights: InFlightRuns, own: FdSet) -> None:
        (fd,) = own.fds
        try:
            while flights.collect(fd):
                await self._trio.lowlevel.wait_readable(fd)
        finally:
            self._watched.discard(flights)
            own.close()

    def waiter(self) -> _TrioWaiter:
        return _TrioWaiter(self._trio, self._token(), self._thread)

    def look_until(self) -> int:
        if not self._turn_ends:
            self._turn_ends = time.monotonic_ns() + _LONGEST_TURN
            if self._turner is None:
                self._turner = self._trio.lowlevel.spawn_system_task(self._begin_iteration)
            else:
                self._trio.lowlevel.reschedule(self._turner)
        return self._turn_ends

    async def _begin_iteration(self) -> None:
        """Begin a new iteration once all tasks that were ready have run."""
        try:
            while True:
                self._turn_ends = 0
                await self._trio.lowlevel.wait_task_rescheduled(lambda _: self._trio.lowlevel.Abort.SUCCEEDED)
        finally:
            self._turner = None

    def yield_once(self) -> Awaitable[None]:
        checkpoint: Awaitable[None] = self._trio.lowlevel.checkpoint()
        return checkpoint

    def checkpoint(self) -> Awaitable[None]:
        return self.yield_once()


class _TrioWaiter:
    __slots__ = ("_event", "_thread", "_token", "_trio")

    def __init__(self, trio: Any, token: Any, thread: int) -> None:
        self._trio, self._token, self._thread = trio, token, thread
        self._event = trio.Event()

    def set(self, flight: InFlight | None = None) -> None:
        if threading.get_ident() == self._thread:
            self._event.set()
        else:
            with contextlib.suppress(self._trio.RunFinishedError):
                self._token.run_sync_soon(self._event.set)

    async def wait(self, timeout: float | None) -> bool:
        with self._trio.move_on_after(float("inf") if timeout is None else timeout):
            await self._event.wait()
        return bool(self._event.is_set())


def _trio_loop() -> _TrioLoop:
    import trio

    token = trio.lowlevel.current_trio_token()
    found = _trio_loops.get(token)
    if found is None:
        found = _trio_loops[token] = _TrioLoop(token)
    return found


_trio_loops: weakref.WeakKeyDictionary[Any, _TrioLoop] = weakref.WeakKeyDictionary()
