"""ONNX Runtime's optimisation levels."""

from __future__ import annotations

from enum import IntEnum


class GraphOptimizationLevel(IntEnum):
    """An optimisation level for graphs."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99
