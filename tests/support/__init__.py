"""What tests of many files share. A helper of one file stays there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from nnburst.devices import device_names

ROOT = Path(__file__).resolve().parents[2]
"""The tree."""


def usable_devices() -> list[str]:
    """Return the names of the devices that open here: LiteRT's is in no extra that all tests have."""
    return [name for name in device_names() if name != "nnburst-litert" or find_spec("ai_edge_litert")]
