"""The server of a burst, as its client holds it."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from ..._core._nnburst import ffi, lib
from ..._core.errno import check, system
from ...errors import InvalidArgument
from ...model import ExecutionResult, Request, RunOptions
from ..cancellation import present_token, under_token
from ..endpoint import open_channels
from ..interfaces import BurstCallback, BurstContext, BurstExecutorWithCache, implements
from ..kernel import Kernel
from ..polling import window_ns
from .server_end import MAX_PLANS, ServerEnd
from .slot_executor import SlotExecutor

if TYPE_CHECKING:
    from ...devices import PreparedModel
    from ...fmq import MQDescriptor
    from ..stats import ServerStats


class ExecutionBurstServer(BurstContext):
    """Serves one burst from `create` until `close`, or until it is dropped: from a thread of its own, unless its
    callback has a `flow_queue`.

    The client holds it as its `BurstContext`. `free_memory`, `hang_up` and `close` may be called from any thread.
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
        """Attach to the channels and serve what comes.

        Args:
            callback: Tells which memory a slot names.
            request_channel: Synchronized queue of 24-byte datums with an event word, in sealed memory. The
                descriptors stay with the caller. Whatever is in the queues is erased.
            result_channel: Likewise.
            executor: Runs the requests, through `execute` if it has one of its own, else through `bind`. Or a prepared
                model: then nothing is kept between requests but their memories. Kept alive until the burst ends.
            polling_window: Seconds to poll before sleeping; None for the default of the two ends' CPUs, 0 to never
                poll.

        Raises:
            InvalidArgument: A channel or an argument cannot be used.
        """
        if not isinstance(callback, BurstCallback):
            raise InvalidArgument("callback must be a BurstCallback; it tells which memory a slot names")
        if not isinstance(executor, BurstExecutorWithCache):
            if not hasattr(executor, "execute_synchronously"):
                raise InvalidArgument("executor must be a BurstExecutorWithCache or a prepared model")
            executor = executor_of(executor)
        if not implements(executor, "bind") and not implements(executor, "execute"):
            raise InvalidArgument(f"{type(executor).__name__} implements neither bind nor execute; a burst needs one")
        executor.loop_timeout_ns = callback.loop_timeout_ns
        window = window_ns(polling_window, callback.cpus)
        ends = open_channels(request_channel, result_channel, reset=True)
        out = ffi.new("nnb_server **")
        check(lib.nnb_server_create(out, *ends, window, MAX_PLANS), "burst channels")
        endpoint = ffi.gc(out[0], lib.nnb_server_destroy)
        if callback.max_run is not None:
            lib.nnb_server_limit_runs(endpoint, max(1, int(callback.max_run * 1e9)))
        if callback.bell is not None:
            lib.nnb_server_set_bell(endpoint, system(os.dup, callback.bell))
        return cls(ServerEnd(callback, executor, endpoint))

    def __init__(self, end: ServerEnd) -> None:
        """Use `create`."""
        self._end = end
        for last in (end.hang_up, end.leave):
            weakref.finalize(self, last).atexit = False  # dropped: the burst ends all the same

    def failure_reason(self) -> str:
        return self._end.take_reason()

    @property
    def pipelined(self) -> bool:
        """True: requests are answered one after the other, however many wait."""
        return True

    def free_memory(self, slot: int) -> None:
        self._end.free_memory(slot)

    def forget_plans(self) -> None:
        self._end.forget_plans()

    def leave(self) -> None:
        self._end.leave()

    def hang_up(self) -> None:
        self._end.hang_up()

    def close(self) -> None:
        """End the burst. An execution that is running finishes first."""
        self._end.close()

    def set_answer(self, datums: bytes) -> None:
        """Answer the request at hand with these datums, packet or not; none: not at all. For tests of clients."""
        n = len(datums) // lib.NNB_DATUM_SIZE
        check(lib.nnb_server_set_answer(self._end._endpoint, ffi.from_buffer("uint8_t[]", datums), n), "answer")

    @property
    def stats(self) -> ServerStats:
        return self._end.stats

    @property
    def alive(self) -> bool:
        return self._end.alive


def executor_of(prepared_model: PreparedModel) -> SlotExecutor:
    def bind(request: Request, options: RunOptions) -> Kernel:
        token = present_token()

        def run() -> ExecutionResult:
            with under_token(token):
                return prepared_model.execute_synchronously(request, options)

        return run

    return SlotExecutor(bind)
