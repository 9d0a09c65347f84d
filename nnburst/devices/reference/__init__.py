"""The reference device: every operation in NumPy, correct first."""

from __future__ import annotations

from .device import RUNS, ReferenceDevice
from .prepared import ReferencePreparedModel
from .stages import StagedReferenceDevice, reference_device

__all__ = ["RUNS", "ReferenceDevice", "ReferencePreparedModel", "StagedReferenceDevice", "reference_device"]
