"""The operation table as people see it: methods of the builder. Stub and page: test_docs.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nnburst import ModelBuilder
from nnburst.devices.reference.device import RUNS
from nnburst.errors import InvalidArgument
from nnburst.model.rows import OPERATIONS
from support.operations import F32, I32, Q8, O, outputs_of


def test_every_operation_of_the_table_runs() -> None:
    assert set(OPERATIONS) == RUNS


def test_every_operation_has_a_method() -> None:
    made = {O.IF: "branch", O.WHILE: "loop"}
    assert all(hasattr(ModelBuilder, made.get(operation, O(operation).name.lower())) for operation in RUNS)


X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda b, x: b.mean(x, [1, -1]), X.mean((1, 2))),
        (lambda b, x: b.mean(x, [1], keep=1), X.mean(1, keepdims=True)),
        (lambda b, x: b.reduce_max(x, [0], keep=True), X.max(0, keepdims=True)),
        (lambda b, x: b.gather(x, 1, [2, 0]), X[:, [2, 0]]),
        (lambda b, x: b.relu(b.neg(x)), np.zeros_like(X)),
        (lambda b, x: b.add(x, np.ones(4, np.float32), activation="relu6"), np.minimum(X + 1, 6)),
        (lambda b, x: b.transpose(x), X.transpose()),
        (lambda b, x: b.transpose(x, perm=[0, 2, 1]), X.transpose(0, 2, 1)),
        (lambda b, x: b.concatenation([x, x], 2), np.concatenate([X, X], 2)),
        (lambda b, x: b.l2_normalization(b.exp(b.mul(x, np.float32([0])))), np.full_like(X, 0.5)),
        (lambda b, x: b.elu(b.neg(x), alpha=0.5), 0.5 * np.expm1(-X)),
        (lambda b, x: b.pad(x, [[0, 0], [1, 0], [0, 2]]), np.pad(X, [(0, 0), (1, 0), (0, 2)])),
        (lambda b, x: b.pad_v2(x, [[0, 0], [1, 0], [0, 2]], 7), np.pad(X, [(0, 0), (1, 0), (0, 2)], constant_values=7)),
        (lambda b, x: b.strided_slice(x, [0, 0, 0], [2, 3, 4], [1, 2, 3]), X[:, ::2, ::3]),
        (lambda b, x: b.add(*b.split(x, 2, 2)), X[:, :, :2] + X[:, :, 2:]),
        (lambda b, x: b.cast(x, type=I32), X.astype(np.int32)),
        (lambda b, x: b.maximum(x, b.fill([2, 3, 4], 1.5)), np.maximum(X, 1.5)),
        (lambda b, x: b.cast(b.greater(x, np.float32([5]))), (X > 5)),
        (lambda b, x: b.max_pool_2d(b.expand_dims(x, 3), (1, 2), stride=(3, 2)), X[:, :1, 1::2, None]),
        (lambda b, x: b.max_pool_2d(b.expand_dims(x, 3), (2, 1), stride=1, padding=((1, 0), (0, 0))), X[..., None]),
        (
            lambda b, x: b.conv_2d(
                b.expand_dims(x, 1), np.ones((1, 2, 1, 1), "f4"), stride=(1, 2), dilation=(2, 1), layout="NCHW"
            ),
            (X[:, :1, ::2] + X[:, 2:, ::2])[:, None],
        ),
        (
            lambda b, x: b.depthwise_conv_2d(b.expand_dims(x, 1), np.ones((1, 1, 2, 1), "f4"), layout="NCHW"),
            (X[:, :, :-1] + X[:, :, 1:])[:, None],
        ),
    ],
)
def test_methods_take_what_people_write(make: Any, wanted: np.ndarray) -> None:
    (found,) = outputs_of(make, X)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_methods_of_halves_make_scalars_of_halves() -> None:
    (found,) = outputs_of(lambda b, x: b.elu(x, 0.25), -np.ones((2,), np.float16))
    np.testing.assert_allclose(found, 0.25 * np.expm1(-np.ones(2)), atol=0.01)


def test_methods_with_several_outputs() -> None:
    values, indices = outputs_of(lambda b, x: b.topk_v2(x, 2), X)
    assert values.shape == indices.shape == (2, 3, 2)
    u, i = 3, 2
    weights = {f"w_{g}": np.zeros((u, i), np.float32) for g in ("forget", "cell", "out")}
    weights |= {f"r_{g}": np.zeros((u, u), np.float32) for g in ("forget", "cell", "out")}
    weights |= {f"b_{g}": np.zeros(u, np.float32) for g in ("forget", "cell", "out")}
    state = np.ones((1, u), np.float32)
    found = outputs_of(
        lambda b, x: b.lstm(x, **weights, prev_out=state, prev_cell=state, activation=4), np.ones((1, i), np.float32)
    )
    np.testing.assert_allclose(found[2], 0.5 * state)


def test_wrong_calls_name_what_is_wrong() -> None:
    b = ModelBuilder()
    x = b.input("x", F32, (2, 3))
    with pytest.raises(TypeError, match=r"gather\(\) missing .* 'indices'"):
        b.gather(x, 0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"mean\(\) .*unexpected.* keepdims"):
        b.mean(x, [0], keepdims=True)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="axes"):
        b.mean(x, [5])
    with pytest.raises(InvalidArgument, match="relu6"):
        b.add(x, x, activation="gelu")
    q = b.input("q", Q8, (2,), scale=0.5)
    with pytest.raises(InvalidArgument, match="needs scale="):
        b.hard_swish(q)
