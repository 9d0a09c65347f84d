"""Literal types of option values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    import os

    from .model.types import ExecutionPreference, Priority

OnDeath = Literal["raise", "restart"]
"""Behaviour of calls after the service's death; see `nnburst.Session`."""
OnError = Literal["raise", "return"]
"""Treatment of a wrong input or failed run; see `nnburst.Session.run_many`."""
SandboxMode = Literal["strict", "on", "off"]
"""Sandbox of a service process; see `nnburst.launch`."""
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
"""Lowest level of messages that the log contains; see `nnburst.launch`."""
RealTimePolicy = Literal["fifo", "rr"]
"""Real-time scheduling policy, for the option ``scheduler``; see `nnburst.launch`."""
PreferenceName = Literal["low_power", "fast_single_answer", "sustained_speed"]
"""Goal of a device's optimisation; see `nnburst.Session`."""
PriorityName = Literal["low", "medium", "high"]
"""Rank of a session's waiting runs in a shared service; see `nnburst.Session`."""
ActivationName = Literal["relu", "relu1", "relu6"]
"""Function fused with an operation; see `nnburst.ModelBuilder`."""
TensorLayout = Literal["NHWC", "NCHW"]
"""Order of an image's dimensions; see `nnburst.ModelBuilder`."""
PaddingName = Literal["same", "valid"]
"""Padding of an image; see `nnburst.ModelBuilder`."""
ImageFormat = Literal[
    "RGB", "BGR", "RGBA", "BGRA", "FP16", "GRAY8", "GRAY16", "R8G8", "R16G16", "NV12", "NV21", "P010", "I420", "YV12"
]
"""Pixel format of an image; see `nnburst.Memory.hardware_buffer`."""
FlavourName = Literal["synchronized", "unsynchronized"]
"""Flavour of a queue: how many readers it has, and whether a write can overwrite; see `nnburst.fmq.MessageQueue`."""
QueueLayout = Literal["lines", "stamped", "compat"]
"""Placement of a queue's counters; see `nnburst.fmq.MessageQueue`."""


class SessionKeywords(TypedDict, total=False):
    """Types of the options of `nnburst.Session`, for functions that pass options on."""

    device: str | None
    preference: PreferenceName | ExecutionPreference
    priority: PriorityName | Priority
    concurrency: int | None
    polling_window: float | None
    timeout: float | None
    open_timeout: float | None
    cache_dir: str | os.PathLike[str] | None
    cache_key: bytes | None
    cache_encrypt: bool
    on_death: OnDeath
    retry: int
