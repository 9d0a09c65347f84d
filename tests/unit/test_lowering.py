"""Operations of NNAPI lowered to ONNX: what is refused, and each in each type, with usual numbers and extremes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nnburst
from benchmarks.lowered_speed import mobilenet
from nnburst import GeneralFailure, Model, ModelBuilder
from nnburst.devices import Device
from nnburst.devices.common import device_of
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus
from nnburst.model.operand import Output
from nnburst.model.operand_types import operand_info
from nnburst.model.rows import OPERATIONS
from support.operations import (
    B8,
    F16,
    F32,
    FIXED_QUANTISATION,
    I32,
    QUANTS,
    SAME_QUANTISATION,
    Array,
    Fx,
    O,
    T,
    check_lowered,
    encoded,
    lowering_device,
    rng,
    run_model,
    run_on,
)

pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")

from nnburst.devices.onnxruntime import lowering
from nnburst.devices.onnxruntime.library import onnx
from nnburst.devices.onnxruntime.lowering import Lowering
from nnburst.devices.onnxruntime.operations import LOWERED
from nnburst.nnapi import Compilation
from support.models import compiled

NUMBERS = (
    "0 .5 1 1.5 2.5 1e-45 1e-38 6e-8 1e-5 9.01 20 88 89 104 255.5 256 65504 65536 1e5 16777217 2147483520 3e38 inf"
)
EXTREMES = np.array([sign * float(x) for x in NUMBERS.split() for sign in (1, -1)])
INTEGERS = np.array([0, 1, -1, 7, -7, 65536, 2**31 - 1, -(2**31)], np.int32)


def one(operation: O, *arguments: Any, kind: T = F32, outputs: list[Output] | None = None) -> tuple[Model, list[Array]]:
    """A model of an operation: arrays are inputs, numbers scalars, lists constants."""
    b, operands, inputs = ModelBuilder(), [], []
    for position, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            operands.append(b.input(f"x{position}", kind, argument.shape))
            inputs.append(argument)
        elif isinstance(argument, list):
            operands.append(b.constant(np.int32(argument)))
        else:
            operands.append(b.scalar(argument, T.FLOAT16 if isinstance(argument, float) and kind != F32 else None))
    for which, out in enumerate(b.operation(operation, *operands, outputs=outputs)):
        b.output(f"y{which}", out)
    return b.build(), inputs


def agrees(operation: O, *arguments: Any, **options: Any) -> None:
    compare(*one(operation, *arguments, **options))


def lowered(model: Model, inputs: list[Array]) -> list[Array]:
    """Results of the device that lowers."""
    device = lowering_device()
    assert device is not None
    return run_on(device, model, inputs)[1]


@pytest.mark.parametrize("kind", [F32, T.TENSOR_FLOAT16])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_extremes_come_out_as_on_the_reference_device(kind: T) -> None:
    x = EXTREMES.astype(np.float32 if kind == F32 else np.float16)
    left, right = np.repeat(x, x.size), np.tile(x, x.size)
    for name in "ABS EXP FLOOR LOG NEG SQRT RSQRT SIN LOGISTIC TANH RELU RELU1 RELU6 HARD_SWISH".split():
        agrees(O[name], x, kind=kind)
    for name in "ADD SUB MUL DIV".split():
        for activation in range(4):
            agrees(O[name], left, right, activation, kind=kind)
    for name in "MAXIMUM MINIMUM POW PRELU EQUAL NOT_EQUAL LESS LESS_EQUAL GREATER GREATER_EQUAL".split():
        agrees(O[name], left, right, kind=kind)
    finite = x[np.isfinite(x)]
    for beta in (1.0, 0.5, 3.0):
        agrees(O.SOFTMAX, np.stack([finite, finite / 2, -finite], -1), beta, kind=kind)
    for target in (T.TENSOR_INT32, T.TENSOR_QUANT8_ASYMM, T.TENSOR_FLOAT16, F32):
        scale = 1.0 if target == T.TENSOR_QUANT8_ASYMM else 0.0
        agrees(O.CAST, x, kind=kind, outputs=[{"type": target, "dimensions": x.shape, "scale": scale}])


@pytest.mark.parametrize(("scale", "zero_point"), [(1.0, 0), (0.1, 128), (3.3, 255)])
def test_quantizing_rounds_halves_away_from_zero(scale: float, zero_point: int) -> None:
    x = np.concatenate([EXTREMES, np.arange(-300, 300) * scale / 2]).astype(np.float32)
    said: Output = {"type": T.TENSOR_QUANT8_ASYMM, "dimensions": x.shape, "scale": scale, "zero_point": zero_point}
    model, inputs = one(O.QUANTIZE, x, outputs=[said])
    with np.errstate(all="ignore"):
        _, (found,), _ = run_model(model, inputs)
        wanted = np.clip(np.trunc(x / np.float64(scale) + np.copysign(0.5, x)) + zero_point, 0, 255)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(lowered(model, inputs)[0], wanted)  # to the bit, not within 1


def products(kind: str, filter_: Array, per_channel: bool) -> tuple[Model, list[Array]]:
    """A model that multiplies bytes of 255 by a filter; results end at 0 and 200."""
    b = ModelBuilder()
    shape = (2, filter_.shape[1]) if kind == "fully_connected" else (1, 5, 5, filter_.shape[3])
    x = b.input("x", T.TENSOR_QUANT8_ASYMM, shape, scale=1.0)
    axis = 3 if kind == "depthwise_conv_2d" else 0
    if per_channel:
        w = b.constant(filter_, channel_scales=np.ones(filter_.shape[axis]), channel_dim=axis)
    else:
        w = b.constant((filter_ + np.int16(128)).astype(np.uint8), scale=1.0, zero_point=128)
    sums = 255 * 127 * filter_[..., 0].size if axis else 255 * 127 * filter_[0].size
    b.output("y", getattr(b, kind)(x, w, scale=sums / 200, zero_point=0 if filter_.flat[0] > 0 else 200))
    return b.build(), [np.full(shape, 255, np.uint8)]


@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_extreme_products_do_not_saturate(monkeypatch: pytest.MonkeyPatch, signed: bool) -> None:
    if signed and not lowering._multiplies_signed():
        pytest.skip("needs VNNI")
    monkeypatch.setattr(lowering, "_multiplies_signed", lambda: signed)
    shapes = {"conv_2d": [(32, 1, 1, 64), (32, 3, 3, 64)], "depthwise_conv_2d": [(1, 3, 3, 64)]}
    for kind, each in {**shapes, "fully_connected": [(16, 64)]}.items():
        for shape, extreme, per_channel in itertools.product(each, (127, -127), (False, True)):
            if per_channel and kind == "fully_connected":
                continue
            model, inputs = products(kind, np.full(shape, extreme, np.int8), per_channel)
            status, (wanted,), _ = run_on(ReferenceDevice(), model, inputs)
            assert status is ErrorStatus.NONE
            assert 200 in wanted if extreme > 0 else 0 in wanted
            np.testing.assert_array_equal(lowered(model, inputs)[0], wanted)
            graph = onnx().ModelProto.FromString(Lowering(model, LOWERED).graph()[0])
            types = {tensor.data_type for tensor in graph.graph.initializer}
            assert (onnx().TensorProto.INT8 in types) == signed  # what is unsigned is exact on any processor


def test_filters_are_signed_where_the_processor_has_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, wanted in (("avx2 fma", False), ("avx512f avx512bw", False), ("avx512_vnni", True), ("avx_vnni", True)):
        monkeypatch.setattr(lowering, "cpu_features", lambda flags=flags: f"flags\t\t: sse2 {flags} erms")
        assert lowering._multiplies_signed.__wrapped__() is wanted


def test_large_weights_of_any_length_come_out_of_the_file_beside_the_graph_as_they_are() -> None:
    b = ModelBuilder()
    sizes = (301, 303, 257)  # none fills a multiple of 64 bytes
    inputs = [b.input(f"x{size}", F32, (size,)) for size in sizes]
    for size, x in zip(sizes, inputs, strict=True):
        b.output(f"y{size}", b.add(x, b.constant(np.arange(size, dtype=np.float32) + size)))
    model = b.build()
    assert Lowering(model, LOWERED).graph()[1]
    outputs = lowered(model, [np.zeros(size, np.float32) for size in sizes])
    for size, found in zip(sizes, outputs, strict=True):
        np.testing.assert_array_equal(found, np.arange(size) + size)


def test_integers_wrap_around() -> None:
    left, right = np.repeat(INTEGERS, INTEGERS.size), np.tile(INTEGERS, INTEGERS.size)
    for name in "ADD SUB MUL".split():
        agrees(O[name], left, right, 0, kind=T.TENSOR_INT32)
    for name in "MAXIMUM MINIMUM EQUAL LESS".split():
        agrees(O[name], left, right, kind=T.TENSOR_INT32)
    agrees(O.ABS, INTEGERS, kind=T.TENSOR_INT32)


def test_an_index_out_of_range_fails_a_lowered_run_too() -> None:
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    for index in (-1, -3, 3, 2**31 - 1):
        b = ModelBuilder()
        b.output("y", b.embedding_lookup(b.input("i", T.TENSOR_INT32, (1,)), b.constant(table)))
        model, inputs = b.build(), [np.array([index], np.int32)]
        assert not any(Lowering(model, LOWERED).reasons)
        assert run_model(model, inputs)[0] is ErrorStatus.GENERAL_FAILURE  # compares both


def refused(make: Callable[[ModelBuilder], Any]) -> str:
    b = ModelBuilder()
    b.output("y", make(b))
    (reason,) = Lowering(b.build(), LOWERED).reasons
    return str(reason)


def test_what_cannot_be_exact_is_refused_with_a_reason() -> None:
    x = (2, 4)
    integers = np.ones(x, np.int32)
    assert "divides integers" in refused(lambda b: b.div(b.input("x", T.TENSOR_INT32, x), integers))
    assert "alpha is 1000" in refused(lambda b: b.elu(b.input("x", F32, x), 1000.0))
    assert "not lowered" in refused(lambda b: b.reduce_prod(b.input("x", F32, x), [0]))
    assert "value of axes is not known" in refused(
        lambda b: b.reduce_max(b.input("x", F32, x), b.input("axes", T.TENSOR_INT32, (1,)), dimensions=(2,))
    )
    assert "takes more than" in refused(lambda b: b.tile(b.input("x", F32, x), [1 << 13, 1 << 13]))
    image, out_shape = (1, 1, 1, 1), np.int32([1, 3, 3, 1])
    assert "no product reaches" in refused(
        lambda b: b.operation(
            O.TRANSPOSE_CONV_2D, b.input("x", F32, image), b.constant(np.ones(image, np.float32)),
            b.constant(np.ones(1, np.float32)), b.constant(out_shape), *map(b.scalar, (2, 1, 1, 0, False)),
        )[0]
    )  # fmt: skip


def test_most_operations_are_lowered() -> None:
    left = {O(code).name for code in set(O) - LOWERED.keys()}
    assert {"IF", "WHILE", "HASHTABLE_LOOKUP", "QUANTIZED_LSTM", "REDUCE_PROD", "OEM_OPERATION"} <= left
    assert len(LOWERED) > 3 * len(left)


# -- which device gets a model ----------------------------------------------------------------------------------------


@pytest.fixture
def devices() -> list[Device]:
    return [create_device(name) for name in ("nnburst-reference", "nnburst-onnxruntime")]


def network(units: int, *, sorts: bool = False) -> Model:
    """Two layers; between them what is not lowered: a product of the elements of each row."""
    b = ModelBuilder()
    h = b.fully_connected(b.input("x", F32, (1, units)), np.ones((units, units), np.float32))
    if sorts:
        h = b.mul(h, b.reduce_prod(h, [1], True))
    b.output("y", b.fully_connected(h, np.ones((units, units), np.float32)))
    return b.build()


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        (network(16), [("nnburst-reference", (0, 1))]),
        (network(512), [("nnburst-onnxruntime", (0, 1))]),
        (network(16, sorts=True), [("nnburst-reference", (0, 1, 2, 3))]),
        (
            network(512, sorts=True),
            [("nnburst-onnxruntime", (0,)), ("nnburst-reference", (1, 2)), ("nnburst-onnxruntime", (3,))],
        ),
    ],
)
def test_large_models_are_lowered_and_small_ones_stay(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch, model: Model, steps: list[tuple[str, tuple[int, ...]]]
) -> None:
    with Compilation(model, devices) as compilation:
        monkeypatch.setattr(compilation, "_names_devices", False)  # as with a service
        compilation.finish()
        report = [(step.device, step.operations) for step in compilation.report.steps]
    assert report == steps


def test_a_named_device_gets_what_it_can_run_however_small(devices: list[Device]) -> None:
    lowering = device_of(devices, "nnburst-onnxruntime")
    with compiled(network(16), [lowering]) as compilation:
        assert compilation.report.steps[0].device == lowering.name
    with Compilation(network(16, sorts=True), [lowering]) as compilation:
        with pytest.raises(GeneralFailure, match="nnburst-onnxruntime lacks REDUCE_PROD"):
            compilation.finish()


# ---- each operation in each of its types ---------------------------------------------------------------------------


U, N, S = 3, 2, 3
"""Units of cells, the batch, steps."""


def real(*shape: int, seed: int = 7) -> Array:
    return rng(seed + len(shape)).uniform(-2, 2, shape)


def weights(*shape: int) -> Array:
    return real(*shape) / 3


IMAGE, ROWS = real(1, 4, 4, 4), real(3, 4)
SAME = (1, 1, 1)  # padding, strides
POOL = (IMAGE, 1, 2, 2, 3, 3)
CELL = [weights(U, U) for _ in range(8)] + [None] * 3 + [weights(U) for _ in range(4)] + [None] * 2
STATES = [weights(N, U), weights(N, U)]
CLIPS = (4, Fx(0.0), Fx(0.0))
LOOP = (weights(U, U), weights(U, U), weights(U), weights(N, U))
CASES: dict[O, tuple[Any, ...]] = {
    **{O[name]: (ROWS,) for name in "ABS EXP FLOOR LOGISTIC NEG RELU RELU1 RELU6 SIN TANH HARD_SWISH RANK".split()},
    **{O[name]: (abs(ROWS) + 0.1,) for name in "LOG RSQRT SQRT".split()},
    **{O[name]: (ROWS, real(1, 4), 0) for name in "ADD MUL SUB".split()},
    **{O[name]: (ROWS, real(1, 4)) for name in "MAXIMUM MINIMUM PRELU".split()},
    **{
        O[name]: (ROWS, real(1, 4))
        for name in "EQUAL NOT_EQUAL LESS LESS_EQUAL GREATER GREATER_EQUAL LOGICAL_AND LOGICAL_OR".split()
    },
    **{O[name]: (ROWS, np.array([1]), True) for name in "REDUCE_MAX REDUCE_MIN REDUCE_SUM".split()},
    **{O[name]: (ROWS, np.array([1]), False) for name in "REDUCE_ALL REDUCE_ANY".split()},
    **{O[name]: (ROWS, 1) for name in "ARGMAX ARGMIN".split()},
    O.MEAN: (ROWS, np.array([1]), 1),
    O.DIV: (ROWS, abs(real(1, 4)) + 0.1, 0),
    O.POW: (abs(ROWS) + 0.1, real(1, 4)),
    O.LOGICAL_NOT: (ROWS,),
    O.DEQUANTIZE: (ROWS,),
    O.QUANTIZE: (ROWS,),
    O.CAST: (ROWS,),
    O.ELU: (ROWS, Fx(1.5)),
    O.SELECT: (np.array([True, False, True, False]).reshape(1, 4).repeat(3, 0), ROWS, real(3, 4, seed=9)),
    O.SOFTMAX: (ROWS, Fx(0.7)),
    O.LOG_SOFTMAX: (ROWS, Fx(0.7), 1),
    O.L2_NORMALIZATION: (ROWS,),
    O.INSTANCE_NORMALIZATION: (IMAGE, Fx(1.5), Fx(0.1), Fx(1e-3), False),
    O.AVERAGE_POOL_2D: (*POOL, 0),
    O.MAX_POOL_2D: (*POOL, 0),
    O.L2_POOL_2D: (*POOL, 0),
    O.CONV_2D: (IMAGE, weights(5, 3, 3, 4), weights(5), *SAME, 1),
    O.DEPTHWISE_CONV_2D: (IMAGE, weights(1, 3, 3, 4), weights(4), *SAME, 1, 3),
    O.GROUPED_CONV_2D: (IMAGE, weights(6, 3, 3, 2), weights(6), *SAME, 2, 0, False),
    O.TRANSPOSE_CONV_2D: (IMAGE, weights(5, 3, 3, 4), weights(5), np.array([1, 8, 8, 5]), 1, 2, 2, 0, False),
    O.FULLY_CONNECTED: (ROWS, weights(5, 4), weights(5), 0),
    O.RESHAPE: (ROWS, np.array([4, 3])),
    O.SQUEEZE: (real(3, 1, 4), np.array([1])),
    O.EXPAND_DIMS: (ROWS, 1),
    O.TRANSPOSE: (ROWS, np.array([1, 0])),
    O.SLICE: (ROWS, np.array([1, 0]), np.array([2, 3])),
    O.STRIDED_SLICE: (ROWS, np.array([0, 3]), np.array([3, 0]), np.array([2, -1]), 0, 0, 0),
    O.CONCATENATION: (ROWS, real(2, 4), 0),
    O.SPLIT: (ROWS, 1, 2),
    O.TILE: (ROWS, np.array([2, 1])),
    O.PAD: (ROWS, np.array([[1, 0], [0, 2]])),
    O.PAD_V2: (ROWS, np.array([[1, 0], [0, 2]]), Fx(1.0)),
    O.GATHER: (ROWS, 1, np.array([3, 0])),
    O.EMBEDDING_LOOKUP: (np.array([2, 0]), ROWS),
    O.FILL: (np.array([2, 3]), Fx(1.5)),
    O.TOPK_V2: (ROWS, 2),
    O.CHANNEL_SHUFFLE: (IMAGE, 2, 3),
    O.DEPTH_TO_SPACE: (IMAGE, 2),
    O.SPACE_TO_DEPTH: (IMAGE, 2),
    O.BATCH_TO_SPACE_ND: (real(4, 2, 2, 3), np.array([2, 2])),
    O.SPACE_TO_BATCH_ND: (IMAGE, np.array([2, 2]), np.array([[0, 0], [2, 0]])),
    O.RESIZE_BILINEAR: (IMAGE, 7, 6),
    O.RESIZE_NEAREST_NEIGHBOR: (IMAGE, 7, 6, False),
    O.RNN: (real(N, U), *LOOP, 4),
    O.SVDF: (real(N, U), weights(4, U), weights(4, 3), weights(2), weights(N, 12), 2, 0),
    O.LSTM: (real(N, U), *CELL, *STATES, *CLIPS),
    O.UNIDIRECTIONAL_SEQUENCE_RNN: (real(S, N, U), *LOOP, 4, 1),
    O.UNIDIRECTIONAL_SEQUENCE_LSTM: (real(S, N, U), *CELL, *STATES, *CLIPS, True, *[None] * 4),
    O.BIDIRECTIONAL_SEQUENCE_RNN: (real(S, N, U), *LOOP, *LOOP, *[None] * 3, 4, True, True),
    O.BIDIRECTIONAL_SEQUENCE_LSTM: (
        real(S, N, U), *CELL, *CELL, *STATES, *STATES, *[None] * 9, *CLIPS, True, True, *[None] * 8
    ),
}  # fmt: skip
MADE_OF_TYPES = {O.CAST: (F32, F16, I32, T.TENSOR_QUANT8_ASYMM), O.RANK: (F32, F16, I32, *QUANTS)}
"""Of operations that take any."""
EXACT = {
    O[name]
    for name in "BATCH_TO_SPACE_ND CAST CHANNEL_SHUFFLE DEPTH_TO_SPACE EMBEDDING_LOOKUP EXPAND_DIMS GATHER MAX_POOL_2D "
    "PAD PAD_V2 QUANTIZE REDUCE_MAX REDUCE_MIN RELU RELU1 RELU6 RESHAPE RESIZE_NEAREST_NEIGHBOR SLICE "
    "SPACE_TO_BATCH_ND SPACE_TO_DEPTH SPLIT SQUEEZE STRIDED_SLICE TILE TOPK_V2 TRANSPOSE".split()
}
"""Whose quantised results are the reference device's; others may differ by 1."""
REFUSED = {(O.DIV, I32)}
"""What is left to the reference device."""


def model_of(operation: O, kind: T, low: bool | None = None) -> tuple[Model, list[Array]]:
    """A model of a case: the first tensor is an input, the others are constants.

    Args:
        operation: The operation.
        kind: Its data type.
        low: Zero points at their lowest or highest, codes at either end; None for usual numbers.
    """
    b, inputs, operands = ModelBuilder(), list[Array](), list[Any]()
    info = operand_info(kind)
    scale, zero_point = (0.02, 128 if info.dtype == np.uint8 else 0) if info.is_quantised else (0.0, 0)
    if kind in QUANTS and low is not None:
        zero_point = int(np.iinfo(info.dtype).min if low else np.iinfo(info.dtype).max)
    quant: Any = {"scale": scale, "zero_point": zero_point} if info.is_quantised else {}
    for position, argument in enumerate(CASES[operation]):
        if argument is None:
            operands.append(b.omitted(kind))
        elif isinstance(argument, Fx):
            value: Any = argument.value
            if operation in (O.PAD_V2, O.FILL) and kind in (*QUANTS, I32):
                operands.append(b.scalar(int(value), T.INT32))
            else:
                operands.append(b.scalar(value, T.FLOAT16 if kind == F16 else T.FLOAT32))
        elif not isinstance(argument, np.ndarray):
            operands.append(b.scalar(argument))
        elif argument.dtype == np.int64:
            operands.append(b.constant(argument.astype(np.int32)))
        elif argument.dtype == np.bool_:
            operands.append(b.constant(argument.astype(np.uint8), B8))
        elif kind in QUANTS and argument.ndim == 1 and operation.name.endswith(("CONV_2D", "CONNECTED")):
            index = b.add_operand(I32, argument.shape, scale=scale * scale)
            b.set_operand_value(index, np.round(argument / scale**2).astype(np.int32))
            operands.append(b.operand(index))
        else:
            stored = encoded(argument * (1 if info.is_float or quant else 3), kind, scale, zero_point)
            if kind == B8:
                stored = (argument > 0).astype(np.uint8)
            if quant and low is not None:
                ends = np.iinfo(info.dtype)
                stored = np.where(argument > 0, ends.max, ends.min).astype(info.dtype)
            if inputs:
                operands.append(b.constant(stored, kind, **quant))
            else:
                operands.append(b.input(f"x{position}", kind, stored.shape, **quant))
                inputs.append(stored)
    said: Output = {}
    is_free = operation.name not in SAME_QUANTISATION | FIXED_QUANTISATION
    if operation in (O.QUANTIZE, O.CAST):
        said = {"type": T.TENSOR_QUANT8_ASYMM, "scale": 0.02, "zero_point": 100}
    elif kind in QUANTS and is_free and OPERATIONS[operation].outputs[0][0].kinds[0][0] == "T":
        said = {"scale": scale * 2, "zero_point": zero_point}
    for which, out in enumerate(b.operation(operation, *operands, outputs=[said] if said else None)):
        b.output(f"y{which}", out)
    return b.build(), inputs


ALL = [
    (O(operation), T(kind))
    for operation in sorted(LOWERED)
    for kind in MADE_OF_TYPES.get(O(operation), OPERATIONS[operation].types or (B8,))
    if kind not in (T.TENSOR_QUANT8_SYMM, T.TENSOR_QUANT8_SYMM_PER_CHANNEL)
]


def name_of(value: object) -> str:
    return str(getattr(value, "name", value))


def compare(model: Model, inputs: list[Array]) -> None:
    with np.errstate(all="ignore"):
        status, wanted, _ = run_model(model, inputs)
        assert status is ErrorStatus.NONE
        assert check_lowered(model, inputs, status, wanted), Lowering(model, LOWERED).reasons
        if model.main.operations[0].type in EXACT:
            for index, out, want in zip(model.main.output_indexes, lowered(model, inputs), wanted, strict=True):
                if not operand_info(model.main.operands[index].type).is_float:
                    np.testing.assert_array_equal(out, want)


def test_every_operation_that_is_lowered_has_a_case() -> None:
    assert CASES.keys() == LOWERED.keys()
    assert len(ALL) > 250


@pytest.mark.parametrize(("operation", "kind"), ALL, ids=name_of)
def test_each_operation_is_lowered_in_each_type_and_agrees(operation: O, kind: T) -> None:
    model, inputs = model_of(operation, kind)
    if (operation, kind) in REFUSED:
        assert all(Lowering(model, LOWERED).reasons)
        return
    compare(model, inputs)


@pytest.mark.parametrize("low", [False, True], ids=["highest", "lowest"])
@pytest.mark.parametrize(("operation", "kind"), [each for each in ALL if each[1] in QUANTS], ids=name_of)
def test_codes_and_zero_points_at_the_ends_of_their_range_agree(operation: O, kind: T, low: bool) -> None:
    compare(*model_of(operation, kind, low))


@pytest.mark.parametrize(("operation", "kind"), [each for each in ALL if each[1] in (F32, F16)], ids=name_of)
def test_infinities_and_what_overflows_agree(operation: O, kind: T) -> None:
    model, (x, *_) = model_of(operation, kind)
    for first, last in ((np.inf, 1), (1, -np.inf), (np.inf, -np.inf), (6e4, 0), (0, -6e4)):
        x = x.copy()
        x.flat[0], x.flat[-1] = first, last
        compare(model, [x])


@pytest.mark.check
@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "8 bits"])
def test_a_default_service_gives_a_model_with_enough_work_to_onnxruntime_unasked(quantised: bool) -> None:
    model, (image,) = mobilenet(quantised, size=64)
    with nnburst.launch() as service, compiled(model, service) as compilation:
        (step,) = compilation.report.steps
        assert (step.device, step.operations) == ("nnburst-onnxruntime", tuple(range(len(model.main.operations))))
        with nnburst.Session(model, service=service) as session:
            found = session.run(None, {"x": image})
    wanted = run_on(ReferenceDevice(), model, [image])[1]
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.astype(float), theirs.astype(float), atol=1 if quantised else 1e-5, rtol=1e-5)


def share_of_differences(model: Model, inputs: list[Array]) -> float:
    """How many elements of the last result differ, which they may by 1."""
    wanted, found = (
        each[-1].astype(int) for each in (run_on(ReferenceDevice(), model, inputs)[1], lowered(model, inputs))
    )
    assert np.abs(wanted - found).max() <= 1
    return float((wanted != found).mean())


@pytest.mark.parametrize("operation", [O.ADD, O.CONCATENATION, O.SUB], ids=name_of)
def test_most_halves_are_rounded_away_from_zero(operation: O) -> None:
    model, (x, *_) = model_of(operation, QUANTS[0])
    shares = [share_of_differences(model, [rng(i).integers(0, 256, x.shape).astype(np.uint8)]) for i in range(40)]
    assert np.mean(shares) < 0.12  # rounded to even, a quarter would differ


def test_differences_by_one_do_not_add_up_in_a_mobilenet_of_8_bits() -> None:
    model, (image,) = mobilenet(quantised=True, size=64)
    share_of_differences(model, [image])  # of the 1,000 results after 29 layers; by 1 at most
    codes = run_on(ReferenceDevice(), model, [image])[1][-1]
    assert np.ptp(codes) > 10  # so there is something to differ
