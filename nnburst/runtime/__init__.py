"""What users call: sessions, services, and the NNAPI life cycle below them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach
from ..burst import BurstStats, ExecutionBurstController
from ..devices import Buffer, Device, Fence, PreparedModel
from ..model import BufferToken, ExecutionPreference, ExecutionResult, OutputShape, Priority, Timing
from ..watch import Latency
from .compile.caching import CacheReport
from .compile.compilation import Compilation, CompilationReport, StepReport
from .execution import Execution
from .launch import connect, in_process, launch
from .request.copy import copy_memory
from .request.device_memory import DeviceMemory, MemoryDesc
from .request.node_args import NodeArg
from .run.burst import Burst
from .run.burst_pool import Restart
from .run.computation import Duration
from .run.event import Event
from .run.pipeline import Pipeline
from .session import Service, Session

if TYPE_CHECKING:
    from .executor import BrokenBurst, BurstExecutor
else:
    __getattr__, __dir__ = attach(__name__, {".executor": "BrokenBurst BurstExecutor"})

__all__ = [
    "BrokenBurst",
    "Buffer",
    "BufferToken",
    "Burst",
    "BurstExecutor",
    "BurstStats",
    "CacheReport",
    "Compilation",
    "CompilationReport",
    "Device",
    "DeviceMemory",
    "Duration",
    "Event",
    "Execution",
    "ExecutionBurstController",
    "ExecutionPreference",
    "ExecutionResult",
    "Fence",
    "Latency",
    "MemoryDesc",
    "NodeArg",
    "OutputShape",
    "Pipeline",
    "PreparedModel",
    "Priority",
    "Restart",
    "Service",
    "Session",
    "StepReport",
    "Timing",
    "connect",
    "copy_memory",
    "in_process",
    "launch",
]
