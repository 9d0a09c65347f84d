"""The device that runs any ONNX model with ONNX Runtime. Needs the extra ``onnx``."""

from __future__ import annotations

from ._device import OnnxRuntimeDevice
from ._types import EXTENSION, EXTENSION_NAME

__all__ = ["EXTENSION", "EXTENSION_NAME", "OnnxRuntimeDevice"]
