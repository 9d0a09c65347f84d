"""Models at random: valid ones, with branches and loops inside each other, and what is left of them after a change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import fields, replace

from nnburst import Model
from nnburst.model import Operation
from nnburst.model.operand_types import operand_info
from nnburst.model.types import DataLocation, Lifetime, OperandDesc, Subgraph
from support.mutations import MUTATIONS
from support.samples import Array, O, T

L = Lifetime
F32, I32, B8, Q8 = T.TENSOR_FLOAT32, T.TENSOR_INT32, T.TENSOR_BOOL8, T.TENSOR_QUANT8_ASYMM
UNARY = (O.ABS, O.EXP, O.FLOOR, O.LOGISTIC, O.NEG, O.RELU, O.RELU1, O.RELU6, O.SIN, O.TANH, O.HARD_SWISH)
FUSED = (O.ADD, O.SUB, O.MUL)
COMPARED = (O.EQUAL, O.GREATER, O.GREATER_EQUAL, O.LESS, O.LESS_EQUAL, O.NOT_EQUAL)
_SCALE, _ZERO = 0.0625, 120
_DEEPEST = 3


def typed(kind: int, dims: Sequence[int]) -> OperandDesc:
    """An operand of a type, with the only quantisation that these models have."""
    scale, zero = (_SCALE, _ZERO) if kind == Q8 else (0.0, 0)
    return OperandDesc(kind, tuple(dims), scale=scale, zero_point=zero)


class Draft:
    """A subgraph that is being drawn: its operands, and which of them have values."""

    def __init__(self, author: Author, inputs: Sequence[OperandDesc], depth: int) -> None:
        self.author, self.depth = author, depth
        self.operands = [replace(operand, lifetime=L.SUBGRAPH_INPUT) for operand in inputs]
        self.operations: list[Operation] = []
        self.inputs = tuple(range(len(inputs)))

    # -- operands ------------------------------------------------------------------------------------------------

    def constant(self, array: Any) -> int:
        value = np.asarray(array)
        tensor, scalar = {"f": (F32, T.FLOAT32), "i": (I32, T.INT32), "b": (B8, T.BOOL), "u": (Q8, Q8)}[
            value.dtype.kind
        ]
        kind = tensor if value.ndim else scalar
        dtype = operand_info(kind).dtype
        assert dtype is not None
        where = self.author.keep(value.astype(dtype))
        self.operands.append(replace(typed(kind, value.shape), lifetime=L.CONSTANT_COPY, location=where))
        return len(self.operands) - 1

    def reference(self, subgraph: Subgraph) -> int:
        number = self.author.refer(subgraph)
        self.operands.append(OperandDesc(T.SUBGRAPH, lifetime=L.SUBGRAPH, location=DataLocation(0, number)))
        return len(self.operands) - 1

    def add(self, operation: O, arguments: Sequence[Any], *outputs: OperandDesc) -> int:
        """Append an operation; what is no operand index is a constant."""
        indexes = tuple(a if type(a) is int else self.constant(a) for a in arguments)
        first = len(self.operands)
        self.operands += outputs
        self.operations.append(Operation(operation, indexes, tuple(range(first, first + len(outputs)))))
        return first

    def having(self, kind: int) -> list[int]:
        """Operands of a tensor type that have a value."""
        return [
            i
            for i, o in enumerate(self.operands)
            if o.type == kind and o.dimensions and o.lifetime in (L.SUBGRAPH_INPUT, L.TEMPORARY_VARIABLE)
        ]

    def finished(self, outputs: Sequence[int]) -> Subgraph:
        operands = list(self.operands)
        for index in outputs:
            operands[index] = replace(operands[index], lifetime=L.SUBGRAPH_OUTPUT)
        counts = [0] * len(operands)
        for index in (i for operation in self.operations for i in operation.inputs):
            counts[index] += 1
        counted = [replace(o, number_of_consumers=n) for o, n in zip(operands, counts, strict=True)]
        return Subgraph(tuple(counted), tuple(self.operations), self.inputs, tuple(outputs))

    # -- operations ----------------------------------------------------------------------------------------------

    def grow(self, steps: int) -> None:
        """Append some operations."""
        makers: list[Callable[[], object]] = [
            self.one, self.two, self.two, self.compared, self.moved, self.reduced, self.converted, self.multiplied
        ]  # fmt: skip
        if self.depth < _DEEPEST:
            makers += [self.branch, self.loop]
        for _ in range(steps):
            self.author.one(makers)()

    def real(self) -> int:
        return int(self.author.one(self.having(F32)))

    def dims(self, index: int) -> tuple[int, ...]:
        return self.operands[index].dimensions

    def one(self) -> int:
        x = self.real()
        return self.add(self.author.one(UNARY), [x], typed(F32, self.dims(x)))

    def two(self) -> int:
        x = self.real()
        others = [i for i in self.having(F32) if self.dims(i) == self.dims(x)]
        other: Any = self.author.one([*others, self.author.reals(self.dims(x)[-1:])])
        operation = self.author.one([*FUSED, O.MAXIMUM, O.MINIMUM])
        rest = [np.int32(self.author.upto(3, 0))] if operation in FUSED else []
        return self.add(operation, [x, other, *rest], typed(F32, self.dims(x)))

    def compared(self) -> int:
        x = self.real()
        truth = self.add(self.author.one(COMPARED), [x, self.author.reals((1,))], typed(B8, self.dims(x)))
        if self.author.truth():
            truth = self.add(O.LOGICAL_NOT, [truth], typed(B8, self.dims(x)))
        return self.add(O.SELECT, [truth, x, self.author.reals(self.dims(x))], typed(F32, self.dims(x)))

    def moved(self) -> int:
        x = self.real()
        dims, rank = self.dims(x), len(self.dims(x))
        which = self.author.upto(4)
        if which == 1:
            return self.add(O.TRANSPOSE, [x, np.arange(rank)[::-1].astype(np.int32)], typed(F32, dims[::-1]))
        if which == 2:
            return self.add(O.RESHAPE, [x, np.int32([-1])], typed(F32, (int(np.prod(dims)),)))
        if which == 3 and dims[0] <= 4:
            return self.add(O.CONCATENATION, [x, x, np.int32(0)], typed(F32, (2 * dims[0], *dims[1:])))
        begin, size = [n // 2 for n in dims], [-1] * rank
        left = tuple(n - n // 2 for n in dims)
        return self.add(O.SLICE, [x, np.int32(begin), np.int32(size)], typed(F32, left))

    def reduced(self) -> int:
        x = self.real()
        dims = self.dims(x)
        axis = self.author.upto(len(dims) - 1, 0)
        if self.author.truth():
            return self.add(O.SOFTMAX, [x, np.float32(1)], typed(F32, dims))
        kept = tuple(1 if i == axis else n for i, n in enumerate(dims))
        return self.add(O.MEAN, [x, np.int32([axis]), np.int32(1)], typed(F32, kept))

    def converted(self) -> int:
        x = self.real()
        dims = self.dims(x)
        through = self.author.one([I32, Q8])
        if through == I32:
            small = self.add(O.RELU6, [x], typed(F32, dims))
            return self.add(O.CAST, [self.add(O.CAST, [small], typed(I32, dims))], typed(F32, dims))
        codes = self.add(O.QUANTIZE, [x], typed(Q8, dims))
        if self.author.truth():
            codes = self.add(O.ADD, [codes, codes, np.int32(1)], typed(Q8, dims))
        return self.add(O.DEQUANTIZE, [codes], typed(F32, dims))

    def multiplied(self) -> int:
        x = self.real()
        dims = self.dims(x)
        if len(dims) == 1:
            return self.one()
        units = self.author.upto(4)
        weights, bias = self.author.reals((units, dims[-1])), self.author.reals((units,))
        rows = int(np.prod(dims[:-1]))
        return self.add(O.FULLY_CONNECTED, [x, weights, bias, np.int32(0)], typed(F32, (rows, units)))

    def shown(self, operand: OperandDesc) -> OperandDesc:
        """A result whose dimensions are said, or left open."""
        return operand if self.author.truth() else replace(operand, dimensions=(0,) * len(operand.dimensions))

    def branch(self) -> int:
        values = [self.author.one(self.having(F32)) for _ in range(self.author.upto(2))]
        outers = [self.operands[i] for i in values]
        condition = self.truth_of(self.real())
        branches = [self.author.function(outers, self.depth + 1) for _ in "te"]
        return self.add(O.IF, [condition, *map(self.reference, branches), *values], typed(F32, self.dims(values[0])))

    def truth_of(self, x: int) -> int:
        if self.author.upto(5) == 1:
            return self.constant(np.array([self.author.truth()]))
        flat = self.add(O.RESHAPE, [x, np.int32([-1])], typed(F32, (int(np.prod(self.dims(x))),)))
        mean = self.add(O.MEAN, [flat, np.int32([0]), np.int32(0)], typed(F32, (1,)))
        return self.add(O.GREATER, [mean, self.author.reals((1,))], typed(B8, (1,)))

    def loop(self) -> int:
        """A count, a value that changes and one that does not."""
        x, still = self.real(), self.real()
        outers = [typed(I32, (1,)), self.operands[x], self.operands[still]]
        condition = Draft(self.author, outers, self.depth + 1)
        end = condition.add(O.LESS, [0, np.int32([self.author.upto(4, 0)])], typed(B8, (1,)))
        body = Draft(self.author, outers, self.depth + 1)
        body.grow(self.author.upto(2, 0))
        count = body.add(O.ADD, [0, np.int32([1]), np.int32(0)], typed(I32, (1,)))
        next_ = body.add(O.TANH, [1], typed(F32, self.dims(x)))
        inner = [self.reference(condition.finished([end])), self.reference(body.finished([count, next_]))]
        start = self.constant(np.int32([self.author.upto(3, 0)]))
        outs = typed(I32, (1,)), typed(F32, self.dims(x))
        return self.add(O.WHILE, [*inner, start, x, still], *outs) + 1


class Author:
    """Draws models from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.values = bytearray()
        self.referenced: list[Subgraph] = []

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def upto(self, most: int, least: int = 1) -> int:
        return int(self.rng.integers(least, most + 1))

    def truth(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def reals(self, dims: tuple[int, ...]) -> Array:
        return np.float32(self.rng.uniform(-2, 2, dims))

    def keep(self, array: Array) -> DataLocation:
        where = DataLocation(0, len(self.values), array.nbytes)
        self.values += array.tobytes() + bytes(-array.nbytes % 4)
        return where

    def refer(self, subgraph: Subgraph) -> int:
        self.referenced.append(subgraph)
        return len(self.referenced) - 1

    def function(self, inputs: Sequence[OperandDesc], depth: int) -> Subgraph:
        """A subgraph whose output is like its first input."""
        draft = Draft(self, inputs, depth)
        draft.grow(self.upto(2, 0))
        same = [i for i in draft.having(F32) if draft.dims(i) == draft.dims(0)]
        last = draft.add(O.ADD, [0, self.one(same), np.int32(0)], typed(F32, draft.dims(0)))
        return draft.finished([last])

    def model(self) -> tuple[Model, list[Array], list[tuple[int, ...]]]:
        """Return a valid model, inputs for it, and the true dimensions of its outputs."""
        inputs = [typed(F32, tuple(self.upto(4) for _ in range(self.upto(3)))) for _ in range(self.upto(2))]
        main = Draft(self, inputs, 0)
        main.grow(self.upto(6, 2))
        temporary = [i for i in main.having(F32) if main.operands[i].lifetime == L.TEMPORARY_VARIABLE]
        outs = sorted({self.one(temporary) for _ in range(self.upto(2))})
        dims = [main.dims(i) for i in outs]
        for index in outs:
            if self.truth():
                main.operands[index] = replace(main.operands[index], dimensions=(0,) * len(main.dims(index)))
        subgraph = main.finished(outs)
        model = Model(
            subgraph, tuple(self.referenced), bytes(self.values), relax_computation_float32_to_float16=self.truth()
        )
        return model, [self.reals(operand.dimensions) for operand in inputs], dims


HOSTILE = (0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**32 - 1)


def changed(model: Model, author: Author) -> Model:
    """Return the model after one change, which need not make it invalid."""
    kind = author.upto(4 if model.operand_values else 3)
    if kind == 1:
        mutants = list(MUTATIONS[author.one(sorted(MUTATIONS))](model))
        return author.one(mutants)[1] if mutants else model
    which = author.upto(len(model.referenced), 0)
    subgraph = model.main if which == 0 else model.referenced[which - 1]
    if kind == 2:
        position = author.upto(len(subgraph.operations) - 1, 0)
        operation = subgraph.operations[position]
        operations = list(subgraph.operations)
        operations[position] = replace(operation, **_one_field(operation, author))
        subgraph = replace(subgraph, operations=tuple(operations))
    elif kind == 3:
        index = author.upto(len(subgraph.operands) - 1, 0)
        operands = list(subgraph.operands)
        operands[index] = replace(operands[index], **_one_field(operands[index], author))
        subgraph = replace(subgraph, operands=tuple(operands))
    else:
        values = bytearray(model.operand_values)
        for _ in range(author.upto(4)):
            values[author.upto(len(values) - 1, 0)] = author.one((0, 1, 127, 128, 255))
        return replace(model, operand_values=bytes(values))
    if which == 0:
        return replace(model, main=subgraph)
    return replace(model, referenced=tuple(subgraph if i == which - 1 else g for i, g in enumerate(model.referenced)))


def _one_field(value: Any, author: Author) -> dict[str, Any]:
    """Another value for one field of an operand or operation."""
    name = author.one([field.name for field in fields(value) if field.name != "extra_params"])
    now = getattr(value, name)
    if isinstance(now, DataLocation):
        return {
            name: DataLocation(
                *(author.one(HOSTILE) if author.truth() else n for n in (now.pool_index, now.offset, now.length))
            )
        }
    if isinstance(now, tuple):
        numbers = list(now)
        if numbers and author.truth():
            numbers[author.upto(len(numbers) - 1, 0)] = author.one(HOSTILE)
        elif numbers and author.truth():
            numbers.pop(author.upto(len(numbers) - 1, 0))
        else:
            numbers.insert(author.upto(len(numbers), 0), author.one(HOSTILE))
        return {name: tuple(numbers)}
    if isinstance(now, float):
        return {name: author.one((0.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("nan")))}
    return {name: author.one([*HOSTILE, -1, int(now) + 1, int(now) - 1, author.upto(101, 0)])}
