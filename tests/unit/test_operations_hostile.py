"""Operations drawn at random, with numbers that make no sense: an answer or a status, never an exception or a hang."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import ModelBuilder
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument
from nnburst.model.operand_types import OPERANDS
from nnburst.model.rows import OPERATIONS
from nnburst.model.signature import Param, types_of
from nnburst.model.types import OperandDesc
from support.models import built
from support.operations import Array, O, T, rng, run_model

SENSIBLE, HOSTILE = [0, 1, 1, 2, 2, 3], [-(2**31), -1, 0, 1, 4, 7, 65536, 2**31 - 1]
REALS = [0.0, 1.0, -1.0, 0.5, 2.0, 1e30, np.inf, np.nan, 1e-30]
KINDS = [o for o in OPERATIONS if o not in (O.IF, O.WHILE)]


class Draw:
    """A random use of an operation."""

    def __init__(self, seed: int, operation: int) -> None:
        self.rng = rng(seed)
        self.operation = O(operation)
        self.row: Any = OPERATIONS[operation]
        self.data_type = self.one(list(self.row.types))
        self.builder = ModelBuilder()
        self.inputs: list[Array] = []
        self.last: tuple[int, ...] = (2, 2)

    def one(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def model(self) -> Any:
        operands = [index for param in self.one(self.row.forms) for index in self.arguments(param)]
        outputs = []
        for param in self.row.outputs[-1]:
            kind = types_of(param.kinds[0][0], self.data_type)[0]
            scale = 1.0 if param.name == "hits" else 0.125 if OPERANDS[kind].is_quantised else 0.0
            outputs.append(self.builder.add_operand(kind, (), scale=scale))
        self.builder.add_operation(self.operation, operands, outputs)
        for which, index in enumerate(outputs):
            self.builder.output(f"y{which}", index)
        return self.builder.build()

    def arguments(self, param: Param) -> list[int]:
        kind = self.one(types_of(self.one(param.kinds)[0], self.data_type))
        if param.may_be_omitted and self.rng.random() < 0.5:
            return [self.builder.omitted(kind)]
        make = self.scalar if OPERANDS[kind].is_scalar else self.tensor
        return [make(kind, param.name) for _ in range(self.one([1, 2, 3]) if param.variadic else 1)]

    def scalar(self, kind: T, name: str) -> int:
        if OPERANDS[kind].is_float:
            return self.builder.scalar(self.one(REALS), kind)
        number = self.one(HOSTILE if self.rng.random() < 0.4 else SENSIBLE)
        return self.builder.scalar(bool(number) if kind == T.BOOL else number, kind)

    def tensor(self, kind: T, name: str) -> int:
        dims = tuple(self.one([1, 1, 2, 2, 3, 4, 8]) for _ in range(self.one([1, 2, 3, 4, 4])))
        dims = self.last = self.last if self.rng.random() < 0.4 else dims
        info = OPERANDS[kind]
        if info.is_float:
            value = self.rng.normal(size=dims).astype(info.dtype)
        elif kind == T.TENSOR_INT32:
            value = self.rng.choice(HOSTILE if self.rng.random() < 0.4 else SENSIBLE, dims).astype(np.int32)
        else:
            bounds = np.iinfo(info.dtype)
            value = self.rng.integers(bounds.min, bounds.max, dims, endpoint=True).astype(info.dtype)
        if kind == T.TENSOR_QUANT8_SYMM_PER_CHANNEL:
            return self.builder.constant(value, channel_scales=np.ones(dims[0]))
        quant = {"scale": 0.125} if info.is_quantised else {}
        if name == "bias" and OPERANDS[self.data_type].is_quantised:
            return self.builder.constant(value, kind, scale=0.015625)
        if self.rng.random() < 0.5:
            return self.builder.constant(value, kind, **quant)  # type: ignore[arg-type]
        self.inputs.append(value)
        return self.builder.input(f"x{len(self.inputs)}", kind, dims, **quant)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("operation", KINDS, ids=lambda o: O(o).name)
def test_random_uses_end_with_a_status(operation: int) -> None:
    statuses = []
    for seed in range(25):
        draw = Draw(seed * 1000 + operation, operation)
        try:
            model = draw.model()
        except InvalidArgument:
            continue
        status, _, _ = run_model(model, draw.inputs)
        statuses.append(status)
    assert all(status in tuple(ErrorStatus) for status in statuses)
    assert ErrorStatus.INVALID_ARGUMENT not in statuses  # the request itself is right


@pytest.mark.parametrize("operation", [O.RESIZE_BILINEAR, O.RESIZE_NEAREST_NEIGHBOR], ids=lambda o: o.name)
@pytest.mark.parametrize("wide", [False, True])
def test_what_lies_between_image_and_result_is_no_larger_than_both(operation: O, wide: bool) -> None:
    """A column that becomes a row: rows times columns of the two would be 64 million elements."""
    long = 8192
    x = np.arange(long, dtype=np.float32).reshape((1, 1, long, 1) if wide else (1, long, 1, 1))
    desc, size = OperandDesc(T.TENSOR_FLOAT32, x.shape), (1, long) if wide else (long, 1)
    model = built([desc], lambda b, x: b.operation(operation, x, *map(b.scalar, (*size, False)))[0])
    run_model(model, [x])  # what devices import is not counted
    tracemalloc.start()
    try:
        status, (y,), _ = run_model(model, [x])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert status is ErrorStatus.NONE
    assert y.shape == (x.shape[0], x.shape[2], x.shape[1], 1)
    assert (y == 0).all()
    assert peak < 64 * x.nbytes


@pytest.mark.parametrize("late", [False, True])
def test_what_fails_while_it_runs_is_named(late: bool) -> None:
    """Also behind an operation that is bound anew in every run."""
    b = ModelBuilder()
    x, indices = b.input("x", T.TENSOR_FLOAT32, (3,)), b.input("i", T.TENSOR_INT32, (2,))
    shape = b.input("shape", T.TENSOR_INT32, (1,)) if late else b.constant(np.int32([3]))
    y = b.operand(b.add_operand(T.TENSOR_FLOAT32, (3,)))
    b.add_operation(O.RESHAPE, [b.neg(x), shape], [y])
    b.output("y", b.gather(y, 0, indices))
    inputs = {"x": np.zeros(3, np.float32), "i": np.int32([0, 7])} | ({"shape": np.int32([3])} if late else {})
    with nnburst.in_process() as service, service.session(b.build()) as session:
        with pytest.raises(GeneralFailure, match=r"operation 2 \(GATHER\).*(an index is not in 0 … 2|idx=7)"):
            session.run(None, inputs)
