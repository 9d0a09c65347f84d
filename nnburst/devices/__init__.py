"""Devices: the interface that everything above relies on, the registry, and the built-in devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
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
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "..burst": "WorkingMemory",
            ".buffers": "LocalBuffer",
            ".caching": "DeviceCacheHome build_epoch",
            ".common": "check_preparation",
            ".described": "DescribedDevice DeviceInfo",
            ".fence": "Fence FenceSignal FenceState",
            ".fenced": "FencedExecution FencedInfo LocalFenced checked_fences",
            ".interfaces": "Buffer CacheFiles CompileJob Device PreparedModel",
            ".local": "LocalDevice LocalModel",
            ".measure": "measured_capabilities",
            ".named": "NamedDevice",
            ".noop": "NoopDevice NoopPreparedModel",
            ".partitioned": "PartitionedDevice PartitionedModel",
            ".plan": "Plan",
            ".reference": "ReferenceDevice ReferencePreparedModel",
            ".registry": "create_device device_names",
            ".resilient": "ResilientDevice check_device checked_model",
            ".wrapped": "WrappedModel",
        },
    )

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
