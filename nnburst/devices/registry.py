"""The registry of devices: built-in devices, and entry points of the group ``nnburst.devices``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import DeviceUnavailable, GeneralFailure, InvalidArgument
from .interfaces import Device

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_GROUP = "nnburst.devices"
_signature = cache(inspect.signature)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_BUILT_IN = {
    "nnburst-reference": ("nnburst.devices.reference.device", "ReferenceDevice"),
    "nnburst-onnxruntime": ("nnburst.devices.onnxruntime.device", "OnnxRuntimeDevice"),
    "nnburst-function": ("nnburst.devices.function", "FunctionDevice"),
    "nnburst-litert": ("nnburst.devices.litert", "LitertDevice"),
    "nnburst-noop": ("nnburst.devices.noop", "NoopDevice"),
}
"""(module, class) by name. A module is imported when its device is first made."""


def _find_installed() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # This import is slow, and built-in devices do not need it.

    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def _parse(spec: str) -> tuple[str, dict[str, str]]:
    name, _, rest = spec.partition(":")
    options = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not key.isidentifier() or not equals:
            raise InvalidArgument(f"option {part!r} of device {name!r} is not KEY=VALUE")
        options[key] = value
    return name, options


def check_names(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a service's devices as a tuple; a single string is one name."""
    names = (devices,) if isinstance(devices, str) else tuple(devices) if isinstance(devices, Iterable) else ()
    if not names or not all(isinstance(name, str) and name.isprintable() for name in names):
        raise InvalidArgument(f"devices={devices!r}: give at least one device by its name, such as 'nnburst-reference'")
    return names


def device_names() -> tuple[str, ...]:
    """Return the names of all known devices, built-in devices first, even if their libraries are missing.

    Example:
        >>> nnburst.devices.device_names()[0]
        'nnburst-reference'
    """
    return (*_BUILT_IN, *sorted(name for name in _find_installed() if name not in _BUILT_IN))


def create_device(spec: str) -> Device:
    """Return a new device.

    Args:
        spec: One of `device_names`, with options after a colon: ``"nnburst-onnxruntime:threads=2,spinning=1"``.

    Raises:
        DeviceUnavailable: No device has this name, or a library that it needs is not installed.
        InvalidArgument: The device has no such option.
        GeneralFailure: The entry point does not return a `Device` of that name.
    """
    name, options = _parse(spec)
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        factory = getattr(import_module(module), attribute)
    else:
        entry = _find_installed().get(name)
        if entry is None:
            raise DeviceUnavailable(f"there is no device {name!r}; there are {', '.join(device_names())}")
        factory = entry.load()
    signature = _signature(factory)
    known = [each.name for each in signature.parameters.values() if each.kind not in _REST]
    unknown = sorted(options.keys() - set(known))
    if unknown and not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values()):
        raise InvalidArgument(
            f"device {name!r} has no option {', '.join(map(repr, unknown))}; it has {', '.join(known) or 'none'}"
        )
    try:
        signature.bind(**options)
    except TypeError as error:
        raise InvalidArgument(f"device {name!r}: options {sorted(options)}: {error}") from None
    device = factory(**options)
    if not isinstance(device, Device) or device.name != name:
        raise GeneralFailure(f"the entry point {name!r} of {_GROUP} does not give a Device of that name")
    return device
