"""The reference device: every operation in NumPy, correct first."""

from __future__ import annotations

from .device import ReferenceDevice
from .executor import ReferenceBurstExecutor
from .prepared import ReferencePreparedModel

__all__ = ["ReferenceBurstExecutor", "ReferenceDevice", "ReferencePreparedModel"]
