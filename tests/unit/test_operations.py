"""Kernels of the reference device beside random cases (test_oracle_*): ends, rounding, tables, large images."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from nnburst import ModelBuilder, Operand, OperandType
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.reference.kernels.fingerprint import fingerprint64
from nnburst.errors import ErrorStatus, InvalidArgument
from nnburst.model.operand_types import operand_info
from nnburst.model.types import OperandDesc
from support.models import built
from support.operations import (
    B8,
    F16,
    F32,
    FLOATS,
    I32,
    Q8,
    QUANTS,
    REALS,
    Array,
    Case,
    Fx,
    O,
    T,
    Typed,
    encoded,
    outputs_of,
    rng,
    run_model,
)
from support.samples import make_request, run

X = rng(1).uniform(-2, 2, (2, 3, 4, 5))


def test_pad_v2_of_quantised_data_takes_a_stored_value() -> None:
    outputs, _, _ = Case(O.PAD_V2, np.array([1.0, 2.0]), np.array([[1, 0]]), 9).run(Q8)
    assert outputs[0][0] == 9


@pytest.mark.parametrize("bad", [-1, 2])
def test_an_index_out_of_range_fails_the_execution(bad: int) -> None:
    model = built([OperandDesc(F32, (2, 3)), OperandDesc(I32, (2,))], lambda b, x, i: b.gather(x, 0, i))
    status, _, _ = run_model(model, [np.zeros((2, 3), np.float32), np.int32([0, bad])])
    assert status is ErrorStatus.GENERAL_FAILURE
    outputs, _, _ = Case(O.EMBEDDING_LOOKUP, Typed([1, 0], I32), X).run(F32)
    assert outputs[0].shape == X.shape
    with pytest.raises(AssertionError):
        Case(O.EMBEDDING_LOOKUP, Typed([1, bad], I32), X).run(F32)


def test_a_dropped_axis_has_one_element_and_all_dropped_leave_one() -> None:
    x = np.arange(6.0)
    one = [np.array([v]) for v in (2, 3, 1)]
    Case(O.STRIDED_SLICE, x, *one, 0, 0, 1).check(lambda x: x[2:3])
    with pytest.raises(ValueError, match="axis 0 is dropped, but 2 elements"):
        Case(O.STRIDED_SLICE, x, np.array([2]), np.array([4]), np.array([1]), 0, 0, 1).run(F32)


def test_fill_and_rank() -> None:
    for value, kind in ((2.5, T.FLOAT32), (2.5, T.FLOAT16), (-7, T.INT32)):
        dtype = {T.FLOAT32: np.float32, T.FLOAT16: np.float16, T.INT32: np.int32}[kind]
        _, (found,), _ = run_model(built([OperandDesc(kind)], lambda b, v: b.fill([2, 3], v)), [dtype(value)])
        np.testing.assert_array_equal(found, np.full((2, 3), value, dtype))
    for kind in (F32, F16, B8, I32):
        outputs, _, _ = Case(O.RANK, Typed(np.zeros((2, 1, 3)), kind)).run(F32)
        assert outputs[0].shape == ()
        assert outputs[0] == 3


def test_resize_by_factors() -> None:
    x = rng(7).normal(size=(1, 2, 4, 1))
    for kind in REALS:
        outputs, _, _ = Case(O.RESIZE_BILINEAR, x, Fx(1.6), Fx(2.0)).run(kind)
        assert outputs[0].shape == (1, 4, 6, 1)  # floor(4 x 1.6)
        outputs, _, _ = Case(O.RESIZE_NEAREST_NEIGHBOR, x, Fx(0.5), Fx(0.5), False).run(kind)
        assert outputs[0].shape == (1, 1, 2, 1)


def test_lookups() -> None:
    rows = Typed([2, 0, 2], I32)
    Case(O.EMBEDDING_LOOKUP, rows, X.reshape(6, 4, 5)).check(lambda i, x: x[i])
    keys, lookups = Typed([10, 20, 30], I32), Typed([30, 11, 10, 40], I32)
    values = rng(8).uniform(1, 2, (3, 4))
    outputs, _, _ = Case(O.HASHTABLE_LOOKUP, lookups, keys, values).run(F32)
    np.testing.assert_array_equal(
        outputs[0], np.stack([values[2], 0 * values[0], values[0], 0 * values[0]]).astype(np.float32)
    )
    assert outputs[1].tolist() == [1, 0, 1, 0]
    outputs, _, _ = Case(O.HASHTABLE_LOOKUP, lookups, keys, values - 1.5).run(Q8)
    assert outputs[0][1].tolist() == [0] * 4  # zero bytes, not the zero point


def test_lsh_projection_collects_signs_of_hashes() -> None:
    seeds = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    data = np.array([[1, 2], [3, 4], [5, 6]])
    weights = np.array([0.5, -1.0, 2.0])

    def bits(weights: Array) -> Array:
        out = np.zeros((2, 3), int)
        for f, k in itertools.product(range(2), range(3)):
            total = 0.0
            for weight, row in zip(weights, data, strict=True):
                number = fingerprint64(np.float32(seeds[f, k]).tobytes() + row.astype(np.int32).tobytes())
                total += weight * float(number - 2**64 if number >= 2**63 else number)
            out[f, k] = total > 0
        return out

    plain = bits(np.ones(3)) @ [4, 2, 1]
    for given, form, wanted in ((weights, 2, bits(weights).reshape(-1)), (None, 1, plain), (None, 3, plain + [0, 8])):
        found, _, _ = Case(O.LSH_PROJECTION, seeds, Typed(data, I32), given, form).run(F32)
        np.testing.assert_array_equal(found[0], wanted)


@pytest.mark.parametrize(
    ("length", "fingerprint"),
    [
        (0, 0x9AE16A3B2F90404F),
        (3, 0x94A13D22E9EBA49A),
        (6, 0x92FDBCD8E94A2333),
        (12, 0x9FD5DF33AEFC3D7D),
        (20, 0x8DD7E7F1BF16A0E9),
        (40, 0x08F45B937B49468C),
        (64, 0xF58504BB53DECC4B),
        (65, 0xC6A3282C3E793DBE),
        (128, 0x1C484C95F0EA5DD3),
        (129, 0xCE8BA3741121083E),
        (200, 0x074C7FCC26D66FB3),
    ],
)
def test_fingerprints_are_those_of_farmhash(length: int, fingerprint: int) -> None:
    assert fingerprint64(bytes(range(length))) == fingerprint


def test_random_multinomial_draws_from_the_distribution() -> None:
    logits = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]))
    for kind in FLOATS:
        outputs, _, _ = Case(O.RANDOM_MULTINOMIAL, logits, 4000, np.array([7, 9])).run(kind)
        for row, wanted in zip(outputs[0], np.exp(logits), strict=True):
            np.testing.assert_allclose(np.bincount(row, minlength=3) / 4000, wanted, atol=0.04)
    again, _, _ = Case(O.RANDOM_MULTINOMIAL, logits, 50, np.array([7, 9])).run(F32)
    np.testing.assert_array_equal(again[0], Case(O.RANDOM_MULTINOMIAL, logits, 50, np.array([7, 9])).run(F32)[0][0])


# ---- elementwise operations, reductions and normalisations ---------------------------------------------------------


Y = rng(2).uniform(-2, 2, (2, 3, 4, 5))


@pytest.mark.parametrize("operation", [O.ABS, O.NEG], ids=lambda o: o.name)
def test_integers_are_exact(operation: O) -> None:
    x = np.array([[-(2**24) - 1, 0, 2**30 + 1]])
    outputs, _, expected = Case(operation, Typed(x, I32)).run(F32, {O.ABS: np.abs, O.NEG: np.negative}[operation])
    assert outputs[0].dtype == np.int32
    np.testing.assert_array_equal(outputs[0], expected[0])


def test_comparison_of_different_quantisations() -> None:
    """0 … 255 in halves against bytes: 100 halves are 50."""
    halves, whole = OperandDesc(Q8, (3,), scale=0.5), OperandDesc(Q8, (3,), scale=1.0, zero_point=10)
    model = built([halves, whole], lambda b, x, y: b.equal(x, y))
    _, (found,), _ = run_model(model, [np.uint8([100, 100, 0]), np.uint8([60, 61, 10])])
    assert found.tolist() == [1, 0, 1]


def test_logic_takes_every_byte_but_zero_for_true() -> None:
    a, b = np.array([[0, 0, 1, 255]]), np.array([[0, 2, 0, 3]])
    for operation, function in ((O.LOGICAL_AND, np.logical_and), (O.LOGICAL_OR, np.logical_or)):
        outputs, _, _ = Case(operation, Typed(a, B8), Typed(b, B8)).run(F32)
        np.testing.assert_array_equal(outputs[0], function(a, b))
    outputs, _, _ = Case(O.LOGICAL_NOT, Typed(a, B8)).run(F32)
    np.testing.assert_array_equal(outputs[0], a == 0)


def test_select() -> None:
    chosen = rng(6).integers(0, 2, Y.shape)
    Case(O.SELECT, Typed(chosen, B8), Y + 1, Y).check(lambda c, x, y: np.where(c, x, y))
    outputs, _, _ = Case(O.SELECT, Typed([1, 0], B8), Typed([5, 6], I32), Typed([7, 8], I32)).run(F32)
    assert outputs[0].tolist() == [5, 8]


CASTS = (F32, F16, I32, T.TENSOR_QUANT8_ASYMM)


@pytest.mark.parametrize("source", CASTS, ids=lambda t: t.name)
@pytest.mark.parametrize("target", CASTS, ids=lambda t: t.name)
def test_cast_drops_fractions_and_saturates(source: T, target: T) -> None:
    values = np.array([-300.7, -1.5, 0, 2.5, 254.9, 255, 300.7, 1000])
    info, into = operand_info(source), operand_info(target)
    x = np.clip(np.trunc(values), 0, 255) if source == T.TENSOR_QUANT8_ASYMM else values
    x = x.astype(info.dtype)
    quant = {"scale": 0.25, "zero_point": 3} if info.is_quantised else {}
    made = {"scale": 9.0, "zero_point": 7} if into.is_quantised else {}
    (found,) = outputs_of(lambda b, x: b.cast(x, type=target, **made), x, **quant)
    wanted = x.astype(np.float64)
    if into.dtype.kind != "f":
        wanted = np.trunc(wanted)
    if target == T.TENSOR_QUANT8_ASYMM:
        wanted = np.clip(wanted, 0, 255)
    np.testing.assert_array_equal(found, wanted.astype(into.dtype))


def test_reductions_of_truth() -> None:
    x = np.array([[0, 1, 7], [1, 1, 255]])
    for operation, function in ((O.REDUCE_ALL, np.all), (O.REDUCE_ANY, np.any)):
        outputs, _, _ = Case(operation, Typed(x, B8), np.array([1]), False).run(F32)
        np.testing.assert_array_equal(outputs[0], function(x, 1))


def test_topk_takes_the_last_of_equal_values_first() -> None:
    x = np.array([[1.0, 3, 2, 3], [5, 5, 5, 0]])
    outputs, _, _ = Case(O.TOPK_V2, x, 3).run(F32)
    assert outputs[0].tolist() == [[3, 3, 2], [5, 5, 5]]
    assert outputs[1].tolist() == [[3, 1, 2], [2, 1, 0]]
    for kind in QUANTS:
        stored, _, _ = Case(O.TOPK_V2, x, 3).run(kind)
        assert stored[1].tolist() == [[3, 1, 2], [2, 1, 0]]


def test_zeros_stay_zeros_when_normalised() -> None:
    _, values, _ = Case(O.L2_NORMALIZATION, np.array([[0.0, 0.0], [3.0, 4.0]])).run(F32)
    np.testing.assert_allclose(values[0], [[0, 0], [0.6, 0.8]], atol=1e-6)


# ---- rounding, tables, integers, large images ----------------------------------------------------------------------


def compute(make: Callable[..., Any], *inputs: Array, kinds: Sequence[T] = (F32,), **quantisation: Any) -> list[Array]:
    """Run what `make` makes of a builder and of inputs synchronously and as a plan; both agree to the bit."""
    descs = [OperandDesc(kind, x.shape, **quantisation) for kind, x in zip(kinds, inputs, strict=True)]
    model = built(descs, make)
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
    (found,) = compute(lambda b, x: b.conv_2d(x, w, padding="same"), x)
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
    (found,) = compute(lambda b, x: b.sub(x, np.int32([5, -7])), np.int32([1, 2**31 - 1]), kinds=[I32])
    assert found.tolist() == [-4, -(2**31) + 6]


@both_quants
@pytest.mark.parametrize("source", FLOATS, ids=["f32", "f16"])
def test_quantize_rounds_half_away_from_zero_and_saturates(kind: OperandType, source: OperandType) -> None:
    shift = 0 if kind == Q8 else 128
    x = np.array([-1e4, -1.25, -0.75, -0.25, 0, 0.25, 0.75, 1.25, 1e4], operand_info(source).dtype)
    (found,) = compute(lambda b, x: b.quantize(x, type=kind, scale=0.5, zero_point=128 - shift), x, kinds=[source])
    assert (found.astype(int) + shift).tolist() == [0, 125, 126, 127, 128, 129, 130, 131, 255]


def test_each_operation_of_a_model_has_a_table_of_its_own() -> None:
    x = np.arange(256).astype(np.uint8)
    both = compute(lambda b, x: (b.tanh(x), b.logistic(x)), x, kinds=[Q8], scale=1 / 32, zero_point=128)
    real = (x.astype(float) - 128) / 32
    wanted = encoded(np.tanh(real), Q8, 1 / 128, 128), encoded(1 / (1 + np.exp(-real)), Q8, 1 / 256, 0)
    for found, expected in zip(both, wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("target", FLOATS, ids=["f32", "f16"])
@pytest.mark.parametrize("kind", [*QUANTS, T.TENSOR_QUANT8_SYMM])
def test_dequantize(kind: OperandType, target: OperandType) -> None:
    x = np.arange(256).astype(np.uint8).view(operand_info(kind).dtype)
    zero_point = 0 if kind == T.TENSOR_QUANT8_SYMM else 5
    (found,) = compute(lambda b, x: b.dequantize(x, type=target), x, kinds=[kind], scale=0.5, zero_point=zero_point)
    np.testing.assert_array_equal(found, (x.astype(float) - zero_point) * 0.5)


def test_dequantize_per_channel() -> None:
    x = np.array([[1, -2, 3], [-4, 5, 127]], np.int8)

    def plus(b: ModelBuilder, y: Operand) -> Operand:
        return b.add(b.dequantize(b.constant(x, channel_scales=[0.5, 0.25, 2.0], channel_dim=1)), y)

    (found,) = compute(plus, np.zeros((2, 3), np.float32))
    np.testing.assert_array_equal(found, x * np.array([0.5, 0.25, 2.0]))
