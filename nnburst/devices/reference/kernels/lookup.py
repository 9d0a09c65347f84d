"""Kernels of table look-ups, locality-sensitive hashing and random draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....model.types import Array
from ..call import KernelCall
from .fingerprint import fingerprint64
from .shape import require_indexes

_SPARSE_WITH_OFFSET, _DENSE = 3, 2


def embedding_lookup(call: KernelCall) -> None:
    """EMBEDDING_LOOKUP: rows of a table by index."""

    def function(lookups: Array, values: Array) -> Array:
        return np.take(values, require_indexes(lookups, len(values)), 0)

    call.move(function, call.array("lookups"), call.array("values"))


def hashtable_lookup(call: KernelCall) -> None:
    """HASHTABLE_LOOKUP: rows of a table by key. A missing key gives zero bytes and a hit of 0."""
    out, hits = call.out(0), call.out(1)

    def function(lookups: Array, keys: Array, values: Array) -> None:
        wanted, keys = lookups.copy(), keys.copy()
        places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        found = keys[places] == wanted
        out[...] = np.where(found.reshape((-1,) + (1,) * (values.ndim - 1)), values[places], values.dtype.type(0))
        hits[...] = found

    call.do(function, call.array("lookups"), call.array("keys"), call.array("values"))


def lsh_projection(call: KernelCall) -> None:
    """LSH_PROJECTION: for each bit, hash its seed with each slice of x. The bit is 1 if the hashes' sum is above 0.

    The sum is weighted if the operation has weights.
    """
    kind = call.integer("kind")
    count, bits = call.dims("hash")
    powers = 1 << np.arange(bits - 1, -1, -1, dtype=np.int64)
    offsets = (np.arange(count, dtype=np.int64) << bits) if kind == _SPARSE_WITH_OFFSET else 0

    def function(hashes: Array, data: Array, weight: Array | None = None) -> Array:
        slices = [part.tobytes() for part in data.copy()]
        weights = np.ones(len(slices)) if weight is None else weight.astype(np.float64)

        def signed(seed: Any) -> bool:
            prefix = np.float32(seed).tobytes()
            numbers = np.array([fingerprint64(prefix + part) for part in slices], np.uint64).view(np.int64)
            return bool((weights * numbers.astype(np.float64)).sum() > 0)

        found = np.array([[signed(seed) for seed in row] for row in hashes.copy()], np.int64)
        if kind == _DENSE:
            return found.reshape(-1)
        return np.asarray(((found * powers).sum(1) + offsets).astype(np.int32))

    weights = [call.array("weight")] if call.is_given("weight") else []
    call.move(function, call.array("hash"), call.array("input"), *weights)


def random_multinomial(call: KernelCall) -> None:
    """RANDOM_MULTINOMIAL: draw from distributions. The input contains logarithms of their probabilities.

    If all seeds are 0, every run is different.
    """
    samples = call.integer("samples")

    def function(logits: Array, seeds: Array) -> Array:
        chosen = [int(seed) & 0xFFFFFFFF for seed in seeds.reshape(-1)]
        generator = np.random.default_rng(chosen if any(chosen) else None)
        weights = np.exp((logits - logits.max(1, keepdims=True)).astype(np.float64)).cumsum(1)
        draws = generator.random((len(weights), samples)) * weights[:, -1:]
        rows = zip(weights, draws, strict=True)
        last = weights.shape[1] - 1
        return np.stack([np.minimum(np.searchsorted(row, draw, "right"), last) for row, draw in rows])

    call.move(function, call.real("logits"), call.array("seeds"))
