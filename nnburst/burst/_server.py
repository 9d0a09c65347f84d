"""The server of a burst: one listener thread, the slot table and the bound plans (facts sheet `burst.md` §5)."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import threading
import weakref
from typing import TYPE_CHECKING

from .._core import check, ffi, lib
from ..errors import BadState, ErrorStatus, InvalidArgument, NNBurstError, ResourceExhausted
from ..memory import free_closed_buffers
from ..model import NO_TIMING, MeasureTiming
from ._endpoint import c_result, open_channel, python_request
from ._executor import DefaultBurstExecutor
from ._interfaces import BoundPlan, BurstCallback, BurstContext, BurstExecutorWithCache, ExecutionResult, GuardedPlan
from ._stats import BurstStats, read_stats
from ._window import window_ns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .._core._nnburst import CData
    from ..fmq import MQDescriptor
    from ..model import Request
    from ._interfaces import SupportsExecute

__all__ = ["ExecutionBurstServer"]

_log = logging.getLogger("nnburst.burst")

_RESTART = -errno.ERESTART
_MAX_PLANS = 64


class ExecutionBurstServer(BurstContext):
    """Serves one burst from a thread of its own, from `create` until `close`.

    The client holds it as its `BurstContext`. `free_memory`, `hang_up` and `close` may be called from any thread.
    """

    @classmethod
    def create(
        cls,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        executor: BurstExecutorWithCache | SupportsExecute,
        polling_window: float | None = None,
    ) -> ExecutionBurstServer:
        """Attach to the channels and start the listener thread.

        Args:
            callback: Tells which memory a slot names.
            request_channel: Synchronized queue of 24-byte datums with an event word, in sealed memory. The
                descriptors stay with the caller. Whatever is in the queues is erased.
            result_channel: Likewise.
            executor: Runs the requests; or a prepared model, which is then wrapped in an executor that caches
                nothing. Kept alive until `close`.
            polling_window: Seconds to poll before sleeping; None for the default, 0 to never poll.

        Raises:
            InvalidArgument: A channel or an argument cannot be used.
        """
        if not isinstance(callback, BurstCallback):
            raise InvalidArgument("callback must be a BurstCallback; it tells which memory a slot names")
        if not isinstance(executor, BurstExecutorWithCache):
            if not hasattr(executor, "execute_synchronously"):
                raise InvalidArgument("executor must be a BurstExecutorWithCache or a prepared model")
            executor = DefaultBurstExecutor(executor)
        window = window_ns(polling_window)
        request = open_channel(request_channel, "request channel", reset=True)
        try:
            result = open_channel(result_channel, "result channel", reset=True)
        except BaseException:
            lib.nnb_mq_close(request)
            raise
        out = ffi.new("nnb_server **")
        check(lib.nnb_server_create(out, request, result, window, _MAX_PLANS), "burst channels")
        return cls(callback, executor, ffi.gc(out[0], lib.nnb_server_destroy))

    def __init__(self, callback: BurstCallback, executor: BurstExecutorWithCache, endpoint: CData) -> None:
        """Use `create`."""
        self._callback = callback
        self._executor = executor
        self._endpoint = endpoint
        self._plans: list[BoundPlan] = [self._rebind] * _MAX_PLANS
        self._guarded: dict[int, GuardedPlan] = {}
        # Guards the executor's slot entries. Held for dictionary work only, never across a call to the client.
        # Reentrant: in the client's process a signal handler may free or close over a call that does.
        self._slots_lock = threading.RLock()
        self._freed_meanwhile: set[int] | None = None
        self._close_lock = threading.RLock()  # `hang_up` may come from a finaliser, in whatever thread that runs
        self._closed = False
        self._final_stats: BurstStats | None = None
        self._thread = threading.Thread(target=self._listen, name="nnburst-listener", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            ffi.release(endpoint)
            raise ResourceExhausted(f"a burst needs a thread: {error}") from error
        _SERVERS[id(self)] = self

    # ---- the listener thread ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        endpoint, following, plans = self._endpoint, lib.nnb_server_next, self._plans
        new, guarded = lib.NNB_PLAN_NEW, lib.NNB_PLAN_GUARDED
        while True:
            try:
                # The hot loop: one C call per execution, which sends the last answer and takes the next request.
                while 0 <= (plan := following(endpoint)) < new:
                    result = plans[plan]()
                    if result is not None:
                        self._answer(result)
                if plan >= guarded:
                    self._answer_guarded(plan - guarded)
                elif plan >= new:
                    self._answer_new(plan - new)
                elif plan == _RESTART:
                    free_closed_buffers()
                else:
                    break
            except NNBurstError as error:
                _log.info("request refused: %s", error)
                self._answer((error.status, (), NO_TIMING))
            except BaseException:  # also SystemExit: a client must not wait for a thread that has left
                _log.exception("the executor failed; the client gets GENERAL_FAILURE")
                self._answer((ErrorStatus.GENERAL_FAILURE, (), NO_TIMING))
        if plan != -errno.EPIPE:
            _log.error("burst ended: %s", _ENDINGS.get(-plan, errno.errorcode.get(-plan, str(plan))))

    def _answer(self, result: ExecutionResult) -> None:
        raw, keep_alive = c_result(result)
        lib.nnb_server_set_result(self._endpoint, raw)
        del keep_alive

    def _answer_new(self, plan_id: int) -> None:
        plan = self._bind_request()
        with self._close_lock:  # against `free_memory`
            # Refused if a slot was freed meanwhile: then the plan runs this once and is not found again.
            kept = lib.nnb_server_keep_plan(self._endpoint, plan_id) == 0
            self._plans[plan_id] = plan if kept else self._rebind
            self._guarded.pop(plan_id, None)
            if kept and isinstance(plan, GuardedPlan):
                self._guard(plan_id, plan)
        self._run_guarded(plan_id, plan)

    def _guard(self, plan_id: int, plan: GuardedPlan) -> None:
        uses = plan.uses
        if uses is None:
            return
        server, guarded = weakref.ref(self), weakref.ref(plan)

        def forget() -> None:
            this = server()
            # Another plan may have the id by now.
            if this is not None and this._guarded.get(plan_id) is guarded() is not None:
                this._plans[plan_id] = this._rebind

        self._guarded[plan_id] = plan
        plan.when_freed(forget)
        lib.nnb_server_guard_plan(self._endpoint, plan_id, uses)

    def _answer_guarded(self, plan_id: int) -> None:
        """The plan's buffers are in use, without contents, or not where they were."""
        self._run_guarded(plan_id, self._guarded.get(plan_id, self._rebind))

    def _run_guarded(self, plan_id: int, plan: BoundPlan) -> None:
        """Run a plan that enters its buffers itself. From then on, also if it failed, C does; see `GuardedPlan`."""
        try:
            result = plan()
            if result is not None:
                self._answer(result)
        finally:
            if plan_id in self._guarded:
                self._take_admitted(plan_id)

    def _take_admitted(self, plan_id: int) -> None:
        with self._close_lock:
            plan = self._guarded.get(plan_id)
            admitted = None if plan is None else plan.admitted
            if plan is not None and admitted is not None:
                self._plans[plan_id] = admitted
                if plan.admitted is not admitted:  # a buffer was freed meanwhile
                    self._plans[plan_id] = self._rebind

    def _rebind(self) -> ExecutionResult | None:
        """Stands where a plan was dropped between its look-up in C and its call."""
        lib.nnb_server_forgo(self._endpoint)  # the new plan enters its buffers itself
        return self._bind_request()()

    def _bind_request(self) -> BoundPlan:
        request, slots, measure = python_request(lib.nnb_server_request(self._endpoint))
        self._ensure_present(slots)
        return self._bind(request, slots, MeasureTiming.YES if measure else MeasureTiming.NO)

    def _bind(self, request: Request, slots: list[int], measure: MeasureTiming) -> BoundPlan:
        for kind, arguments in (("input", request.inputs), ("output", request.outputs)):
            for i, argument in enumerate(arguments):
                if not argument.has_no_value and argument.location.pool_index >= len(slots):
                    raise InvalidArgument(
                        f"{kind} {i}: pool {argument.location.pool_index} of a request with {len(slots)} pools"
                    )
        return self._executor.bind(request, slots, measure)

    def _ensure_present(self, slots: Iterable[int]) -> None:
        """Fetch the memories of unknown slots, all in one call (facts sheet §5.4)."""
        with self._slots_lock:
            unknown = sorted(slot for slot in set(slots) if not self._executor.is_cache_entry_present(slot))
            if not unknown:
                return
            self._freed_meanwhile = set()
        try:
            status, memories = self._callback.get_memories(unknown)
            if status is not ErrorStatus.NONE:
                raise NNBurstError(f"the client has no memory for some of the slots {unknown}", status=status)
            if len(memories) != len(unknown):
                raise NNBurstError(f"the client sent {len(memories)} memories for {len(unknown)} slots")
            with self._slots_lock:
                for slot, memory in zip(unknown, memories, strict=True):
                    if slot in self._freed_meanwhile:
                        raise InvalidArgument(f"slot {slot} was freed while a request with it was on its way")
                    self._executor.add_cache_entry(memory, slot)
        finally:
            with self._slots_lock:
                self._freed_meanwhile = None

    # ---- any thread ------------------------------------------------------------------------------------------

    def free_memory(self, slot: int) -> None:
        with self._slots_lock:
            if self._freed_meanwhile is not None:
                self._freed_meanwhile.add(slot)
            self._executor.remove_cache_entry(slot)
        # Held by this frame, too: a signal handler may close the burst over it.
        endpoint, plans, guarded = self._endpoint, self._plans, self._guarded
        with self._close_lock:
            if not endpoint:
                return
            # After the entry is gone: a plan that is bound from now on asks the client for the slot.
            ids = ffi.new("uint32_t[]", lib.NNB_MAX_PLANS)
            for i in range(lib.nnb_server_free_slot(endpoint, slot, ids)):
                plans[ids[i]] = self._rebind
                guarded.pop(ids[i], None)

    def hang_up(self) -> None:
        endpoint = self._endpoint
        with self._close_lock:
            if endpoint:
                lib.nnb_server_hang_up(endpoint)

    def close(self) -> None:
        """End the burst. An execution that is running finishes first."""
        if threading.current_thread() is self._thread:
            raise BadState("a burst cannot be closed by its own listener thread; close it from another one")
        self.hang_up()
        self._thread.join()
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._final_stats = read_stats(lib.nnb_server_stats, self._endpoint)
            self._endpoint = ffi.NULL  # destroyed with the last reference
        self._plans, self._guarded = [], {}
        self._executor.close()

    @property
    def stats(self) -> BurstStats:
        """Counters since `create`."""
        endpoint = self._endpoint
        with self._close_lock:
            return self._final_stats or read_stats(lib.nnb_server_stats, endpoint)

    @property
    def alive(self) -> bool:
        """Whether the listener thread still serves requests."""
        return self._thread.is_alive()


_ENDINGS = {
    errno.EBADMSG: "the client corrupted the shared counters",
    errno.ENOBUFS: "the client takes no results",
    errno.ECHILD: "the process was forked",
}

_SERVERS: weakref.WeakValueDictionary[int, ExecutionBurstServer] = weakref.WeakValueDictionary()


def _close_all() -> None:
    """At interpreter exit: a listener must not be inside C while the interpreter is taken down."""
    for server in filter(None, (ref() for ref in _SERVERS.valuerefs())):  # other threads may still make some
        with contextlib.suppress(NNBurstError):
            server.close()


atexit.register(_close_all)
