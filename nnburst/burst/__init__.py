"""Bursts: executions over fast message queues, with memory named by slot."""

from __future__ import annotations

from ..model import ExecutionResult
from ._caller import Account, Caller, WorkingMemory, called_by, present_caller
from ._controller import BoundRequest, ExecutionBurstController
from ._executor import SlotExecutor
from ._flights import Flight, Flights
from ._group import ListenerGroup, Seat
from ._interfaces import (
    BurstCallback,
    BurstContext,
    BurstExecutorWithCache,
    Kernel,
    SupportsExecute,
    run_until,
)
from ._server import ExecutionBurstServer
from ._slots import SlotTable
from ._stats import BurstStats, ServerStats
from ._window import CHANNEL_LENGTH, DATUM, default_polling_window, loop_timeout_ns

__all__ = [
    "CHANNEL_LENGTH",
    "DATUM",
    "Account",
    "BoundRequest",
    "BurstCallback",
    "BurstContext",
    "BurstExecutorWithCache",
    "BurstStats",
    "Caller",
    "ExecutionBurstController",
    "ExecutionBurstServer",
    "ExecutionResult",
    "Flight",
    "Flights",
    "Kernel",
    "ListenerGroup",
    "Seat",
    "ServerStats",
    "SlotExecutor",
    "SlotTable",
    "SupportsExecute",
    "WorkingMemory",
    "called_by",
    "default_polling_window",
    "loop_timeout_ns",
    "present_caller",
    "run_until",
]
