"""The reference device: every operation in NumPy, correct first."""

from __future__ import annotations

from .device import ReferenceDevice
from .prepared import ReferencePreparedModel
from .stages import StagedReferenceDevice, reference_device

__all__ = ["ReferenceDevice", "ReferencePreparedModel", "StagedReferenceDevice", "reference_device"]
