"""What a connection owns in the service: models, buffers and bursts, and the way back to the client's memories."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct

from ...burst import Account, BurstCallback, BurstContext, FlowQueue
from ...devices import Buffer, FencedExecution, PreparedModel
from ...errors import BadState, DeadObject, ErrorStatus, GeneralFailure, NNBurstError
from ...memory import Memory, check_pools
from ...model import MemoryLike, Named, Priority
from ...watch import Row
from ..connection.transport import Connection
from ..wire.marshal import pools_from_wire, total_size
from ..wire.protocol import EndNotice, GetMemories, GetMemoriesReply
from .quotas import Charge, Ledger

if TYPE_CHECKING:
    from .faults import FaultPoints

_SLOTS_PER_CALL = 200
"""Each slot's memory has at least one descriptor, and 253 fit into a message."""
_GET_MEMORIES_TIMEOUT = 10.0
_MOST_SLOTS = 16384
"""Of one burst, also those that name buffers, which no quota counts."""


_LONGEST_WINDOW = 0.01


class HostedModel:
    """A prepared model in a connection's table.

    Attributes:
        prepared: As the device made it.
        served: What runs requests: the same, or the same with fault points.
        row: Where its executions are counted, if anywhere.
        priority: Of its bursts.
    """

    what: ClassVar[str] = "prepared model"

    def __init__(
        self, prepared: PreparedModel, row: Row | None, priority: Priority, faults: FaultPoints | None = None
    ) -> None:
        self.prepared = prepared
        self.served = prepared if faults is None else faults.wrap(prepared)
        self.row = row
        self.priority = priority


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


class HostedFenced:
    """A fenced execution in a connection's table. It goes once it has ended and its client has let go."""

    what: ClassVar[str] = "fenced execution"

    def __init__(self) -> None:
        self._execution: FencedExecution | None = None
        self._cancelled = False

    @property
    def execution(self) -> FencedExecution:
        assert self._execution is not None  # its client does not know its number before
        return self._execution

    def launched(self, execution: FencedExecution) -> None:
        """Tell what was launched."""
        self._execution = execution
        if self._cancelled:  # meanwhile
            execution.cancel()

    def cancel(self) -> None:
        """Have it not begin."""
        self._cancelled = True
        if self._execution is not None:
            self._execution.cancel()


class HostedBurst(Struct, frozen=True):
    """A burst in a connection's table, and the memories that it has fetched."""

    context: BurstContext
    memories: SlotMemories
    what: ClassVar[str] = "burst"

    def leave(self) -> None:
        """Its client awaits nothing of it any more."""
        if self.memories.row is not None:
            self.memories.row.leave()
        self.context.leave()


class SlotMemories(BurstCallback):
    """The client's `BurstCallback` as the burst's server sees it; counts the memories that it brings in."""

    def __init__(
        self,
        connection: Connection,
        ledger: Ledger,
        account: Account,
        number: int,
        tokens: Container[int],
        allow_direct: bool,
        cpus: Iterable[int],
        row: Row | None = None,
        flow_queue: FlowQueue | None = None,
        bell: int | None = None,
        max_run: float | None = None,
        loop_timeout_ns: int = 0,
    ) -> None:
        self._cpus = frozenset(cpus)
        self.row = row
        self.flow_queue = flow_queue
        self.bell = bell
        self.max_run = max_run
        self.loop_timeout_ns = loop_timeout_ns
        self._allow_direct = allow_direct
        self._connection = connection
        self._tokens = tokens
        self._ledger = ledger
        self.account = account
        self._number = number
        self._charges: dict[int, Charge] = {}

    @property
    def cpus(self) -> frozenset[int]:
        """As the client has told."""
        return self._cpus

    def ended(self, reason: str) -> None:
        """Tell the client; an older one loses its connection."""
        if self._connection.peer_version >= (2, 4):
            self._connection.forget(EndNotice(reason, self._number))
        else:
            self._connection.hang_up(EndNotice(reason))

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
        reply: GetMemoriesReply
        reply, fds = self._connection.call(
            GetMemories(callback=self._number, slots=slots), timeout=_GET_MEMORIES_TIMEOUT
        )
        with fds:
            if reply.status != ErrorStatus.NONE:
                raise NNBurstError("the client knows no such slot", status=ErrorStatus(reply.status))
            if len(reply.memories) != len(slots):
                raise GeneralFailure(f"{len(slots)} memories wanted, {len(reply.memories)} came")
            for slot, handle in zip(slots, reply.memories, strict=True):
                charges[slot] = self._ledger.charge(mapped_bytes=total_size([handle]), fds=handle.n_fds)
            memories += pools_from_wire(reply.memories, fds, self._tokens, self._allow_direct)
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


def limited_window(asked: float | None) -> float | None:
    """The polling window that a client gets of the one it asks for, in seconds."""
    return None if asked is None else min(asked, _LONGEST_WINDOW)


def close_all(pools: Sequence[MemoryLike | Named]) -> None:
    """Close the memories that a message brought; buffers are not its own."""
    for pool in pools:
        if isinstance(pool, Memory):
            pool.close()
