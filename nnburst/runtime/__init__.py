"""What users call: sessions, services, and the NNAPI life cycle below them."""

from __future__ import annotations

from ..burst import BurstStats, ExecutionBurstController
from ..devices import Buffer, Device, Fence, PreparedModel
from ..model import BufferToken, ExecutionPreference, ExecutionResult, OutputShape, Priority, Timing
from ..watch import Latency
from ._arguments import NodeArg
from ._burst import Burst
from ._caching import CacheReport
from ._compilation import Compilation, CompilationReport, StepReport
from ._copy import copy_memory
from ._event import Event
from ._execution import Duration, Execution
from ._executor import BrokenBurst, BurstExecutor
from ._memory_desc import DeviceMemory, MemoryDesc
from ._pipeline import Pipeline
from ._recovery import Restart
from ._service import Service, connect, in_process, launch
from ._session import Session

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
