"""What a client asks of bursts."""

from __future__ import annotations

import contextlib

from ..._core._nnburst import lib
from ..._core.errno import check
from ...burst import FlowQueue
from ...errors import GeneralFailure
from ...watch import RowKind
from ..wire import protocol as calls
from ..wire.marshal import descriptor_from_wire
from ..wire.packets import FdBundle
from ..wire.values import WireQueue
from .client import HostedClient
from .hosted import HostedBurst, HostedModel, SlotMemories, limited_window


def on_configure_execution_burst(
    client: HostedClient, message: calls.ConfigureBurst, fds: FdBundle
) -> calls.ConfigureBurstReply:
    """Serve a burst; it keeps its model alive."""
    sizes = _extent(message.request_channel) + _extent(message.result_channel)
    with contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
        model = owned.enter_context(client.objects.lease(message.prepared_model, HostedModel))
        owned.enter_context(client.ledger.charge(bursts=1, mapped_bytes=sizes, fds=len(fds)))
        page, row = client.offer.page, None
        if page is not None and model.row is not None:
            row = page.open(RowKind.BURST, "", model.row, client.peer)
        if row is not None:
            row.count("bursts")
            owned.callback(row.close)
        bell = call.enter_context(FdBundle([fds.take_last()])) if message.bell else None
        if bell is not None:
            check(lib.nnb_bell_check(bell.fds[0]), "bell")
        flow = client.flow  # once: the connection may end meanwhile
        callback = SlotMemories(
            client.connection,
            client.ledger,
            client.account,
            message.callback,
            client.tokens,
            client.same_user,
            message.cpus,
            row,
            None if flow is None else FlowQueue(flow, model.priority),
            None if bell is None else bell.fds[0],
            client.offer.max_run,
            message.loop_timeout_ns,
        )
        owned.callback(callback.forget_all)
        requests = call.enter_context(descriptor_from_wire(message.request_channel, fds))
        results = call.enter_context(descriptor_from_wire(message.result_channel, fds))
        window = limited_window(message.polling_window)
        context = model.served.configure_execution_burst(callback, requests, results, window)
        if context is None:
            raise GeneralFailure("the device gave no burst")
        owned.callback(context.close)
        hosted = HostedBurst(context, callback)
        number = client.objects.add(hosted, owned.pop_all().close, context.hang_up, hosted.leave)
        return calls.ConfigureBurstReply(number, tuple(context.cpus), message.bell and context.pipelined)


def on_failure_reason(client: HostedClient, message: calls.FailureReason, fds: FdBundle) -> calls.FailureReasonReply:
    """Say why a run of a burst failed."""
    with client.objects.lease(message.burst, HostedBurst) as burst:
        return calls.FailureReasonReply(calls.sendable(burst.context.failure_reason()))


def on_free_memory(client: HostedClient, message: calls.FreeMemory, fds: FdBundle) -> calls.Done:
    """Forget a slot of a burst."""
    with client.objects.lease(message.burst, HostedBurst) as burst:
        burst.context.free_memory(message.slot)
        burst.memories.forget(message.slot)
    return calls.Done()


def _extent(queue: WireQueue) -> int:
    return max((grantor.offset + grantor.extent for grantor in queue.grantors), default=0)
