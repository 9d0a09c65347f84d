"""Constant folding of the reference device: computed once when it compiles, with the bits that a run would give."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnburst.devices import CacheFiles, CompileJob, ReferenceDevice, ReferencePreparedModel
from nnburst.errors import ErrorStatus
from nnburst.memory import Memory
from nnburst.model import (
    DataLocation,
    Model,
    ModelBuilder,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
    operation_name,
)

T, O = OperandType, OperationType  # noqa: E741
RNG = np.random.default_rng(3)
W = RNG.integers(-127, 128, (6, 8), np.int8)
SCALES = RNG.random(6).astype(np.float32)
X = RNG.normal(size=(2, 6)).astype(np.float32)


def dequantised(*, transposed: bool = True, as_output: bool = False) -> Model:
    """[2, 6] times weights that are stored as [6, 8] bytes, for use as [8, 6] floats."""
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (2, 6))
    w = b.dequantize(b.constant(W, channel_scales=SCALES))
    if as_output:
        b.output("w", w)
    if transposed:
        b.output("y", b.fully_connected(x, b.transpose(w, perm=np.array([1, 0], np.int32))))
    return b.build()


def names(prepared: ReferencePreparedModel) -> list[str]:
    return [operation_name(operation.type) for operation in prepared.model.main.operations]


def run(prepared: ReferencePreparedModel, x: np.ndarray[Any, Any], *shapes: tuple[int, ...]) -> list[Any]:
    with Memory.ashmem(1 << 18) as memory:
        memory.array(np.float32, x.shape)[...] = x
        places = [DataLocation(0, 1024 * (1 + i), 4 * math.prod(shape)) for i, shape in enumerate(shapes)]
        request = Request(
            (RequestArgument(False, DataLocation(0, 0, x.nbytes)),),
            tuple(RequestArgument(False, place) for place in places),
            (memory,),
        )
        status, _, _ = prepared.execute_synchronously(request)
        assert status is ErrorStatus.NONE
        return [memory.array(np.float32, s, p.offset).copy() for s, p in zip(shapes, places, strict=True)]


def test_chain_of_operations_on_constants_becomes_one_constant() -> None:
    prepared = ReferenceDevice().prepare_model(dequantised())
    assert names(prepared) == ["FULLY_CONNECTED"]
    assert not any(value.dtype == np.int8 for value in prepared.constants.values())
    real = W * SCALES[:, None].astype(np.float64)
    np.testing.assert_allclose(run(prepared, X, (2, 8))[0], X @ real, rtol=1e-4)


def test_folded_model_gives_what_the_operations_give() -> None:
    folded = ReferenceDevice().prepare_model(dequantised())
    plain = ReferencePreparedModel.compile(dequantised(), lower=False)
    assert names(plain) == ["DEQUANTIZE", "TRANSPOSE", "FULLY_CONNECTED"]
    x = np.eye(2, 6, dtype=np.float32)  # no sums: exact
    assert run(folded, x, (2, 8))[0].tobytes() == run(plain, x, (2, 8))[0].tobytes()


def test_output_of_the_model_is_written_in_every_run() -> None:
    prepared = ReferenceDevice().prepare_model(dequantised(as_output=True))
    assert names(prepared) == ["DEQUANTIZE", "TRANSPOSE", "FULLY_CONNECTED"]
    for _ in range(2):
        w, _ = run(prepared, X, (6, 8), (2, 8))
        np.testing.assert_allclose(w, W * SCALES[:, None], rtol=1e-6)


@pytest.mark.parametrize("folded", [False, True])
def test_constant_that_an_operation_reads_twice_is_restored(
    folded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once as weights, of which it keeps an arrangement of its own, and once as values."""
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    b = ModelBuilder()
    bias = b.input("bias", T.TENSOR_FLOAT32, (160,))
    w = b.constant(RNG.normal(size=(160, 160)).astype(np.float32))
    if folded:
        w = b.transpose(w, perm=np.array([1, 0], np.int32))
    b.output("y", b.operation(O.FULLY_CONNECTED, w, w, bias, b.scalar(0))[0])
    device, x = ReferenceDevice(), np.zeros(160, np.float32)
    with open(tmp_path / "model", "w+b") as model_file, open(tmp_path / "data", "w+b") as data_file:
        fds = (model_file.fileno(),), (data_file.fileno(),)
        prepared = device.prepare_model(b.build(), CompileJob(cache=CacheFiles(*fds, bytes(32))))
        restored = device.prepare_model_from_cache(CacheFiles(*fds, bytes(32)))
    assert run(restored, x, (160, 160))[0].tobytes() == run(prepared, x, (160, 160))[0].tobytes()


def test_what_would_grow_too_much_is_not_folded() -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (400, 400))
    grown = b.add(np.ones((400, 1), np.float32), np.ones((1, 400), np.float32))  # 3 KB become 640 KB
    b.output("y", b.mul(x, grown))
    assert names(ReferenceDevice().prepare_model(b.build())) == ["ADD", "MUL"]


def test_operation_that_fails_fails_when_it_is_run() -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (2,))
    w = b.constant(np.ones((2, 2), np.float32))
    wrong = b.operand(b.add_operand(T.TENSOR_FLOAT32, (3,)))  # what the operation gives has four
    b.add_operation(O.RESHAPE, (w, b.constant(np.array([4], np.int32))), (wrong,))
    y = b.relu(x)
    z = b.operand(b.add_operand(T.TENSOR_FLOAT32, (3,)))
    b.add_operation(O.RELU, (wrong,), (z,))
    b.output("y", y)
    b.output("z", z)
    prepared = ReferenceDevice().prepare_model(b.build())
    assert "RESHAPE" in names(prepared)
    with Memory.ashmem(64) as memory:
        one, two, three = (RequestArgument(False, DataLocation(0, 16 * i, 12 if i == 2 else 8)) for i in range(3))
        status, _, _ = prepared.execute_synchronously(Request((one,), (two, three), (memory,)))
        assert status is ErrorStatus.GENERAL_FAILURE


def test_hit_gives_the_folded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    device = ReferenceDevice()
    with open(tmp_path / "model", "w+b") as model_file, open(tmp_path / "data", "w+b") as data_file:
        fds = (model_file.fileno(),), (data_file.fileno(),)
        prepared = device.prepare_model(dequantised(), CompileJob(cache=CacheFiles(*fds, bytes(32))))
        assert prepared.cache_result is not None
        assert prepared.cache_result.saved
        restored = device.prepare_model_from_cache(CacheFiles(*fds, bytes(32)))
    assert names(restored) == ["FULLY_CONNECTED"]
    assert restored.transformations == prepared.transformations
    assert run(restored, X, (2, 8))[0].tobytes() == run(prepared, X, (2, 8))[0].tobytes()
