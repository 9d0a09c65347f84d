"""Fast message queues: lock-free FIFOs in shared memory, with a futex event flag."""

from __future__ import annotations

from .descriptor import Dialect, Flavour, Grantor, Layout, MQDescriptor, unpack_grantors
from .event_flag import NOT_EMPTY, NOT_FULL, EventFlag
from .queue import MessageQueue
from .queue_end import QueueError
from .transaction import MemTransaction

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
