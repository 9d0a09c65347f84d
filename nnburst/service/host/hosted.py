"""What a client owns in the service: models, buffers and fenced executions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ...devices import Buffer, FencedExecution, PreparedModel
from ...memory import Memory
from ...model import MemoryLike, Named, Priority
from ...watch import Row
from .quotas import Charge, Ledger

if TYPE_CHECKING:
    from .faults import FaultPoints


class HostedModel:
    """A prepared model in a connection's table.

    Attributes:
        served: What runs requests: the same, or the same with fault points.
        row: Where its executions are counted.
        priority: Of its bursts.
    """

    what: ClassVar[str] = "prepared model"

    def __init__(
        self, prepared: PreparedModel, row: Row, priority: Priority, faults: FaultPoints | None = None
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


def close_all(pools: Sequence[MemoryLike | Named]) -> None:
    """Close the memories that a message brought; buffers are not its own."""
    for pool in pools:
        if isinstance(pool, Memory):
            pool.close()
