"""Lowering of NNAPI operations: functions that append ONNX nodes.

The reference device runs all other operations, because ONNX cannot express them exactly (ties, lookup misses, random
numbers, 16-bit fixed point, data-dependent sizes) or has too large rounding errors (products of many factors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...errors import GeneralFailure
from ...model.operand_types import OperandType, operand_info
from ...model.operation_types import OperationType
from ...model.rows.shape import pad_widths, slice_bounds, strided_slices
from ...model.types import Array
from ...model.window import (
    WindowGeometry,
    block_axes,
    nearest_places,
    neighbour_places,
    resizes_rows_first,
    transposed_axes,
    window_geometry,
)
from . import recurrent
from .lowering import LoweredCall

_Lowered = Callable[[LoweredCall], None]
_TO_NCHW, _TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)
_I32, _B8, _F32, _F16 = (
    OperandType.TENSOR_INT32,
    OperandType.TENSOR_BOOL8,
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_FLOAT16,
)
_STEEPEST = 16.0
"""Largest alpha of an ELU that is lowered, since exp(x) - 1 is inexact near 0."""
_BELOW_2_31 = 2147483647


# -- element by element -----------------------------------------------------------------------------------------------


def _unary(kind: str, c: LoweredCall) -> None:
    if c.data_type is _I32:
        c.set_result(c.node(kind, c.stored_value("x")))
    else:
        c.store_result(c.node(kind, c.real("x")))


def _clamp(low: float, high: float | None, c: LoweredCall) -> None:
    c.store_result(c.clip(c.real("x"), low, high))


def _reciprocal_root(c: LoweredCall) -> None:
    c.store_result(c.node("Reciprocal", c.node("Sqrt", c.real("x"))))


def _hard_swish(c: LoweredCall) -> None:
    x, sixth = c.real("x"), c.array(1 / 6, np.float32)
    c.store_result(c.node("Mul", x, c.node("Mul", c.clip(c.node("Add", x, c.array(3, np.float32)), 0, 6), sixth)))


def _elu(c: LoweredCall) -> None:
    if abs(c.number("alpha")) > _STEEPEST:
        raise GeneralFailure(f"alpha is {c.number('alpha'):g}, and small results would not be exact")
    c.store_result(c.node("Elu", c.real("x"), alpha=c.number("alpha")))


def _binary(kind: str, c: LoweredCall) -> None:
    if c.data_type is not _I32:
        c.store_result(c.node(kind, c.real("a"), c.real("b")))
    elif kind == "Div":
        raise GeneralFailure("ONNX divides integers towards 0, and by 0 at its peril")
    else:
        c.set_result(c.node(kind, c.stored_value("a"), c.stored_value("b")))


def _prelu(c: LoweredCall) -> None:
    x, slope = c.real("x"), c.real("alpha")
    c.store_result(c.node("Where", c.node("GreaterOrEqual", x, c.array(0, np.float32)), x, c.node("Mul", slope, x)))


def _comparison(kind: str, c: LoweredCall, *, negated: bool = False) -> None:
    """Lower a comparison of real values. A table has the real value, as float32, of each quantised value."""

    def compare(c: LoweredCall, name: str) -> str:
        operand = c.operand(name)
        if c.data_type is _B8:
            return c.cast(c.as_bool(name), np.int32)
        if c.info.is_quantised:
            table = c.array((np.arange(256) - operand.zero_point) * float(operand.scale), np.float32)
            return c.node("Gather", table, c.cast(c.stored_value(name), np.int32))
        return c.stored_value(name) if c.data_type is _I32 else c.real(name)

    found = c.node(kind, compare(c, "a"), compare(c, "b"))
    c.set_result(c.cast(c.node("Not", found) if negated else found, np.uint8))


def _logical(kind: str, names: str, c: LoweredCall) -> None:
    c.set_result(c.cast(c.node(kind, *map(c.as_bool, names)), np.uint8))


def _select(c: LoweredCall) -> None:
    is_real = c.info.is_quantised or c.data_type is _F16
    a, b = (c.real(name) if is_real else c.stored_value(name) for name in "ab")
    chosen = c.node("Where", c.as_bool("cond"), a, b)
    (c.store_result if is_real else c.set_result)(chosen)


def _cast(c: LoweredCall) -> None:
    """Cast numbers. For an integer result, drop the fraction, clip to the range, and convert NaN to 0."""
    x, source, target = c.stored_value("x"), operand_info(c.operand("x").type), operand_info(c.output().type)
    if source.dtype == target.dtype:
        c.set_result(x)
        return
    if (target.type is _I32 and source.is_float) or target.dtype == np.uint8:
        wide = c.cast(x, np.float64)
        zero = c.array(0, np.float64)
        limits = (0.0, 255.0) if target.dtype == np.uint8 else (-_BELOW_2_31 - 1.0, float(_BELOW_2_31))
        known = c.node("Where", c.node("Equal", wide, wide), wide, zero)
        x = c.clip(known, *limits, dtype=np.float64)
    c.set_result(c.cast(x, target.dtype))


def _convert(c: LoweredCall) -> None:
    c.store_result(c.real("x"))


def _quantize(c: LoweredCall) -> None:
    operand = c.output()
    steps = c.node("Mul", c.cast(c.real("x"), np.float64), c.array(1 / operand.scale, np.float64))
    half = c.node("Mul", c.node("Sign", steps), c.array(0.5, np.float64))
    low, high = -float(operand.zero_point), 255.0 - operand.zero_point
    whole = c.cast(c.clip(c.node("Add", steps, half), low, high, np.float64), np.int32)
    c.set_result(c.cast(c.node("Add", whole, c.array(operand.zero_point, np.int32)), np.uint8))


# -- moving elements --------------------------------------------------------------------------------------------------


def _reshape(c: LoweredCall) -> None:
    c.set_result(c.reshape(c.stored_value("x"), c.outputs[0]))


def _transpose(c: LoweredCall) -> None:
    rank = len(c.dims("x"))
    c.set_result(c.transpose(c.stored_value("x"), c.integers("perm") if c.is_given("perm") else range(rank)[::-1]))


def _slice(c: LoweredCall) -> None:
    bounds = slice_bounds(c, c.dims("x"))
    first, end = zip(*((first, first + length) for first, length in bounds), strict=True)
    c.set_result(c.node("Slice", c.stored_value("x"), c.array(first), c.array(end)))


def _strided_slice(c: LoweredCall) -> None:
    ranges, _ = strided_slices(c, c.dims("x"))
    axes = c.array(range(len(ranges)))
    ends = [part.stop if part.stop >= 0 else -(1 << 31) for part in ranges]
    steps = c.array([part.step for part in ranges])
    part = c.node("Slice", c.stored_value("x"), c.array([part.start for part in ranges]), c.array(ends), axes, steps)
    c.set_result(c.reshape(part, c.outputs[0]))


def _concatenation(c: LoweredCall) -> None:
    axis, out = c.axis("axis", len(c.dims("x"))), c.output()
    parts = [c.operand("x", which) for which in range(c.count("x"))]
    if all((part.scale, part.zero_point) == (out.scale, out.zero_point) for part in parts):
        c.set_result(c.node("Concat", *(c.stored_value("x", which) for which in range(len(parts))), axis=axis))
    else:
        c.store_result(c.node("Concat", *(c.real("x", which) for which in range(len(parts))), axis=axis))


def _split(c: LoweredCall) -> None:
    count = c.integer("parts")
    axis = c.axis("axis", len(c.dims("x")))
    parts = c.nodes(count, "Split", c.stored_value("x"), axis=axis, num_outputs=count)
    for which, part in enumerate(parts):
        c.set_result(part, which)


def _tile(c: LoweredCall) -> None:
    c.set_result(c.node("Tile", c.stored_value("x"), c.array(c.integers("multiples"))))


def _append_pad(c: LoweredCall, value: str, pads: Sequence[tuple[int, int]], filler: Any) -> str:
    dtype = operand_info(c.operand("x").type).dtype
    starts, ends = zip(*pads, strict=True)
    return c.node("Pad", value, c.array([*starts, *ends]), c.array(filler, dtype))


def _pad(c: LoweredCall) -> None:
    value: Any = c.operand("x").zero_point
    if c.count("value"):
        (value,) = c.value("value").reshape(-1)
        value = int(value) + 128 if c.is_signed("x") else value
    c.set_result(_append_pad(c, c.stored_value("x"), pad_widths(c, len(c.dims("x"))), value))


def _check_indices(c: LoweredCall, name: str, size: int) -> str:
    """Replace each negative index by an index that is too large, so that the run fails."""
    indices = c.stored_value(name)
    negative = c.node("Less", indices, c.array(0, np.int32))
    return c.node("Where", negative, c.array(size, np.int32), indices)


def _gather(c: LoweredCall) -> None:
    axis = c.axis("axis", len(c.dims("x")))
    c.set_result(c.node("Gather", c.stored_value("x"), _check_indices(c, "indices", c.dims("x")[axis]), axis=axis))


def _embedding_lookup(c: LoweredCall) -> None:
    c.set_result(c.node("Gather", c.stored_value("values"), _check_indices(c, "lookups", c.dims("values")[0]), axis=0))


def _fill(c: LoweredCall) -> None:
    c.set_result(c.node("Expand", c.stored_value("value"), c.array(c.outputs[0])))


def _rank(c: LoweredCall) -> None:
    c.set_result(c.array(len(c.dims("x")), np.int32))


def _channel_shuffle(c: LoweredCall) -> None:
    dims, groups = c.dims("x"), c.integer("groups")
    axis = c.axis("axis", len(dims))
    apart = (*dims[:axis], groups, dims[axis] // groups, *dims[axis + 1 :])
    axes = list(range(len(apart)))
    axes[axis], axes[axis + 1] = axis + 1, axis
    c.set_result(c.reshape(c.transpose(c.reshape(c.stored_value("x"), apart), axes), dims))


def _move_blocks(c: LoweredCall) -> None:
    nchw = bool(c.integer("nchw", 0))
    x = c.transpose(c.stored_value("x"), _TO_NHWC) if nchw else c.stored_value("x")
    dims, out = c.dims("x"), c.outputs[0]
    if nchw:
        dims, out = (tuple(shape[i] for i in _TO_NHWC) for shape in (dims, out))
    if c.count("pads"):
        pads = [(0, 0), *pad_widths(c, 2), (0, 0)]
        x = _append_pad(c, x, pads, c.operand("x").zero_point)
        dims = tuple(size + sum(pad) for size, pad in zip(dims, pads, strict=True))
    apart, axes = block_axes(c, dims)
    moved = c.reshape(c.transpose(c.reshape(x, apart), axes), out)
    c.set_result(c.transpose(moved, _TO_NCHW) if nchw else moved)


def _pick_places(c: LoweredCall, value: str, axis: int, places: Array) -> str:
    return c.node("Gather", value, c.array(places), axis=axis)


def _resize_nearest(c: LoweredCall) -> None:
    value, dims, out = c.stored_value("x"), c.dims("x"), c.outputs[0]
    for axis in (2, 3) if c.integer("nchw") else (1, 2):
        value = _pick_places(c, value, axis, nearest_places(c, dims[axis], out[axis]))
    c.set_result(value)


def _resize_bilinear(c: LoweredCall) -> None:
    value, dims, out = c.real("x"), c.dims("x"), c.outputs[0]
    down, across = axes = (2, 3) if c.integer("nchw", 0) else (1, 2)
    for axis in axes if resizes_rows_first((dims[down], dims[across]), (out[down], out[across])) else axes[::-1]:
        first, second, part = neighbour_places(c, dims[axis], out[axis])
        part = part.astype(np.float32).reshape(-1, *[1] * (3 - axis))
        near = c.node("Mul", _pick_places(c, value, axis, first), c.array(1 - part, np.float32))
        far = c.node("Mul", _pick_places(c, value, axis, second), c.array(part, np.float32))
        value = c.node("Add", near, far)
    c.store_result(value)


# -- windows and matrices ---------------------------------------------------------------------------------------------


def _image(c: LoweredCall) -> str:
    return c.real("x", axes=() if c.integer("nchw", 0) else _TO_NCHW)


def _give_image(c: LoweredCall, value: str, *, halves: bool = False) -> None:
    c.store_result(value, axes=() if c.integer("nchw", 0) else _TO_NHWC, halves=halves)


def _window_attributes(g: WindowGeometry) -> dict[str, list[int]]:
    h, w = g.height, g.width
    return {
        "kernel_shape": [h.filter, w.filter],
        "strides": [h.stride, w.stride],
        "pads": [h.head, w.head, h.tail, w.tail],
    }


def _bias(c: LoweredCall) -> str:
    """Return the bias in float32. A quantised bias has the scale of the input times the scale of the filter."""
    if not c.info.is_quantised:
        return c.real("bias")
    channels = c.channel_scales("filter")
    scales = np.multiply(c.operand("x").scale, c.operand("filter").scale if channels is None else channels[0])
    return c.node("DequantizeLinear", c.stored_value("bias"), c.array(scales, np.float32), axis=0)


def _conv(c: LoweredCall) -> None:
    _, fh, fw, _ = c.dims("filter")
    g = window_geometry(c, fh, fw)
    groups = g.channels if c.count("multiplier") else c.integer("groups", 1)
    options = {"dilations": [g.height.dilation, g.width.dilation], "group": groups, **_window_attributes(g)}
    axes = (3, 0, 1, 2) if c.count("multiplier") else _TO_NCHW
    _give_image(c, c.node("Conv", _image(c), c.real("filter", axes=axes), _bias(c), **options))


def _transpose_conv(c: LoweredCall) -> None:
    _, fh, fw, _ = c.dims("filter")
    g = transposed_axes(c, fh, fw)
    options = _window_attributes(g)
    beyond = [max(0, -axis.tail) for axis in (g.height, g.width)]
    if any(more >= axis.stride for more, axis in zip(beyond, (g.height, g.width), strict=True)):
        raise GeneralFailure("no product reaches the last elements of the result")
    options["pads"] = [max(0, pad) for pad in options["pads"]]
    filter_ = c.real("filter", axes=(3, 0, 1, 2))
    _give_image(c, c.node("ConvTranspose", _image(c), filter_, _bias(c), output_padding=beyond, **options))


def _fully_connected(c: LoweredCall) -> None:
    size = c.dims("filter")[1]
    x = c.real("x")
    x = x if c.dims("x") == (c.outputs[0][0], size) else c.reshape(x, (-1, size))
    c.store_result(c.node("Gemm", x, c.real("filter"), _bias(c), transB=1), halves=False)


def _pool_geometry(c: LoweredCall) -> WindowGeometry:
    return window_geometry(c, c.integer("filter_h"), c.integer("filter_w"))


def _average_pool(c: LoweredCall) -> None:
    mean = c.node("AveragePool", _image(c), count_include_pad=0, **_window_attributes(_pool_geometry(c)))
    _give_image(c, mean, halves=True)


def _max_pool(c: LoweredCall) -> None:
    _give_image(c, c.node("MaxPool", _image(c), **_window_attributes(_pool_geometry(c))))


def _l2_pool(c: LoweredCall) -> None:
    x = _image(c)
    mean = c.node("AveragePool", c.node("Mul", x, x), count_include_pad=0, **_window_attributes(_pool_geometry(c)))
    _give_image(c, c.node("Sqrt", mean))


# -- along axes -------------------------------------------------------------------------------------------------------


def _reduce(c: LoweredCall, kind: str, value: str, axes: Sequence[int]) -> str:
    return c.node(kind, value, c.array(axes), keepdims=1) if axes else value


def _reduction_in_double(kind: str, c: LoweredCall) -> None:
    axes = c.axes("axes", len(c.dims("x")))
    found = c.cast(_reduce(c, kind, c.cast(c.real("x"), np.float64), axes), np.float32)
    c.store_result(c.reshape(found, c.outputs[0]))


def _extreme(kind: str, c: LoweredCall) -> None:
    axes = c.axes("axes", len(c.dims("x")))
    is_half = c.data_type is _F16
    found = c.reshape(_reduce(c, kind, c.real("x") if is_half else c.stored_value("x"), axes), c.outputs[0])
    (c.store_result if is_half else c.set_result)(found)


def _all_or_any(kind: str, c: LoweredCall) -> None:
    axes = c.axes("axes", len(c.dims("x")))
    c.set_result(c.reshape(_reduce(c, kind, c.cast(c.as_bool("x"), np.uint8), axes), c.outputs[0]))


def _numbers(c: LoweredCall) -> str:
    """Return the name of the input's values in a type in which ONNX Runtime can find the largest elements."""
    if c.info.is_quantised:
        return c.cast(c.stored_value("x"), np.int32)
    return c.stored_value("x") if c.data_type is _I32 else c.real("x")


def _argument(kind: str, c: LoweredCall) -> None:
    axis = c.axis("axis", len(c.dims("x")))
    found = c.node(kind, _numbers(c), axis=axis, keepdims=0)
    c.set_result(c.cast(c.reshape(found, c.outputs[0]), np.int32))


def _topk(c: LoweredCall) -> None:
    """Lower TOPK_V2 to TopK of reversed elements. Among equals, ONNX prefers the first, NNAPI the last."""
    size = c.dims("x")[-1]
    last, end, axis, step = c.array([size - 1]), c.array([-(1 << 31)]), c.array([-1]), c.array([-1])
    turned = c.node("Slice", _numbers(c), last, end, axis, step)
    values, places = c.nodes(2, "TopK", turned, c.array([c.integer("k")]), axis=-1)
    stored = operand_info(c.output().type).dtype
    c.set_result(values if c.data_type in (_F32, _I32) else c.cast(values, stored))
    c.set_result(c.cast(c.node("Sub", last, places), np.int32), 1)


def _softmax(kind: str, c: LoweredCall) -> None:
    x, axis, beta = c.real("x"), c.axis("axis", len(c.dims("x"))), c.number("beta")
    if beta != 1:
        x = c.node("Mul", c.node("Sub", x, c.node("ReduceMax", x, c.array([axis]))), c.array(beta, np.float32))
    c.store_result(c.node(kind, x, axis=axis))


def _l2_normalization(c: LoweredCall) -> None:
    x, axis = c.cast(c.real("x"), np.float64), c.axis("axis", len(c.dims("x")))
    norm = c.node("Sqrt", c.node("ReduceSum", c.node("Mul", x, x), c.array([axis]), keepdims=1))
    some = c.node("Where", c.node("Equal", norm, c.array(0, np.float64)), c.array(1, np.float64), norm)
    c.store_result(c.cast(c.node("Div", x, some), np.float32))


def _instance_normalization(c: LoweredCall) -> None:
    axes = c.array((2, 3) if c.integer("nchw") else (1, 2))
    gamma, beta, epsilon = (c.array(c.number(name), np.float64) for name in ("gamma", "beta", "epsilon"))
    x = c.cast(c.real("x"), np.float64)
    centred = c.node("Sub", x, c.node("ReduceMean", x, axes))
    variance = c.node("ReduceMean", c.node("Mul", centred, centred), axes)
    scaled = c.node("Div", c.node("Mul", centred, gamma), c.node("Sqrt", c.node("Add", variance, epsilon)))
    c.store_result(c.cast(c.node("Add", scaled, beta), np.float32))


_O = OperationType

LOWERED: dict[int, _Lowered] = {
    _O.ABS: partial(_unary, "Abs"),
    _O.ADD: partial(_binary, "Add"),
    _O.ARGMAX: partial(_argument, "ArgMax"),
    _O.ARGMIN: partial(_argument, "ArgMin"),
    _O.AVERAGE_POOL_2D: _average_pool,
    _O.BATCH_TO_SPACE_ND: _move_blocks,
    _O.BIDIRECTIONAL_SEQUENCE_LSTM: recurrent.both_ways_lstm,
    _O.BIDIRECTIONAL_SEQUENCE_RNN: recurrent.both_ways_rnn,
    _O.CAST: _cast,
    _O.CHANNEL_SHUFFLE: _channel_shuffle,
    _O.CONCATENATION: _concatenation,
    _O.CONV_2D: _conv,
    _O.DEPTHWISE_CONV_2D: _conv,
    _O.DEPTH_TO_SPACE: _move_blocks,
    _O.DEQUANTIZE: _convert,
    _O.DIV: partial(_binary, "Div"),
    _O.ELU: _elu,
    _O.EMBEDDING_LOOKUP: _embedding_lookup,
    _O.EQUAL: partial(_comparison, "Equal"),
    _O.EXP: partial(_unary, "Exp"),
    _O.EXPAND_DIMS: _reshape,
    _O.FILL: _fill,
    _O.FLOOR: partial(_unary, "Floor"),
    _O.FULLY_CONNECTED: _fully_connected,
    _O.GATHER: _gather,
    _O.GREATER: partial(_comparison, "Greater"),
    _O.GREATER_EQUAL: partial(_comparison, "GreaterOrEqual"),
    _O.GROUPED_CONV_2D: _conv,
    _O.HARD_SWISH: _hard_swish,
    _O.INSTANCE_NORMALIZATION: _instance_normalization,
    _O.L2_NORMALIZATION: _l2_normalization,
    _O.L2_POOL_2D: _l2_pool,
    _O.LESS: partial(_comparison, "Less"),
    _O.LESS_EQUAL: partial(_comparison, "LessOrEqual"),
    _O.LOG: partial(_unary, "Log"),
    _O.LOGICAL_AND: partial(_logical, "And", "ab"),
    _O.LOGICAL_NOT: partial(_logical, "Not", "a"),
    _O.LOGICAL_OR: partial(_logical, "Or", "ab"),
    _O.LOGISTIC: partial(_unary, "Sigmoid"),
    _O.LOG_SOFTMAX: partial(_softmax, "LogSoftmax"),
    _O.LSTM: recurrent.lstm,
    _O.MAXIMUM: partial(_binary, "Max"),
    _O.MAX_POOL_2D: _max_pool,
    _O.MEAN: partial(_reduction_in_double, "ReduceMean"),
    _O.MINIMUM: partial(_binary, "Min"),
    _O.MUL: partial(_binary, "Mul"),
    _O.NEG: partial(_unary, "Neg"),
    _O.NOT_EQUAL: partial(_comparison, "Equal", negated=True),
    _O.PAD: _pad,
    _O.PAD_V2: _pad,
    _O.POW: partial(_binary, "Pow"),
    _O.PRELU: _prelu,
    _O.QUANTIZE: _quantize,
    _O.RANK: _rank,
    _O.REDUCE_ALL: partial(_all_or_any, "ReduceMin"),
    _O.REDUCE_ANY: partial(_all_or_any, "ReduceMax"),
    _O.REDUCE_MAX: partial(_extreme, "ReduceMax"),
    _O.REDUCE_MIN: partial(_extreme, "ReduceMin"),
    _O.REDUCE_SUM: partial(_reduction_in_double, "ReduceSum"),
    _O.RELU: partial(_clamp, 0, None),
    _O.RELU1: partial(_clamp, -1, 1),
    _O.RELU6: partial(_clamp, 0, 6),
    _O.RESHAPE: _reshape,
    _O.RESIZE_BILINEAR: _resize_bilinear,
    _O.RESIZE_NEAREST_NEIGHBOR: _resize_nearest,
    _O.RNN: recurrent.rnn,
    _O.RSQRT: _reciprocal_root,
    _O.SELECT: _select,
    _O.SIN: partial(_unary, "Sin"),
    _O.SLICE: _slice,
    _O.SOFTMAX: partial(_softmax, "Softmax"),
    _O.SPACE_TO_BATCH_ND: _move_blocks,
    _O.SPACE_TO_DEPTH: _move_blocks,
    _O.SPLIT: _split,
    _O.SQRT: partial(_unary, "Sqrt"),
    _O.SQUEEZE: _reshape,
    _O.STRIDED_SLICE: _strided_slice,
    _O.SUB: partial(_binary, "Sub"),
    _O.SVDF: recurrent.svdf,
    _O.TANH: partial(_unary, "Tanh"),
    _O.TILE: _tile,
    _O.TOPK_V2: _topk,
    _O.TRANSPOSE: _transpose,
    _O.TRANSPOSE_CONV_2D: _transpose_conv,
    _O.UNIDIRECTIONAL_SEQUENCE_LSTM: recurrent.sequence_lstm,
    _O.UNIDIRECTIONAL_SEQUENCE_RNN: recurrent.sequence_rnn,
}
"""The lowering function of each operation that can be lowered."""
