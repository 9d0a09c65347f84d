"""A self-describing encoding in bytes for values that are not numeric arrays.

Encoded values are strings, elements smaller than a byte, sequences, maps, and optionals without a value. An encoded
value begins with a little-endian number of eight bytes: the size of the whole value in bytes. MessagePack follows: nil
for an optional without a value, else one of the structures below. Readers ignore all bytes beyond the size.

A reader copies the bytes and then checks all of them, because another process may have written anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from ..errors import GeneralFailure, InvalidArgument
from ..model.dimensions import element_count
from .elements import ElementType, element_within

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
if TYPE_CHECKING:
    _Data = Bytes
    _Offsets = np.ndarray[Any, np.dtype[np.int64]]
else:
    _Data = _Offsets = bytes  # Unchecked data stays bytes: decoded objects take many times their size.
STRING = 8
ROOM = 1 << 16
"""Bytes of memory reserved for a value of unknown size."""
_WORD = 8
_MOST_ITEMS = 1 << 20
"""Largest number of values in a sequence."""
_HIGHEST_RANK = 64


class EncodedTensor(Struct, frozen=True, array_like=True, tag=1):
    """The elements of a tensor, stored as ONNX Runtime stores them. Strings are UTF-8, each followed by a NUL.

    `offsets` contains the position of each string's first byte, and the end of the last string.
    """

    element: int
    shape: Annotated[tuple[int, ...], Meta(max_length=_HIGHEST_RANK)]
    data: _Data
    offsets: _Offsets | None = None


class EncodedMap(Struct, frozen=True, array_like=True, tag=2):
    """One or several maps that share their keys. `keys` has one dimension, `values` has one row for each map."""

    keys: EncodedTensor
    values: EncodedTensor


class EncodedSequence(Struct, frozen=True, array_like=True, tag=3):
    """A sequence of tensors or of maps. `element` is the element type of the tensors."""

    element: int
    items: Annotated[tuple[EncodedTensor | EncodedMap, ...], Meta(max_length=_MOST_ITEMS)]


Value = EncodedTensor | EncodedMap | EncodedSequence | None


def tensor_nbytes(element: ElementType, shape: Sequence[int]) -> int:
    count = element_count(shape)
    return -(-count * element.bits // 8) if element.bits else count * element.itemsize


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda array: array.data)


def write(value: Value) -> Bytes:
    body = _encoder.encode(value)
    return np.frombuffer(struct.pack("<q", _WORD + len(body)) + body, np.uint8)


def copy_region(region: Bytes, place: str) -> Bytes:
    """Copy a value's bytes from shared memory. Raises `InvalidArgument` if the value exceeds the region."""
    nbytes = int(region[:_WORD].copy().view("<i8")[0]) if region.size >= _WORD else 0
    if not nbytes:
        raise InvalidArgument(f"{place} has no value yet")
    if not _WORD < nbytes <= region.size:
        raise InvalidArgument(f"{place} says that it has {nbytes} bytes; there are {region.size}")
    return region[:nbytes].copy()


def read(data: Bytes, place: str, count: Callable[[], object] = lambda: None) -> Value:
    """Decode a value from private bytes, which no other process can change.

    Args:
        count: Called before each tensor is decoded. It can raise an error to limit the number of tensors.

    Raises:
        InvalidArgument: The bytes are not an encoded value.
    """
    try:
        value: Value = msgspec.msgpack.decode(data[_WORD:].data, type=Value)
        return value if value is None else _check(value, place, count)
    except (GeneralFailure, InvalidArgument, RecursionError, ValueError, msgspec.MsgspecError) as error:
        raise InvalidArgument(f"{place} is no encoded value: {error}") from None


def _check(value: Any, place: str, count: Callable[[], object]) -> Any:
    if isinstance(value, EncodedTensor):
        count()
        return _check_tensor(value, place)
    if isinstance(value, EncodedSequence):
        return replace(value, items=tuple(_check(item, place, count) for item in value.items))
    keys, values = (_check(tensor, place, count) for tensor in (value.keys, value.values))
    if len(keys.shape) != 1 or keys.shape != values.shape[-1:] or len(values.shape) > 2:
        raise InvalidArgument(f"a map of keys of shape {keys.shape} and values of shape {values.shape}")
    return EncodedMap(keys, values)


def _check_tensor(tensor: EncodedTensor, place: str) -> EncodedTensor:
    element, count = element_within(tensor.element, place), element_count(tensor.shape)
    data = np.frombuffer(tensor.data, np.uint8)
    offsets = None if tensor.offsets is None else np.frombuffer(tensor.offsets, "<i8")
    if tensor.element != STRING:
        if offsets is not None or data.size != tensor_nbytes(element, tensor.shape):
            raise InvalidArgument(f"{data.size} bytes for {element.name} of shape {tensor.shape}")
        return replace(tensor, data=(data != 0).view(np.uint8) if element.dtype == "|b1" else data)
    if (
        offsets is None
        or offsets.size != count + 1
        or (offsets[0], offsets[-1]) != (0, data.size)
        or (offsets[1:] <= offsets[:-1]).any()
        or data[offsets[1:] - 1].any()
    ):
        raise InvalidArgument("offsets of strings that lead elsewhere")
    try:
        data.tobytes().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"a string is no UTF-8 ({error})") from None
    return replace(tensor, data=data, offsets=offsets)  # NULs separate the strings, so each is valid UTF-8.


# ---- Python's values ---------------------------------------------------------------------------------------------


def string_type() -> np.dtype[Any]:
    """Return NumPy's type for strings: ``StringDType`` from NumPy 2 on, else ``object``."""
    own = getattr(getattr(np, "dtypes", None), "StringDType", None)
    return np.dtype(object) if own is None else own()


def inner_types(holds: str) -> tuple[str, str]:
    """Split ``seq(tensor(float))`` into ``seq`` and ``tensor(float)``."""
    kind, _, inner = holds.partition("(")
    return kind, inner[:-1]


def numpy_type(holds: str) -> np.dtype[Any]:
    """Return the NumPy type of a tensor, given ONNX Runtime's name of its type; ``object`` if it is no tensor."""
    kind, inner = inner_types(holds)
    if kind != "tensor":
        return np.dtype(object)
    return string_type() if inner == "string" else np.dtype(element_within(inner, holds).dtype)


def from_python(value: Any, holds: str, place: str) -> Value:
    """Convert a caller's Python value to a value that can be encoded.

    Args:
        value: A list for a sequence, a dict for a map, None for an optional without a value, else an array or a value
            that converts to one.
        holds: Expected type, as ONNX Runtime writes it, such as ``seq(tensor(float))``.

    Raises:
        InvalidArgument: The value does not have this type.
    """
    kind, inner = inner_types(holds)
    if kind == "optional":
        return None if value is None else from_python(value, inner, place)
    if kind == "seq":
        if not isinstance(value, list | tuple):
            raise InvalidArgument(f"{place} is a sequence: give a list, not {_kind(value)}")
        of = inner_types(inner)
        element = element_within(of[1], place).number if of[0] == "tensor" else 0
        return EncodedSequence(element, tuple(from_python(v, inner, f"{place}[{i}]") for i, v in enumerate(value)))  # type: ignore[misc]
    if kind == "map":
        if not isinstance(value, dict):
            raise InvalidArgument(f"{place} is a map: give a dict, not {_kind(value)}")
        key, _, held = inner.partition(",")
        keys = _tensor(list(value.keys()), key, f"{place}, its keys", is_list=True)
        values = _tensor(list(value.values()), inner_types(held)[1], f"{place}, its values", is_list=True)
        return EncodedMap(keys, values)
    return _tensor(value, inner, place)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _tensor(value: Any, name: str, place: str, *, is_list: bool = False) -> EncodedTensor:
    element = element_within(name, place)
    if value is None:
        raise InvalidArgument(f"{place} has no array, but None")
    try:
        array = np.asarray(value, element.dtype if is_list and element.number != STRING else None)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{place} cannot be made an array: {error}") from None
    if element.number == STRING:
        return _strings(array, place)
    wanted, dtype = np.dtype(element.dtype), array.dtype
    if dtype.name == element.library:  # The type is one of ml_dtypes; its bits are passed.
        array = array.astype(wanted) if element.bits and wanted.kind == "i" else array.view(wanted)
    elif dtype != wanted:
        to = f"ml_dtypes.{element.library}" if element.library else repr(str(wanted))
        raise InvalidArgument(f"{place} is {element.library or wanted}, got {dtype}; convert it with .astype({to})")
    return EncodedTensor(element.number, array.shape, _pack(array, element, place))


def _strings(array: np.ndarray[Any, Any], place: str) -> EncodedTensor:
    if array.size and array.dtype.kind not in "UTO":
        raise InvalidArgument(f"{place} holds strings: give an array of str, not of {array.dtype}")
    flat = array.reshape(-1).tolist()
    wrong = next((one for one in flat if type(one) is not str), "")
    if wrong != "":
        raise InvalidArgument(
            f"{place} holds strings: give an array of str; there is {str(wrong)[:40]!r} in it, {_kind(wrong)}"
        )
    try:
        texts = [one.encode() for one in flat]
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{place}: a string that cannot be UTF-8: {error}") from None
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) + 1 for text in texts], out=offsets[1:])
    data = np.frombuffer(b"\0".join([*texts, b""]), np.uint8)
    return EncodedTensor(STRING, array.shape, data, offsets)


def _pack(array: np.ndarray[Any, Any], element: ElementType, place: str) -> Bytes:
    """Return the bytes of an array. Two 4-bit elements share a byte, the first one in the lower half."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if not element.bits:
        return flat.view(np.uint8)
    least, most = (-8, 7) if flat.dtype.kind == "i" else (0, 15)
    if flat.size and not least <= flat.min() <= flat.max() <= most:
        raise InvalidArgument(f"{place} holds {element.name}: whole numbers from {least} to {most}, one in each byte")
    halves = np.zeros(flat.size + flat.size % 2, np.uint8)
    halves[: flat.size] = flat.view(np.uint8) & 15
    packed: Bytes = halves[::2] | halves[1::2] << np.uint8(4)
    return packed


def to_python(value: Value) -> Any:
    """Convert a value to the form that ONNX Runtime's Python interface returns."""
    if isinstance(value, EncodedSequence):
        return [to_python(item) for item in value.items]
    if isinstance(value, EncodedMap):
        keys, values = _array(value.keys).tolist(), _array(value.values)
        if values.ndim == 1:
            return dict(zip(keys, values.tolist(), strict=True))
        columns = dict(sorted(zip(keys, values.T.tolist(), strict=True), key=itemgetter(0)))  # ONNX Runtime sorts keys.
        return [dict(zip(columns, row, strict=False)) for row in zip(*columns.values(), strict=True)]
    return None if value is None else _array(value)


def _array(tensor: EncodedTensor) -> np.ndarray[Any, Any]:
    if tensor.offsets is not None:
        raw = tensor.data.tobytes()
        texts = raw.decode().split("\0")[:-1]
        if len(texts) + 1 != len(tensor.offsets):  # Some string contains a NUL.
            texts = [raw[start : end - 1].decode() for start, end in pairwise(tensor.offsets.tolist())]
        return np.array(texts, string_type()).reshape(tensor.shape)
    element = element_within(tensor.element, "")
    if not element.bits:
        return tensor.data.copy().view(element.dtype).reshape(tensor.shape)  # A caller may write into it.
    halves = np.stack([tensor.data & 15, tensor.data >> 4], 1).reshape(-1)[: element_count(tensor.shape)]
    signed = (halves ^ 8) - 8 if element.dtype == "|i1" else halves
    return signed.astype(np.uint8).view(element.dtype).reshape(tensor.shape)
