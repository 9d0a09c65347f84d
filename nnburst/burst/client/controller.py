"""The client's end of a burst."""

from __future__ import annotations

import atexit
import contextlib
import errno
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..._core._nnburst import ffi, lib
from ..._core.deadline import Deadline
from ..._core.errno import check
from ..._core.leaving import Closing, Leaving, OneProcess, process_lock
from ...errors import BadState, DeadObject, GeneralFailure, InvalidArgument, MissedDeadline, NNBurstError
from ...fmq.descriptor import Layout
from ...fmq.queue import new_queue
from ...model.running import RunOptions
from ...model.types import MeasureTiming, Named
from ...watch.page import make_private_row
from ...watch.stats import Latency, row_stats
from ..endpoint import open_channels
from ..polling import CHANNEL_LENGTH, DATUM, loop_timeout_ns, window_ns
from ..stats import BurstStats
from .in_flight import InFlightRuns, make_bell
from .request import BoundRequest
from .slots import SlotTable

if TYPE_CHECKING:
    from ..._core._nnburst import CData
    from ...devices.interfaces import PreparedModel
    from ...errors import Ending
    from ...memory.memory import Memory
    from ...model.running import ExecutionResult
    from ...model.types import Request
    from ..interfaces import BurstContext

_COUNTERS = lib.NNB_REQUESTS, lib.NNB_RESULTS, lib.NNB_SLEEPS, lib.NNB_WAKES, lib.NNB_MALFORMED, lib.NNB_DROPPED


class ExecutionBurstController(OneProcess, Closing):
    """The client's end of a burst on a prepared model. Context manager.

    It runs one execution at a time. A second one raises `BadState`, in any thread.

    Attributes:
        closed: True after `close` or `refuse`.
    """

    @classmethod
    def create(
        cls,
        prepared_model: PreparedModel,
        *,
        polling_window: float | None = None,
        loop_timeout: float | None = None,
        channel_length: int = CHANNEL_LENGTH,
        result_channel_length: int | None = None,
    ) -> ExecutionBurstController:
        """Create a burst that runs a prepared model.

        Args:
            prepared_model: The model, kept alive by the burst.
            polling_window: Seconds that both ends poll before they sleep; 0 to never poll, None for a default that
                depends on the CPUs. A service in another process polls 10 ms at most.
            loop_timeout: Seconds that each WHILE operation of a run may take; None for the default.
            channel_length: Length of the request channel in 24-byte datums, 4 to 65,536. A request needs 2 datums, and
                one for each input, output, pool and dimension in it. A longer request runs without the burst.
            result_channel_length: Length of the result channel in datums; None for `channel_length`.

        Raises:
            InvalidArgument: A length, the polling window or the loop timeout is out of range.
            NNBurstError: The model cannot serve a burst; the error's status says why.
        """
        window_ns(polling_window, ())  # an invalid window raises before anything is created
        loop_ns = loop_timeout_ns(loop_timeout)
        lengths = (channel_length, channel_length if result_channel_length is None else result_channel_length)
        least, most = lib.NNB_MIN_CHANNEL, lib.NNB_MAX_CHANNEL
        if not all(least <= length <= most for length in lengths):
            raise InvalidArgument(f"a burst channel has {least} to {most} datums, not {lengths}")
        watched, rung = make_bell()
        slots = SlotTable(rung.fds[0], loop_ns)
        with contextlib.closing(rung), contextlib.ExitStack() as stack, contextlib.ExitStack() as failing:
            failing.callback(watched.close)  # an error that stays alive would keep the socket open
            request, result = [stack.enter_context(new_queue(DATUM, n, layout=Layout.STAMPED)) for n in lengths]
            context = prepared_model.configure_execution_burst(slots, request, result, polling_window)
            failing.callback(context.close)
            # The server has emptied the queues, so the client may write from now on.
            window = window_ns(polling_window, context.cpus)
            ends = open_channels(request, result, reset=False)
            out = ffi.new("nnb_client **")
            check(lib.nnb_client_create(out, *ends, window), "burst channels")
            endpoint = ffi.gc(out[0], lib.nnb_client_destroy)
            flights = None
            if context.pipelined:
                check(lib.nnb_client_set_pipelined(endpoint, rung.fds[0]), "bell")
                flights = InFlightRuns(endpoint, watched, polls=window > 0)
            failing.pop_all()
        return cls(prepared_model, context, slots, endpoint, flights)

    def __init__(
        self,
        prepared_model: PreparedModel,
        context: BurstContext,
        slots: SlotTable,
        endpoint: CData,
        flights: InFlightRuns | None,
    ) -> None:
        """Use `create` instead."""
        self._flights = flights
        self._prepared_model = prepared_model
        self._context = context
        self._slots = slots
        self._row = make_private_row()
        lib.nnb_client_watch(endpoint, self._row.pointer)
        self.endpoint = endpoint
        self._lock = process_lock()
        self.closed = False
        self._fallbacks = 0
        self._holders: dict[Memory | Named, set[object]] = {}
        self._dropped: deque[tuple[Memory | Named, object]] = deque()
        self._leaving: Leaving | None = None
        # Listeners live until the connection ends, and must not keep a dropped burst alive.
        this = weakref.ref(self)

        def hang_up() -> None:
            if (end := this()) is not None:
                lib.nnb_client_hang_up(end.endpoint)

        slots.set_end_listener(hang_up)
        self._unlink = prepared_model.link_to_death(hang_up)
        _ENDS[id(self)] = self

    def bind(self, request: Request, *, measure: bool = False) -> BoundRequest:
        """Serialise a request once, for many runs.

        Args:
            request: Request whose pools get slots until `free_memory` or `close`.
            measure: True if results carry `Timing`.

        Raises:
            BadState: The burst or a memory is closed.
            InvalidArgument: A number does not fit the wire format.
        """
        return BoundRequest(self, (request,), measure=measure)

    def compute(self, request: Request, *, measure: bool = False, timeout: float | None = None) -> ExecutionResult:
        """Run a request once. An error of the request or execution is returned as a status."""
        bound = self.bind(request, measure=measure)
        bound.timeout = timeout
        return bound.execute()

    def record(self, trace: CData) -> None:
        """Record each later run in an ``nnb_trace``. Call this only while no execution runs."""
        self._trace = trace
        lib.nnb_client_trace(self.endpoint, trace, 1)

    @property
    def flights(self) -> InFlightRuns:
        """Executions that block no caller. Raises `GeneralFailure` if the server takes one request at a time."""
        if self._flights is None:
            raise GeneralFailure("the service takes one request at a time, as burst servers of its own do; use run()")
        return self._flights

    def slots_for(self, pools: Sequence[Memory | Named]) -> list[int]:
        """Return a slot for each memory. Raises the same errors as `bind`."""
        if self.closed:
            raise BadState("the burst is closed; open another one")
        with self._lock:  # no other thread may release a memory meanwhile
            self.forget_dropped()
            return self._slots.slots_for(pools)

    def run_without_burst(self, request: Request, measure: bool, timeout: float | None) -> ExecutionResult:
        """Run a request that does not fit into the channel, without the burst."""
        self._fallbacks += 1
        flag = MeasureTiming.YES if measure else MeasureTiming.NO
        return self._prepared_model.execute_synchronously(request, RunOptions(flag, Deadline.after(timeout).at_ns))

    def failure_reason(self) -> str:
        """Ask the server for the reason of the last failure."""
        return self._context.failure_reason()

    # ---- memory and life -------------------------------------------------------------------------------------

    def free_memory(self, memory: Memory | Named) -> bool:
        """Drop a memory on both sides of the burst. Return True if the memory had a slot. Later runs with it fail."""
        slot = self._slots.free(memory)
        if slot is None:
            return False
        try:
            self._context.free_memory(slot)
        except (BadState, DeadObject, MissedDeadline):  # a dead service has no memory left
            pass
        except NNBurstError:
            if not self.closed:  # another thread or a signal handler may close it
                raise
        return True

    def forget(self, memory: Memory | Named) -> None:
        """Drop a memory like `free_memory`, but without waiting for the service."""
        slot = self._slots.free(memory)
        if slot is not None:
            with contextlib.suppress(NNBurstError):
                self._context.forget_memory(slot)

    def hold(self, memory: Memory | Named, holder: object) -> None:
        """Keep a memory until all holders have released it."""
        with self._lock:
            self._holders.setdefault(memory, set()).add(holder)

    def release(self, memory: Memory | Named, holder: object, *, wait: bool = False) -> None:
        """Release a memory for a holder. If no holder is left, drop the memory; with `wait`, wait for the service."""
        with self._lock:
            holders = self._holders.get(memory, set())
            holders.discard(holder)
            if holders:
                return
            self._holders.pop(memory, None)
        if wait:
            self.free_memory(memory)
        else:
            self.forget(memory)

    def release_soon(self, memory: Memory | Named, holder: object) -> None:
        """Release a memory when the next request is bound. Finalisers may call it, because it takes no lock."""
        if not self.closed:
            self._dropped.append((memory, holder))

    def forget_dropped(self) -> None:
        """Release the memories that were passed to `release_soon`."""
        with self._lock:
            while self._dropped:
                with contextlib.suppress(IndexError):  # a signal handler or `close` may have emptied it
                    self.release(*self._dropped.popleft())

    @property
    def stats(self) -> BurstStats:
        """Counts of events at this end of the burst."""
        return BurstStats(*[*(self._row.pointer.counters[i] for i in _COUNTERS), self._fallbacks])

    def latency(self) -> Latency:
        """Return histograms of the runs' round trips, waits and executions, in nanoseconds."""
        row = row_stats(self._row.pointer)
        assert row is not None
        return Latency(row.round_trip, row.queue_wait, row.execution)

    @property
    def is_free(self) -> bool:
        """True if the burst is idle. Another thread may start a run at any time."""
        return bool(lib.nnb_client_is_free(self.endpoint))

    @property
    def is_sound(self) -> bool:
        """True unless the burst is closed, ended by the service, or corrupt."""
        return not self.end_reason and lib.nnb_client_is_sound(self.endpoint) == 1

    @property
    def end_reason(self) -> str:
        """The server's reason for ending the burst, or an empty string."""
        return self._slots.end_reason

    @property
    def ending(self) -> Ending:
        """The `Ending` of the process that contains the model. Its reason is empty while the process lives."""
        return self._prepared_model.ending

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that the server may use."""
        return self._context.cpus

    def close(self) -> None:
        """End the burst. Idempotent.

        A call that waits for a run raises `BadState`, but the service finishes the run.
        """
        self.refuse()
        self._leaving = self._leaving or Leaving(
            self._unlink, self._context.detach_client, self._context.close, self._close_endpoint, self._forget_all
        )
        self._leaving()

    def _close_endpoint(self) -> None:
        # EDEADLK means that this signal handler interrupted the running execution, which will find the burst closed.
        while lib.nnb_client_close(self.endpoint) == -errno.EBUSY:
            time.sleep(0.001)  # meanwhile, the running execution takes the lock and stops

    def _forget_all(self) -> None:
        if self._flights is not None:
            self._flights.close()
        self._slots.clear()
        self._dropped.clear()
        self._holders.clear()

    def refuse(self) -> None:
        """Refuse further runs. A call that waits for a run raises `BadState`."""
        self.closed = True
        lib.nnb_client_hang_up(self.endpoint)

    def hang_up(self) -> None:
        """End the burst without waiting. Any thread or finaliser may call it."""
        with contextlib.suppress(NNBurstError):
            self._unlink()
            self._context.detach_client()
            self._context.hang_up()


_ENDS: weakref.WeakValueDictionary[int, ExecutionBurstController] = weakref.WeakValueDictionary()


def _hang_up_all() -> None:
    """End all bursts at interpreter exit. Otherwise, an execution could wait for a server that has ended."""
    for end in filter(None, (ref() for ref in _ENDS.valuerefs())):
        lib.nnb_client_hang_up(end.endpoint)


atexit.register(_hang_up_all)
