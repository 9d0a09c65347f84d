"""The client of a burst, as its user makes it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ..._core._nnburst import ffi, lib
from ..._core.errno import check, system
from ..._core.leaving import Closing
from ...errors import InvalidArgument
from ...fmq import Layout, MessageQueue
from ..endpoint import open_channels
from ..polling import CHANNEL_LENGTH, DATUM, loop_timeout_ns, window_ns
from .client_end import ClientEnd
from .in_flight import Bell, InFlightRuns
from .request import BoundRequest
from .slots import SlotTable

if TYPE_CHECKING:
    from ...model import ExecutionResult, Request
    from .client_end import BurstCapable


class ExecutionBurstController(ClientEnd, Closing):
    """One burst on a prepared model: one execution at a time, each one packet there and one back.

    Thread-safe in that a second concurrent execution gets `BadState`. Context manager.
    """

    @classmethod
    def create(
        cls,
        prepared_model: BurstCapable,
        *,
        polling_window: float | None = None,
        loop_timeout: float | None = None,
        channel_length: int = CHANNEL_LENGTH,
        result_channel_length: int | None = None,
    ) -> ExecutionBurstController:
        """Make the two channels and have the prepared model serve them.

        Args:
            prepared_model: Kept alive by the burst.
            polling_window: Seconds that both ends poll before they sleep; None for the default of the two ends' CPUs, 0
                to never poll. A service in another process polls 10 ms at most.
            loop_timeout: Seconds that each WHILE of a run may take; None for the default.
            channel_length: Datums in the request channel, 4 to 65,536. A request needs 2 + inputs + outputs + pools +
                given dimensions; what does not fit runs without the burst.
            result_channel_length: Datums in the result channel; None for the same.

        Raises:
            InvalidArgument: A length, the window or the time of a loop is out of range.
            NNBurstError: The model cannot serve a burst; the error's status says why.
        """
        window_ns(polling_window, ())  # a wrong one is refused before anything is made
        loop_ns = loop_timeout_ns(loop_timeout)
        lengths = (channel_length, channel_length if result_channel_length is None else result_channel_length)
        least, most = lib.NNB_MIN_CHANNEL, lib.NNB_MAX_CHANNEL
        if not all(least <= length <= most for length in lengths):
            raise InvalidArgument(f"a burst channel has {least} to {most} datums, not {lengths}")
        bell = Bell()
        slots = SlotTable(bell.rung.fds[0], loop_ns)
        with contextlib.ExitStack() as stack, contextlib.closing(bell.rung):
            failing = stack.enter_context(contextlib.ExitStack())
            failing.callback(bell.watched.close)  # not when the error is collected, which may be kept
            queues = [stack.enter_context(MessageQueue(DATUM, length, layout=Layout.STAMPED)) for length in lengths]
            request, result = [stack.enter_context(queue.descriptor) for queue in queues]
            context = prepared_model.configure_execution_burst(slots, request, result, polling_window)
            try:
                # The server has attached and emptied the queues; only from now on may anything be written.
                window = window_ns(polling_window, context.cpus)
                ends = open_channels(request, result, reset=False)
                out = ffi.new("nnb_client **")
                check(lib.nnb_client_create(out, *ends, window), "burst channels")
                endpoint = ffi.gc(out[0], lib.nnb_client_destroy)
                flights = None
                if context.pipelined:
                    lib.nnb_client_set_pipelined(endpoint, system(os.dup, bell.rung.fds[0]))
                    flights = InFlightRuns(endpoint, bell.watched, polls=window > 0)
            except BaseException:
                context.close()
                raise
            failing.pop_all()
        return cls(prepared_model, context, slots, endpoint, flights)

    def bind(self, request: Request, *, measure: bool = False) -> BoundRequest:
        """Serialise a request once, to be run many times.

        Args:
            request: Its pools get a slot each, which they keep until `free_memory` or `close`.
            measure: Whether results carry `Timing`.

        Raises:
            BadState: The burst is closed, or a memory.
            InvalidArgument: A number does not fit the wire format.
        """
        bound = BoundRequest()
        bound._bind_to(self, (request,), measure=measure)
        return bound

    def compute(self, request: Request, *, measure: bool = False, timeout: float | None = None) -> ExecutionResult:
        """Run a request once; as `BoundRequest.run`, but an error of the request or the execution is a status."""
        bound = self.bind(request, measure=measure)
        bound.timeout = timeout
        return bound.execute()
