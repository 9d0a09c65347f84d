"""Quantised operations of the reference device, to the last bit, against loops that were written without it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from nnburst.devices import ReferenceDevice
from nnburst.errors import ErrorStatus, InvalidArgument
from nnburst.model import (
    Model,
    ModelBuilder,
    OperandType,
    OperationType,
    operand_info,
)
from support.samples import make_request, run

T, O = OperandType, OperationType  # noqa: E741
Array = np.ndarray[Any, np.dtype[Any]]
Q8, Q8S = T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED
FLOATS = {T.TENSOR_FLOAT32: 1e-5, T.TENSOR_FLOAT16: 5 / 1024}


def compute(model: Model, *inputs: Array) -> list[Array]:
    """Run a model with fully specified outputs synchronously and as a plan; both agree to the bit."""
    prepared = ReferenceDevice().prepare_model(model)
    outcome = run(prepared, model, inputs)
    assert outcome.status is ErrorStatus.NONE
    request, memory = make_request(model, inputs)
    with memory:
        plan = prepared.plan(request)
        for _ in range(2):  # a plan that kept state from its first run would differ in the second
            views = [memory.array(np.uint8, (o.location.length,), o.location.offset) for o in request.outputs]
            for view in views:
                view[...] = 77
            assert plan() is None
            assert [view.tobytes() for view in views] == [result.tobytes() for result in outcome.outputs]
        return outcome.outputs


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def stored(real: Array, scale: float, zero_point: int, type_: OperandType) -> Array:
    """Quantise by the book: one element at a time, halves away from zero."""
    bounds = np.iinfo(operand_info(type_).dtype)

    def one(value: float) -> int:
        steps = value / scale
        return max(bounds.min, min(bounds.max, int(math.copysign(math.floor(abs(steps) + 0.5), steps)) + zero_point))

    return np.vectorize(one, otypes=[operand_info(type_).dtype])(real)


def padding_of(size: int, filter_: int, stride: int, dilation: int, padding: Any, axis: int) -> tuple[int, int]:
    """Return (head, output size) of an axis, as the operation is defined."""
    extent = (filter_ - 1) * dilation + 1
    if padding == "same":
        out = math.ceil(size / stride)
        return max(0, (out - 1) * stride + extent - size) // 2, out
    head, tail = (0, 0) if padding == "valid" else padding[axis]
    return head, (size + head + tail - extent) // stride + 1


def slide(
    x: Array, fh: int, fw: int, stride: tuple[int, int], dilation: tuple[int, int], padding: Any
) -> list[tuple[int, int, int, list[tuple[int, int, Array]]]]:
    """Return (b, i, j, [(filter row, filter column, x[b, row, column, :])]) for each output cell."""
    b, h, w, _ = x.shape
    top, oh = padding_of(h, fh, stride[0], dilation[0], padding, 0)
    left, ow = padding_of(w, fw, stride[1], dilation[1], padding, 1)
    cells = []
    for n, i, j in itertools.product(range(b), range(oh), range(ow)):
        inside = []
        for p, q in itertools.product(range(fh), range(fw)):
            row, column = i * stride[0] - top + p * dilation[0], j * stride[1] - left + q * dilation[1]
            if 0 <= row < h and 0 <= column < w:
                inside.append((p, q, x[n, row, column]))
        cells.append((n, i, j, inside))
    return cells


def naive_conv(x: Array, w: Array, bias: Array, **window: Any) -> Array:
    co, fh, fw, _ = w.shape
    cells = slide(x, fh, fw, **window)
    out = np.zeros((*(1 + max(c[k] for c in cells) for k in range(3)), co))
    for n, i, j, inside in cells:
        for k in range(co):
            out[n, i, j, k] = bias[k] + sum(float((v * w[k, p, q]).sum()) for p, q, v in inside)
    return out


def naive_depthwise(x: Array, w: Array, bias: Array, multiplier: int, **window: Any) -> Array:
    _, fh, fw, co = w.shape
    cells = slide(x, fh, fw, **window)
    out = np.zeros((*(1 + max(c[k] for c in cells) for k in range(3)), co))
    for n, i, j, inside in cells:
        for k in range(co):
            out[n, i, j, k] = bias[k] + sum(float(v[k // multiplier] * w[0, p, q, k]) for p, q, v in inside)
    return out


WINDOWS = [
    {"padding": "valid", "stride": (1, 1), "dilation": (1, 1)},
    {"padding": "same", "stride": (1, 1), "dilation": (1, 1)},
    {"padding": "same", "stride": (2, 3), "dilation": (1, 1)},
    {"padding": "same", "stride": (1, 2), "dilation": (2, 1)},
    {"padding": "valid", "stride": (2, 1), "dilation": (1, 2)},
    {"padding": ((1, 2), (0, 3)), "stride": (2, 2), "dilation": (1, 1)},
    {"padding": ((3, 0), (2, 1)), "stride": (1, 1), "dilation": (2, 3)},
]
every_window = pytest.mark.parametrize("window", WINDOWS, ids=[str(i) for i in range(len(WINDOWS))])
every_layout = pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
both_quants = pytest.mark.parametrize("kind", [Q8, Q8S], ids=["q8", "q8s"])


def laid_out(x: Array, layout: str) -> Array:
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if layout == "NCHW" else x


@every_window
@every_layout
@both_quants
@pytest.mark.parametrize("per_channel", [False, True])
def test_conv_2d_quant(window: dict[str, Any], layout: str, kind: OperandType, per_channel: bool) -> None:
    shift = 128 if kind == Q8S else 0
    dtype = operand_info(kind).dtype
    x = (rng(1).integers(0, 256, (1, 7, 8, 3)) - shift).astype(dtype)
    bias = rng(3).integers(-5000, 5000, 4).astype(np.int32)
    b = ModelBuilder()
    i = b.input("x", kind, laid_out(x, layout).shape, scale=0.5, zero_point=120 - shift)
    scales = np.array([0.25, 0.5, 0.125, 0.01])
    if per_channel:
        w = rng(2).integers(-127, 128, (4, 2, 3, 3)).astype(np.int8)
        centred, filter_ = w.astype(int), b.constant(w, channel_scales=scales)
    else:
        scales = np.full(4, 0.25)
        w = (rng(2).integers(0, 256, (4, 2, 3, 3)) - shift).astype(dtype)
        centred, filter_ = w.astype(int) - (100 - shift), b.constant(w, kind, scale=0.25, zero_point=100 - shift)
    out = {"scale": 40.0, "zero_point": 128 - shift}
    b.output("y", b.conv_2d(i, filter_, bias, layout=layout, activation="relu", **out, **window))
    sums = naive_conv(x.astype(int) - (120 - shift), centred, bias, **window)
    wanted = np.maximum(stored(sums * 0.5 * scales, 40.0, 128 - shift, kind), 128 - shift)
    (found,) = compute(b.build(), laid_out(x, layout))
    # Sums and scales are exact in binary except for 0.01: there a tie may fall to either side.
    exact = scales != 0.01
    difference = np.abs(found.astype(int) - laid_out(wanted, layout).astype(int))
    assert difference.max() <= 1
    channels = np.moveaxis(difference, 1, -1) if layout == "NCHW" else difference
    assert channels[..., exact].max() == 0


@both_quants
@pytest.mark.parametrize("per_channel", [False, True])
def test_depthwise_conv_2d_quant(kind: OperandType, per_channel: bool) -> None:
    shift = 128 if kind == Q8S else 0
    dtype = operand_info(kind).dtype
    x = (rng(1).integers(0, 256, (1, 4, 5, 2)) - shift).astype(dtype)
    bias = rng(3).integers(-500, 500, 4).astype(np.int32)
    b = ModelBuilder()
    i = b.input("x", kind, x.shape, scale=0.5, zero_point=120 - shift)
    scales = np.array([0.25, 0.5, 0.125, 1.0]) if per_channel else np.full(4, 0.25)
    if per_channel:
        w = rng(2).integers(-127, 128, (1, 3, 2, 4)).astype(np.int8)
        centred, filter_ = w.astype(int), b.constant(w, channel_scales=scales, channel_dim=3)
    else:
        w = (rng(2).integers(0, 256, (1, 3, 2, 4)) - shift).astype(dtype)
        centred, filter_ = w.astype(int) - (90 - shift), b.constant(w, kind, scale=0.25, zero_point=90 - shift)
    y = b.depthwise_conv_2d(i, filter_, bias, multiplier=2, padding="same", scale=32.0, zero_point=128 - shift)
    b.output("y", y)
    window = {"padding": "same", "stride": (1, 1), "dilation": (1, 1)}
    sums = naive_depthwise(x.astype(int) - (120 - shift), centred, bias, 2, **window)
    (found,) = compute(b.build(), x)
    np.testing.assert_array_equal(found, stored(sums * 0.5 * scales, 32.0, 128 - shift, kind))


def test_conv_2d_large_enough_to_be_unfolded_in_pieces() -> None:
    x, w = rng(1).normal(size=(2, 90, 90, 8)).astype(np.float32), rng(2).normal(size=(2, 5, 5, 8)).astype(np.float32)
    b = ModelBuilder()
    b.output("y", b.conv_2d(b.input("x", T.TENSOR_FLOAT32, x.shape), w, padding="same"))
    (found,) = compute(b.build(), x)
    padded = np.pad(x.astype(np.float64), ((0, 0), (2, 2), (2, 2), (0, 0)))
    wanted = sum(padded[:, p : p + 90, q : q + 90] @ w[:, p, q].T for p in range(5) for q in range(5))
    np.testing.assert_allclose(found, wanted, atol=1e-4)


POOL_WINDOWS = [
    ((2, 2), (2, 2), "valid"),
    ((2, 3), (1, 2), "same"),
    ((3, 3), (2, 2), ((1, 2), (2, 0))),
    ((5, 6), (1, 1), "same"),  # more cells than one call per cell is good for
    ((7, 8), (7, 8), "valid"),
]


def naive_pool(x: Array, size: tuple[int, int], stride: tuple[int, int], padding: Any, function: Any) -> Array:
    cells = slide(x, *size, stride=stride, dilation=(1, 1), padding=padding)
    out = np.zeros((*(1 + max(c[k] for c in cells) for k in range(3)), x.shape[3]))
    for n, i, j, inside in cells:
        out[n, i, j] = function(np.array([v for _, _, v in inside], np.float64))
    return out


POOLS = {
    O.MAX_POOL_2D: lambda v: v.max(0),
    O.AVERAGE_POOL_2D: lambda v: v.mean(0),
    O.L2_POOL_2D: lambda v: np.sqrt((v**2).mean(0)),
}


@pytest.mark.parametrize("shape", POOL_WINDOWS, ids=[str(i) for i in range(len(POOL_WINDOWS))])
@pytest.mark.parametrize("operation", [O.MAX_POOL_2D, O.AVERAGE_POOL_2D], ids=["max", "average"])
@both_quants
def test_pools_quant(shape: Any, operation: OperationType, kind: OperandType) -> None:
    size, stride, padding = shape
    shift = 128 if kind == Q8S else 0
    x = (rng(1).integers(0, 256, (2, 7, 8, 3)) - shift).astype(operand_info(kind).dtype)
    b = ModelBuilder()
    i = b.input("x", kind, x.shape, scale=0.05, zero_point=100 - shift)
    b.output("y", b._pool(operation, i, size, stride=stride, padding=padding, activation="relu6"))
    wanted = naive_pool(x, size, stride, padding, POOLS[operation])
    wanted = np.clip(wanted, 100 - shift, min(100 + 120, 255) - shift)  # 6 / 0.05 = 120 steps above the zero point
    (found,) = compute(b.build(), x)
    assert np.abs(found - wanted).max() <= (0 if operation == O.MAX_POOL_2D else 0.51)


@both_quants
def test_fully_connected_quant(kind: OperandType) -> None:
    shift = 128 if kind == Q8S else 0
    dtype = operand_info(kind).dtype
    x, w = ((rng(k).integers(0, 256, s) - shift).astype(dtype) for k, s in enumerate(((3, 50), (4, 50))))
    bias = np.array([0, 1000, -1000, 7], np.int32)
    b = ModelBuilder()
    i = b.input("x", kind, x.shape, scale=0.5, zero_point=3 - shift)
    weights = b.constant(w, kind, scale=0.25, zero_point=130 - shift)
    b.output("y", b.fully_connected(i, weights, bias, scale=256.0, zero_point=77 - shift))
    sums = (x.astype(int) - (3 - shift)) @ (w.astype(int) - (130 - shift)).T + bias
    (found,) = compute(b.build(), x)
    np.testing.assert_array_equal(found, stored(sums * 0.125, 256.0, 77 - shift, kind))


BINARY = {O.ADD: np.add, O.SUB: np.subtract, O.MUL: np.multiply}


@pytest.mark.parametrize("operation", BINARY, ids=[o.name for o in BINARY])
@both_quants
def test_binary_quant(operation: OperationType, kind: OperandType) -> None:
    shift = 128 if kind == Q8S else 0
    x, y = ((rng(k).integers(0, 256, (5, 40)) - shift).astype(operand_info(kind).dtype) for k in range(2))
    b = ModelBuilder()
    i = b.input("x", kind, x.shape, scale=0.5, zero_point=10 - shift)
    j = b.input("y", kind, y.shape, scale=0.25, zero_point=200 - shift)
    (z,) = b.operation(operation, i, j, b.scalar(0), outputs=[{"scale": 1.0, "zero_point": 128 - shift}])
    b.output("z", z)
    real = BINARY[operation]((x.astype(int) - (10 - shift)) * 0.5, (y.astype(int) - (200 - shift)) * 0.25)
    (found,) = compute(b.build(), x, y)
    np.testing.assert_array_equal(found, stored(real, 1.0, 128 - shift, kind))


@pytest.mark.parametrize("activation", ["relu", "relu1", "relu6"])
def test_add_of_integers_has_no_activation(activation: Any) -> None:
    b = ModelBuilder()
    i = b.input("x", T.TENSOR_INT32, (2,))
    with pytest.raises(InvalidArgument, match="TENSOR_INT32 arithmetic has no fused activation"):
        b.add(i, np.array([5, -7], np.int32), activation=activation)


def test_difference_of_integers_wraps_around() -> None:
    b = ModelBuilder()
    i = b.input("x", T.TENSOR_INT32, (2,))
    b.output("z", b.sub(i, np.array([5, -7], np.int32)))
    (found,) = compute(b.build(), np.array([1, 2**31 - 1], np.int32))
    assert found.tolist() == [-4, -(2**31) + 6]


def logistic(x: Array) -> Array:
    return np.array([1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in x.reshape(-1)]).reshape(x.shape)


UNARY = {
    O.RELU: lambda x: np.maximum(x, 0),
    O.RELU1: lambda x: np.clip(x, -1, 1),
    O.RELU6: lambda x: np.clip(x, 0, 6),
    O.LOGISTIC: logistic,
    O.TANH: lambda x: np.array([math.tanh(v) for v in x.reshape(-1)]).reshape(x.shape),
}


@pytest.mark.parametrize("operation", UNARY, ids=[o.name for o in UNARY])
@both_quants
def test_unary_quant_for_every_stored_value(operation: OperationType, kind: OperandType) -> None:
    shift = 128 if kind == Q8S else 0
    x = (np.arange(256) - shift).astype(operand_info(kind).dtype)
    b = ModelBuilder()
    i = b.input("x", kind, x.shape, scale=0.0625, zero_point=128 - shift)
    y = b.operation(operation, i)[0]
    b.output("y", y)
    model = b.build()
    out = model.main.operands[model.main.output_indexes[0]]
    real = UNARY[operation]((np.arange(256) - 128) * 0.0625)
    (found,) = compute(model, x)
    np.testing.assert_array_equal(found, stored(real, out.scale, out.zero_point, kind))


@both_quants
def test_softmax_quant(kind: OperandType) -> None:
    shift = 128 if kind == Q8S else 0
    x = (rng(1).integers(0, 256, (2, 10)) - shift).astype(operand_info(kind).dtype)
    b = ModelBuilder()
    b.output("y", b.softmax(b.input("x", kind, x.shape, scale=0.03, zero_point=0)))
    e = np.exp(x.astype(float) * 0.03)
    (found,) = compute(b.build(), x)
    np.testing.assert_array_equal(found, stored(e / e.sum(-1, keepdims=True), 1 / 256, -shift, kind))


@both_quants
def test_concatenation_requantises(kind: OperandType) -> None:
    shift = 128 if kind == Q8S else 0
    xs = [(rng(k).integers(0, 256, (3, 4)) - shift).astype(operand_info(kind).dtype) for k in range(2)]
    b = ModelBuilder()
    i = b.input("x", kind, (3, 4), scale=0.5, zero_point=100 - shift)
    j = b.input("y", kind, (3, 4), scale=0.25, zero_point=30 - shift)
    b.output("z", b.concatenation([i, j], 1, scale=0.5, zero_point=100 - shift))
    (found,) = compute(b.build(), *xs)
    other = stored((xs[1].astype(int) - (30 - shift)) * 0.25, 0.5, 100 - shift, kind)
    np.testing.assert_array_equal(found, np.concatenate([xs[0], other], 1))


@both_quants
@pytest.mark.parametrize("source", FLOATS, ids=["f32", "f16"])
def test_quantize_rounds_half_away_from_zero_and_saturates(kind: OperandType, source: OperandType) -> None:
    shift = 128 if kind == Q8S else 0
    x = np.array([-1e4, -1.25, -0.75, -0.25, 0, 0.25, 0.75, 1.25, 1e4], operand_info(source).dtype)
    b = ModelBuilder()
    i = b.input("x", source, x.shape)
    b.output("y", b.quantize(i, type=kind, scale=0.5, zero_point=128 - shift))
    (found,) = compute(b.build(), x)
    assert (found.astype(int) + shift).tolist() == [0, 125, 126, 127, 128, 129, 130, 131, 255]


def test_each_operation_of_a_model_has_a_table_of_its_own() -> None:
    x = np.arange(256).astype(np.uint8)
    b = ModelBuilder()
    i = b.input("x", Q8, x.shape, scale=1 / 32, zero_point=128)
    b.output("tanh", b.tanh(i))
    b.output("logistic", b.logistic(i))
    real = (x.astype(float) - 128) / 32
    wanted = stored(np.tanh(real), 1 / 128, 128, Q8), stored(1 / (1 + np.exp(-real)), 1 / 256, 0, Q8)
    for found, expected in zip(compute(b.build(), x), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("target", FLOATS, ids=["f32", "f16"])
@pytest.mark.parametrize("kind", [Q8, Q8S, T.TENSOR_QUANT8_SYMM])
def test_dequantize(kind: OperandType, target: OperandType) -> None:
    x = np.arange(256).astype(np.uint8).view(operand_info(kind).dtype)
    zero_point = 0 if kind == T.TENSOR_QUANT8_SYMM else 5
    b = ModelBuilder()
    i = b.input("x", kind, x.shape, scale=0.5, zero_point=zero_point)
    b.output("y", b.dequantize(i, type=target))
    (found,) = compute(b.build(), x)
    np.testing.assert_array_equal(found, (x.astype(float) - zero_point) * 0.5)


def test_dequantize_per_channel() -> None:
    x = np.array([[1, -2, 3], [-4, 5, 127]], np.int8)
    b = ModelBuilder()
    i = b.constant(x, channel_scales=[0.5, 0.25, 2.0], channel_dim=1)
    j = b.input("y", T.TENSOR_FLOAT32, (2, 3))
    b.output("y", b.add(b.dequantize(i), j))
    (found,) = compute(b.build(), np.zeros((2, 3), np.float32))
    np.testing.assert_array_equal(found, x * np.array([0.5, 0.25, 2.0]))
