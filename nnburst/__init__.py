"""Run a neural network in another process as if it were a function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _safe_path, errors  # noqa: F401 (`_safe_path` comes first: libraries may be imported after it)
from ._core import lib as _lib  # noqa: F401 (here, so that no two threads are the first to take a part of it)
from ._lazy import attach
from ._version import VERSION as __version__
from .errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    OutputInsufficientSize,
    ResourceExhausted,
)
from .model import provide_pools

if TYPE_CHECKING:
    from .memory import Memory
    from .model import Model, ModelBuilder, Operand, OperandType, OperationType
    from .runtime import (
        BrokenBurst,
        Burst,
        BurstExecutor,
        Compilation,
        DeviceMemory,
        Execution,
        MemoryDesc,
        Pipeline,
        Service,
        Session,
        copy_memory,
    )
    from .runtime.launch import connect, in_process, launch
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            ".": "burst cache devices fmq memory model runtime watch",
            ".memory": "Memory",
            ".model": "Model ModelBuilder Operand OperandType OperationType",
            ".runtime": (
                "BrokenBurst Burst BurstExecutor Compilation DeviceMemory Execution MemoryDesc Pipeline Service "
                "Session copy_memory"
            ),
            ".runtime.launch": "connect in_process launch",
        },
    )

__all__ = [
    "BadState",
    "BrokenBurst",
    "Burst",
    "BurstExecutor",
    "Compilation",
    "DeadObject",
    "DeviceMemory",
    "DeviceUnavailable",
    "ErrorStatus",
    "Execution",
    "GeneralFailure",
    "InvalidArgument",
    "Memory",
    "MemoryDesc",
    "MissedDeadline",
    "Model",
    "ModelBuilder",
    "NNBurstError",
    "Operand",
    "OperandType",
    "OperationType",
    "OutputInsufficientSize",
    "Pipeline",
    "ResourceExhausted",
    "Service",
    "Session",
    "__version__",
    "connect",
    "copy_memory",
    "errors",
    "in_process",
    "launch",
]


def _pool_of_constants(nbytes: int) -> Memory:
    from .memory import Memory

    return Memory.ashmem(nbytes, "nnburst-constants")


provide_pools(_pool_of_constants)
