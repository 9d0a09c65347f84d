"""The device that runs any ONNX model with ONNX Runtime. Needs the extra ``onnx``."""

from __future__ import annotations

from .device import EXTENSION, OnnxRuntimeDevice
from .importer import EXTENSION_NAME

__all__ = ["EXTENSION", "EXTENSION_NAME", "OnnxRuntimeDevice"]
