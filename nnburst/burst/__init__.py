"""Bursts: executions over fast message queues, with memory named by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..model import ExecutionResult
    from .cancellation import Account, CancelToken, WorkingMemory, present_token, under_token
    from .client.client_end import ClientEnd, MemoryUse
    from .client.controller import ExecutionBurstController
    from .client.in_flight import InFlight, InFlightRuns
    from .client.request import BoundRequest
    from .client.slots import SlotTable
    from .interfaces import BurstCallback, BurstContext, BurstExecutorWithCache, SupportsExecute
    from .kernel import Kernel, run_until
    from .polling import CHANNEL_LENGTH, DATUM, default_polling_window, loop_timeout_ns
    from .server.group import Flow, FlowQueue, ListenerGroup
    from .server.server import ExecutionBurstServer
    from .server.slot_executor import SlotExecutor
    from .stats import BurstStats, ServerStats
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "..model": "ExecutionResult",
            ".cancellation": "Account CancelToken WorkingMemory present_token under_token",
            ".client.client_end": "ClientEnd MemoryUse",
            ".client.controller": "ExecutionBurstController",
            ".client.in_flight": "InFlight InFlightRuns",
            ".client.request": "BoundRequest",
            ".client.slots": "SlotTable",
            ".interfaces": "BurstCallback BurstContext BurstExecutorWithCache SupportsExecute",
            ".kernel": "Kernel run_until",
            ".polling": "CHANNEL_LENGTH DATUM default_polling_window loop_timeout_ns",
            ".server.group": "Flow FlowQueue ListenerGroup",
            ".server.server": "ExecutionBurstServer",
            ".server.slot_executor": "SlotExecutor",
            ".stats": "BurstStats ServerStats",
        },
    )

__all__ = [
    "CHANNEL_LENGTH",
    "DATUM",
    "Account",
    "BoundRequest",
    "BurstCallback",
    "BurstContext",
    "BurstExecutorWithCache",
    "BurstStats",
    "CancelToken",
    "ClientEnd",
    "ExecutionBurstController",
    "ExecutionBurstServer",
    "ExecutionResult",
    "Flow",
    "FlowQueue",
    "InFlight",
    "InFlightRuns",
    "Kernel",
    "ListenerGroup",
    "MemoryUse",
    "ServerStats",
    "SlotExecutor",
    "SlotTable",
    "SupportsExecute",
    "WorkingMemory",
    "default_polling_window",
    "loop_timeout_ns",
    "present_token",
    "run_until",
    "under_token",
]
