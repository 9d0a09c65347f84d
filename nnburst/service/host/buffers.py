"""What a client asks of driver-managed buffers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from ...devices import Buffer
from ...memory import Memory
from ...model import BufferDesc
from ..wire import protocol as calls
from ..wire.marshal import memories_from_wire
from ..wire.packets import FdBundle
from ..wire.protocol import WireMemory
from .models import HostedModel
from .quotas import Charge, Ledger

if TYPE_CHECKING:
    from .host import Client


class HostedBuffer:
    """A driver-managed buffer in a connection's table: its token, and an account of its bytes.

    Args:
        buffer: Closed by `dispose`.
        ledger: Where its bytes count.
        tokens: Those that the connection may name.
    """

    what: ClassVar[str] = "buffer"

    def __init__(self, buffer: Buffer, ledger: Ledger, tokens: set[int]) -> None:
        self.buffer = buffer
        self._ledger = ledger
        self._charges: list[Charge] | None = []
        self._lock = threading.Lock()
        self._tokens = tokens
        tokens.add(buffer.token)
        try:
            buffer.account_to(self._account)
        except BaseException:
            self.dispose()
            raise

    def _account(self, nbytes: int) -> None:
        charge = self._ledger.charge(buffer_bytes=nbytes)
        with self._lock:
            if self._charges is not None:
                self._charges.append(charge)
                return
        charge.release()  # a run that was under way when the buffer was released: its bytes go when it ends

    def dispose(self) -> None:
        self._tokens.discard(self.buffer.token)
        try:
            self.buffer.close()
        finally:
            with self._lock:
                charges, self._charges = self._charges or [], None
            for charge in charges:
                charge.release()


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
