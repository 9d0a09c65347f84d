"""The protocol's names of types, and bytes as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from ..model import OperandType
from ..runtime import NodeArg

Array = np.ndarray[Any, np.dtype[Any]]
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 32
"""In one dimension. Checked before any arithmetic: a product of what clients send could take hours."""
_MOST_BYTES = 2 << 30
"""Of an input: what a sparse region of shared memory announces costs its client nothing, and the gateway memory."""

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{f"INT{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"FP{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def datatype_of(node: NodeArg) -> str:
    """Return the protocol's name for the elements of an input or output."""
    if node.type == OperandType.TENSOR_BOOL8:
        return "BOOL"
    return _NAMES.get(node.dtype, str(node.dtype).upper())


def shape_of(node: NodeArg) -> list[int]:
    """Return the dimensions, -1 where a model leaves one open."""
    return [size if isinstance(size, int) else -1 for size in node.shape or ()]


def size_of(node: NodeArg, datatype: str, shape: Sequence[int]) -> int:
    """Return the bytes of an input.

    Raises:
        InvalidArgument: The input has another type, or the shape is none.
    """
    wanted = datatype_of(node)
    if datatype != wanted:
        raise InvalidArgument(f"input {node.name!r} is {wanted}, got {datatype or 'no datatype'}")
    if len(shape) > _MOST_DIMENSIONS or not all(0 <= size < _MOST_ELEMENTS for size in shape):
        raise InvalidArgument(
            f"input {node.name!r}: a shape has at most {_MOST_DIMENSIONS} dimensions, "
            f"each from 0 to {_MOST_ELEMENTS - 1}"
        )
    size = math.prod(shape) * _DTYPES.get(datatype, node.dtype).itemsize
    if size > _MOST_BYTES:
        raise InvalidArgument(f"input {node.name!r} of shape {list(shape)} is larger than {_MOST_BYTES} bytes")
    return size


def check_size(node: NodeArg, shape: Sequence[int], size: int, given: int) -> None:
    """Refuse an input that has not as many bytes as its shape takes.

    Raises:
        InvalidArgument: So it is.
    """
    if given != size:
        raise InvalidArgument(f"input {node.name!r} of shape {list(shape)} takes {size} bytes, got {given}")


def array_of(node: NodeArg, datatype: str, shape: Sequence[int], data: bytes | memoryview | Sequence[Any]) -> Array:
    """Return what a client sent for an input: bytes, or elements in row-major order.

    Raises:
        InvalidArgument: They are not what the input takes, or not as many as the shape says.
    """
    size = size_of(node, datatype, shape)
    dtype = _DTYPES.get(datatype, node.dtype)
    if isinstance(data, bytes | memoryview):
        check_size(node, shape, size, len(data))
        return np.frombuffer(data, dtype).reshape(shape)
    count = size // dtype.itemsize
    try:
        array = np.asarray(data, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"input {node.name!r}: the elements are no {datatype}: {error}") from None
    if array.size != count:
        raise InvalidArgument(f"input {node.name!r} of shape {list(shape)} takes {count} elements, got {array.size}")
    return array.reshape(shape)


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
