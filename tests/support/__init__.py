"""Helpers that tests of several files share. A helper of a single file stays in that file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from nnburst.devices import device_names

ROOT = Path(__file__).resolve().parents[2]
"""Root of the source tree."""


def usable_devices() -> list[str]:
    """Return the names of the devices that can be opened. LiteRT may be missing, because tests do not require it."""
    return [name for name in device_names() if name != "nnburst-litert" or find_spec("ai_edge_litert")]
