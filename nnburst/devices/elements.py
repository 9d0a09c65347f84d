"""ONNX element types and their operand types: types of NNAPI, or types of the ONNX extension where NNAPI has none.

An integer of 8 or 16 bits is an NNAPI quantised type of scale 1 and zero point 0, so its real and stored values are
equal. NNAPI has no tensors of rank 0, so a scalar has an NNAPI scalar type, or an extension type with the bit
`_SCALAR`. An extension type has the number of its ONNX element type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ..errors import GeneralFailure
from ..model.extensions import ExtensionOperandType, extension_code
from ..model.operand_types import OperandType
from ..model.types import OperandDesc

_SCALAR = 0x100
_FIRST_OF_BITS = 16
"""Lowest ``TensorProto.DataType`` of an element type that NumPy lacks."""


class ElementType(Struct, frozen=True):
    """An ONNX element type and its equivalents in NNAPI and NumPy.

    Attributes:
        number: ``TensorProto.DataType``, which is also the type's number in NNAPI extensions.
        name: The word that ONNX Runtime prints in ``tensor(…)``.
        dtype: NumPy type of an element; for types that NumPy lacks, the integer of the same size.
        tensor: NNAPI type of tensors; None for an extension type.
        scalar: NNAPI type of scalars; None for an extension type.
        scale: Scale of the NNAPI tensor type.
        bits: Bits of an element smaller than a byte, else 0.
        library: Name in ``ml_dtypes`` of a type that NumPy lacks.
    """

    number: int
    name: str
    dtype: str
    tensor: OperandType | None = None
    scalar: OperandType | None = None
    scale: float = 0.0
    bits: int = 0
    library: str = ""

    @property
    def itemsize(self) -> int:
        return int(self.dtype[-1])


_T = OperandType
_ROWS = (
    ElementType(1, "float", "<f4", _T.TENSOR_FLOAT32, _T.FLOAT32),
    ElementType(2, "uint8", "|u1", _T.TENSOR_QUANT8_ASYMM, None, 1.0),
    ElementType(3, "int8", "|i1", _T.TENSOR_QUANT8_ASYMM_SIGNED, None, 1.0),
    ElementType(4, "uint16", "<u2", _T.TENSOR_QUANT16_ASYMM, None, 1.0),
    ElementType(5, "int16", "<i2", _T.TENSOR_QUANT16_SYMM, None, 1.0),
    ElementType(6, "int32", "<i4", _T.TENSOR_INT32, _T.INT32),
    ElementType(7, "int64", "<i8"),
    ElementType(9, "bool", "|b1"),
    ElementType(10, "float16", "<f2", _T.TENSOR_FLOAT16, _T.FLOAT16),
    ElementType(11, "double", "<f8"),
    ElementType(12, "uint32", "<u4", None, _T.UINT32),
    ElementType(13, "uint64", "<u8"),
    ElementType(16, "bfloat16", "<u2", library="bfloat16"),
    ElementType(17, "float8e4m3fn", "|u1", library="float8_e4m3fn"),
    ElementType(18, "float8e4m3fnuz", "|u1", library="float8_e4m3fnuz"),
    ElementType(19, "float8e5m2", "|u1", library="float8_e5m2"),
    ElementType(20, "float8e5m2fnuz", "|u1", library="float8_e5m2fnuz"),
    ElementType(64, "encoded value", "|u1"),
)
ENCODED = _ROWS[-1]
"""Element type of values that are not numeric arrays; see `devices.encoded`."""
_WITHIN = (
    ElementType(8, "string", "|u1"),
    ElementType(21, "uint4", "|u1", bits=4, library="uint4"),
    ElementType(22, "int4", "|i1", bits=4, library="int4"),
    ElementType(23, "float4e2m1", "|u1", bits=4, library="float4_e2m1fn"),
)
"""Element types that only encoded values contain."""

_BY_KEY: dict[int | str, ElementType] = {key: row for row in (*_ROWS, *_WITHIN) for key in (row.number, row.name)}
_OTHERS = {14: "complex numbers", 15: "complex numbers", 25: "2-bit integers", 26: "2-bit integers"}


def element_types() -> tuple[ExtensionOperandType, ...]:
    """Return the operand types of the ONNX extension: a tensor type and a scalar type for each element type."""
    return tuple(
        ExtensionOperandType(row.number | flag, not flag, row.itemsize, row.dtype, row.library)
        for flag in (0, _SCALAR)
        for row in _ROWS
    )


def element_type(key: int | str, place: str) -> ElementType:
    """Return an element type that a request's arguments can have.

    Args:
        key: ``TensorProto.DataType``, or ONNX Runtime's name.

    Raises:
        GeneralFailure: The type is unknown, or values of this type (strings, 4-bit numbers) are encoded as bytes.
    """
    row = element_within(key, place)
    if row in _WITHIN:
        raise GeneralFailure(f"{place} holds {row.name}; only strings and numbers of 4 to 64 bits can be passed")
    return row


def element_within(key: int | str, place: str) -> ElementType:
    """Find an element type by number or name. Raises `GeneralFailure`, with `place`, for an unknown `key`."""
    if key not in _BY_KEY:
        what = _OTHERS.get(key, f"elements of type {key}") if isinstance(key, int) else key
        raise GeneralFailure(f"{place} holds {what}; only strings and numbers of 4 to 64 bits can be passed")
    return _BY_KEY[key]


def element_of(dtype: np.dtype[Any], place: str) -> ElementType:
    """Return the element type for a NumPy type. Raises `GeneralFailure` if there is none."""
    row = next((row for row in _ROWS if np.dtype(row.dtype) == dtype and row.number < _FIRST_OF_BITS), None)
    if row is None:
        raise GeneralFailure(f"{place} has dtype {dtype}; only numbers of 1, 2, 4 or 8 bytes can be passed to a model")
    return row


def operand_code(row: ElementType, rank: int | None, prefix: int) -> tuple[int, float]:
    """Return the operand type and scale of a value in a graph.

    Args:
        rank: Rank of the value; None if unknown.
    """
    if rank == 0:
        return row.scalar if row.scalar is not None else extension_code(prefix, row.number | _SCALAR), 0.0
    if row.tensor is not None:
        return row.tensor, row.scale
    return extension_code(prefix, row.number), 0.0


def is_scalar(operand: OperandDesc) -> bool:
    """Return True if an operand of a graph is known to have rank 0."""
    if operand.type > 0xFFFF:
        return bool(operand.type & _SCALAR)
    return operand.type in (_T.FLOAT32, _T.FLOAT16, _T.INT32, _T.UINT32)


def open_operand(operand: OperandDesc, prefix: int) -> OperandDesc:
    """Return an operand with the same element type and an unknown rank. `prefix` is that of the model's extension."""
    if not is_scalar(operand):
        return replace(operand, dimensions=())
    row = next(row for row in _ROWS if row.scalar == operand.type or row.number | _SCALAR == operand.type & 0xFFFF)
    return replace(operand, type=extension_code(prefix, row.number), dimensions=())
