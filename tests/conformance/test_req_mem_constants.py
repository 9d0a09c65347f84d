"""REQ-MEM 056 … 062, 097: constants of a model, given as arrays or in memory that somebody else holds."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnburst
from nnburst import Memory, ModelBuilder, OperandType, OperationType, Service
from nnburst.errors import BadState, InvalidArgument
from nnburst.memory.kinds import PROT_READ
from nnburst.model.dimensions import combine_dimensions
from nnburst.model.types import Lifetime
from support.memory_kinds import KINDS

T, Op = OperandType, OperationType
ROWS, COLUMNS = 32, 64  # the bias travels inside the model
NBYTES = ROWS * COLUMNS * 4
WEIGHTS = (np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) % 7) - 3
X = np.linspace(-1, 1, COLUMNS, dtype=np.float32)[None]


def layer(builder: ModelBuilder, weights: int) -> Any:
    x = builder.input("x", T.TENSOR_FLOAT32, (1, COLUMNS))
    builder.output("y", builder.fully_connected(x, weights))
    return builder.build()


# ---- weights in a file --------------------------------------------------------------------------------------------


@pytest.mark.representative
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "direct"])
def test_REQ_MEM_058_060_weights_in_memory_of_every_kind(service: Service, kind: str) -> None:
    make, _ = KINDS[kind]
    with make(NBYTES + 100) as memory:
        memory.write(WEIGHTS, 100)
        b = ModelBuilder()
        model = layer(b, b.constant_from_memory(memory, WEIGHTS.shape, offset=100))
        (weights,) = (o for o in model.main.operands if o.dimensions == WEIGHTS.shape)
        assert weights.lifetime is Lifetime.CONSTANT_REFERENCE
        assert model.pools[weights.location.pool_index] is memory
        with service.session(model) as session:
            memory.write(np.zeros_like(WEIGHTS), 100)  # the device has its own by now
            np.testing.assert_allclose(session.run(None, {"x": X})[0], X @ WEIGHTS.T, rtol=1e-5, atol=1e-5)


def test_weights_in_a_read_only_file_are_never_read_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile(dir="/var/tmp") as file, nnburst.launch() as service:
        file.write(bytes(52) + WEIGHTS.tobytes())
        file.flush()
        with open(f"/proc/self/fd/{file.fileno()}", "rb") as read_only:
            memory = Memory.mmap_fd(read_only.fileno(), 52 + NBYTES, prot=PROT_READ)
        for name in ("_copy_out", "_map_for", "read", "array"):
            monkeypatch.setattr(Memory, name, lambda *a, **k: pytest.fail("the client touched the weights"))
        b = ModelBuilder()
        model = layer(b, b.constant_from_memory(memory, WEIGHTS.shape, np.float32, offset=52))
        prepared = service.devices[0].prepare_model(model)
        monkeypatch.undo()
        file.seek(0)
        file.truncate()
        memory.close()
        with Memory.ashmem(1024) as pool:
            pool.array(np.float32, X.shape)[...] = X
            region = nnburst.model.types.RequestArgument
            place = nnburst.model.types.DataLocation
            request = nnburst.model.Request(
                (region(False, place(0, 0, X.nbytes)),), (region(False, place(0, 512, ROWS * 4)),), (pool,)
            )
            assert prepared.execute_synchronously(request)[0] == 0
            np.testing.assert_allclose(pool.array(np.float32, (1, ROWS), 512), X @ WEIGHTS.T, rtol=1e-5, atol=1e-5)
        prepared.close()


def test_quantised_weights_in_memory(service: Service) -> None:
    stored = np.array([[10, 20, 30, 40]], np.int8)
    with Memory.ashmem(64) as memory:
        memory.write(stored, 3)
        b = ModelBuilder()
        x = b.input("x", T.TENSOR_QUANT8_ASYMM_SIGNED, (1, 4), scale=1.0, zero_point=0)
        with pytest.raises(InvalidArgument, match="scale"):
            b.constant_from_memory(memory, (1, 4), np.int8, offset=3)
        w = b.constant_from_memory(memory, (1, 4), np.int8, offset=3, scale=0.5)
        b.output("y", b.fully_connected(x, w, scale=1.0, zero_point=0))
        with service.session(b.build()) as session:
            (y,) = session.run(None, {"x": np.array([[1, 2, 1, 0]], np.int8)})
        assert y.tolist() == [[40]]


def test_per_channel_weights_in_memory() -> None:
    with Memory.ashmem(64) as memory:
        b = ModelBuilder()
        index = b.constant_from_memory(memory, (2, 1, 1, 3), np.int8, scale=0.0, channel_scales=[0.5, 0.25])
        assert index.type is T.TENSOR_QUANT8_SYMM_PER_CHANNEL


def test_shape_in_memory_is_looked_at_when_it_decides(service: Service) -> None:
    with Memory.ashmem(64) as memory:
        memory.write(np.array([4, 2], np.int32), 8)
        b = ModelBuilder()
        x = b.input("x", T.TENSOR_FLOAT32, (2, 4))
        b.output("y", b.reshape(x, b.constant_from_memory(memory, (2,), np.int32, offset=8)))
        with service.session(b.build()) as session:
            assert session.run(None, {"x": np.ones((2, 4), np.float32)})[0].shape == (4, 2)


@pytest.mark.parametrize(
    ("dimensions", "type", "offset"),
    [((4,), "<f4", 52), ((4,), "<f4", -1), ((4,), "<f4", 2**63), ((0,), "<f4", 0), ((), "<f4", 0), ((4,), "<f8x", 0)],
)
def test_REQ_MEM_058_regions_and_types_that_do_not_exist(dimensions: Any, type: str, offset: int) -> None:
    with Memory.ashmem(64) as memory, pytest.raises((InvalidArgument, TypeError)):
        ModelBuilder().constant_from_memory(memory, dimensions, type, offset=offset)


# ---- setting values -------------------------------------------------------------------------------------------------


def test_REQ_MEM_056_optional_operand_without_value() -> None:
    b = ModelBuilder()
    b.set_operand_value(b.add_operand(T.TENSOR_INT32, (2,)), None)


def small_model() -> tuple[ModelBuilder, int, int]:
    """y = x + w + no activation, with `w` and the activation still without value."""
    b = ModelBuilder()
    x, w, activation, y = (
        b.add_operand(T.TENSOR_FLOAT32, (2,)),
        b.add_operand(T.TENSOR_FLOAT32, (2,)),
        b.add_operand(T.INT32),
        b.add_operand(T.TENSOR_FLOAT32, (2,)),
    )
    b.add_operation(Op.ADD, [x, w, activation], [y])
    b.identify_inputs_and_outputs([x], [y])
    return b, w, activation


def test_REQ_MEM_057_set_operand_value() -> None:
    b, w, activation = small_model()
    for index in (-1, 4, 999):
        with pytest.raises(InvalidArgument):
            b.set_operand_value(index, np.zeros(2, np.float32))
    for wrong in (np.zeros(3, np.float32), np.zeros(2, np.float64), np.zeros((2, 1), np.float32)):
        with pytest.raises(InvalidArgument):
            b.set_operand_value(w, wrong)
    b.set_operand_value(w, np.ones(2, np.float32))
    b.set_operand_value(activation, np.array(0, np.int32))
    b.finish()
    with pytest.raises(BadState):
        b.set_operand_value(w, np.ones(2, np.float32))


def test_REQ_MEM_058_060_set_operand_value_from_memory() -> None:
    b, w, activation = small_model()
    for memory in (Memory.ashmem(20), Memory.hardware_buffer_blob(20)):
        with memory:
            for index, offset, length in (
                (-1, 0, 8),
                (4, 0, 8),
                (w, 0, 20),
                (w, 0, 4),
                (w, 20, 8),
                (w, 24, 8),
                (w, 16, 8),
                (w, -8, 8),
                (w, 2**64 - 4, 8),
            ):
                with pytest.raises(InvalidArgument):
                    b.set_operand_value_from_memory(index, memory, offset, length)
            b.set_operand_value_from_memory(w, memory, 12, 8)
    b.set_operand_value(activation, np.array(0, np.int32))
    with Memory.ashmem(20) as memory:
        b.set_operand_value_from_memory(w, memory, 0, 8)
        b.finish()
        with pytest.raises(BadState):
            b.set_operand_value_from_memory(w, memory, 0, 8)


@pytest.mark.parametrize("dimensions", [(), (0,), (2, 0)])
def test_REQ_MEM_061_constant_of_unknown_dimensions(dimensions: tuple[int, ...]) -> None:
    b = ModelBuilder()
    index = b.add_operand(T.TENSOR_FLOAT32, dimensions)
    with pytest.raises(InvalidArgument):
        b.set_operand_value(index, np.zeros(2, np.float32))
    with Memory.ashmem(64) as memory, pytest.raises(InvalidArgument):
        b.set_operand_value_from_memory(index, memory, 0, 8)


@pytest.mark.parametrize("dimensions", [(2**16, 2**16), (2**31, 2), (2**32,), (2**16, 0, 2**16)])
@pytest.mark.parametrize("type", [T.TENSOR_FLOAT32, T.TENSOR_INT32])
def test_REQ_MEM_062_097_dimensions_larger_than_a_tensor(type: OperandType, dimensions: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        ModelBuilder().add_operand(type, dimensions)


dims = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(dims, dims)
def test_REQ_MEM_096_combining_dimensions_is_commutative_and_loses_nothing(a: Any, b: Any) -> None:
    for pair in ((a, b), (b, a)):
        if a and b and (len(a) != len(b) or any(m and n and m != n for m, n in zip(a, b, strict=True))):
            with pytest.raises(InvalidArgument):
                combine_dimensions(*pair)
        elif not a or not b:
            assert combine_dimensions(*pair) == (a or b)
        else:
            assert combine_dimensions(*pair) == tuple(m or n for m, n in zip(a, b, strict=True))
