"""Devices: the interface that everything above relies on, the registry, and the built-in devices."""

from __future__ import annotations

from ._common import check_preparation
from ._interfaces import Device, PreparedModel
from ._registry import create_device, device_names
from .noop import NoopDevice, NoopPreparedModel
from .reference import ReferenceDevice, ReferencePreparedModel

__all__ = [
    "Device",
    "NoopDevice",
    "NoopPreparedModel",
    "PreparedModel",
    "ReferenceDevice",
    "ReferencePreparedModel",
    "check_preparation",
    "create_device",
    "device_names",
]
