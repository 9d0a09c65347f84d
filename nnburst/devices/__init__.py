"""Devices: the interface that everything above relies on, the registry, and the built-in devices."""

from __future__ import annotations

from ._buffers import LocalBuffer, allocate_buffer, bind_buffers
from ._caching import DeviceCacheHome, build_epoch
from ._common import check_preparation
from ._interfaces import Buffer, CacheFiles, CompileJob, Device, PreparedModel
from ._registry import create_device, device_names
from ._resilient import ResilientDevice, check_device, checked_model
from .noop import NoopDevice, NoopPreparedModel
from .reference import ReferenceDevice, ReferencePreparedModel

__all__ = [
    "Buffer",
    "CacheFiles",
    "CompileJob",
    "Device",
    "DeviceCacheHome",
    "LocalBuffer",
    "NoopDevice",
    "NoopPreparedModel",
    "PreparedModel",
    "ReferenceDevice",
    "ReferencePreparedModel",
    "ResilientDevice",
    "allocate_buffer",
    "bind_buffers",
    "build_epoch",
    "check_device",
    "check_preparation",
    "checked_model",
    "create_device",
    "device_names",
]
