"""Elementwise operations, reductions and normalisations of the reference device against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nnburst.errors import ErrorStatus
from support.operations import B8, F16, F32, FLOATS, I32, QUANTS, REALS, Array, Case, Fx, O, T, Typed, rng

X = rng(1).uniform(0.2, 3, (2, 3, 4, 5))
Y = rng(2).uniform(-2, 2, (2, 3, 4, 5))
Z = rng(3).uniform(0.5, 2, (3, 1, 5))

UNARY: dict[O, tuple[Callable[[Array], Array], Array]] = {
    O.ABS: (np.abs, Y),
    O.EXP: (np.exp, Y),
    O.FLOOR: (np.floor, Y),
    O.LOG: (np.log, X),
    O.NEG: (np.negative, Y),
    O.RSQRT: (lambda x: x**-0.5, X),
    O.SIN: (np.sin, Y),
    O.SQRT: (np.sqrt, X),
}


@pytest.mark.parametrize("operation", UNARY, ids=lambda o: o.name)
def test_elementary_functions(operation: O) -> None:
    function, x = UNARY[operation]
    Case(operation, x).check(function, FLOATS)


@pytest.mark.parametrize("operation", [O.ABS, O.NEG], ids=lambda o: o.name)
def test_integers_are_exact(operation: O) -> None:
    x = np.array([[-(2**24) - 1, 0, 2**30 + 1]])
    outputs, _, expected = Case(operation, Typed(x, I32)).run(F32, UNARY[operation][0])
    assert outputs[0].dtype == np.int32
    np.testing.assert_array_equal(outputs[0], expected[0])


def test_activations_of_one_number() -> None:
    Case(O.HARD_SWISH, 3 * Y).check(lambda x: x * np.clip(x + 3, 0, 6) / 6)
    Case(O.ELU, Y, Fx(0.7)).check(lambda x, alpha: np.where(x >= 0, x, alpha * (np.exp(x) - 1)), FLOATS)


BINARY: dict[O, tuple[Callable[[Array, Array], Array], Any]] = {
    O.DIV: (np.divide, FLOATS),
    O.MAXIMUM: (np.maximum, REALS),
    O.MINIMUM: (np.minimum, REALS),
    O.POW: (np.power, FLOATS),
    O.PRELU: (lambda x, alpha: np.where(x > 0, x, alpha * x), REALS),
}


@pytest.mark.parametrize("operation", BINARY, ids=lambda o: o.name)
@pytest.mark.parametrize("swapped", [False, True])
def test_two_tensors_broadcast(operation: O, swapped: bool) -> None:
    function, kinds = BINARY[operation]
    a, b = (Z, X) if swapped else (X if operation == O.POW else Y, Z)
    more = (0,) if operation == O.DIV else ()
    Case(operation, a, b, *more).check(function, kinds)


def test_division_of_integers_rounds_down_and_by_zero_is_zero() -> None:
    a, b = np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2])
    outputs, _, _ = Case(O.DIV, Typed(a, I32), Typed(b, I32), 0).run(F32)
    assert outputs[0].tolist() == [3, -4, -4, 3]
    outputs, _, _ = Case(O.DIV, Typed(a, I32), Typed(b * 0, I32), 0).run(F32)
    assert outputs[0].tolist() == [0, 0, 0, 0]


COMPARISONS = {
    O.EQUAL: np.equal,
    O.GREATER: np.greater,
    O.GREATER_EQUAL: np.greater_equal,
    O.LESS: np.less,
    O.LESS_EQUAL: np.less_equal,
    O.NOT_EQUAL: np.not_equal,
}


@pytest.mark.parametrize("operation", COMPARISONS, ids=lambda o: o.name)
def test_comparisons_of_real_values(operation: O) -> None:
    a, b = rng(4).integers(0, 3, (3, 4)).astype(float), rng(5).integers(0, 3, 4).astype(float)
    for kind in REALS:
        outputs, _, expected = Case(operation, a, b).run(
            kind, COMPARISONS[operation], shared=True, quantisations=[(0, 0)]
        )
        np.testing.assert_array_equal(outputs[0], expected[0], err_msg=kind.name)
    for kind in (I32, B8):
        pair = (a.astype(int), b.astype(int))
        outputs, _, _ = Case(operation, *(Typed(v, kind) for v in pair)).run(F32)
        as_truth = [v != 0 if kind == B8 else v for v in pair]
        np.testing.assert_array_equal(outputs[0], COMPARISONS[operation](*as_truth))


def test_comparison_of_different_quantisations() -> None:
    """0 … 255 in halves against bytes: 100 halves are 50."""
    from nnburst.model import ModelBuilder
    from support.operations import Q8, run_model

    b = ModelBuilder()
    x = b.input("x", Q8, (3,), scale=0.5, zero_point=0)
    y = b.input("y", Q8, (3,), scale=1.0, zero_point=10)
    b.output("z", b.equal(x, y))
    status, (found,), _ = run_model(b.build(), [np.uint8([100, 100, 0]), np.uint8([60, 61, 10])])
    assert status is ErrorStatus.NONE
    assert found.tolist() == [1, 0, 1]


def test_logic_takes_every_byte_but_zero_for_true() -> None:
    a, b = np.array([[0, 0, 1, 255]]), np.array([[0, 2, 0, 3]])
    for operation, function in ((O.LOGICAL_AND, np.logical_and), (O.LOGICAL_OR, np.logical_or)):
        outputs, _, _ = Case(operation, Typed(a, B8), Typed(b, B8)).run(F32)
        np.testing.assert_array_equal(outputs[0], function(a, b))
    outputs, _, _ = Case(O.LOGICAL_NOT, Typed(a, B8)).run(F32)
    np.testing.assert_array_equal(outputs[0], a == 0)


def test_select() -> None:
    chosen = rng(6).integers(0, 2, X.shape)
    Case(O.SELECT, Typed(chosen, B8), X, Y).check(lambda c, x, y: np.where(c, x, y))
    outputs, _, _ = Case(O.SELECT, Typed([1, 0], B8), Typed([5, 6], I32), Typed([7, 8], I32)).run(F32)
    assert outputs[0].tolist() == [5, 8]


CASTS = (F32, F16, I32, T.TENSOR_QUANT8_ASYMM)


@pytest.mark.parametrize("source", CASTS, ids=lambda t: t.name)
@pytest.mark.parametrize("target", CASTS, ids=lambda t: t.name)
def test_cast_drops_fractions_and_saturates(source: T, target: T) -> None:
    from nnburst.model import ModelBuilder, operand_info
    from support.operations import run_model

    values = np.array([-300.7, -1.5, 0, 2.5, 254.9, 255, 300.7, 1000])
    info, into = operand_info(source), operand_info(target)
    x = np.clip(np.trunc(values), 0, 255) if source == T.TENSOR_QUANT8_ASYMM else values
    x = x.astype(info.dtype)
    b = ModelBuilder()
    quant = {"scale": 0.25, "zero_point": 3} if info.is_quantised else {}
    made = {"scale": 9.0, "zero_point": 7} if into.is_quantised else {}
    b.output("y", b.cast(b.input("x", source, x.shape, **quant), type=target, **made))
    _, (found,), _ = run_model(b.build(), [x])
    wanted = x.astype(np.float64)
    if into.dtype.kind != "f":
        wanted = np.trunc(wanted)
    if target == T.TENSOR_QUANT8_ASYMM:
        wanted = np.clip(wanted, 0, 255)
    np.testing.assert_array_equal(found, wanted.astype(into.dtype))


AXES = [[0], [1, -1], [0, 1, 2, 3], [-3, 1, 1]]
REDUCTIONS: dict[O, tuple[Any, Any]] = {
    O.MEAN: (np.mean, REALS),
    O.REDUCE_MAX: (np.max, REALS),
    O.REDUCE_MIN: (np.min, REALS),
    O.REDUCE_SUM: (np.sum, FLOATS),
    O.REDUCE_PROD: (np.prod, FLOATS),
}


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("operation", REDUCTIONS, ids=lambda o: o.name)
def test_reductions(operation: O, axes: list[int], keep: int) -> None:
    function, kinds = REDUCTIONS[operation]
    over = tuple({axis % 4 for axis in axes})
    x = rng(7).uniform(0.7, 1.4, (2, 3, 2, 2))

    def wanted(x: Array) -> Array:
        return np.atleast_1d(function(x, axis=over, keepdims=bool(keep)))

    Case(operation, x, np.array(axes), keep if operation == O.MEAN else bool(keep)).check(wanted, kinds)


def test_reductions_of_truth() -> None:
    x = np.array([[0, 1, 7], [1, 1, 255]])
    for operation, function in ((O.REDUCE_ALL, np.all), (O.REDUCE_ANY, np.any)):
        outputs, _, _ = Case(operation, Typed(x, B8), np.array([1]), False).run(F32)
        np.testing.assert_array_equal(outputs[0], function(x, 1))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_arguments_of_extremes_take_the_first(axis: int) -> None:
    x = rng(8).integers(0, 3, (4, 5, 6)).astype(float)
    for operation, function in ((O.ARGMAX, np.argmax), (O.ARGMIN, np.argmin)):
        Case(operation, x, axis).check(lambda x, f=function: f(x, axis), REALS, quantisations=[(0, 0)])
        Case(operation, x[0, 0], -1).check(lambda x, f=function: np.atleast_1d(f(x)), (F32,))


def test_topk_takes_the_last_of_equal_values_first() -> None:
    x = np.array([[1.0, 3, 2, 3], [5, 5, 5, 0]])
    outputs, _, _ = Case(O.TOPK_V2, x, 3).run(F32)
    assert outputs[0].tolist() == [[3, 3, 2], [5, 5, 5]]
    assert outputs[1].tolist() == [[3, 1, 2], [2, 1, 0]]
    for kind in QUANTS:
        stored, _, _ = Case(O.TOPK_V2, x, 3).run(kind)
        assert stored[1].tolist() == [[3, 1, 2], [2, 1, 0]]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_normalisations_along_an_axis(axis: int) -> None:
    x = rng(9).normal(size=(2, 5, 3, 4))

    def softmax(x: Array, beta: float) -> Array:
        e = np.exp(beta * x)
        return np.log(e / e.sum(axis, keepdims=True))

    Case(O.LOG_SOFTMAX, x, Fx(0.7), axis).check(softmax, FLOATS)
    Case(O.L2_NORMALIZATION, x, axis).check(lambda x: x / np.linalg.norm(x, axis=axis, keepdims=True))

    def response(x: Array, bias: float, alpha: float, beta: float) -> Array:
        moved = np.moveaxis(x, axis, -1)
        out = np.empty_like(moved)
        for i in range(moved.shape[-1]):
            window = moved[..., max(0, i - 1) : i + 2]
            out[..., i] = moved[..., i] / (bias + alpha * (window**2).sum(-1)) ** beta
        return np.moveaxis(out, -1, axis)

    Case(O.LOCAL_RESPONSE_NORMALIZATION, x, 1, Fx(2.0), Fx(0.5), Fx(0.75), axis).check(response, FLOATS)


def test_zeros_stay_zeros_when_normalised() -> None:
    _, values, _ = Case(O.L2_NORMALIZATION, np.array([[0.0, 0.0], [3.0, 4.0]])).run(F32)
    np.testing.assert_allclose(values[0], [[0, 0], [0.6, 0.8]], atol=1e-6)


@pytest.mark.parametrize("nchw", [False, True])
def test_instance_normalization(nchw: bool) -> None:
    x, over = rng(10).normal(size=(2, 3, 4, 5)), (2, 3) if nchw else (1, 2)

    def wanted(x: Array, gamma: float, beta: float, epsilon: float) -> Array:
        return gamma * (x - x.mean(over, keepdims=True)) / np.sqrt(x.var(over, keepdims=True) + epsilon) + beta

    Case(O.INSTANCE_NORMALIZATION, x, Fx(1.5), Fx(0.25), Fx(0.01), nchw).check(wanted, FLOATS)
