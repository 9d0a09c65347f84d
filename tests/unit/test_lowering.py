"""Operations of NNAPI lowered to ONNX: what is refused, what becomes of extremes, and which models get there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nnburst import GeneralFailure, Model, ModelBuilder, OperandType, OperationType
from nnburst.devices import Device
from nnburst.devices.common import device_of
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus
from nnburst.model.operand import Output
from support.operations import check_lowered, lowering_device, run_model, run_on

pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")

from nnburst.devices.onnxruntime import lowering
from nnburst.devices.onnxruntime.library import onnx
from nnburst.devices.onnxruntime.lowering import Lowering
from nnburst.devices.onnxruntime.operations import LOWERED
from nnburst.nnapi import Compilation

T, O = OperandType, OperationType  # noqa: E741 - short, for tables
F32 = T.TENSOR_FLOAT32
Array = np.ndarray[Any, np.dtype[Any]]

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


def agrees(operation: O, *arguments: Any, kind: T = F32, outputs: list[Output] | None = None) -> None:
    model, inputs = one(operation, *arguments, kind=kind, outputs=outputs)
    with np.errstate(all="ignore"):
        status, found, _ = run_model(model, inputs)
        assert status is ErrorStatus.NONE
        assert check_lowered(model, inputs, status, found), Lowering(model, LOWERED).reasons


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
    device = lowering_device()
    assert device is not None
    np.testing.assert_array_equal(run_on(device, model, inputs)[1][0], wanted)  # to the bit, not within 1


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
    device = lowering_device()
    assert device is not None
    shapes = {"conv_2d": [(32, 1, 1, 64), (32, 3, 3, 64)], "depthwise_conv_2d": [(1, 3, 3, 64)]}
    for kind, each in {**shapes, "fully_connected": [(16, 64)]}.items():
        for shape, extreme, per_channel in itertools.product(each, (127, -127), (False, True)):
            if per_channel and kind == "fully_connected":
                continue
            model, inputs = products(kind, np.full(shape, extreme, np.int8), per_channel)
            status, (wanted,), _ = run_on(ReferenceDevice(), model, inputs)
            assert status is ErrorStatus.NONE
            assert 200 in wanted if extreme > 0 else 0 in wanted
            np.testing.assert_array_equal(run_on(device, model, inputs)[1][0], wanted)
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
    device = lowering_device()
    assert device is not None
    assert Lowering(model, LOWERED).graph()[1]
    _, outputs, _ = run_on(device, model, [np.zeros(size, np.float32) for size in sizes])
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
    with Compilation(network(16), [lowering]) as compilation:
        compilation.finish()
        assert compilation.report.steps[0].device == lowering.name
    with Compilation(network(16, sorts=True), [lowering]) as compilation:
        with pytest.raises(GeneralFailure, match="nnburst-onnxruntime lacks REDUCE_PROD"):
            compilation.finish()
