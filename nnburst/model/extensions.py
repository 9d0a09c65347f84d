"""Extensions and their operand types. Models that a device imports from files, as operations of an extension."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from ..errors import InvalidArgument
from .types import Model

OpenShape = tuple[int | str | None, ...] | None
"""Dimensions, each a size, a symbolic name, or None if unknown. If the rank is unknown, None replaces the tuple."""

_NUMBERS = "biuf"
_LOW = 0xFFFF


class ExtensionOperandType(Struct, frozen=True):
    """An operand type of an extension.

    Attributes:
        type: Number within the extension, 0 … 65535.
        is_tensor: True if operands have dimensions.
        byte_size: Bytes per element; 0 for opaque values.
        dtype: NumPy type of an element (``"<i8"``); empty for opaque values.
        bits_of: Name in ``ml_dtypes``, such as ``"bfloat16"``, if NumPy lacks the element type. `dtype` is then an
            integer type for the bits.
    """

    type: int
    is_tensor: bool
    byte_size: int
    dtype: str = ""
    bits_of: str = ""

    def element(self) -> np.dtype[np.generic]:
        """Return the NumPy type of an element. Raises `InvalidArgument` for opaque values or an unknown type."""
        try:
            dtype = np.dtype(self.dtype) if self.dtype else None
        except TypeError:
            dtype = None
        if dtype is None or dtype.kind not in _NUMBERS or dtype.itemsize != self.byte_size:
            raise InvalidArgument(
                f"extension type {self.type} ({self.dtype!r}, {self.byte_size} bytes) has no NumPy type"
            )
        return dtype


class Extension(Struct, frozen=True):
    """An extension that a device supports.

    Attributes:
        name: Lower-case letters, digits, ``_`` and ``.``, with at least one dot.
        operand_types: All operand types of the extension.
    """

    name: str
    operand_types: tuple[ExtensionOperandType, ...] = ()


class ModelMetadata(Struct, frozen=True):
    """The metadata of a model file. The attributes have the names that ONNX Runtime uses.

    Attributes:
        version, producer_name, graph_name, domain, description, graph_description: As in the file.
        custom_metadata_map: Further properties by name.

    Example:
        >>> from nnburst.runtime import ModelMetadata
        >>> ModelMetadata(1, {"language": "en"}, "exporter", "main", "", "", "").custom_metadata_map["language"]
        'en'
    """

    version: int
    custom_metadata_map: dict[str, str]
    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str


class ImportedModel(Struct, frozen=True):
    """A model that a device has imported from files.

    Attributes:
        model: The model. It has pools only if the importer attached them.
        files: Name of each pool's file, which is in the imported file's directory. An empty name is the imported file.
        input_shapes: Shape of each input, with symbolic dimensions.
        output_shapes: Shape of each output.
        optional_inputs: Number of inputs with defaults. They are the last inputs, and a request can omit them.
        metadata: Metadata of the file; None if missing or too long.
    """

    model: Model
    files: tuple[str, ...] = ()
    input_shapes: tuple[OpenShape, ...] = ()
    output_shapes: tuple[OpenShape, ...] = ()
    optional_inputs: int = 0
    metadata: ModelMetadata | None = None


def extension_code(prefix: int, number: int) -> int:
    """Combine a model's prefix for an extension, and the number of an operand type or operation, into a code."""
    return prefix << 16 | number


def extension_prefix(model: Model, name: str) -> int:
    """Return a model's prefix for an extension; 0 if the model does not use the extension."""
    return model.extension_name_to_prefix.get(name, 0)


def extension_operand_type(model: Model, code: int, extensions: Iterable[Extension]) -> ExtensionOperandType:
    """Return the description of an extension type that a model uses.

    Args:
        model: The model, which maps the upper 16 bits of codes to extensions.
        code: Operand type above 0xFFFF.
        extensions: Extensions of the device.

    Raises:
        InvalidArgument: No extension has this type.
    """
    for extension in extensions:
        if model.extension_name_to_prefix.get(extension.name) == code >> 16:
            for row in extension.operand_types:
                if row.type == code & _LOW:
                    return row
    raise InvalidArgument(f"no extension of the device describes operand type {code:#x}")
