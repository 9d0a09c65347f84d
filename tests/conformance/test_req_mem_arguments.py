"""REQ-MEM 063 … 068, 073 … 076, 092, 093: what an execution accepts as arguments, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nnburst import Memory, Model, ModelBuilder, OperandType, OperationType, Service
from nnburst.errors import BadState, GeneralFailure, InvalidArgument, NNBurstError, OutputInsufficientSize
from nnburst.nnapi import Burst, Compilation, Event, Execution

T, Op = OperandType, OperationType
WAYS = ("compute", "start", "burst")
every_way = pytest.mark.parametrize("way", WAYS)
kinds = pytest.mark.parametrize("kind", ["input", "output"])
DTYPES = {T.TENSOR_FLOAT32: np.float32, T.TENSOR_FLOAT16: np.float16, T.TENSOR_QUANT8_ASYMM: np.uint8}


@pytest.fixture
def compile_(service: Service) -> Iterator[Callable[[Model], Compilation]]:
    made: list[Compilation] = []

    def compiled(model: Model) -> Compilation:
        made.append(Compilation(model, service))
        made[-1].finish()
        return made[-1]

    yield compiled
    while made:
        made.pop().close()


def add(shape: tuple[int, ...] = (2,), type: OperandType = T.TENSOR_FLOAT32) -> Model:
    """out = a + b; the output is as open as the inputs."""
    quantised = {"scale": 1.0, "zero_point": 0} if type is T.TENSOR_QUANT8_ASYMM else {}
    b = ModelBuilder()
    x, y = (b.input(name, type, shape, **quantised) for name in "ab")
    b.output("out", b.add(x, y, dimensions=shape, **quantised))
    return b.build()


def run(execution: Execution, way: str) -> None:
    if way == "compute":
        execution.compute()
    elif way == "start":
        execution.start_compute().wait()
    else:
        with Burst(execution.compilation) as burst:
            execution.burst_compute(burst)


def setter(execution: Execution, kind: str, memory: bool = False) -> Callable[..., None]:
    return getattr(execution, f"set_{kind}_from_memory" if memory else f"set_{kind}")  # type: ignore[no-any-return]


@kinds
def test_REQ_MEM_063_064_arrays(compile_: Any, kind: str) -> None:
    execution = Execution(compile_(add()))
    give, good = setter(execution, kind), np.zeros(2, np.float32)
    for index in (-1, 2, 999):
        with pytest.raises(InvalidArgument):
            give(index, good)
    for wrong in (np.zeros(5, np.float32), np.zeros(2, np.float64), np.zeros(0, np.float32), [0, 0], b"12345678"):
        with pytest.raises(InvalidArgument):
            give(0, wrong)
    for dimensions in ((3,), (2, 1), (-2,), (2**32,), (2**33,)):
        with pytest.raises(InvalidArgument):
            give(0, good, dimensions=dimensions)
    give(0, good, dimensions=(2,))
    with pytest.raises(BadState):
        give(0, good)
    with Memory.ashmem(64) as memory, pytest.raises(BadState):
        setter(execution, kind, memory=True)(0, memory, 0, 8)


@pytest.mark.representative
@kinds
@pytest.mark.parametrize("make", [Memory.ashmem, Memory.hardware_buffer_blob], ids=["ashmem", "blob"])
def test_REQ_MEM_065_066_067_068_memories(compile_: Any, kind: str, make: Callable[[int], Memory]) -> None:
    execution = Execution(compile_(add()))
    give = setter(execution, kind, memory=True)
    with make(20) as memory:
        for wrong in (None, np.zeros(2, np.float32), memory.fds[0]):
            with pytest.raises(InvalidArgument):
                give(0, wrong, 0, 8)
        for index, offset, length in (
            (-1, 0, 8),
            (999, 0, 8),
            (0, 0, 20),
            (0, 0, 4),
            (0, 0, 0),
            (0, 20, 8),
            (0, 24, 8),
            (0, 16, 8),
            (0, -8, 8),
            (0, 0, -8),
            (0, 2**64 - 4, 8),
        ):
            with pytest.raises(InvalidArgument):
                give(index, memory, offset, length)
        for dimensions in ((3,), (2, 1), (-2,), (2**32,)):
            with pytest.raises(InvalidArgument):
                give(0, memory, 0, 8, dimensions=dimensions)
        give(0, memory, 12, 8)
        with pytest.raises(BadState):
            give(0, memory, 0, 8)
        with pytest.raises(BadState):
            setter(execution, kind)(0, np.zeros(2, np.float32))


@kinds
def test_REQ_MEM_065_067_images_are_used_whole(compile_: Any, kind: str) -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_QUANT8_ASYMM, (1, 4, 4, 1), scale=1.0, zero_point=0)
    b.output("y", b.relu(x))
    execution = Execution(compile_(b.build()))
    values = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1)
    with Memory.hardware_buffer(4, 4, "GRAY8", pitch=64) as image, Memory.ashmem(16) as other:
        with pytest.raises(InvalidArgument):
            setter(execution, kind, memory=True)(0, image, 0, 16)
        setter(execution, kind, memory=True)(0, image)
        setter(execution, "output" if kind == "input" else "input", memory=True)(0, other, 0, 16)
        (image if kind == "input" else other).write(values)
        execution.compute()
        assert (other if kind == "input" else image).read(np.uint8, values.shape).tolist() == values.tolist()


def filled(compilation: Compilation, **options: Any) -> tuple[Execution, np.ndarray]:
    execution, out = Execution(compilation, **options), np.empty(2, np.float32)
    execution.set_input(0, np.array([1, 2], np.float32))
    execution.set_input(1, np.array([10, 20], np.float32))
    execution.set_output(0, out)
    return execution, out


@every_way
@pytest.mark.parametrize("reusable", [False, True])
def test_REQ_MEM_073_REQ_API_008_REQ_MODEL_079_execution_that_was_started(
    compile_: Any, way: str, reusable: bool
) -> None:
    execution, out = filled(compile_(add()), reusable=reusable)
    run(execution, way)
    assert out.tolist() == [11, 22]
    with Memory.ashmem(64) as memory:
        for kind in ("input", "output"):
            with pytest.raises(BadState, match="was started"):
                setter(execution, kind)(0, out)
            with pytest.raises(BadState, match="was started"):
                setter(execution, kind, memory=True)(0, memory, 0, 8)
    with pytest.raises(BadState, match="was started"):
        execution.set_timeout(1)
    with pytest.raises(BadState, match="was started"):
        execution.set_measure_timing(True)
    for again in WAYS:
        if reusable:
            out[:] = 0
            run(execution, again)
            assert out.tolist() == [11, 22]
        else:
            with pytest.raises(BadState):
                run(execution, again)


@every_way
def test_REQ_MEM_074_rank_and_dimensions_of_outputs(compile_: Any, way: str) -> None:
    execution, _ = filled(compile_(add()))
    for ask in (execution.get_output_dimensions, execution.get_output_rank):
        with pytest.raises(BadState):
            ask(0)
    event: Event | None = None
    if way == "start":
        event = execution.start_compute()
        event.wait()
    else:
        run(execution, way)
    for index in (-1, 1, 999):
        for ask in (execution.get_output_dimensions, execution.get_output_rank):
            with pytest.raises(InvalidArgument):
                ask(index)
    assert execution.get_output_rank(0) == 1
    assert execution.get_output_dimensions(0) == (2,)


@kinds
@pytest.mark.parametrize("dimensions", [(2**16, 2**16), (2**31, 2), (2**32 - 1, 2**32 - 1)])
def test_REQ_MEM_075_dimensions_larger_than_a_tensor(compile_: Any, kind: str, dimensions: tuple[int, ...]) -> None:
    execution = Execution(compile_(add((0, 0))))
    with pytest.raises(InvalidArgument):
        setter(execution, kind)(0, np.zeros((1, 1), np.float32), dimensions=dimensions)
    with Memory.ashmem(64) as memory, pytest.raises(InvalidArgument):
        setter(execution, kind, memory=True)(0, memory, 0, 64, dimensions=dimensions)


@every_way
def test_REQ_MEM_076_deduced_output_larger_than_a_tensor(compile_: Any, way: str) -> None:
    """A column and a row of 65,536 each would make 16 GiB."""
    b = ModelBuilder()
    x, y = (b.input(name, T.TENSOR_FLOAT32, (0, 0)) for name in "ab")
    b.output("out", b.add(x, y, dimensions=(0, 0)))
    execution, side = Execution(compile_(b.build())), 2**16
    execution.set_input(0, np.zeros((side, 1), np.float32))
    execution.set_input(1, np.zeros((1, side), np.float32))
    execution.set_output(0, np.zeros((1, 4), np.float32))
    with pytest.raises(NNBurstError):
        run(execution, way)


# ---- unspecified dimensions: every combination ----------------------------------------------------------------------

FULL, OPEN_DIM, OPEN_RANK = (2, 2), (2, 0), ()


@pytest.mark.parametrize("memory", [False, True], ids=["array", "memory"])
@pytest.mark.parametrize("size", ["less", "equal", "more"])
@pytest.mark.parametrize("type_of_output", [FULL, OPEN_DIM, None])
@pytest.mark.parametrize("model_shape", [FULL, OPEN_DIM, OPEN_RANK])
@pytest.mark.parametrize("type", list(DTYPES), ids=lambda t: t.name)
def test_REQ_MEM_092_unspecified_outputs(
    compile_: Any, type: OperandType, model_shape: Any, type_of_output: Any, size: str, memory: bool
) -> None:
    """All dimensions known: exactly the size. Else any size is accepted, and too small is told with the shape."""
    element = np.dtype(DTYPES[type])
    count = {"less": 2, "equal": 4, "more": 6}[size]
    way = WAYS[(int(type) + count // 2 + memory) % 3]
    known = model_shape == FULL or type_of_output == FULL
    execution, out = Execution(compile_(add(model_shape, type))), np.zeros(count, element)
    for i in (0, 1):
        execution.set_input(i, np.array([[1, 2], [3, 4]], element), dimensions=FULL)
    given = {} if type_of_output is None else {"dimensions": type_of_output}
    with Memory.ashmem(64) as pool:

        def give() -> None:
            if memory:
                execution.set_output_from_memory(0, pool, 16, out.nbytes, **given)
            else:
                execution.set_output(0, out, **given)

        if known and size != "equal":
            with pytest.raises(InvalidArgument):
                give()
            return
        give()
        if size == "less":
            with pytest.raises(OutputInsufficientSize) as error:
                run(execution, way)
            assert error.value.output_shapes[0].dimensions == FULL
            with pytest.raises(OutputInsufficientSize):
                execution.get_output_dimensions(0)
            return
        run(execution, way)
        assert execution.get_output_dimensions(0) == FULL
        found = pool.read(element, (count,), 16) if memory else out
        assert found[:4].tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("memory", [False, True], ids=["array", "memory"])
@pytest.mark.parametrize("model_shape", [FULL, OPEN_DIM, OPEN_RANK])
@pytest.mark.parametrize("given", [FULL, OPEN_DIM, OPEN_RANK, (2, 3), (2, 2, 1), (4,)])
def test_REQ_MEM_092_unspecified_inputs(compile_: Any, model_shape: Any, given: Any, memory: bool) -> None:
    """An input's dimensions are all known once it is set, and its size is exactly theirs."""
    execution = Execution(compile_(add(model_shape)))
    values = np.arange(4, dtype=np.float32).reshape(FULL)
    complete = bool(given) and 0 not in given
    fits = (
        (given == FULL if complete else model_shape == FULL)
        or (model_shape == FULL and given == OPEN_DIM)
        or (model_shape == OPEN_RANK and complete and np.prod(given) == 4)
    )
    with Memory.ashmem(64) as pool:

        def give() -> None:
            if memory:
                execution.set_input_from_memory(0, pool, 0, values.nbytes, dimensions=given)
            else:
                execution.set_input(0, values, dimensions=given)

        if fits:
            give()
        else:
            with pytest.raises(InvalidArgument):
                give()


@every_way
@pytest.mark.parametrize("type", list(DTYPES), ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("shape_of_a", "shape_of_b"), list(itertools.product([(0, 2), (2, 0), (0, 0), ()], repeat=2)), ids=str
)
def test_REQ_MEM_093_unknown_at_compile_time_known_at_run_time(
    compile_: Any, way: str, type: OperandType, shape_of_a: Any, shape_of_b: Any
) -> None:
    quantised = {"scale": 1.0, "zero_point": 0} if type is T.TENSOR_QUANT8_ASYMM else {}
    b = ModelBuilder()
    x, y = b.input("a", type, shape_of_a, **quantised), b.input("b", type, shape_of_b, **quantised)
    b.output("out", b.add(x, y, dimensions=(), **quantised))
    compilation, element = compile_(b.build()), DTYPES[type]
    good, wrong = np.array([[1, 2], [3, 4]], element), np.ones((2, 3), element)
    execution, out = Execution(compilation), np.empty(FULL, element)
    execution.set_input(0, good)
    execution.set_input(1, good)
    execution.set_output(0, out)
    run(execution, way)
    assert out.tolist() == [[2, 4], [6, 8]]
    other = Execution(compilation)
    other.set_input(0, good)
    if 2 in shape_of_b and shape_of_b[1] == 2:
        with pytest.raises(InvalidArgument):
            other.set_input(1, wrong)
        return
    other.set_input(1, wrong)
    other.set_output(0, out)
    with pytest.raises(GeneralFailure):
        run(other, way)


def test_REQ_MEM_093_constant_of_unknown_dimensions_makes_no_model() -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (2,))
    w = b.operand(b.add_operand(T.TENSOR_FLOAT32, (0,)))
    with pytest.raises(InvalidArgument):
        b.set_operand_value(w, np.zeros(2, np.float32))
    b.output("y", b.add(x, w, dimensions=(2,)))
    with pytest.raises(InvalidArgument):
        b.build()
