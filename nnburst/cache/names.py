"""Cache keys, fingerprints of models, and file names of cache entries."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from ..memory.staging import read_constant
from ..model.types import Lifetime, Model, Priority, Subgraph, SymmPerChannelQuantParams

_KEY_SIZE = 32
PRIORITY_CODE = {Priority.LOW: 90, Priority.MEDIUM: 100, Priority.HIGH: 110}
"""NNAPI's numbers of priorities, for cache keys."""
_PIECE = 4 << 20


def check_cache_key(cache_key: object) -> bytes:
    """Return a cache key as bytes. Raises `InvalidArgument` if its length is not 32."""
    if not isinstance(cache_key, bytes | bytearray | memoryview) or len(bytes(cache_key)) != _KEY_SIZE:
        what = f"{len(cache_key)} bytes" if isinstance(cache_key, bytes | bytearray) else type(cache_key).__name__
        raise InvalidArgument(f"a cache key is {_KEY_SIZE} bytes, not {what}; hashlib.sha256(...).digest() makes one")
    return bytes(cache_key)


def pack_part(operations: Sequence[tuple[int, int]]) -> bytes:
    """Encode a part of a model for a cache key.

    Args:
        operations: Subgraph and index of each operation.
    """
    return b"".join(struct.pack("<Ii", subgraph, index) for subgraph, index in operations)


def device_cache_key(
    cache_key: bytes,
    *,
    device: str,
    version: str,
    epoch: bytes,
    preference: int,
    priority: int,
    relaxed: bool,
    files: tuple[int, int],
    part: Sequence[tuple[int, int]] = (),
) -> bytes:
    """Derive a device's cache key: hash each field with its tag and length."""
    from hashlib import sha256

    digest = sha256()

    def field(tag: str, value: bytes) -> None:
        name = tag.encode()
        digest.update(struct.pack("<HQ", len(name), len(value)) + name + value)

    field("label", b"nnburst-token-v2")
    field("app", check_cache_key(cache_key))
    field("device", device.encode())
    field("version", version.encode())
    field("epoch", epoch)
    field("preference", struct.pack("<i", preference))
    field("priority", struct.pack("<i", priority))
    field("relaxed", bytes([relaxed]))
    field("files", struct.pack("<II", *files))
    if part:
        field("part", pack_part(part))
    return digest.digest()


def entry_name(cache_key: bytes) -> str:
    """Return the name of an entry: a digest, which does not reveal the cache key."""
    from hashlib import sha256

    return sha256(b"nnburst-entry-v1" + cache_key).hexdigest()


def model_fingerprint(
    model: Model, *, constants: bool = True, copies: Mapping[int, np.ndarray[Any, Any]] | None = None
) -> bytes:
    """Return a digest of 32 bytes that identifies the model's computation.

    Another process can change memory and files that constants refer to. With `copies`, the fingerprint is of the
    values that a device really compiled.

    Args:
        constants: False to ignore the values of constants. Models that differ only in weights then have the same
            fingerprint.
        copies: Values of constants, by operand of the main subgraph. They replace the values in memory or a file.

    Raises:
        InvalidArgument: This process has no right to read a constant.
        GeneralFailure: A constant cannot be read.
    """
    from hashlib import sha256

    digest = sha256(b"nnburst-model-v1")
    _feed(digest, (model.relax_computation_float32_to_float16, sorted(model.extension_name_to_prefix.items())))
    _feed(digest, (model.input_names, model.output_names))
    _feed_subgraph(digest, model, model.main, constants, copies or {})
    for subgraph in model.referenced:
        _feed_subgraph(digest, model, subgraph, constants, {})
    return digest.digest()


def _feed(digest: Any, value: object) -> None:
    text = repr(value).encode()
    digest.update(struct.pack("<Q", len(text)) + text)


def _feed_subgraph(
    digest: Any, model: Model, subgraph: Subgraph, constants: bool, copies: Mapping[int, np.ndarray[Any, Any]]
) -> None:
    _feed(digest, (subgraph.input_indexes, subgraph.output_indexes))
    _feed(digest, [(int(o.type), o.inputs, o.outputs) for o in subgraph.operations])
    for index, operand in enumerate(subgraph.operands):  # Plain numbers have one `repr` in client and service.
        params = operand.extra_params
        extra = (
            (tuple(map(float, params.scales)), int(params.channel_dim))
            if isinstance(params, SymmPerChannelQuantParams)
            else params
        )
        constant = operand.lifetime in (Lifetime.CONSTANT_COPY, Lifetime.CONSTANT_REFERENCE)
        lifetime = "constant" if constant else int(operand.lifetime)  # The two kinds of constants hash alike.
        numbers = (float(operand.scale), int(operand.zero_point), lifetime, extra)
        _feed(digest, (int(operand.type), tuple(map(int, operand.dimensions)), *numbers))
        if not constant or not constants:
            continue
        location = operand.location
        digest.update(struct.pack("<Q", location.length))
        if operand.lifetime == Lifetime.CONSTANT_COPY:
            digest.update(model.operand_values[location.offset : location.offset + location.length])
            continue
        if index in copies:
            digest.update(np.ascontiguousarray(copies[index]))
            continue
        pool = model.pools[location.pool_index]
        for start in range(0, location.length, _PIECE):
            count = min(_PIECE, location.length - start)
            digest.update(read_constant(pool, np.uint8, (count,), location.offset + start))
