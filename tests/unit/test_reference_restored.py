"""Models of the reference device that are restored from a cache give what they gave."""

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
    ModelBuilder,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
)

T, O = OperandType, OperationType  # noqa: E741
RNG = np.random.default_rng(3)


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


def test_constant_that_an_operation_reads_twice_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as weights, of which it keeps an arrangement of its own, and once as values."""
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    b = ModelBuilder()
    bias = b.input("bias", T.TENSOR_FLOAT32, (160,))
    w = b.constant(RNG.normal(size=(160, 160)).astype(np.float32))
    b.output("y", b.operation(O.FULLY_CONNECTED, w, w, bias, b.scalar(0))[0])
    device, x = ReferenceDevice(), np.zeros(160, np.float32)
    with open(tmp_path / "model", "w+b") as model_file, open(tmp_path / "data", "w+b") as data_file:
        fds = (model_file.fileno(),), (data_file.fileno(),)
        prepared = device.prepare_model(b.build(), CompileJob(cache=CacheFiles(*fds, bytes(32))))
        restored = device.prepare_model_from_cache(CacheFiles(*fds, bytes(32)))
    assert run(restored, x, (160, 160))[0].tobytes() == run(prepared, x, (160, 160))[0].tobytes()
