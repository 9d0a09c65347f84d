"""NumPy arrays as elements of a queue, and as memory that C may read or fill."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core._nnburst import ffi
from ..errors import InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt

Elements = np.ndarray[Any, np.dtype[Any]]

MAX_COUNT = (1 << 64) - 1


def element_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype that `dtype` describes, if a queue can carry it."""
    try:
        element = np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgument(f"{dtype!r} is no NumPy dtype: {error}") from error
    if element.hasobject or not element.itemsize:
        raise InvalidArgument(f"{element} cannot live in shared memory; use a dtype of fixed size without objects")
    if element.subdtype is not None:
        raise InvalidArgument(f"{element} is an array type; wrap it in a structured dtype of one field")
    return element


def element_count(count: int) -> int:
    """`count` as a non-negative 64-bit number."""
    number = operator.index(count)
    if not 0 <= number <= MAX_COUNT:
        raise InvalidArgument(f"count is {count}; a number of elements is not negative")
    return number


def as_elements(data: Any, dtype: np.dtype[Any]) -> Elements:
    """`data` as a contiguous array of elements, without a copy where possible."""
    if isinstance(data, np.ndarray):
        if data.dtype != dtype:
            raise InvalidArgument(f"the queue holds {dtype}, not {data.dtype}; convert with astype()")
        return data if data.flags.c_contiguous else np.ascontiguousarray(data)
    if isinstance(data, (bytes, bytearray, memoryview)):
        if memoryview(data).nbytes % dtype.itemsize:
            raise InvalidArgument(f"the bytes are not a whole number of {dtype.itemsize}-byte elements")
        return np.frombuffer(data, np.uint8).view(dtype)
    try:
        return np.ascontiguousarray(data, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"cannot turn {type(data).__name__} into {dtype}: {error}") from error


def _exportable(array: Elements) -> Elements:
    # Dates export no buffer; their bytes do.
    return array.view(np.int64) if array.dtype.kind in "mM" else array


def readable(array: Elements) -> Any:
    """The memory of an array as a C pointer that keeps it alive."""
    return ffi.from_buffer("char[]", _exportable(array))


def writable(array: Elements) -> Any:
    """Likewise, for C to fill."""
    return ffi.from_buffer("char[]", _exportable(array), True)
