"""The client's end of a burst: its slots, its channels and its death."""

from __future__ import annotations

import atexit
import contextlib
import errno
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..._core._nnburst import ffi, lib
from ..._core.deadline import Deadline
from ..._core.leaving import Leaving, ProcessLock
from ..._core.one_process import OneProcess
from ...errors import BadState, DeadObject, GeneralFailure, MissedDeadline, NNBurstError
from ...model import MeasureTiming, Named, RunOptions
from ...watch import Latency, private_row, row_stats
from ..stats import BurstStats, client_stats
from .slots import SlotTable

if TYPE_CHECKING:
    from ..._core._nnburst import CData
    from ...errors import Ending
    from ...fmq import MQDescriptor
    from ...memory import Memory
    from ...model import ExecutionResult, Request, Steps
    from ..interfaces import BurstCallback, BurstContext
    from .in_flight import InFlightRuns


class BurstCapable(Protocol):
    """What a controller needs of a prepared model, local or remote."""

    def configure_execution_burst(
        self,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        polling_window: float | None = None,
    ) -> BurstContext: ...

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult: ...

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]: ...

    @property
    def ending(self) -> Ending: ...


class ClientEnd(OneProcess):
    """One burst on a prepared model: one execution at a time, each one packet there and one back.

    Attributes:
        told: Why the server has ended the burst, if it did so by itself.
    """

    told: str

    def __init__(
        self,
        prepared_model: BurstCapable,
        context: BurstContext,
        slots: SlotTable,
        endpoint: CData,
        flights: InFlightRuns | None,
    ) -> None:
        """Use `ExecutionBurstController.create`."""
        self._flights = flights
        self._prepared_model = prepared_model
        self._context = context
        self._slots = slots
        self._row = private_row()
        lib.nnb_client_watch(endpoint, self._row.pointer)
        self._endpoint = endpoint
        self._lock = ProcessLock()  # a signal handler may drop a memory while another one is dropped
        self._closed = False
        self._fallbacks = 0
        self._dropped: deque[tuple[Memory | Named, bool]] = deque()
        self._uses: weakref.WeakValueDictionary[Memory | Steps, MemoryUse] = weakref.WeakValueDictionary()
        self._adrift: list[CData] = []
        self._leaving: Leaving | None = None
        # Weakly: listeners are kept until the connection ends, and an end that is just dropped must not be.
        this = weakref.ref(self)

        def hang_up(reason: str = "") -> None:
            end = this()
            if end is not None:
                end.told = end.told or reason
                lib.nnb_client_hang_up(end._endpoint)

        self.told = ""
        slots.when_ended(hang_up)
        self._unlink = prepared_model.link_to_death(hang_up)
        _ENDS[id(self)] = self

    def record(self, trace: CData, every: int) -> None:
        """Note at least one run of so many in an ``nnb_trace``, from now on; while nothing runs."""
        self._trace = trace
        lib.nnb_client_trace(self._endpoint, trace, every)

    @property
    def flights(self) -> InFlightRuns:
        """The executions that were started and are not waited for; `GeneralFailure` if there can be none."""
        if self._flights is None:
            raise GeneralFailure("the service takes one request at a time, as burst servers of its own do; use run()")
        return self._flights

    def slots_for(self, pools: Sequence[Memory | Named]) -> list[int]:
        """Return the slots of memories, giving each a slot that has none; raises as `bind`."""
        if self._closed:
            raise BadState("the burst is closed; open another one")
        with self._lock.lock:  # a memory that is used again from now on is not among the dropped ones
            self.forget_dropped()
            return self._slots.slots_for(pools)

    def _run_without_burst(self, request: Request, measure: bool, timeout: float | None) -> ExecutionResult:
        self._fallbacks += 1
        flag = MeasureTiming.YES if measure else MeasureTiming.NO
        return self._prepared_model.execute_synchronously(request, RunOptions(flag, Deadline.after(timeout).at_ns))

    # ---- memory and life -------------------------------------------------------------------------------------

    def free_memory(self, memory: Memory | Named) -> bool:
        """Forget a memory on both sides; return whether it was known. Executions bound to it fail from now on."""
        slot = self._slots.free(memory)
        if slot is None:
            return False
        try:
            self._context.free_memory(slot)
        except (BadState, DeadObject, MissedDeadline):  # a service that has ended holds nothing
            pass
        except NNBurstError:
            if not self._closed:  # meanwhile, by another thread or a signal handler
                raise
        return True

    def forget(self, memory: Memory | Named) -> None:
        """As `free_memory`, but do not wait for the service."""
        slot = self._slots.free(memory)
        if slot is not None:
            with contextlib.suppress(NNBurstError):
                self._context.forget_memory(slot)

    def forget_soon(self, memory: Memory | Named, *, close: bool = True) -> None:
        """For a finaliser, which may take no lock: forget, and close, a memory when the next request is bound."""
        if not self._closed:
            self._dropped.append((memory, close))

    def use(self, memory: Memory | Steps) -> MemoryUse:
        """Return what stands for the uses of what is not one request's alone. It is forgotten with the last use."""
        with self._lock.lock:
            use = self._uses.get(memory)
            if use is None:
                use = self._uses[memory] = MemoryUse()
                weakref.finalize(use, _unused, weakref.ref(self), memory).atexit = False
            return use

    def forget_dropped(self) -> None:
        """Do what `forget_soon` and `give_up` have put off."""
        with self._lock.lock:
            adrift, self._adrift = self._adrift, []
            self.give_up(adrift)
            while self._dropped:
                with contextlib.suppress(
                    IndexError
                ):  # perhaps a signal handler has come to the last one first, or `close`
                    self._forget_one(*self._dropped.popleft())

    def _forget_one(self, memory: Memory | Named, close: bool) -> None:
        if not close and memory in self._uses:  # again
            return
        self.forget(memory)
        if close and not isinstance(memory, Named):
            memory.close()

    @property
    def stats(self) -> BurstStats:
        return client_stats(self._row, self._fallbacks)

    def latency(self) -> Latency:
        """Say how long the runs took."""
        row = row_stats(self._row.pointer)
        assert row is not None
        return Latency(row.round_trip, row.queue_wait, row.execution)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def is_free(self) -> bool:
        """Whether it runs nothing now. It may be otherwise a moment later."""
        return bool(lib.nnb_client_is_free(self._endpoint))

    @property
    def is_sound(self) -> bool:
        """Whether it may be used again: it is not closed, the service has not ended it, nor corrupted its channels."""
        return not self.told and lib.nnb_client_is_sound(self._endpoint) == 1

    @property
    def ending(self) -> Ending:
        return self._prepared_model.ending

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that the server may use."""
        return self._context.cpus

    def close(self) -> None:
        """End the burst; an execution in flight gets `BadState`, though the service finishes it. Idempotent."""
        self.refuse()
        self._leaving = self._leaving or Leaving(
            self._unlink,
            self._context.leave,
            self._context.close,
            self._close_endpoint,
            self._forget_all,
        )
        self._leaving()

    def _close_endpoint(self) -> None:
        # EDEADLK: this is a signal handler over the execution in flight, which finds the burst closed when it goes on.
        while lib.nnb_client_close(self._endpoint) == -errno.EBUSY:
            time.sleep(0.001)  # the execution in flight has been told to stop; the lock is free for it here

    def _forget_all(self) -> None:
        if self._flights is not None:
            self._flights.close()
        self._slots.clear()
        self._dropped.clear()

    def give_up(self, executions: Sequence[CData]) -> None:
        """Await none of those of this burst that are in flight, for they are going to be dropped. Waits for nothing.

        Any thread, also in a finaliser.
        """
        for execution in filter(lib.nnb_execution_flies, executions):
            if lib.nnb_execution_advance(ffi.NULL, execution) == -errno.EBUSY:
                self._adrift.append(execution)  # another thread waits in the burst, and will receive their answers
            lib.nnb_execution_abandon(execution)

    def refuse(self) -> None:
        """The first half of `close`: nothing is run any more, and an execution in flight gets `BadState`."""
        self._closed = True
        lib.nnb_client_hang_up(self._endpoint)

    def hang_up(self) -> None:
        """End the burst without waiting, from any thread, also in a finaliser; `close` may follow."""
        with contextlib.suppress(NNBurstError):
            self._unlink()
            self._context.leave()
            self._context.hang_up()


class MemoryUse:
    """That a request of a burst names a memory; see `ClientEnd.use`."""

    __slots__ = ("__weakref__",)


def _unused(burst: weakref.ref[ClientEnd], memory: Memory | Steps) -> None:
    this = burst()
    if this is not None:
        this.forget_soon(memory, close=False)


_ENDS: weakref.WeakValueDictionary[int, ClientEnd] = weakref.WeakValueDictionary()


def _hang_up_all() -> None:
    """At interpreter exit servers end; an execution that still runs afterwards must not wait for one."""
    for end in filter(None, (ref() for ref in _ENDS.valuerefs())):
        lib.nnb_client_hang_up(end._endpoint)


atexit.register(_hang_up_all)
