"""Ends of elementwise operations, reductions and normalisations; test_oracle_elements.py has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from nnburst.errors import ErrorStatus
from support.operations import B8, F16, F32, I32, QUANTS, Case, O, T, Typed, rng

Y = rng(2).uniform(-2, 2, (2, 3, 4, 5))


@pytest.mark.parametrize("operation", [O.ABS, O.NEG], ids=lambda o: o.name)
def test_integers_are_exact(operation: O) -> None:
    x = np.array([[-(2**24) - 1, 0, 2**30 + 1]])
    outputs, _, expected = Case(operation, Typed(x, I32)).run(F32, {O.ABS: np.abs, O.NEG: np.negative}[operation])
    assert outputs[0].dtype == np.int32
    np.testing.assert_array_equal(outputs[0], expected[0])


def test_comparison_of_different_quantisations() -> None:
    """0 … 255 in halves against bytes: 100 halves are 50."""
    from nnburst import ModelBuilder
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
    chosen = rng(6).integers(0, 2, Y.shape)
    Case(O.SELECT, Typed(chosen, B8), Y + 1, Y).check(lambda c, x, y: np.where(c, x, y))
    outputs, _, _ = Case(O.SELECT, Typed([1, 0], B8), Typed([5, 6], I32), Typed([7, 8], I32)).run(F32)
    assert outputs[0].tolist() == [5, 8]


CASTS = (F32, F16, I32, T.TENSOR_QUANT8_ASYMM)


@pytest.mark.parametrize("source", CASTS, ids=lambda t: t.name)
@pytest.mark.parametrize("target", CASTS, ids=lambda t: t.name)
def test_cast_drops_fractions_and_saturates(source: T, target: T) -> None:
    from nnburst import ModelBuilder
    from nnburst.model.operand_types import operand_info
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
