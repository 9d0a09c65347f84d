"""The service's side of a burst."""

from __future__ import annotations

import errno
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ..._core._nnburst import drop_plans, ffi, lib
from ..._core.deadline import Deadline
from ..._core.errno import check
from ..._core.threads import start_daemon
from ...errors import BadState, ErrorStatus, InvalidArgument, MissedDeadline, NNBurstError, error_for
from ...memory.managed import BufferSet
from ...model.running import ExecutionResult, RunOptions, overrun_reason, reason_of
from ...model.types import MeasureTiming, Request
from ...watch.page import make_private_row
from ..cancellation import CancelFlag, present_cancel_flag, use_cancel_flag
from ..endpoint import c_result, open_channels, python_request
from ..interfaces import BurstCallback, BurstContext, BurstExecutorWithCache
from ..kernel import Kernel, run_until
from ..polling import window_ns
from .loop import SERVING, serve

if TYPE_CHECKING:
    from ..._core._nnburst import CData
    from ...devices.interfaces import PreparedModel
    from ...fmq.descriptor import MQDescriptor

_log = logging.getLogger("nnburst.burst")

MAX_PLANS: int = lib.NNB_BURST_PLANS


class ServerEnd:
    """The server's end of a burst, served by a `ListenerGroup` or by its own thread.

    It does not refer to its `ExecutionBurstServer`, so that dropping the server ends the burst. All resources are
    released when the burst ends.
    """

    def __init__(self, callback: BurstCallback, executor: BurstExecutorWithCache, endpoint: CData) -> None:
        self._callback = callback
        self._row = callback.row or make_private_row()
        lib.nnb_server_watch(endpoint, self._row.pointer)
        self._executor = executor
        self._endpoint = endpoint
        self._cancel_flag = CancelFlag(endpoint, callback.account)
        self._plans: list[Kernel] = []
        self._base = 0  # index of the first of this burst's plans
        self._gated: dict[int, tuple[Kernel, BufferSet]] = {}
        self._leaving: list[Kernel] = []  # kernels that were dropped during their run, kept until it ends
        self._reason = ""
        self._freed_meanwhile: set[int] | None = None
        self._ended = threading.Event()
        queue = callback.flow_queue
        self._group = None if queue is None else queue.flow.group
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start serving the burst. Raises the same errors as `ListenerGroup.add`."""
        if (queue := self._callback.flow_queue) is not None:
            queue.flow.group.add(self, queue, self._endpoint)
        else:
            self.place_plans([], 0)
            self._thread = start_daemon(self._listen, name="nnburst-listener", what="a burst")
            SERVING[id(self)] = self

    def _listen(self) -> None:
        ending = 0
        try:
            ending = serve(lib.nnb_server_next, self._endpoint, self._plans, lambda plan: self)
        finally:
            self.end(ending)

    # ---- the thread that runs a request of the burst -------------------------------------------------------------

    def place_plans(self, plans: list[Kernel], first: int) -> None:
        """Keep the kernels of this burst's prepared requests in ``plans[first:first + MAX_PLANS]`` from now on."""
        self._base = first
        plans[first : first + MAX_PLANS] = [self._rebind] * MAX_PLANS
        self._plans = plans

    def run_request(self, plan: int) -> None:
        """Run a request that the C core could not run. `plan` is the plan's id, with flags for the reason."""
        deadline_ns = lib.nnb_server_deadline(self._endpoint)
        if plan & lib.NNB_PLAN_KERNEL:
            self._run_kernel(partial(self._finish_in_c, plan % MAX_PLANS, deadline_ns), deadline_ns)
        elif plan & lib.NNB_PLAN_GUARDED:  # the plan's buffers are in use, undefined, or moved
            bound, _ = self._gated.get(plan % MAX_PLANS, (self._rebind, None))
            self._run_gated(plan % MAX_PLANS, bound, deadline_ns)
        elif plan & lib.NNB_PLAN_NEW:
            self._answer_new(plan % MAX_PLANS, deadline_ns)
        else:
            self._run_kernel(self._plans[self._base + plan % MAX_PLANS], deadline_ns)

    def _run_kernel(self, kernel: Kernel, deadline_ns: int) -> None:
        try:
            result = run_until(kernel, deadline_ns)
        except MissedDeadline as error:
            if self._callback.max_run is None or time.monotonic_ns() < deadline_ns:
                raise
            raise MissedDeadline(overrun_reason(str(error), self._callback.max_run)) from error
        if result is not None:
            self.answer(result)

    def _finish_in_c(self, plan_id: int, deadline_ns: int) -> ExecutionResult | None:
        """Conclude a C kernel's run that failed, or whose plan was dropped during the run."""
        status, sentence = ffi.new("int32_t *"), ffi.new("const char **")
        kernel = self._plans[self._base + plan_id]  # this reference keeps the kernel alive when C releases it
        if lib.nnb_server_outcome(self._endpoint, status, sentence):
            kernel = self._leaving.pop()
        conclude: Callable[[int, int], ExecutionResult | None] | None = getattr(kernel, "conclude", None)
        if status[0] and conclude is not None:
            return conclude(status[0], deadline_ns)
        if status[0]:
            reason = ffi.string(sentence[0]).decode(errors="replace") if sentence[0] else "the kernel does not say why"
            raise error_for(ErrorStatus(status[0]), reason)
        return None

    def end(self, number: int) -> None:
        """Release everything after the last run. `number` is the negative errno that ended the burst."""
        try:
            if number != -errno.EPIPE:
                reason = _ENDINGS.get(-number, errno.errorcode.get(-number, str(number)))
                _log.error("burst ended: %s", reason)
                self._callback.report_end(reason)
            self.forget_plans()  # no plan may be dropped later, because another burst gets the indexes
            self._endpoint = self._cancel_flag.server = ffi.NULL  # C destroys it with the last reference
            self._plans[self._base : self._base + MAX_PLANS] = [_nothing] * MAX_PLANS
            self._gated, self._leaving, self._plans = {}, [], []
            self._row.close()
            self._executor.close()
        except Exception:  # user code may raise, but the thread must serve other bursts
            _log.exception("giving back a burst failed")
        finally:
            self._ended.set()

    def answer(self, result: ExecutionResult) -> None:
        if result[0] is not ErrorStatus.NONE:
            if result[0] is not ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:  # no client asks for its reason
                self._reason = reason_of(result)
            if self._cancel_flag.cancelled[0]:
                lib.nnb_server_keep_failures(self._endpoint)
        raw, keep_alive = c_result(result)
        lib.nnb_server_set_result(self._endpoint, raw)
        del keep_alive

    def _answer_new(self, plan_id: int, deadline_ns: int) -> None:
        # The replaced plan is dropped first, as its memory may be needed.
        self._drop_plan(plan_id)
        plan = self._bind_request()
        gate, c_kernel = getattr(plan, "gate", None), getattr(plan, "c_kernel", None)
        # The plan is stored before C knows it, since another thread may drop it from then on.
        self._plans[self._base + plan_id] = plan
        if isinstance(gate, BufferSet):
            self._gated[plan_id] = plan, gate
            end = weakref.ref(self)
            gate.set_free_listener(lambda: None if (this := end()) is None else this.forget_plans())
        if lib.nnb_server_keep_plan(self._endpoint, plan_id):
            self._drop_plan(plan_id)  # another thread has freed a slot, so the plan runs only once
        elif gate is None and c_kernel is not None:
            lib.nnb_server_set_kernel(self._endpoint, plan_id, c_kernel)
        self._run_gated(plan_id, plan, deadline_ns)

    def _drop_plan(self, plan_id: int) -> None:
        """Drop a plan that the C core no longer uses."""
        self._gated.pop(plan_id, None)
        self._plans[self._base + plan_id] = self._rebind

    def _run_gated(self, plan_id: int, plan: Kernel, deadline_ns: int) -> None:
        """Run a plan. If its kernel has a `gate` (a set of buffers), the C core locks them from the next run on."""
        try:
            self._run_kernel(plan, deadline_ns)
        finally:
            gate = self._gated.get(plan_id, (None, None))[1]
            admitted = None if gate is None or not (gate.fixed or gate.found_in_c) else gate.current
            if gate is not None and admitted is not None:
                lib.nnb_server_guard_plan(self._endpoint, plan_id, gate.handle)
                if gate.found_in_c:
                    lib.nnb_server_set_kernel(self._endpoint, plan_id, admitted.c_kernel)
                self._plans[self._base + plan_id] = admitted
                if plan_id not in self._gated:  # another thread has freed a buffer or a slot
                    self._plans[self._base + plan_id] = self._rebind

    def _rebind(self) -> ExecutionResult | None:
        """Bind and run a request whose plan was dropped after C looked up the plan."""
        lib.nnb_server_forgo(self._endpoint)  # the new plan locks its buffers itself
        return self._bind_request()()

    def _bind_request(self) -> Kernel:
        request, slots, measure = python_request(lib.nnb_server_request(self._endpoint))
        self._ensure_present(slots)
        with use_cancel_flag(self._cancel_flag):
            return self._bind(request, slots, MeasureTiming.YES if measure else MeasureTiming.NO)

    def _bind(self, request: Request, slots: list[int], measure: MeasureTiming) -> Kernel:
        for kind, arguments in (("input", request.inputs), ("output", request.outputs)):
            for i, argument in enumerate(arguments):
                if not argument.has_no_value and argument.location.pool_index >= len(slots):
                    raise InvalidArgument(
                        f"{kind} {i}: pool {argument.location.pool_index} of a request with {len(slots)} pools"
                    )
        return self._executor.bind(request, slots, measure)

    def _ensure_present(self, slots: Iterable[int]) -> None:
        """Fetch the memories of all unknown slots in one call."""
        freed = self._freed_meanwhile = set[int]()  # it is set before the check, so no freed slot is missed
        try:
            unknown = sorted(slot for slot in set(slots) if not self._executor.is_cache_entry_present(slot))
            if not unknown:
                return
            lib.nnb_row_count(self._row.pointer, lib.NNB_SLOT_MISSES, len(unknown))
            status, memories = self._callback.get_memories(unknown)
            if status is not ErrorStatus.NONE:
                raise NNBurstError(f"the client has freed a memory of the request (slots {unknown})", status=status)
            if len(memories) != len(unknown):
                raise NNBurstError(f"the client sent {len(memories)} memories for {len(unknown)} slots")
            for slot, memory in zip(unknown, memories, strict=True):
                self._executor.add_cache_entry(memory, slot)
                if slot in freed:  # from here on, freeing the slot removes the entry
                    self._executor.remove_cache_entry(slot)
                    raise InvalidArgument(f"slot {slot} was freed while a request with it was on its way")
        finally:
            self._freed_meanwhile = None

    # ---- any thread ------------------------------------------------------------------------------------------

    # These methods take no locks: a signal handler that interrupts one may close the burst and wait for its thread.

    def free_memory(self, slot: int) -> None:
        freed = self._freed_meanwhile
        if freed is not None:
            freed.add(slot)
        self._executor.remove_cache_entry(slot)
        # The entry is removed, so a plan that is bound from now on asks the client for the slot.
        self._drop_plans(slot)

    def forget_plans(self) -> None:
        self._drop_plans(lib.NNB_ANY_SLOT)

    def _drop_plans(self, slot: int) -> None:
        endpoint, plans = self._endpoint, self._plans
        if endpoint and plans:
            address = int(ffi.cast("uintptr_t", endpoint))
            drop_plans(address, slot, plans, self._base, self._rebind, self._gated, self._leaving)

    def take_reason(self) -> str:
        """Return and forget the reason of the last failed execution."""
        reason, self._reason = self._reason, ""
        return reason

    def detach_client(self) -> None:
        """Record that the client no longer waits for answers. Takes no lock."""
        self._cancel_flag.cancel()

    def hang_up(self) -> None:
        """Stop taking requests, without waiting. Takes no Python lock, so finalisers may call it."""
        endpoint = self._endpoint
        if endpoint:
            lib.nnb_server_hang_up(endpoint)
        if self._group is not None:
            self._group.wake_all()

    def close(self) -> None:
        """End the burst after the running execution. Idempotent."""
        thread, group = self._thread, self._group
        if threading.current_thread() is thread or (group is not None and group.serves_here()):
            raise BadState("a burst cannot be closed by a listener thread; close it from another one")
        self.hang_up()
        if thread is None:
            self._ended.wait(Deadline.after().left())
        else:
            thread.join(Deadline.after().left())

    @property
    def alive(self) -> bool:
        """True until the burst has ended."""
        return not self._ended.is_set()


def _nothing() -> None:
    """Do nothing. This function replaces the prepared requests of a burst that has ended."""


_ENDINGS = {
    0: "its listener has failed",
    errno.EBADMSG: "the client corrupted the shared counters",
    errno.ENOBUFS: "the client takes no results",
    errno.ECHILD: "the process was forked",
}


class ExecutionBurstServer(BurstContext):
    """The server of one burst, which ends with `close` or when this object is dropped.

    It has its own thread unless `BurstCallback.flow_queue` is set. Any thread may call `free_memory`, `hang_up` and
    `close`.
    """

    @classmethod
    def create(
        cls,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        executor: BurstExecutorWithCache | PreparedModel,
        polling_window: float | None = None,
    ) -> ExecutionBurstServer:
        """Attach to the channels and serve requests.

        Args:
            callback: The client, which provides the memory of each slot.
            request_channel: Synchronized queue of 24-byte datums with an event word, in sealed memory. The caller keeps
                the descriptor. Elements in the queue are discarded.
            result_channel: See `request_channel`.
            executor: Object that binds the requests, or a prepared model, which is called anew for each request.
            polling_window: See `ExecutionBurstController.create`.

        Raises:
            InvalidArgument: A channel or an argument cannot be used.
        """
        if not isinstance(callback, BurstCallback):
            raise InvalidArgument("callback must be a BurstCallback; it tells which memory a slot names")
        if not isinstance(executor, BurstExecutorWithCache):
            if not hasattr(executor, "execute_synchronously"):
                raise InvalidArgument("executor must be a BurstExecutorWithCache or a prepared model")
            executor = executor_of(executor)
        executor.loop_timeout_ns = callback.loop_timeout_ns
        window = window_ns(polling_window, callback.cpus)
        ends = open_channels(request_channel, result_channel, reset=True)
        out = ffi.new("nnb_server **")
        check(lib.nnb_server_create(out, *ends, window, MAX_PLANS), "burst channels")
        endpoint = ffi.gc(out[0], lib.nnb_server_destroy)
        if callback.max_run is not None:
            lib.nnb_server_limit_runs(endpoint, max(1, int(callback.max_run * 1e9)))
        if callback.bell is not None:
            check(lib.nnb_server_set_bell(endpoint, callback.bell), "bell")
        server = cls(ServerEnd(callback, executor, endpoint))
        server._end.start()  # an interrupt that drops the server ends its thread
        return server

    def __init__(self, end: ServerEnd) -> None:
        """Use `create` instead."""
        self._end = end
        for last in (end.hang_up, end.detach_client):
            weakref.finalize(self, last).atexit = False  # the burst ends when the server is dropped

    def failure_reason(self) -> str:
        return self._end.take_reason()

    @property
    def pipelined(self) -> bool:
        return True

    def free_memory(self, slot: int) -> None:
        self._end.free_memory(slot)

    def forget_plans(self) -> None:
        self._end.forget_plans()

    def detach_client(self) -> None:
        self._end.detach_client()

    def hang_up(self) -> None:
        self._end.hang_up()

    def close(self) -> None:
        self._end.close()

    @property
    def alive(self) -> bool:
        """True until the burst has ended."""
        return self._end.alive


def executor_of(prepared_model: PreparedModel) -> BurstExecutorWithCache:
    def bind(request: Request, options: RunOptions) -> Kernel:
        flag = present_cancel_flag()

        def run() -> ExecutionResult:
            with use_cancel_flag(flag):
                return prepared_model.execute_synchronously(request, options)

        return run

    return BurstExecutorWithCache(bind)
