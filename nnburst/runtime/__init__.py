"""What users call: sessions, services, and the NNAPI life cycle below them."""

from __future__ import annotations

from ._burst import Burst
from ._caching import CacheReport
from ._compilation import Compilation
from ._copy import copy_memory
from ._execution import Duration, Event, Execution
from ._memory_desc import DeviceMemory, MemoryDesc
from ._service import Service, in_process, launch
from ._session import NodeArg, Session

__all__ = [
    "Burst",
    "CacheReport",
    "Compilation",
    "DeviceMemory",
    "Duration",
    "Event",
    "Execution",
    "MemoryDesc",
    "NodeArg",
    "Service",
    "Session",
    "copy_memory",
    "in_process",
    "launch",
]
