"""A device's constant properties as one value, which a service sends to a client's proxy of the device."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..model.extensions import Extension
from ..model.types import Capabilities, DeviceType
from .interfaces import Device

MOST_CACHE_FILES = 32
"""Largest number of model files, and of data files, in a cache entry."""

Name = Annotated[str, Meta(max_length=256)]
CacheCount = Annotated[int, Meta(ge=0, le=MOST_CACHE_FILES)]


class DeviceInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of a device that never change."""

    name: Name
    version_string: Name
    type: DeviceType
    capabilities: Capabilities
    cache_files: tuple[CacheCount, CacheCount]
    extensions: Annotated[tuple[Extension, ...], Meta(max_length=256)] = ()
    cache_epoch: Annotated[bytes, Meta(max_length=32)] = b""

    @classmethod
    def of(cls, device: Device) -> DeviceInfo:
        return cls(
            name=device.name,
            version_string=device.version_string,
            type=device.type,
            capabilities=device.capabilities,
            cache_files=device.get_number_of_cache_files_needed(),
            extensions=device.get_supported_extensions(),
            cache_epoch=device.cache_epoch,
        )


class DescribedDevice(Device):
    """A device that reports the properties in a `DeviceInfo`. Subclasses define its behaviour."""

    name = version_string = ""
    type, capabilities, cache_epoch = DeviceType.OTHER, Capabilities(), b""

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info
        self.name, self.version_string, self.type = info.name, info.version_string, info.type
        self.capabilities, self.cache_epoch = info.capabilities, info.cache_epoch

    def get_supported_extensions(self) -> tuple[Extension, ...]:
        return self._info.extensions

    def get_number_of_cache_files_needed(self) -> tuple[int, int]:
        return self._info.cache_files
