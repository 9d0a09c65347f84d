"""Bursts: executions over fast message queues, with memory named by slot (facts sheet `burst.md`)."""

from __future__ import annotations

from ..model import ExecutionResult
from ._controller import BoundRequest, BurstStats, ExecutionBurstController
from ._executor import DefaultBurstExecutor, PlanBurstExecutor
from ._interfaces import (
    BoundPlan,
    BurstCallback,
    BurstContext,
    BurstExecutorWithCache,
    GuardedPlan,
    SupportsExecute,
    consistent_result,
)
from ._server import ExecutionBurstServer
from ._slots import SlotTable
from ._stats import ServerStats
from ._window import CHANNEL_LENGTH, DATUM, default_polling_window

__all__ = [
    "CHANNEL_LENGTH",
    "DATUM",
    "BoundPlan",
    "BoundRequest",
    "BurstCallback",
    "BurstContext",
    "BurstExecutorWithCache",
    "BurstStats",
    "DefaultBurstExecutor",
    "ExecutionBurstController",
    "ExecutionBurstServer",
    "ExecutionResult",
    "GuardedPlan",
    "PlanBurstExecutor",
    "ServerStats",
    "SlotTable",
    "SupportsExecute",
    "consistent_result",
    "default_polling_window",
]
