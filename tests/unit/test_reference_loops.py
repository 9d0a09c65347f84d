"""Programs of the reference device as loops in C; the oracle is NumPy, which runs the same program, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import ModelBuilder, OperandType
from nnburst._core._nnburst import lib
from nnburst.devices import ReferenceDevice
from nnburst.devices.reference import loops
from nnburst.devices.reference.call import store
from nnburst.devices.reference.program import Program
from nnburst.errors import ErrorStatus, MissedDeadline
from nnburst.memory import Memory
from nnburst.model import DataLocation, Model, Request, RequestArgument, operand_info

T = OperandType
F, I, Q, S = T.TENSOR_FLOAT32, T.TENSOR_INT32, T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED  # noqa: E741
RNG = np.random.default_rng(7)
SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 3e38, 1e-45, 0.5, 6, 7], np.float32)
Array = np.ndarray[Any, np.dtype[Any]]


def drawn(kind: OperandType, shape: tuple[int, ...]) -> Array:
    dtype = operand_info(kind).dtype
    assert dtype is not None
    if dtype.kind == "f":
        return RNG.choice(np.concatenate([SPECIAL, RNG.standard_normal(40).astype(np.float32)]), shape)
    bounds = np.iinfo(dtype)
    return RNG.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)


class Pool:
    """A model's program, its arguments in one memory."""

    def __init__(self, model: Model) -> None:
        main, place = model.main, 0
        self.memory, self.arrays, spots = Memory.ashmem(1 << 20), list[Array](), []
        for index in (*main.input_indexes, *main.output_indexes):
            operand = main.operands[index]
            dtype = operand_info(operand.type).dtype
            self.arrays.append(self.memory.array(dtype, operand.dimensions, place))
            spots.append(RequestArgument(location=DataLocation(0, place, self.arrays[-1].nbytes)))
            place += self.arrays[-1].nbytes + 64
        self.inputs, self.outputs = self.arrays[: len(main.input_indexes)], self.arrays[len(main.input_indexes) :]
        request = Request(tuple(spots[: len(self.inputs)]), tuple(spots[len(self.inputs) :]), (self.memory,))
        self.program = ReferenceDevice().prepare_model(model).plan(request).call
        assert isinstance(self.program, Program)

    def run(self, run: Callable[[], object], inputs: list[Array]) -> list[bytes]:
        for output in self.outputs:
            output[...] = 77
        for array, value in zip(self.inputs, inputs, strict=True):
            array[...] = value
        assert not run()
        return [output.tobytes() for output in self.outputs]

    def compare(self) -> None:
        in_c = self.program.c_kernel
        assert in_c is not None
        for _ in range(20):
            inputs = [
                drawn({np.dtype("f4"): F, np.dtype("i4"): I, np.dtype("u1"): Q}.get(a.dtype, S), a.shape)
                for a in self.inputs
            ]
            assert self.run(lambda: lib.nnb_kernel_run(in_c, 0), inputs) == self.run(self.program, inputs)


@pytest.fixture
def pool() -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(*arguments: Any) -> Pool:
        pools.append(Pool(*arguments))
        return pools[-1]

    yield make
    for made in pools:
        made.memory.close()


def model(function: Callable[[ModelBuilder, Callable[..., Any]], Any]) -> Model:
    b, names = ModelBuilder(), iter("abcdef")
    b.output("y", function(b, lambda kind, shape, **quant: b.input(next(names), kind, shape, **quant)))
    return b.build()


U = {"scale": 0.5, "zero_point": 3}
V = {"scale": 0.02, "zero_point": 200}
W = {"scale": 0.11, "zero_point": -4}
FLOAT_FILTER, FLOAT_BIAS = RNG.standard_normal((5, 9)).astype(np.float32), RNG.standard_normal(5).astype(np.float32)
CODES, INTS = RNG.integers(0, 255, (5, 9), np.uint8), RNG.integers(-99, 99, 5, np.int32)


def dense(b: ModelBuilder, x: Any) -> Any:
    kernel = b.constant(CODES, Q, scale=0.1, zero_point=100)
    bias = b.constant(INTS, I, scale=0.05, zero_point=0)
    return b.fully_connected(x, kernel, bias, scale=1.5, zero_point=20)


MODELS: dict[str, Callable[[ModelBuilder, Callable[..., Any]], Any]] = {
    "add": lambda b, x: b.add(x(F, (3, 7)), x(F, (3, 7))),
    "add one row to all": lambda b, x: b.add(x(F, (6, 3, 7)), x(F, (7,))),
    "add one column to all": lambda b, x: b.add(x(F, (5, 1)), x(F, (5, 7))),
    "subtract, RELU6": lambda b, x: b.sub(x(F, (40,)), x(F, (40,)), activation="relu6"),
    "multiply by a scalar": lambda b, x: b.mul(x(F, (33,)), x(F, (1,))),
    "divide": lambda b, x: b.div(x(F, (33,)), x(F, (33,))),
    "largest": lambda b, x: b.maximum(x(F, (33,)), x(F, (33,))),
    "relu": lambda b, x: b.relu(x(F, (67,))),
    "relu1": lambda b, x: b.relu1(x(F, (67,))),
    "exp": lambda b, x: b.exp(x(F, (67,))),
    "tanh of a root": lambda b, x: b.tanh(b.sqrt(x(F, (67,)))),
    "int32": lambda b, x: b.mul(b.add(x(I, (9,)), x(I, (9,))), x(I, (9,))),
    "dense": lambda b, x: b.relu(b.fully_connected(x(F, (1, 9)), FLOAT_FILTER, FLOAT_BIAS)),
    "dense, rows": lambda b, x: b.fully_connected(x(F, (4, 9)), FLOAT_FILTER, FLOAT_BIAS, activation="relu"),
    "codes added": lambda b, x: b.add(x(Q, (99,), **U), x(Q, (99,), **V), scale=0.3, zero_point=7),
    "codes multiplied, signed": lambda b, x: b.mul(x(S, (99,), **W), x(S, (99,), **W), scale=0.3, zero_point=-9),
    "codes, one row to all": lambda b, x: b.add(
        x(Q, (9, 11), **U), x(Q, (11,), **V), scale=0.3, zero_point=7, activation="relu"
    ),
    "tanh of codes": lambda b, x: b.tanh(x(Q, (99,), **U), scale=1 / 128, zero_point=128),
    "dense codes": lambda b, x: dense(b, x(Q, (3, 9), **U)),
    "more rows than at once": lambda b, x: b.add(x(Q, (5, 4000), **U), x(Q, (5, 4000), **V), scale=0.3, zero_point=7),
}


@pytest.mark.parametrize("name", MODELS)
def test_loops_compute_what_numpy_does(name: str, pool: Callable[..., Pool]) -> None:
    made = pool(model(MODELS[name]))
    if name == "more rows than at once":  # conversions of many elements are left to NumPy
        assert made.program.c_kernel is None
    else:
        made.compare()


def test_call_that_numpy_would_make_a_copy_for_is_no_loop() -> None:
    a = np.zeros(9, np.float32)
    assert loops.Loops.of([partial(np.add, a[1:], a[1:], a[1:])]) is not None
    assert loops.Loops.of([partial(np.add, a[:8], a[1:], a[1:])]) is None
    assert loops.Loops.of([partial(np.add, a, np.float64(1), a)]) is None
    assert loops.Loops.of([partial(np.add, a.view(">f4"), a, a)]) is None
    misaligned = np.zeros(37, np.uint8)[1:].view(np.float32)
    assert loops.Loops.of([partial(np.add, misaligned, a, a)]) is None


def test_code_that_is_not_a_number_is_stored_as_numpy_stores_it() -> None:
    real = np.array([np.nan, 1.9, -1.9, 255.0, -300.0, 2**31, -(2.0**31)])
    for dtype, zero_point in ((np.uint8, 3), (np.int8, -4), (np.uint16, 500), (np.int16, 0)):
        out, whole, wanted = np.zeros(7, dtype), np.zeros(7, np.int32), np.zeros(7, dtype)
        made = loops.Loops.of([partial(store, real, whole, zero_point, out)])
        assert made is not None
        assert lib.nnb_kernel_run(made.kernel, 0) == 0
        with np.errstate(all="ignore"):
            store(real, whole, zero_point, wanted)
        assert out.tobytes() == wanted.tobytes()


def test_what_is_no_loop_is_left_to_python(pool: Callable[..., Pool]) -> None:
    assert pool(model(lambda b, x: b.logistic(b.relu(x(F, (4,)))))).program.c_kernel is None
    assert pool(model(lambda b, x: b.relu(x(T.TENSOR_FLOAT16, (4,))))).program.c_kernel is None


def test_step_that_numpy_would_compute_in_another_type_is_left_to_python() -> None:
    single, double, whole = np.ones(3, np.float32), np.ones(3), np.ones(3, np.int32)
    steps = [
        partial(np.add, single, single, double),
        partial(np.add, single, 2.5, double),
        partial(np.exp, single, double),
        partial(np.power, whole, whole, whole),  # which may raise
        partial(np.copyto, single, np.ones(3, np.float32)),  # which keeps every bit
    ]
    assert [loops.Loops.of([step]) for step in steps] == [None] * 5
    assert loops.Loops.of([partial(np.add, single, np.ones(3), double)]) is not None


def test_ufunc_of_another_layout_is_left_to_python() -> None:
    class Ufunc:
        nin, nout, nargs, ntypes, types, __name__ = 2, 1, 3, 9, ["ff->f"], "add"

    with pytest.raises(loops._NoLoop):
        loops._inner.__wrapped__(Ufunc(), "ff->f")  # type: ignore[arg-type]


def test_run_ends_at_its_deadline_and_when_it_is_cancelled(pool: Callable[..., Pool]) -> None:
    made = pool(model(lambda b, x: b.relu(x(F, (4,)))))
    in_c = made.program.c_kernel
    assert lib.nnb_kernel_run(in_c, time.monotonic_ns() + 10**12) == 0
    assert lib.nnb_kernel_run(in_c, 1) == ErrorStatus.MISSED_DEADLINE_TRANSIENT
    made.program.cancel()
    assert lib.nnb_kernel_run(in_c, 0) == ErrorStatus.MISSED_DEADLINE_TRANSIENT
    with pytest.raises(MissedDeadline):
        made.program()


def test_program_that_is_cancelled_while_its_loops_are_made_never_runs(
    pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pool(model(lambda b, x: b.relu(x(F, (4,)))))
    of = loops.Loops.of

    def late(steps: Any) -> Any:
        done = of(steps)
        made.program.cancel()
        return done

    monkeypatch.setattr(loops.Loops, "of", late)
    assert lib.nnb_kernel_run(made.program.c_kernel, 0) == ErrorStatus.MISSED_DEADLINE_TRANSIENT


def test_loops_keep_the_arrays_of_a_program_that_is_cancelled(pool: Callable[..., Pool]) -> None:
    """Its steps, which held them, are gone, and the run may be under way."""
    made = pool(model(lambda b, x: b.relu(b.add(x(F, (4,)), x(F, (4,))))))
    assert made.program.c_kernel is not None
    steps = list(made.program._steps)
    made.program.cancel()
    assert made.program._loops is not None
    assert all(any(step is kept for kept in made.program._loops._kept) for step in steps)


def test_burst_runs_loops_with_what_its_inputs_hold() -> None:
    with (
        nnburst.in_process(devices=["nnburst-reference"]) as service,
        service.session(model(lambda b, x: b.add(x(F, (5,)), x(F, (5,))))) as session,
        session.bind() as execution,
    ):
        for i in range(20):
            execution.inputs["a"][:], execution.inputs["b"][:] = i, np.arange(5)
            execution.run()
            assert execution.outputs["y"].tolist() == [i, i + 1, i + 2, i + 3, i + 4]
