"""Operand types and their properties."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from msgspec import Struct

from ..errors import InvalidArgument
from .dimensions import element_count

BASE_MAXIMUM = 0xFFFF
"""Largest code of an NNAPI type. A larger code has an extension's prefix in its high 16 bits."""

_SIZE_LIMIT = 2**32 - 1


class HalVersion(enum.IntEnum):
    """A version of NNAPI's device interface (HAL). A model is made for one version."""

    V1_0 = 10
    V1_1 = 11
    V1_2 = 12
    V1_3 = 13


class OperandType(enum.IntEnum):
    """The type of an operand. The number is part of the wire format."""

    FLOAT32 = 0
    INT32 = 1
    UINT32 = 2
    TENSOR_FLOAT32 = 3
    TENSOR_INT32 = 4
    TENSOR_QUANT8_ASYMM = 5
    BOOL = 6
    TENSOR_QUANT16_SYMM = 7
    TENSOR_FLOAT16 = 8
    TENSOR_BOOL8 = 9
    FLOAT16 = 10
    TENSOR_QUANT8_SYMM_PER_CHANNEL = 11
    TENSOR_QUANT16_ASYMM = 12
    TENSOR_QUANT8_SYMM = 13
    TENSOR_QUANT8_ASYMM_SIGNED = 14
    SUBGRAPH = 15
    OEM = 10000
    TENSOR_OEM_BYTE = 10001


class OperandInfo(Struct, frozen=True):
    """The properties of an operand type.

    Attributes:
        short: Name of the type in the texts of the operation table, which `signature.py` reads.
        since: First HAL version with the type.
        dtype: NumPy type of an element in memory; None if the service defines the contents. Booleans are ``uint8``, in
            which any byte but 0 is true.
        is_scalar: True for scalars, False for tensors.
        scale: Rule for the scale: "zero", "non-negative", "positive" or "any".
        zero_points: Smallest and largest zero point; None if all are allowed.
    """

    type: OperandType
    short: str
    since: HalVersion
    dtype: np.dtype[Any] | None
    is_scalar: bool
    scale: str = "zero"
    zero_points: tuple[int, int] | None = (0, 0)

    @property
    def element_size(self) -> int:
        """Bytes per element; 0 for a type whose contents only the service understands."""
        return 0 if self.dtype is None else self.dtype.itemsize

    @property
    def is_quantised(self) -> bool:
        """True if real values are (stored value - zero point) x scale."""
        return self.scale == "positive"

    @property
    def is_float(self) -> bool:
        return self.dtype is not None and self.dtype.kind == "f"


def _row(type_: OperandType, short: str, since: HalVersion, dtype: str | None, *rest: Any) -> OperandInfo:
    return OperandInfo(type_, short, since, None if dtype is None else np.dtype(dtype), *rest)


_T, _H = OperandType, HalVersion

OPERANDS: dict[int, OperandInfo] = {
    row.type: row
    for row in (
        _row(_T.FLOAT32, "f32", _H.V1_0, "<f4", True),
        _row(_T.INT32, "i32", _H.V1_0, "<i4", True),
        _row(_T.UINT32, "u32", _H.V1_0, "<u4", True),
        _row(_T.TENSOR_FLOAT32, "F32", _H.V1_0, "<f4", False),
        _row(_T.TENSOR_INT32, "I32", _H.V1_0, "<i4", False, "non-negative"),
        _row(_T.TENSOR_QUANT8_ASYMM, "Q8", _H.V1_0, "u1", False, "positive", (0, 255)),
        _row(_T.BOOL, "bool", _H.V1_2, "u1", True),
        _row(_T.TENSOR_QUANT16_SYMM, "Q16S", _H.V1_2, "<i2", False, "positive"),
        _row(_T.TENSOR_FLOAT16, "F16", _H.V1_2, "<f2", False),
        _row(_T.TENSOR_BOOL8, "B8", _H.V1_2, "u1", False),
        _row(_T.FLOAT16, "f16", _H.V1_2, "<f2", True),
        _row(_T.TENSOR_QUANT8_SYMM_PER_CHANNEL, "Q8C", _H.V1_2, "i1", False),
        _row(_T.TENSOR_QUANT16_ASYMM, "Q16A", _H.V1_2, "<u2", False, "positive", (0, 65535)),
        _row(_T.TENSOR_QUANT8_SYMM, "Q8Y", _H.V1_2, "i1", False, "positive"),
        _row(_T.TENSOR_QUANT8_ASYMM_SIGNED, "Q8S", _H.V1_3, "i1", False, "positive", (-128, 127)),
        _row(_T.SUBGRAPH, "sub", _H.V1_3, None, True),
        _row(_T.OEM, "oem", _H.V1_0, None, True, "any", None),
        _row(_T.TENSOR_OEM_BYTE, "OEM8", _H.V1_0, "u1", False, "any", None),
    )
}
"""NNAPI's operand types, by code."""


def is_extension(code: int) -> bool:
    return BASE_MAXIMUM < code <= 0xFFFFFFFF


def type_name(code: int) -> str:
    """Return a name for an operand type in error messages. The type may be unknown."""
    info = OPERANDS.get(code)
    if info is not None:
        return info.type.name
    return f"extension type {code:#x}" if is_extension(code) else f"unknown operand type {code}"


def check_type(type: int) -> int:
    """Return an operand type as an int. Raises `InvalidArgument` if the type is not a number."""
    if not isinstance(type, int):
        raise InvalidArgument(f"type={type!r}: give a member of OperandType, such as OperandType.TENSOR_FLOAT32")
    return type


def operand_info(code: int) -> OperandInfo:
    """Return the properties of an operand type. Raises `InvalidArgument` for an unknown or extension type."""
    try:
        return OPERANDS[code]
    except KeyError:
        raise InvalidArgument(f"{type_name(code)} has no entry in the operand table") from None


def operand_nbytes(code: int, dimensions: tuple[int, ...]) -> int:
    """Return the size of an operand's value in bytes.

    Args:
        dimensions: ``()`` for scalars and for tensors of unknown rank; 0 is an unknown dimension.

    Returns:
        Bytes; 0 if the size is unknown or an extension defines it.

    Raises:
        InvalidArgument: The type is unknown, the rank too high, or the size does not fit in 32 bits.
    """
    info = operand_info(code)
    if info.is_scalar:
        return info.element_size
    least = info.element_size * element_count([size or 1 for size in dimensions])  # An unknown size is at least 1.
    if least > _SIZE_LIMIT:
        raise InvalidArgument(f"{info.type.name} of dimensions {list(dimensions)} is larger than 2^32-1 bytes")
    return least if dimensions and 0 not in dimensions else 0
