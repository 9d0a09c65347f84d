"""The protocol's names of types, and bytes as arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from ..model import Array, OperandType
from ..runtime import NodeArg

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
_KINDS: dict[str, set[type]] = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}}
"""Of Python's numbers, as JSON gives them, for each kind of dtype."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensor:
    """An input or output of a model.

    Attributes:
        name: The model's own.
        datatype: The protocol's name for its elements.
        dtype: Of arrays.
        shape: -1 where the model leaves a dimension open.
    """

    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, nodes: Iterable[NodeArg]) -> dict[str, ModelTensor]:
        """Return the tensors of a model by name, in order."""
        return {node.name: cls._of(node) for node in nodes}

    @classmethod
    def _of(cls, node: NodeArg) -> ModelTensor:
        datatype = "BOOL" if node.type == OperandType.TENSOR_BOOL8 else _NAMES.get(node.dtype)
        shape = tuple(size if isinstance(size, int) else -1 for size in node.shape or ())
        return cls(node.name, datatype or str(node.dtype).upper(), _DTYPES.get(datatype or "", node.dtype), shape)

    def check_size(self, datatype: str, shape: tuple[int, ...], given: int) -> None:
        """Refuse another number of bytes than the shape says.

        Raises:
            InvalidArgument: It is another; or the datatype is, or no array has the shape, or it is too large.
        """
        size = _count_of(self, datatype, shape) * self.dtype.itemsize
        if given != size:
            raise InvalidArgument(f"input {self.name!r} of shape {list(shape)} takes {size} bytes, got {given}")

    def array_of(
        self, datatype: str, shape: tuple[int, ...], data: bytes | memoryview | Sequence[Any] | Array
    ) -> Array:
        """Return what a client sent: bytes, or elements in row-major order.

        Args:
            datatype: As the client says.
            shape: Likewise.
            data: Elements as Python's numbers, perhaps in lists of lists, or of the same kind as the input's in an
                array of one dimension.

        Raises:
            InvalidArgument: They are not what the input takes, or not as many as the shape says.
        """
        if isinstance(data, bytes | memoryview):
            self.check_size(datatype, shape, len(data))
            return np.frombuffer(data, self.dtype).reshape(shape)
        count = _count_of(self, datatype, shape)
        flat = data if isinstance(data, np.ndarray) else self._flat(data)
        if len(flat) != count:
            raise InvalidArgument(f"input {self.name!r} of shape {list(shape)} takes {count} elements, got {len(flat)}")
        if self.dtype.kind in "iu" and count:
            least, most = (flat.min(), flat.max()) if isinstance(flat, np.ndarray) else (min(flat), max(flat))
            limits = np.iinfo(self.dtype)
            if least < limits.min or most > limits.max:
                wrong = least if least < limits.min else most
                raise InvalidArgument(f"input {self.name!r}: {_brief(wrong)} is not from {limits.min} to {limits.max}")
        try:
            with np.errstate(over="ignore"):
                array = np.asarray(flat, self.dtype).reshape(shape)
        except OverflowError:  # an integer beyond every floating-point number
            array = None
        finite = isinstance(data, np.ndarray) or self.dtype.kind != "f"  # else JSON, which has no other numbers
        if array is None or not (finite or np.isfinite(array).all()):
            raise InvalidArgument(f"input {self.name!r}: a number is too large for {datatype}")
        return array

    def _flat(self, data: Sequence[Any]) -> Sequence[Any]:
        """Return numbers that may come in lists of lists, if they are of the input's kind."""
        flat, depth = data, 0
        while flat and all(type(one) is list for one in flat) and depth < _MOST_DIMENSIONS:
            if len({len(one) for one in flat}) > 1:
                raise InvalidArgument(f"input {self.name!r}: lists of one level have different lengths")
            flat, depth = list(itertools.chain.from_iterable(flat)), depth + 1
        kinds = _KINDS[self.dtype.kind]
        if not kinds.issuperset(map(type, flat)):
            wrong = next(type(one).__name__ for one in flat if type(one) not in kinds)
            raise InvalidArgument(f"input {self.name!r}: the elements are {self.datatype}, got a {wrong}")
        return flat


@lru_cache(maxsize=256)
def _count_of(tensor: ModelTensor, datatype: str, shape: tuple[int, ...]) -> int:
    """Return how many elements a client must give for an input."""
    if datatype != tensor.datatype:
        raise InvalidArgument(f"input {tensor.name!r} is {tensor.datatype}, got {datatype or 'no datatype'}")
    if shape and not (len(shape) <= _MOST_DIMENSIONS and min(shape) >= 0 and max(shape) < _MOST_ELEMENTS):
        raise InvalidArgument(
            f"input {tensor.name!r}: a shape has at most {_MOST_DIMENSIONS} dimensions, "
            f"each from 0 to {_MOST_ELEMENTS - 1}"
        )
    count = math.prod(shape)
    if count * tensor.dtype.itemsize > _MOST_BYTES:
        raise InvalidArgument(f"input {tensor.name!r} of shape {list(shape)} is larger than {_MOST_BYTES} bytes")
    return count


def _brief(number: int) -> str:
    return str(number) if abs(number) < 1 << 64 else "a number of more than 64 bits"


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
