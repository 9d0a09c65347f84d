"""The reference device: every operation in NumPy, correct first."""

from __future__ import annotations

from .device import RUNS, ReferenceDevice
from .prepared import ReferencePreparedModel

__all__ = ["RUNS", "ReferenceDevice", "ReferencePreparedModel"]
