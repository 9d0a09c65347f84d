"""Kernels of the reference device beside random cases: rounding, tables, integers, large images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nnburst import Model, ModelBuilder, OperandType
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.errors import ErrorStatus, InvalidArgument
from nnburst.model.operand_types import operand_info
from support.operations import FLOATS, Q8, QUANTS, Array, T, encoded, rng
from support.samples import make_request, run


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


both_quants = pytest.mark.parametrize("kind", QUANTS, ids=["q8", "q8s"])


def test_conv_2d_large_enough_to_be_unfolded_in_pieces() -> None:
    x, w = rng(1).normal(size=(2, 90, 90, 8)).astype(np.float32), rng(2).normal(size=(2, 5, 5, 8)).astype(np.float32)
    b = ModelBuilder()
    b.output("y", b.conv_2d(b.input("x", T.TENSOR_FLOAT32, x.shape), w, padding="same"))
    (found,) = compute(b.build(), x)
    padded = np.pad(x.astype(np.float64), ((0, 0), (2, 2), (2, 2), (0, 0)))
    wanted = sum(padded[:, p : p + 90, q : q + 90] @ w[:, p, q].T for p in range(5) for q in range(5))
    np.testing.assert_allclose(found, wanted, atol=1e-4)


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


@both_quants
@pytest.mark.parametrize("source", FLOATS, ids=["f32", "f16"])
def test_quantize_rounds_half_away_from_zero_and_saturates(kind: OperandType, source: OperandType) -> None:
    shift = 0 if kind == Q8 else 128
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
    wanted = encoded(np.tanh(real), Q8, 1 / 128, 128), encoded(1 / (1 + np.exp(-real)), Q8, 1 / 256, 0)
    for found, expected in zip(compute(b.build(), x), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("target", FLOATS, ids=["f32", "f16"])
@pytest.mark.parametrize("kind", [*QUANTS, T.TENSOR_QUANT8_SYMM])
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
