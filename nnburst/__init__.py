"""Run a neural network in another process as if it were a function."""

from __future__ import annotations

from . import _safe_path, errors  # noqa: F401 (`_safe_path` comes first: libraries may be imported after it)
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
    connect,
    copy_memory,
    in_process,
    launch,
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
