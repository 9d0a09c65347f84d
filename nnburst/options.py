"""The words that options take, as types: for annotations of functions that hand an option on.

Where an option also takes a member of an enumeration, or a number, its own annotation says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    import os

    from .model import ExecutionPreference, Priority

OnDeath = Literal["raise", "restart"]
"""What the death of the service is to the calls after it: `nnburst.Session`."""
OnError = Literal["raise", "return"]
"""What becomes of the exception of one input: `nnburst.Session.run_many`."""
SandboxMode = Literal["strict", "on", "off"]
"""How a service process is kept from what it does not need: `nnburst.launch`."""
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
"""What is logged, at least: `nnburst.launch`."""
RealTimePolicy = Literal["fifo", "rr"]
"""The policy of a ``scheduler``: `nnburst.launch`."""
PreferenceName = Literal["low_power", "fast_single_answer", "sustained_speed"]
"""What a device optimises for: `nnburst.Session`."""
PriorityName = Literal["low", "medium", "high"]
"""Whose waiting runs a shared service takes first: `nnburst.Session`."""
ActivationName = Literal["relu", "relu1", "relu6"]
"""The function that is fused with an operation: `nnburst.ModelBuilder`."""
TensorLayout = Literal["NHWC", "NCHW"]
"""The order of an image's dimensions: `nnburst.ModelBuilder`."""
PaddingName = Literal["same", "valid"]
"""The rows and columns that are added to an image: `nnburst.ModelBuilder`."""
ImageFormat = Literal[
    "RGB",
    "BGR",
    "RGBA",
    "BGRA",
    "FP16",
    "GRAY8",
    "GRAY16",
    "R8G8",
    "R16G16",
    "NV12",
    "NV21",
    "P010",
    "I420",
    "YV12",
]
"""What a pixel is made of: `nnburst.Memory.hardware_buffer`."""
FlavourName = Literal["synchronized", "unsynchronized"]
"""How many readers, and what becomes of a write that does not fit: `nnburst.fmq.MessageQueue`."""
QueueLayout = Literal["lines", "stamped", "compat"]
"""Where a queue's counters lie: `nnburst.fmq.MessageQueue`."""


class SessionKeywords(TypedDict, total=False):
    """Options of a session, as a type: for functions that hand them on to `nnburst.Session`, which explains each."""

    device: str | None
    preference: PreferenceName | ExecutionPreference
    priority: PriorityName | Priority
    concurrency: int | None
    polling_window: float | None
    loop_timeout: float | None
    timeout: float | None
    open_timeout: float | None
    cache_dir: str | os.PathLike[str] | None
    token: bytes | None
    cache_encrypt: bool
    on_death: OnDeath
    retry: int
