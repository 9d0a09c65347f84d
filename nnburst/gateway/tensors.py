"""The protocol's datatypes, and conversion between bytes and arrays."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..errors import InvalidArgument
from ..model.dimensions import element_count
from ..model.operand_types import OperandType
from ..model.types import Array
from ..runtime.request.node_args import NodeArg

P = ParamSpec("P")
T = TypeVar("T")

_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 32
"""Maximum size of a dimension, checked first: the product of huge numbers could take hours."""
_MOST_BYTES = 2 << 30
"""Maximum bytes of an input. The gateway copies each input, but sparse shared memory costs the client nothing."""
_MOST_STRINGS, _MOST_TEXT = 1 << 20, 256 << 20
"""Maximum elements and bytes of an input of strings: each string becomes an object."""
_BRISK = 1 << 20
"""Maximum bytes that the event loop's thread converts; another thread converts a larger request or answer."""
PIECE = 1 << 14
"""Number of elements that a thread converts before it yields the interpreter lock."""
_LENGTH = struct.Struct("<I")
"""The format of the length before each string."""

_NUMBERS = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{f"INT{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"FP{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
}
_NAMES = {dtype: name for name, dtype in _NUMBERS.items()}
_DTYPES = _NUMBERS | {"BF16": np.dtype(np.uint16), "BYTES": np.dtype(object)}
"""The dtype of each datatype's arrays: for BF16 the bits, for BYTES string objects."""
_KINDS: dict[str, set[type]] = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}, "O": {str}}
"""The Python types of JSON values, by kind of dtype."""


async def convert_in_thread(size: int, convert: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `convert`, which converts `size` bytes; if `size` is large, in another thread."""
    return convert(*args, **kwargs) if size <= _BRISK else await asyncio.to_thread(convert, *args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensor:
    """An input or output of a model.

    Attributes:
        datatype: The protocol's name of the elements' type.
        shape: Sizes of the dimensions; -1 for an open dimension.
    """

    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def by_name(cls, nodes: Iterable[NodeArg]) -> dict[str, ModelTensor]:
        """Return the tensors of a model by name, in order.

        Raises:
            InvalidArgument: The protocol has no datatype for a tensor.
        """
        return {node.name: cls._of(node) for node in nodes}

    @classmethod
    def _of(cls, node: NodeArg) -> ModelTensor:
        if what := node.holds or node.bits_of:
            datatype = {"tensor(string)": "BYTES", "bfloat16": "BF16"}.get(what)
        else:
            datatype = "BOOL" if node.type == OperandType.TENSOR_BOOL8 else _NAMES.get(node.dtype)
        if datatype is None:
            raise InvalidArgument(
                f"{node.name!r} is {what or node.dtype}, which the Open Inference Protocol has no datatype for: only "
                "sessions of programs on its machine run this model"
            )
        shape = tuple(size if isinstance(size, int) else -1 for size in node.shape or ())
        return cls(node.name, datatype, _DTYPES[datatype], shape)

    def check_size(self, datatype: str, shape: tuple[int, ...], nbytes: int) -> None:
        """Check that a number of bytes fits the shape or, for strings, does not exceed the limit.

        Raises:
            InvalidArgument: The number, datatype or shape does not fit, or the shape is too large.
        """
        size = _count_of(self, datatype, shape) * self.dtype.itemsize
        if self.datatype == "BYTES":
            if nbytes > _MOST_TEXT:
                raise InvalidArgument(f"input {self.name!r} has {nbytes} bytes; strings have at most {_MOST_TEXT}")
        elif nbytes != size:
            raise InvalidArgument(f"input {self.name!r} of shape {list(shape)} takes {size} bytes, got {nbytes}")

    def array_of(
        self, datatype: str, shape: tuple[int, ...], data: bytes | memoryview | Sequence[Any] | Array
    ) -> Array:
        """Return an array from a client's bytes, or from elements in row-major order.

        Args:
            datatype, shape: Values from the client.
            data: Numbers or strings, possibly in nested lists; or a one-dimensional array of the input's kind, with
                strings as bytes.

        Raises:
            InvalidArgument: The elements do not fit the input's type, or their number does not fit the shape.
        """
        if isinstance(data, bytes | memoryview):
            self.check_size(datatype, shape, len(data))
            if self.datatype != "BYTES":
                return np.frombuffer(data, self.dtype).reshape(shape)
            data = self._strings_in(data, _count_of(self, datatype, shape))
        count = _count_of(self, datatype, shape)
        flat = data if isinstance(data, np.ndarray) else self._flat(data)
        if len(flat) != count:
            raise InvalidArgument(f"input {self.name!r} of shape {list(shape)} takes {count} elements, got {len(flat)}")
        if self.datatype == "BYTES":
            return self._decode(flat).reshape(shape)
        try:
            with np.errstate(over="ignore"):
                array = np.asarray(flat, self.dtype)
            if isinstance(data, np.ndarray):
                fits = np.array_equal(array, data, equal_nan=True)
            else:  # an infinity means that a number is too large: JSON has none
                fits = bool(np.isfinite(array).all())
        except OverflowError:
            fits = False
        if not fits:
            raise InvalidArgument(f"input {self.name!r}: a number is beyond those of {datatype}")
        return array.reshape(shape)

    def _flat(self, data: Sequence[Any]) -> Sequence[Any]:
        """Return the elements of possibly nested lists. Check that all elements have the kind of the input."""
        flat: Sequence[Any] = np.array(data, object).ravel().tolist() if data and type(data[0]) is list else data
        if self.datatype == "BF16" and flat:
            raise InvalidArgument(f"input {self.name!r} is BF16, which JSON has not: send it as binary data")
        kinds = _KINDS[self.dtype.kind]
        if not kinds.issuperset(map(type, flat)):
            wrong = next(type(one).__name__ for one in flat if type(one) not in kinds)
            raise InvalidArgument(f"input {self.name!r}: the elements are {self.datatype}, got a {wrong}")
        return flat

    def _strings_in(self, data: bytes | memoryview, count: int) -> Array:
        """Return the `count` strings in a buffer. In the buffer, each string follows its length."""
        found, at, most = np.empty(count, object), 0, len(data)
        for i in range(count):
            start = at + _LENGTH.size
            at = start + _LENGTH.unpack_from(data, at)[0] if start <= most else most + 1
            if at > most:
                break
            found[i] = data[start:at]
        if at != most:
            raise InvalidArgument(
                f"input {self.name!r}: {most} bytes are not {count} strings, each behind its length in four bytes"
            )
        return found

    def _decode(self, texts: Iterable[Any]) -> Array:
        try:
            return np.array([one if type(one) is str else str(one, "utf-8") for one in texts], object)
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"input {self.name!r}: a string is no UTF-8 ({error})") from None


@lru_cache(maxsize=256)
def _count_of(tensor: ModelTensor, datatype: str, shape: tuple[int, ...]) -> int:
    """Return the number of elements that a client must send for an input."""
    if datatype != tensor.datatype:
        raise InvalidArgument(f"input {tensor.name!r} is {tensor.datatype}, got {datatype or 'no datatype'}")
    if shape and not (len(shape) <= _MOST_DIMENSIONS and min(shape) >= 0 and max(shape) < _MOST_ELEMENTS):
        raise InvalidArgument(
            f"input {tensor.name!r}: a shape has at most {_MOST_DIMENSIONS} dimensions, "
            f"each from 0 to {_MOST_ELEMENTS - 1}"
        )
    try:
        count = element_count(shape)
    except InvalidArgument as error:
        raise InvalidArgument(f"input {tensor.name!r}: {error}") from None
    if tensor.datatype == "BYTES" and count > _MOST_STRINGS:
        raise InvalidArgument(f"input {tensor.name!r} of shape {list(shape)} has more than {_MOST_STRINGS} strings")
    if count * tensor.dtype.itemsize > _MOST_BYTES:
        raise InvalidArgument(f"input {tensor.name!r} of shape {list(shape)} is larger than {_MOST_BYTES} bytes")
    return count


def to_wire(array: Array) -> Array:
    """Return an output in the protocol's form: each string follows its length; other arrays are unchanged."""
    if not text_size(array):
        return array
    flat = array.reshape(-1)
    parts: list[bytes] = []
    for at in range(0, len(flat), PIECE):
        for text in flat[at : at + PIECE].tolist():
            encoded = text.encode()
            parts += (_LENGTH.pack(len(encoded)), encoded)
    return np.frombuffer(b"".join(parts), np.uint8)


def text_size(array: Array) -> int:
    """Return an estimate of the bytes of an output of strings; 0 for other types."""
    return _BRISK + 1 if array.dtype.kind in ("O", "T") else 0


def bytes_of(array: Array) -> memoryview:
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
