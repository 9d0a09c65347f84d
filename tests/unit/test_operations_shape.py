"""Operations of the reference device that move or look up elements; test_oracle_shapes.py has most of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nnburst import ModelBuilder
from nnburst.errors import ErrorStatus
from support.operations import B8, F16, F32, FLOATS, I32, Q8, REALS, Array, Case, Fx, O, T, Typed, rng, run_model

X = rng(1).uniform(-2, 2, (2, 3, 4, 5))


def test_pad_v2_of_quantised_data_takes_a_stored_value() -> None:
    outputs, _, _ = Case(O.PAD_V2, np.array([1.0, 2.0]), np.array([[1, 0]]), 9).run(Q8)
    assert outputs[0][0] == 9


@pytest.mark.parametrize("bad", [-1, 2])
def test_an_index_out_of_range_fails_the_execution(bad: int) -> None:
    b = ModelBuilder()
    x, i = b.input("x", F32, (2, 3)), b.input("i", I32, (2,))
    b.output("y", b.gather(x, b.scalar(0), i))
    status, _, _ = run_model(b.build(), [np.zeros((2, 3), np.float32), np.int32([0, bad])])
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
        b = ModelBuilder()
        b.output("y", b.fill(np.array([2, 3]), b.input("v", kind)))
        dtype = {T.FLOAT32: np.float32, T.FLOAT16: np.float16, T.INT32: np.int32}[kind]
        status, (found,), _ = run_model(b.build(), [dtype(value)])
        assert status is ErrorStatus.NONE
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
    from nnburst.devices.reference.kernels.fingerprint import fingerprint64

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

    for kind in (F32,):
        dense, _, _ = Case(O.LSH_PROJECTION, seeds, Typed(data, I32), weights, 2).run(kind)
        np.testing.assert_array_equal(dense[0], bits(weights).reshape(-1))
        plain = bits(np.ones(3)) @ [4, 2, 1]
        old, _, _ = Case(O.LSH_PROJECTION, seeds, Typed(data, I32), None, 1).run(kind)
        np.testing.assert_array_equal(old[0], plain)
        sparse, _, _ = Case(O.LSH_PROJECTION, seeds, Typed(data, I32), None, 3).run(kind)
        np.testing.assert_array_equal(sparse[0], plain + [0, 8])


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
    from nnburst.devices.reference.kernels.fingerprint import fingerprint64

    assert fingerprint64(bytes(range(length))) == fingerprint


def test_random_multinomial_draws_from_the_distribution() -> None:
    logits = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]))
    for kind in FLOATS:
        outputs, _, _ = Case(O.RANDOM_MULTINOMIAL, logits, 4000, np.array([7, 9])).run(kind)
        for row, wanted in zip(outputs[0], np.exp(logits), strict=True):
            np.testing.assert_allclose(np.bincount(row, minlength=3) / 4000, wanted, atol=0.04)
    again, _, _ = Case(O.RANDOM_MULTINOMIAL, logits, 50, np.array([7, 9])).run(F32)
    np.testing.assert_array_equal(again[0], Case(O.RANDOM_MULTINOMIAL, logits, 50, np.array([7, 9])).run(F32)[0][0])
