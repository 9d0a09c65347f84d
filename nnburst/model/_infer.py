"""What each operation produces: one small function per operation or family (facts sheet `model.md` §2).

A function reads dimensions and parameters through the view and returns one `OutputSpec` per output, or raises
`InvalidArgument` when the inputs do not fit together. In a partial view 0 is an unknown dimension and stays 0.
"""

from __future__ import annotations

import math

from ..errors import InvalidArgument
from ._dimensions import element_count
from ._operand_types import HalVersion, OperandType
from ._operation_types import FusedActivation
from ._operation_view import OperationView, OutputSpec
from ._window import window_geometry

__all__ = [
    "broadcast_dims",
    "check_bias",
    "check_bias_before_1_2",
    "check_concatenation",
    "check_mul",
    "check_softmax",
    "infer_binary",
    "infer_concatenation",
    "infer_conv",
    "infer_depthwise_conv",
    "infer_dequantize",
    "infer_fully_connected",
    "infer_pool",
    "infer_quantize",
    "infer_reshape",
    "infer_slice",
    "infer_softmax",
    "infer_squeeze",
    "infer_transpose",
    "infer_unary",
    "slice_bounds",
]

Outputs = tuple[OutputSpec, ...]


def _like_data(view: OperationView, dims: tuple[int, ...]) -> Outputs:
    """One output of type T with the quantisation that the row prescribes."""
    return (OutputSpec(view.data_type, dims, *view.output_quantisation()),)


def _check_activation(view: OperationView) -> None:
    code = view.integer("act")
    if code not in tuple(FusedActivation):
        raise InvalidArgument(f"act is {code}; it must be 0 (NONE), 1 (RELU), 2 (RELU1) or 3 (RELU6)")


def infer_unary(view: OperationView) -> Outputs:
    """The output has the shape of x."""
    return _like_data(view, view.dims("x"))


def _broadcast_dimension(m: int, n: int, partial: bool) -> int:
    if partial and 0 in (m, n):
        return max(m, n) if max(m, n) > 1 else 0
    if m == n or n == 1:
        return m
    if m == 1:
        return n
    raise InvalidArgument(f"sizes {m} and {n} cannot be broadcast to each other")


def broadcast_dims(a: tuple[int, ...], b: tuple[int, ...], partial: bool) -> tuple[int, ...]:
    """Return the dimensions of a broadcast: trailing axes aligned, sizes equal or 1; a 0 wins over 1."""
    rank = max(len(a), len(b))
    wide_a, wide_b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(_broadcast_dimension(m, n, partial) for m, n in zip(wide_a, wide_b, strict=True))


def infer_binary(view: OperationView) -> Outputs:
    """Broadcasting arithmetic with a fused activation."""
    _check_activation(view)
    if view.data_type is OperandType.TENSOR_INT32 and view.integer("act") != FusedActivation.NONE:
        raise InvalidArgument("TENSOR_INT32 arithmetic has no fused activation; act must be 0")
    return _like_data(view, broadcast_dims(view.dims("a"), view.dims("b"), view.partial))


def check_mul(view: OperationView, version: HalVersion) -> None:
    """A quantised product needs an output scale above the product of the input scales."""
    if view.data_type is OperandType.TENSOR_QUANT8_ASYMM:
        product = view.operand("a").scale * view.operand("b").scale
        if not view.output().scale > product:
            raise InvalidArgument(f"the output's scale {view.output().scale:g} must be above {product:g} = a x b")


def check_bias(view: OperationView, version: HalVersion, channel_dim: int = 0) -> None:
    """The bias rule of §2.6 and the channel dimension of a per-channel filter."""
    if not view.info.is_quantised:
        return
    x, filter_, bias = view.operand("x"), view.operand("filter"), view.operand("bias")
    channels = view.channel_scales("filter")
    if channels is not None and channels[1] != channel_dim:
        raise InvalidArgument(f"the filter's channel dimension is {channels[1]}; it must be {channel_dim}")
    wanted = 0.0 if channels is not None else x.scale * filter_.scale
    if bias.zero_point != 0 or not math.isclose(bias.scale, wanted, rel_tol=1e-5, abs_tol=0.0):
        raise InvalidArgument(
            f"the bias has scale {bias.scale:g} and zero point {bias.zero_point}; they must be {wanted:g} and 0"
            " (input scale x filter scale, or 0 with a per-channel filter)"
        )


def check_bias_before_1_2(view: OperationView, version: HalVersion, channel_dim: int = 0) -> None:
    """As `check_bias`; before HAL 1.2 the output scale must exceed the bias scale."""
    check_bias(view, version, channel_dim)
    if version < HalVersion.V1_2 and view.info.is_quantised and not view.output().scale > view.operand("bias").scale:
        raise InvalidArgument("before HAL 1.2 the output's scale must be above input scale x filter scale")


def _require_equal(what: str, found: int, wanted: int, partial: bool) -> None:
    if found != wanted and not (partial and 0 in (found, wanted)):
        raise InvalidArgument(f"{what} is {found}; it must be {wanted}")


def infer_conv(view: OperationView) -> Outputs:
    """CONV_2D: filter [co, fh, fw, ci]."""
    _check_activation(view)
    co, fh, fw, ci = view.dims("filter")
    geometry = window_geometry(view, fh, fw)
    _require_equal("the filter's input depth", ci, geometry.channels, view.partial)
    _require_equal("the bias' length", view.dims("bias")[0], co, view.partial)
    return _like_data(view, geometry.output_dims(co))


def infer_depthwise_conv(view: OperationView) -> Outputs:
    """DEPTHWISE_CONV_2D: filter [1, fh, fw, ci x multiplier]."""
    _check_activation(view)
    one, fh, fw, co = view.dims("filter")
    geometry = window_geometry(view, fh, fw)
    multiplier = view.integer("multiplier", least=1)
    _require_equal("the filter's first dimension", one, 1, view.partial)
    _require_equal("the filter's depth", co, geometry.channels * multiplier, view.partial)
    _require_equal("the bias' length", view.dims("bias")[0], co, view.partial)
    return _like_data(view, geometry.output_dims(co))


def infer_pool(view: OperationView) -> Outputs:
    """2-D pools. Padding must be smaller than the filter, so that every window touches the image."""
    _check_activation(view)
    geometry = window_geometry(view, view.integer("filter_h", least=1), view.integer("filter_w", least=1))
    for axis in (geometry.height, geometry.width):
        if max(axis.head, axis.tail) >= axis.filter:
            raise InvalidArgument(f"padding {axis.head}, {axis.tail} must be smaller than the filter, {axis.filter}")
    return _like_data(view, geometry.output_dims(geometry.channels))


def infer_concatenation(view: OperationView) -> Outputs:
    """CONCATENATION: equal dimensions but for the axis, where sizes add up."""
    shapes = [view.dims("x", which) for which in range(view.count("x"))]
    first = shapes[0]
    axis = view.axis("axis", len(first))
    dims = list(first)
    for shape in shapes[1:]:
        if len(shape) != len(first):
            raise InvalidArgument(f"ranks {len(first)} and {len(shape)} cannot be concatenated")
        for i, size in enumerate(shape):
            if i != axis:
                _require_equal(f"dimension {i} of an input", size, dims[i], view.partial)
                dims[i] = max(dims[i], size)
    sizes = [shape[axis] for shape in shapes]
    dims[axis] = 0 if view.partial and 0 in sizes else sum(sizes)
    return _like_data(view, tuple(dims))


def check_concatenation(view: OperationView, version: HalVersion) -> None:
    """Before HAL 1.2 quantised inputs share the output's quantisation."""
    if version >= HalVersion.V1_2 or not view.info.is_quantised:
        return
    out = view.output()
    for which in range(view.count("x")):
        x = view.operand("x", which)
        if (x.scale, x.zero_point) != (out.scale, out.zero_point):
            raise InvalidArgument("before HAL 1.2 all inputs must have the output's scale and zero point")


def infer_fully_connected(view: OperationView) -> Outputs:
    """FULLY_CONNECTED: x flattened to [count / in, in], filter [units, in]."""
    _check_activation(view)
    dims = view.dims("x")
    if len(dims) < 2:
        raise InvalidArgument(f"x has rank {len(dims)}; it must be 2 to 4")
    units, size = view.dims("filter")
    _require_equal("the bias' length", view.dims("bias")[0], units, view.partial)
    if view.partial and (0 in dims or size == 0):
        return _like_data(view, (0, units))
    if size < 1:
        raise InvalidArgument("the filter's input size is 0")
    count = element_count(dims)
    if count % size:
        raise InvalidArgument(f"x has {count} elements, which is no multiple of the filter's input size {size}")
    return _like_data(view, (count // size, units))


def infer_reshape(view: OperationView) -> Outputs:
    """RESHAPE: one -1 stands for what is left."""
    dims = view.dims("x")
    target = [int(size) for size in view.value("shape").reshape(-1)]
    if any(size < -1 for size in target) or target.count(-1) > 1:
        raise InvalidArgument(f"shape {target} may have one -1 and no other negative size")
    if view.partial and 0 in dims:
        return _like_data(view, tuple(max(size, 0) for size in target))
    count, known = element_count(dims), element_count([size for size in target if size != -1])
    if -1 in target:
        if known == 0 or count % known:
            raise InvalidArgument(f"{count} elements cannot be reshaped to {target}")
        target[target.index(-1)] = count // known
    elif count != known:
        raise InvalidArgument(f"{count} elements cannot be reshaped to {target}")
    return _like_data(view, tuple(target))


def infer_softmax(view: OperationView) -> Outputs:
    """SOFTMAX: shape of x; beta must be positive, the axis must exist."""
    dims = view.dims("x")
    view.axis("axis", len(dims))
    if not view.number("beta") > 0:
        raise InvalidArgument(f"beta is {view.number('beta'):g}; it must be positive")
    return _like_data(view, dims)


def check_softmax(view: OperationView, version: HalVersion) -> None:
    """Before HAL 1.2 only ranks 2 and 4."""
    rank = len(view.operand("x").dimensions)
    if version < HalVersion.V1_2 and rank not in (0, 2, 4):
        raise InvalidArgument(f"x has rank {rank}; before HAL 1.2 it must be 2 or 4")


def infer_quantize(view: OperationView) -> Outputs:
    """QUANTIZE: the output operand says to what."""
    return (OutputSpec(OperandType.TENSOR_QUANT8_ASYMM, view.dims("x")),)


def infer_dequantize(view: OperationView) -> Outputs:
    """DEQUANTIZE: float of either precision."""
    return (OutputSpec(OperandType.TENSOR_FLOAT32, view.dims("x")),)


def infer_transpose(view: OperationView) -> Outputs:
    """TRANSPOSE: without a permutation the axes are reversed."""
    dims = view.dims("x")
    perm = [int(i) for i in view.value("perm").reshape(-1)] if view.given("perm") else list(range(len(dims)))[::-1]
    if sorted(perm) != list(range(len(dims))):
        raise InvalidArgument(f"perm {perm} is no permutation of {len(dims)} axes")
    return _like_data(view, tuple(dims[i] for i in perm))


def slice_bounds(view: OperationView, dims: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (first, length) for each axis of a SLICE; a size of -1 reaches to the end."""
    begin = [int(i) for i in view.value("begin").reshape(-1)]
    size = [int(i) for i in view.value("size").reshape(-1)]
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


def infer_slice(view: OperationView) -> Outputs:
    """SLICE: a box out of x."""
    return _like_data(view, tuple(length for _, length in slice_bounds(view, view.dims("x"))))


def infer_squeeze(view: OperationView) -> Outputs:
    """SQUEEZE: without axes every dimension of size 1 goes; nothing left becomes [1]."""
    dims = view.dims("x")
    if view.given("axes"):
        axes = {int(i) for i in view.value("axes").reshape(-1)}
        if any(not -len(dims) <= i < len(dims) for i in axes):
            raise InvalidArgument(f"axes {sorted(axes)} are not all axes of rank {len(dims)}")
        axes = {i % len(dims) for i in axes}
        for i in axes:
            _require_equal(f"squeezed dimension {i}", dims[i], 1, view.partial)
    elif view.partial and 0 in dims:
        return _like_data(view, ())
    else:
        axes = {i for i, size in enumerate(dims) if size == 1}
    return _like_data(view, tuple(size for i, size in enumerate(dims) if i not in axes) or (1,))
