"""What a client asks of driver-managed buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...devices import Buffer
from ...memory import Memory
from ...model import BufferDesc
from ..wire import protocol as calls
from ..wire.marshal import memories_from_wire
from ..wire.packets import FdBundle
from ..wire.protocol import WireMemory
from .hosted import HostedBuffer, HostedModel

if TYPE_CHECKING:
    from .host import Client


def on_allocate(client: Client, message: calls.Allocate, fds: FdBundle) -> calls.AllocateReply:
    """Allocate a driver-managed buffer; the connection owns it."""
    device = client.device(message.device)
    with contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
        owned.enter_context(client.ledger.charge(buffers=1))
        named = {role.model_index for role in (*message.input_roles, *message.output_roles)}
        models: list[Any] = [
            call.enter_context(client.objects.lease(number, HostedModel)).prepared
            if index in named
            else None  # as any entry that no role names: not looked at
            for index, number in enumerate(message.prepared_models)
        ]
        desc = BufferDesc(message.dimensions)
        buffer = device.allocate(desc, models, message.input_roles, message.output_roles)
        hosted = HostedBuffer(buffer, client.ledger, client.tokens)
        owned.callback(hosted.dispose)
        return calls.AllocateReply(buffer=client.objects.add(hosted, owned.pop_all().close), token=buffer.token)


def on_copy_to(client: Client, message: calls.CopyTo, fds: FdBundle) -> calls.CopyToReply:
    with _copying(client, message.buffer, message.memory, fds) as (buffer, memory):
        return calls.CopyToReply(generation=buffer.copy_to(memory))


def on_copy_from(client: Client, message: calls.CopyFrom, fds: FdBundle) -> calls.Done:
    with _copying(client, message.buffer, message.memory, fds) as (buffer, memory):
        buffer.copy_from(memory, message.dimensions)
    return calls.Done()


@contextlib.contextmanager
def _copying(client: Client, number: int, wire: WireMemory, fds: FdBundle) -> Iterator[tuple[Buffer, Memory]]:
    with (
        client.charge_for([wire], fds),
        client.objects.lease(number, HostedBuffer) as owned,
        memories_from_wire((wire,), fds, client.same_user)[0] as memory,
    ):
        yield owned.buffer, memory


def on_copy_buffer(client: Client, message: calls.CopyBuffer, fds: FdBundle) -> calls.Done:
    """Copy inside the device."""
    with (
        client.objects.lease(message.buffer, HostedBuffer) as target,
        client.objects.lease(message.source, HostedBuffer) as source,
    ):
        target.buffer.copy_buffer(source.buffer)
    return calls.Done()
