"""Operations that move elements without changing them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....model import slice_bounds
from ..call import KernelCall, encode_table

__all__ = ["concatenation", "copy", "slice_", "transpose"]

Array = np.ndarray[Any, np.dtype[Any]]


def copy(call: KernelCall) -> None:
    """RESHAPE, SQUEEZE: the same elements in the same order."""
    call.do(np.copyto, call.out().reshape(-1), call.array("x").reshape(-1))


def transpose(call: KernelCall) -> None:
    """TRANSPOSE: without a permutation the axes are reversed."""
    perm = tuple(int(i) for i in call.value("perm").reshape(-1)) if call.given("perm") else None
    call.do(np.copyto, call.out(), call.array("x").transpose(perm))


def slice_(call: KernelCall) -> None:
    """SLICE: a box out of x."""
    x = call.array("x")
    box = tuple(slice(first, first + length) for first, length in slice_bounds(call, x.shape))
    call.do(np.copyto, call.out(), x[box])


def concatenation(call: KernelCall) -> None:
    """CONCATENATION: quantised inputs are brought to the output's quantisation through a table."""
    out, target = call.out(), call.output()
    axis, first = call.axis("axis", out.ndim), 0
    for which in range(call.count("x")):
        x, source = call.array("x", which), call.operand("x", which)
        part = out[(slice(None),) * axis + (slice(first, first + x.shape[axis]),)]
        first += x.shape[axis]
        if (source.scale, source.zero_point) == (target.scale, target.zero_point):
            call.do(np.copyto, part, x)
        else:
            table = encode_table(source, target, lambda real: real)
            call.do(_look_up, table, x.view(np.uint8), part)


def _look_up(table: Array, codes: Array, out: Array) -> None:
    out[...] = table[codes]
