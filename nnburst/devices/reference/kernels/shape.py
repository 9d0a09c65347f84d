"""Kernels of operations that move elements without changing them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....errors import GeneralFailure
from ....model.rows.shape import pad_widths, slice_bounds, strided_slices
from ....model.types import Array
from ..call import KernelCall, encode_table


def copy(call: KernelCall) -> None:
    """RESHAPE, SQUEEZE, EXPAND_DIMS: copy all elements in order."""
    call.do(np.copyto, call.out().reshape(-1), call.array("x").reshape(-1))


def transpose(call: KernelCall) -> None:
    """TRANSPOSE: permute the axes; reverse them if no permutation is given."""
    perm = tuple(call.integers("perm")) if call.is_given("perm") else None
    call.do(np.copyto, call.out(), call.array("x").transpose(perm))


def slice_(call: KernelCall) -> None:
    """SLICE: copy a box of x."""
    x = call.array("x")
    box = tuple(slice(first, first + length) for first, length in slice_bounds(call, x.shape))
    call.do(np.copyto, call.out(), x[box])


def strided_slice(call: KernelCall) -> None:
    """STRIDED_SLICE: every n-th element along each axis."""
    x, out = call.array("x"), call.out()
    ranges, _ = strided_slices(call, x.shape)
    box = tuple(slice(r.start, r.stop if r.stop >= 0 else None, r.step) for r in ranges)
    call.move(lambda x: x[box].reshape(out.shape), x)


def concatenation(call: KernelCall) -> None:
    """CONCATENATION: join the inputs. Look-up tables convert quantised inputs to the output's quantisation."""
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
            call.do(np.take, table, x.view(np.uint8), None, part, "clip")


def split(call: KernelCall) -> None:
    """SPLIT: cut an axis into equal parts."""
    x, count = call.array("x"), call.integer("parts")
    for which, part in enumerate(np.split(x, count, call.axis("axis", x.ndim))):
        call.do(np.copyto, call.out(which), part)


def tile(call: KernelCall) -> None:
    """TILE: repeat x along each axis."""
    multiples = call.integers("multiples")
    call.move(lambda x: np.tile(x, multiples), call.array("x"))


def pad(call: KernelCall) -> None:
    """PAD: pad with the zero point. PAD_V2: pad with a given value (a stored value for quantised data)."""
    x, out = call.array("x"), call.out()
    value: Any = call.operand("x").zero_point if call.info.is_quantised else 0
    if call.count("value"):
        value = call.value("value").reshape(-1)[0]
    pads = pad_widths(call, x.ndim)
    inside = out[tuple(slice(before, before + size) for (before, _), size in zip(pads, x.shape, strict=True))]
    call.do(out.fill, value)
    call.do(np.copyto, inside, x)


def require_indexes(indexes: Array, size: int) -> Array:
    """Return a private copy of indexes after checking that all are in [0, size)."""
    mine = indexes.copy()
    if mine.size and not (mine.min() >= 0 and mine.max() < size):
        raise GeneralFailure(f"an index is not in 0 … {size - 1}")
    return mine


def gather(call: KernelCall) -> None:
    """GATHER: the elements of an axis at the given indices."""
    x = call.array("x")
    axis = call.axis("axis", x.ndim)

    def function(x: Array, indices: Array) -> Array:
        return np.take(x, require_indexes(indices, x.shape[axis]), axis)

    call.move(function, x, call.array("indices"))


def channel_shuffle(call: KernelCall) -> None:
    """CHANNEL_SHUFFLE: view an axis as [groups, rest], and transpose the view."""
    x, groups = call.array("x"), call.integer("groups")
    axis = call.axis("axis", x.ndim)
    split_ = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    call.move(lambda x: x.reshape(split_).swapaxes(axis, axis + 1).reshape(x.shape), x)


def fill(call: KernelCall) -> None:
    """FILL: set all elements to one value."""
    out = call.out()
    call.do(lambda value: out.fill(value.reshape(-1)[0]), call.array("value"))


def rank(call: KernelCall) -> None:
    """RANK: the number of axes of x."""
    call.do(call.out().fill, call.array("x").ndim)
