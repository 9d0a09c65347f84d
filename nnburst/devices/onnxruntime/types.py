"""The extension of the device: one operation, and the operand types that NNAPI lacks."""

from __future__ import annotations

from ...model import Extension, ExtensionOperandType
from ..elements import element_types

EXTENSION_NAME = "org.nnburst.onnx"
FILE = 0
"""Operand type of a file's bytes; the extra parameters are its name."""
GRAPH = 0
"""Operation: files, then the graph's inputs; its outputs are the graph's."""

EXTENSION = Extension(EXTENSION_NAME, (ExtensionOperandType(FILE, is_tensor=False, byte_size=0), *element_types()))
