"""A compiled model as bytes: what it executes for the model cache file, arrays for the data cache file.

The format is MessagePack of the structures below, nothing that could run code. It is read only after it was verified:
this device wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, cast

import msgspec
import numpy as np

from ...cache import CacheReason, CacheRejected
from ...model import OPERATIONS, Array, Match, Model, Signature, Subgraph

FORMAT = 4
"""Part of the epoch: files of another format are not even opened. Another one, too, when kernels make other arrays of
constants: what is not in a file is made anew, of constants that may not be in it."""

_ALIGNMENT = 64
_DTYPES = frozenset(("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "bool"))


class _Struct(msgspec.Struct, array_like=True, frozen=True):
    pass


class _Blob(_Struct, frozen=True):
    """An array of the data file. `kind` is empty for the constant of operand `owner`; else it is what an operation
    (`owner`) derived from the constant of operand `of`."""

    owner: int
    kind: str
    of: int
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _File(_Struct, frozen=True):
    format: int
    relaxed: bool
    main: Subgraph
    matches: tuple[Match, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    blobs: tuple[_Blob, ...]
    size: int


class Compiled(msgspec.Struct, frozen=True):
    """Everything that preparing a model found out.

    Attributes:
        model: Without pools and inline values.
        derived: What operations made from constants.
    """

    model: Model
    constants: dict[int, Array]
    derived: dict[Hashable, Any]
    matches: tuple[tuple[Signature, Match], ...]


def pack(
    model: Model,
    matches: tuple[tuple[Signature, Match], ...],
    constants: Mapping[int, Array],
    derived: Mapping[Hashable, Any],
) -> tuple[bytes, bytes] | None:
    """Return (model file, data file), or None for what this format does not hold.

    Args:
        derived: By (operation, kind) or (operation, (kind, operand)).
    """
    if model.referenced or model.extension_name_to_prefix or len(matches) != len(model.main.operations):
        return None
    blobs: list[_Blob] = []
    arrays: list[tuple[int, Array]] = []
    end = 0

    def add(owner: int, kind: str, of: int, array: Array) -> bool:
        nonlocal end
        if array.dtype.name not in _DTYPES:
            return False
        offset = end = -(-end // _ALIGNMENT) * _ALIGNMENT
        arrays.append((offset, array))
        end += array.nbytes
        blobs.append(_Blob(owner, kind, of, array.dtype.name, array.shape, offset))
        return True

    for index, value in constants.items():
        if not add(index, "", -1, value):
            return None
    for key, value in derived.items():
        position, name = cast("tuple[int, str | tuple[str, int]]", key)
        kind, of = name if isinstance(name, tuple) else (name, -1)
        if not isinstance(value, np.ndarray) or not add(position, kind, of, value):
            return None
    data = bytearray(end)
    for offset, array in arrays:
        data[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    file = _File(
        FORMAT,
        model.relax_computation_float32_to_float16,
        model.main,
        tuple(match for _, match in matches),
        model.input_names,
        model.output_names,
        tuple(blobs),
        end,
    )
    return msgspec.msgpack.encode(file), bytes(data)


_decoder = msgspec.msgpack.Decoder(_File)


def unpack(text: memoryview, data: memoryview) -> Compiled:
    """Read what `pack` wrote, else raise `CacheRejected`. Arrays are read-only views of `data`."""
    try:
        file = _decoder.decode(text)
        if file.format != FORMAT or file.size != len(data):
            raise ValueError("its format or size is wrong")
        rows = (OPERATIONS[operation.type].signature for operation in file.main.operations)
        matches = tuple((row, match) for row, match in zip(rows, file.matches, strict=True) if row is not None)
        constants: dict[int, Array] = {}
        derived: dict[Hashable, Any] = {}
        for blob in file.blobs:
            if blob.kind:
                derived[blob.owner, blob.kind if blob.of < 0 else (blob.kind, blob.of)] = _array(blob, data)
            else:
                constants[blob.owner] = _array(blob, data)
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
        raise CacheRejected(CacheReason.BAD_CONTENT, f"not a compiled model: {error}") from error
    names = {"input_names": file.input_names, "output_names": file.output_names}
    model = Model(file.main, relax_computation_float32_to_float16=file.relaxed, **names)  # type: ignore[arg-type]
    return Compiled(model, constants, derived, matches)


def _array(blob: _Blob, data: memoryview) -> Array:
    dtype = np.dtype(blob.dtype)
    nbytes = math.prod(blob.shape) * dtype.itemsize
    raw = np.frombuffer(data, np.uint8, nbytes, blob.offset) if nbytes else np.zeros(0, np.uint8)
    array = raw.view(dtype).reshape(blob.shape)
    array.flags.writeable = False
    return array
