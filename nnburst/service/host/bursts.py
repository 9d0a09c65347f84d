"""What a client asks of bursts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct

from ..._core._nnburst import lib
from ..._core.errno import check
from ...burst import BurstCallback, BurstContext, FlowQueue
from ...errors import BadState, DeadObject, ErrorStatus, GeneralFailure, NNBurstError
from ...memory import Memory, check_pools
from ...model import Named
from ...watch import Row, RowKind
from ..wire import protocol as calls
from ..wire.marshal import close_all, descriptor_from_wire, pools_from_wire, total_size
from ..wire.packets import FdBundle
from ..wire.protocol import WireQueue
from .models import HostedModel
from .quotas import Charge

if TYPE_CHECKING:
    from .host import Client

_SLOTS_PER_CALL = 200
"""Each slot's memory has at least one descriptor, and 253 fit into a message."""
_GET_MEMORIES_TIMEOUT = 10.0
_MOST_SLOTS = 16384
"""Of one burst, also those that name buffers, which no quota counts."""
_LONGEST_WINDOW = 0.01


class HostedBurst(Struct, frozen=True):
    """A burst in a connection's table, and the memories that it has fetched."""

    context: BurstContext
    memories: SlotMemories
    what: ClassVar[str] = "burst"

    def leave(self) -> None:
        """Its client awaits nothing of it any more."""
        self.memories.row.leave()
        self.context.leave()


class SlotMemories(BurstCallback):
    """The client's `BurstCallback` as the burst's server sees it; counts the memories that it brings in."""

    row: Row
    cpus = frozenset[int]()

    def __init__(
        self,
        client: Client,
        message: calls.ConfigureBurst,
        row: Row,
        flow_queue: FlowQueue | None,
        bell: int | None,
    ) -> None:
        self.row = row
        self.flow_queue = flow_queue
        self.bell = bell
        self.max_run = client.host.max_run
        self.account = client.account
        self.loop_timeout_ns = message.loop_timeout_ns
        self.cpus = frozenset(message.cpus)
        self._number = message.callback
        self._client = client
        self._charges: dict[int, Charge] = {}

    def ended(self, reason: str) -> None:
        """Tell the client."""
        self._client.connection.forget(calls.EndNotice(reason, self._number))

    def get_memories(self, slots: Sequence[int]) -> tuple[ErrorStatus, tuple[Memory | Named, ...]]:
        """Ask the client, in as many calls as the descriptors need."""
        if len(self._charges) + len(slots) > _MOST_SLOTS:
            return ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, ()
        memories: list[Memory | Named] = []
        charges: dict[int, Charge] = {}
        try:
            for start in range(0, len(slots), _SLOTS_PER_CALL):
                self._fetch(tuple(slots[start : start + _SLOTS_PER_CALL]), memories, charges)
        except NNBurstError as error:
            close_all(memories)
            for charge in charges.values():
                charge.release()
            local = isinstance(error, BadState | DeadObject)
            return (ErrorStatus.GENERAL_FAILURE if local else error.status), ()
        for slot, charge in charges.items():
            self.forget(slot)  # asked again: the old one is not in use any more
            self._charges[slot] = charge
        return ErrorStatus.NONE, tuple(memories)

    def _fetch(self, slots: tuple[int, ...], memories: list[Memory | Named], charges: dict[int, Charge]) -> None:
        reply: calls.GetMemoriesReply
        reply, fds = self._client.connection.call(
            calls.GetMemories(callback=self._number, slots=slots), timeout=_GET_MEMORIES_TIMEOUT
        )
        with fds:
            if reply.status != ErrorStatus.NONE:
                raise NNBurstError("the client knows no such slot", status=ErrorStatus(reply.status))
            if len(reply.memories) != len(slots):
                raise GeneralFailure(f"{len(slots)} memories wanted, {len(reply.memories)} came")
            for slot, handle in zip(slots, reply.memories, strict=True):
                charges[slot] = self._client.ledger.charge(mapped_bytes=total_size([handle]), fds=handle.n_fds)
            memories += pools_from_wire(reply.memories, fds, self._client.tokens, self._client.same_user)
            check_pools(memories, "burst")

    def forget(self, slot: int) -> None:
        """A slot was freed."""
        charge = self._charges.pop(slot, None)
        if charge is not None:
            charge.release()

    def forget_all(self) -> None:
        """The burst is over."""
        for slot in list(self._charges):
            self.forget(slot)


def on_configure_execution_burst(
    client: Client, message: calls.ConfigureBurst, fds: FdBundle
) -> calls.ConfigureBurstReply:
    """Serve a burst; it keeps its model alive."""
    sizes = _extent(message.request_channel) + _extent(message.result_channel)
    with contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
        model = owned.enter_context(client.objects.lease(message.prepared_model, HostedModel))
        owned.enter_context(client.ledger.charge(bursts=1, mapped_bytes=sizes, fds=len(fds)))
        row = client.open_row(RowKind.BURST, parent=model.row)
        row.count("bursts")
        owned.callback(row.close)
        bell = call.enter_context(FdBundle([fds.take_last()])) if message.bell else None
        if bell is not None:
            check(lib.nnb_bell_check(bell.fds[0]), "bell")
        flow = client.flow  # once: the connection may end meanwhile
        flow_queue = None if flow is None else FlowQueue(flow, model.priority, model.prepared.batcher)
        callback = SlotMemories(client, message, row, flow_queue, None if bell is None else bell.fds[0])
        owned.callback(callback.forget_all)
        requests = call.enter_context(descriptor_from_wire(message.request_channel, fds))
        results = call.enter_context(descriptor_from_wire(message.result_channel, fds))
        window = None if message.polling_window is None else min(message.polling_window, _LONGEST_WINDOW)
        context = model.served.configure_execution_burst(callback, requests, results, window)
        if context is None:
            raise GeneralFailure("the device gave no burst")
        owned.callback(context.close)
        client.bursts.add(context)
        owned.callback(client.bursts.discard, context)
        hosted = HostedBurst(context, callback)
        number = client.objects.add(hosted, owned.pop_all().close, context.hang_up, hosted.leave)
        return calls.ConfigureBurstReply(number, tuple(context.cpus), message.bell and context.pipelined)


def on_failure_reason(client: Client, message: calls.FailureReason, fds: FdBundle) -> calls.FailureReasonReply:
    with client.objects.lease(message.burst, HostedBurst) as burst:
        return calls.FailureReasonReply(calls.sendable(burst.context.failure_reason()))


def on_free_memory(client: Client, message: calls.FreeMemory, fds: FdBundle) -> calls.Done:
    with client.objects.lease(message.burst, HostedBurst) as burst:
        burst.context.free_memory(message.slot)
        burst.memories.forget(message.slot)
    return calls.Done()


def _extent(queue: WireQueue) -> int:
    return max((grantor.offset + grantor.extent for grantor in queue.grantors), default=0)
