"""Devices: the interface that everything above relies on, the registry, and the built-in devices."""

from __future__ import annotations

from ..burst import WorkingMemory
from .buffers import LocalBuffer
from .caching import DeviceCacheHome, build_epoch
from .common import check_preparation
from .described import DescribedDevice, DeviceInfo
from .fence import Fence, FenceSignal, FenceState
from .fenced import FencedExecution, FencedInfo, LocalFenced, checked_fences
from .interfaces import Buffer, CacheFiles, CompileJob, Device, PreparedModel
from .local import LocalDevice, LocalModel
from .measure import measured_capabilities
from .named import NamedDevice
from .noop import NoopDevice, NoopPreparedModel
from .partitioned import PartitionedDevice, PartitionedModel
from .plan import Plan
from .reference import ReferenceDevice, ReferencePreparedModel
from .registry import create_device, device_names
from .resilient import ResilientDevice, check_device, checked_model
from .wrapped import WrappedModel

__all__ = [
    "Buffer",
    "CacheFiles",
    "CompileJob",
    "DescribedDevice",
    "Device",
    "DeviceCacheHome",
    "DeviceInfo",
    "Fence",
    "FenceSignal",
    "FenceState",
    "FencedExecution",
    "FencedInfo",
    "LocalBuffer",
    "LocalDevice",
    "LocalFenced",
    "LocalModel",
    "NamedDevice",
    "NoopDevice",
    "NoopPreparedModel",
    "PartitionedDevice",
    "PartitionedModel",
    "Plan",
    "PreparedModel",
    "ReferenceDevice",
    "ReferencePreparedModel",
    "ResilientDevice",
    "WorkingMemory",
    "WrappedModel",
    "build_epoch",
    "check_device",
    "check_preparation",
    "checked_fences",
    "checked_model",
    "create_device",
    "device_names",
    "measured_capabilities",
]
