"""Devices by name: the built-in ones and those of the ``nnburst.devices`` entry-point group."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from ..errors import DeviceUnavailable, GeneralFailure
from ._interfaces import Device

__all__ = ["create_device", "device_names"]

_GROUP = "nnburst.devices"

_BUILT_IN = {
    "nnburst-reference": ("nnburst.devices.reference", "ReferenceDevice"),
    "nnburst-noop": ("nnburst.devices.noop", "NoopDevice"),
}
"""Name to (module, class). Imported when asked for, so that a name costs nothing."""


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def device_names() -> tuple[str, ...]:
    """Return the names that `create_device` knows, built-in ones first."""
    return (*_BUILT_IN, *sorted(name for name in _installed() if name not in _BUILT_IN))


def create_device(name: str) -> Device:
    """Return a new device.

    Args:
        name: One of `device_names`.

    Raises:
        DeviceUnavailable: There is no such device.
        GeneralFailure: The entry point does not give a `Device` of that name.
    """
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        device = getattr(import_module(module), attribute)()
    else:
        entry = _installed().get(name)
        if entry is None:
            raise DeviceUnavailable(f"there is no device {name!r}; there are {', '.join(device_names())}")
        device = entry.load()()
    if not isinstance(device, Device) or device.name != name:
        raise GeneralFailure(f"the entry point {name!r} of {_GROUP} does not give a Device of that name")
    return device
