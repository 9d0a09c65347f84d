"""Fast message queues: lock-free FIFOs in shared memory, with a futex event flag."""

from __future__ import annotations

from ._descriptor import Dialect, Flavour, Grantor, Layout, MQDescriptor, unpack_grantors
from ._event_flag import NOT_EMPTY, NOT_FULL, EventFlag
from ._queue import MessageQueue, QueueError
from ._transaction import MemTransaction

__all__ = [
    "NOT_EMPTY",
    "NOT_FULL",
    "Dialect",
    "EventFlag",
    "Flavour",
    "Grantor",
    "Layout",
    "MQDescriptor",
    "MemTransaction",
    "MessageQueue",
    "QueueError",
    "unpack_grantors",
]
