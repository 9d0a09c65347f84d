"""Devices: the interface that everything above relies on, the registry, and the built-in devices."""

from __future__ import annotations

from ..burst import WorkingMemory
from ._buffers import LocalBuffer
from ._caching import DeviceCacheHome, build_epoch
from ._common import check_preparation
from ._described import DescribedDevice, DeviceInfo
from ._fence import Fence, FenceSignal, FenceState
from ._fenced import FencedExecution, FencedInfo, LocalFenced, checked_fences
from ._interfaces import Buffer, CacheFiles, CompileJob, Device, PreparedModel
from ._local import LocalDevice, LocalModel
from ._measure import measured_capabilities
from ._plan import Plan
from ._registry import create_device, device_names
from ._resilient import ResilientDevice, check_device, checked_model
from ._wrapped import WrappedModel
from .named import NamedDevice
from .noop import NoopDevice, NoopPreparedModel
from .partitioned import PartitionedDevice, PartitionedModel
from .reference import ReferenceDevice, ReferencePreparedModel

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
