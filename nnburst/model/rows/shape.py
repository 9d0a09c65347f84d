"""The operation table, part: operations that move elements without changing them."""

from __future__ import annotations

from ...errors import InvalidArgument
from ..dimensions import element_count
from ..operand_types import OPERANDS, OperandType
from ..operation_types import OperationType
from ..operation_view import OperationView, OutputSpec, Signature
from ..signature import signature
from .common import (
    FLOAT_QUANT8,
    LATE_FLOAT_INT_QUANT8,
    LATE_FLOAT_QUANT8,
    Outputs,
    add,
    infer_same_shape,
    like_data,
    require_equal,
)


def _infer_concatenation(view: OperationView) -> Outputs:
    """Infer the output of CONCATENATION, after checking that the dimensions along all other axes are equal."""
    shapes = [view.dims("x", which) for which in range(view.count("x"))]
    first = shapes[0]
    axis = view.axis("axis", len(first))
    dims = list(first)
    for shape in shapes[1:]:
        if len(shape) != len(first):
            raise InvalidArgument(f"ranks {len(first)} and {len(shape)} cannot be concatenated")
        for i, size in enumerate(shape):
            if i != axis:
                require_equal(f"dimension {i} of an input", size, dims[i], view.partial)
                dims[i] = max(dims[i], size)
    along = [shape[axis] for shape in shapes]
    dims[axis] = 0 if view.partial and 0 in along else sum(along)
    return like_data(view, tuple(dims))


def _infer_reshape(view: OperationView) -> Outputs:
    """Infer the output of RESHAPE: the requested shape, with a size of -1 replaced by what the elements need."""
    dims, target = view.dims("x"), view.integers("shape")
    if any(size < -1 for size in target) or target.count(-1) > 1:
        raise InvalidArgument(f"shape {target} may have one -1 and no other negative size")
    if view.partial and 0 in dims:
        return like_data(view, tuple(max(size, 0) for size in target))
    count, known = element_count(dims), element_count([size for size in target if size != -1])
    if -1 in target:
        if known == 0 or count % known:
            raise InvalidArgument(f"{count} elements cannot be reshaped to {target}")
        target[target.index(-1)] = count // known
    elif count != known:
        raise InvalidArgument(f"{count} elements cannot be reshaped to {target}")
    return like_data(view, tuple(target))


def _infer_transpose(view: OperationView) -> Outputs:
    dims = view.dims("x")
    perm = view.integers("perm") if view.is_given("perm") else list(range(len(dims)))[::-1]
    if sorted(perm) != list(range(len(dims))):
        raise InvalidArgument(f"expected a permutation of {len(dims)} axes, got perm {perm}")
    return like_data(view, tuple(dims[i] for i in perm))


def slice_bounds(view: OperationView, dims: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (first, length) for each axis of a SLICE. A length of -1 extends to the end."""
    begin, size = view.integers("begin"), view.integers("size")
    if not len(begin) == len(size) == len(dims):
        raise InvalidArgument(f"begin and size have {len(begin)} and {len(size)} entries for rank {len(dims)}")
    bounds = []
    for axis, (first, length, total) in enumerate(zip(begin, size, dims, strict=True)):
        known = total > 0 or not view.partial
        length = total - first if length == -1 and known else max(length, 0) if length == -1 else length
        if first < 0 or length < 0 or (known and first + length > total):
            raise InvalidArgument(f"elements {first} … {first + length} of axis {axis} are not all in {total}")
        bounds.append((first, length))
    return bounds


def _infer_slice(view: OperationView) -> Outputs:
    return like_data(view, tuple(length for _, length in slice_bounds(view, view.dims("x"))))


def strided_slices(view: OperationView, dims: tuple[int, ...]) -> tuple[tuple[range, ...], tuple[int, ...]]:
    """Return the positions that a STRIDED_SLICE takes along each axis, and the dropped axes."""
    parts = [view.integers(name) for name in ("begin", "end", "strides")]
    if any(len(part) != len(dims) for part in parts):
        raise InvalidArgument(f"begin, end and strides have {[len(p) for p in parts]} entries for rank {len(dims)}")
    no_begin, no_end, shrink = (view.integer(name) for name in ("begin_mask", "end_mask", "shrink_mask"))
    ranges = []
    for axis, (begin, end, stride, size) in enumerate(zip(*parts, dims, strict=True)):
        if stride == 0:
            raise InvalidArgument(f"the stride of axis {axis} is 0")
        part = slice(None if no_begin >> axis & 1 else begin, None if no_end >> axis & 1 else end, stride)
        ranges.append(range(*part.indices(size)))
        count = len(ranges[-1])
        if shrink >> axis & 1 and not (view.partial and size == 0) and (stride < 0 or count != 1):
            raise InvalidArgument(f"axis {axis} is dropped, but {count} elements by steps of {stride} are taken")
    return tuple(ranges), tuple(axis for axis in range(len(dims)) if shrink >> axis & 1)


def _infer_strided_slice(view: OperationView) -> Outputs:
    """Infer the shape without the dropped axes; [1] if no axis remains."""
    ranges, dropped = strided_slices(view, view.dims("x"))
    return like_data(view, tuple(len(part) for axis, part in enumerate(ranges) if axis not in dropped) or (1,))


def _infer_squeeze(view: OperationView) -> Outputs:
    """Infer the shape without the given axes (default: all of size 1); [1] if no axis remains."""
    dims = view.dims("x")
    if view.is_given("axes"):
        axes: tuple[int, ...] = view.axes("axes", len(dims))
        for i in axes:
            require_equal(f"squeezed dimension {i}", dims[i], 1, view.partial)
    elif view.partial and 0 in dims:
        return like_data(view, ())
    else:
        axes = tuple(i for i, size in enumerate(dims) if size == 1)
    return like_data(view, tuple(size for i, size in enumerate(dims) if i not in axes) or (1,))


def _infer_expand_dims(view: OperationView) -> Outputs:
    dims = view.dims("x")
    axis = view.axis("axis", len(dims) + 1)
    return like_data(view, (*dims[:axis], 1, *dims[axis:]))


def pad_widths(view: OperationView, rank: int) -> list[tuple[int, int]]:
    numbers = view.integers("pads")
    if len(numbers) != 2 * rank or any(number < 0 for number in numbers):
        raise InvalidArgument(f"pads {numbers} must be {2 * rank} numbers that are not negative")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _infer_pad(view: OperationView) -> Outputs:
    dims = view.dims("x")
    pads = pad_widths(view, len(dims))
    return like_data(view, tuple(add(view, n, before + after) for n, (before, after) in zip(dims, pads, strict=True)))


def _infer_gather(view: OperationView) -> Outputs:
    """Infer the shape of x, with the gathered axis replaced by the axes of the indices."""
    dims = view.dims("x")
    axis = view.axis("axis", len(dims))
    return like_data(view, dims[:axis] + view.dims("indices") + dims[axis + 1 :])


def _infer_split(view: OperationView) -> Outputs:
    dims, count = view.dims("x"), view.integer("parts", least=1)
    axis = view.axis("axis", len(dims))
    if dims[axis] % count:
        raise InvalidArgument(f"axis {axis} has {dims[axis]} elements, which cannot be split into {count}")
    outputs = len(view.operation.outputs)
    if outputs not in (0, count):
        raise InvalidArgument(f"there are {outputs} outputs for {count} parts")
    return like_data(view, *[(*dims[:axis], dims[axis] // count, *dims[axis + 1 :])] * count)


def _infer_tile(view: OperationView) -> Outputs:
    dims, multiples = view.dims("x"), view.integers("multiples")
    if len(multiples) != len(dims) or any(number < 1 for number in multiples):
        raise InvalidArgument(f"multiples {multiples} must be {len(dims)} positive numbers")
    return like_data(view, tuple(size * number for size, number in zip(dims, multiples, strict=True)))


def _infer_channel_shuffle(view: OperationView) -> Outputs:
    dims, groups = view.dims("x"), view.integer("groups", least=1)
    axis = view.axis("axis", len(dims))
    if dims[axis] % groups:
        raise InvalidArgument(f"axis {axis} has {dims[axis]} elements, which cannot be split into {groups} groups")
    return infer_same_shape(view)


def _infer_fill(view: OperationView) -> Outputs:
    dims = tuple(view.integers("dims"))
    if any(size < 0 for size in dims):
        raise InvalidArgument(f"dims {list(dims)} has a negative size")
    element_count(dims)
    (kind,) = (t for t in OPERANDS if OPERANDS[t].short == view.info.short.upper())
    return (OutputSpec(OperandType(kind), dims),)


def _infer_rank(view: OperationView) -> Outputs:
    view.dims("x")
    return (OutputSpec(OperandType.INT32, ()),)


_TENSORS = " ".join(info.short for info in OPERANDS.values() if not info.is_scalar and info.type < 10000)
_O = OperationType

ROWS: dict[OperationType, Signature] = {
    _O.CHANNEL_SHUFFLE: signature("x/1-4:T groups:i32 axis:i32", LATE_FLOAT_QUANT8, _infer_channel_shuffle, "out:T=x"),
    _O.CONCATENATION: signature("x/1-4:T+ axis:i32", FLOAT_QUANT8, _infer_concatenation, zero_sized=True),
    _O.EXPAND_DIMS: signature("x:T axis:i32", LATE_FLOAT_INT_QUANT8, _infer_expand_dims, "out:T=x"),
    _O.FILL: signature("dims/1:I32 value:T", "f32 f16 i32", _infer_fill, "out:filled"),
    _O.GATHER: signature("x:T axis:i32 indices:I32", LATE_FLOAT_INT_QUANT8, _infer_gather, "out:T=x"),
    _O.PAD: signature("x/1-4:T pads/2:I32", FLOAT_QUANT8, _infer_pad, "out:T=x"),
    _O.PAD_V2: signature("x/1-4:T pads/2:I32 value:fill", LATE_FLOAT_QUANT8, _infer_pad, "out:T=x"),
    _O.RANK: signature("x:T", _TENSORS, _infer_rank, "out:i32", zero_sized=True),
    _O.RESHAPE: signature("x/1-4:T shape/1:I32", FLOAT_QUANT8, _infer_reshape, "out:T=x"),
    _O.SLICE: signature("x:T begin/1:I32 size/1:I32", LATE_FLOAT_INT_QUANT8, _infer_slice, "out:T=x", zero_sized=True),
    _O.SPLIT: signature("x:T axis:i32 parts:i32", LATE_FLOAT_INT_QUANT8, _infer_split, "out:T+=x"),
    _O.SQUEEZE: signature("x/1-4:T axes/1:I32?", FLOAT_QUANT8, _infer_squeeze, "out:T=x"),
    _O.STRIDED_SLICE: signature(
        "x/1-4:T begin/1:I32 end/1:I32 strides/1:I32 begin_mask:i32 end_mask:i32 shrink_mask:i32",
        FLOAT_QUANT8,
        _infer_strided_slice,
        "out:T=x",
    ),
    _O.TILE: signature("x:T multiples/1:I32", LATE_FLOAT_INT_QUANT8, _infer_tile, "out:T=x"),
    _O.TRANSPOSE: signature("x/1-4:T perm/1:I32?", FLOAT_QUANT8, _infer_transpose, "out:T=x", zero_sized=True),
}
