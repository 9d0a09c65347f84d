"""Random ONNX graphs, made from a seed: open and wrong declarations, control flow, empty arrays and scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]
_KINDS = ("float32", "int64", "int32", "bool", "float64")
_UNARY = {
    "f": ("Relu", "Neg", "Abs", "Identity", "Floor", "Sign", "Sqrt", "Reciprocal", "Sigmoid"),
    "i": ("Neg", "Abs", "Identity", "Sign"),
    "b": ("Not", "Identity"),
}
_BINARY = {"f": ("Add", "Sub", "Mul", "Div"), "i": ("Add", "Sub", "Mul"), "b": ("And", "Or", "Xor")}
_OPSET = 17


@dataclass
class Example:
    """A graph and what to run it with, one after the other."""

    model: bytes
    inputs: list[dict[str, Array]]


@dataclass
class _Value:
    name: str
    kind: str
    rank: int | None


@dataclass
class _Maker:
    """A graph that grows; those inside it take what the outer ones have."""

    random: np.random.Generator
    counter: list[int]
    values: list[_Value]
    depth: int = 0
    nodes: list[Any] = field(default_factory=list)

    def new(self) -> str:
        self.counter[0] += 1
        return f"v{self.counter[0]}"

    def pick(self, fits: Callable[[_Value], bool] = lambda value: True) -> _Value | None:
        found = [value for value in self.values if fits(value)]
        return found[self.random.integers(len(found))] if found else None

    def one_of(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def add(self, operator: str, inputs: list[str], kind: str, rank: int | None, **attributes: Any) -> _Value:
        made = _Value(self.new(), kind, rank)
        self.nodes.append(helper.make_node(operator, inputs, [made.name], **attributes))
        self.values.append(made)
        return made

    def constant(self, value: Any, kind: str = "int64") -> str:
        name = self.new()
        array = np.asarray(value, kind)
        self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)))
        return name

    def step(self) -> None:
        """Add an operation, if there is something for it."""
        simple = (_unary, _binary, _reduce, _shape, _reshape, _transpose, _concat, _gather, _cast, _nonzero, _slice)
        rules = (*simple, _where, _expand, _unsqueeze, _matmul)
        nested = (_if, _loop, _scan) if self.depth < 2 else ()
        rule = self.one_of(*rules, *nested, *nested)
        rule(self)

    def inner(self, values: list[_Value]) -> _Maker:
        return _Maker(self.random, self.counter, [*self.values, *values], self.depth + 1)

    def like(self, target: _Value) -> str:
        """Return a value of a kind and rank for the end of a graph inside of this one."""
        found = [value for value in self.values if (value.kind, value.rank) == (target.kind, target.rank)]
        source = found[-1] if found else target
        out = self.new()
        self.nodes.append(helper.make_node("Identity", [source.name], [out]))
        return out


def _info(name: str, kind: str, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape)


def _unary(made: _Maker) -> None:
    value = made.pick()
    assert value is not None
    made.add(made.one_of(*_UNARY[np.dtype(value.kind).kind]), [value.name], value.kind, value.rank)


def _binary(made: _Maker) -> None:
    a = made.pick()
    assert a is not None
    b = made.pick(lambda value: value.kind == a.kind)
    if b is None or (made.random.random() < 0.5 and a.kind != "bool"):
        made.add(
            made.one_of("Add", "Mul"), [a.name, made.constant(2, a.kind)], a.kind, a.rank
        ) if a.kind != "bool" else 0
        return
    rank = None if a.rank is None or b.rank is None else max(a.rank, b.rank)
    made.add(made.one_of(*_BINARY[np.dtype(a.kind).kind]), [a.name, b.name], a.kind, rank)


def _reduce(made: _Maker) -> None:
    value = made.pick(lambda value: value.kind in ("float32", "int64", "int32") and value.rank != 0)
    if value is None:
        return
    keep = int(made.random.integers(2))
    if value.rank is None or made.random.random() < 0.3:
        made.add("ReduceSum", [value.name], value.kind, value.rank if keep else 0, keepdims=keep)
        return
    axis = int(made.random.integers(value.rank))
    rank = value.rank if keep else value.rank - 1
    made.add("ReduceSum", [value.name, made.constant([axis])], value.kind, rank, keepdims=keep)


def _shape(made: _Maker) -> None:
    value = made.pick()
    assert value is not None
    made.add("Shape", [value.name], "int64", 1) if made.random.random() < 0.5 else made.add(
        "Size", [value.name], "int64", 0
    )


def _reshape(made: _Maker) -> None:
    value = made.pick()
    assert value is not None
    if made.random.random() < 0.5:
        made.add("Flatten", [value.name], value.kind, 2, axis=0)
    else:
        made.add("Reshape", [value.name, made.add("Size", [value.name], "int64", 0).name], value.kind, None)
        made.nodes.pop()
        made.values.pop()
        flat = made.add("Unsqueeze", [made.values[-1].name, made.constant([0])], "int64", 1)
        made.add("Reshape", [value.name, flat.name], value.kind, 1, allowzero=1)


def _transpose(made: _Maker) -> None:
    value = made.pick(lambda value: value.rank is not None and value.rank > 1)
    if value is not None and value.rank is not None:
        perm = [int(axis) for axis in made.random.permutation(value.rank)]
        made.add("Transpose", [value.name], value.kind, value.rank, perm=perm)


def _concat(made: _Maker) -> None:
    value = made.pick(lambda value: bool(value.rank))
    if value is None or value.rank is None:
        return
    other = made.pick(lambda other: (other.kind, other.rank) == (value.kind, value.rank))
    second = other if other is not None and made.random.random() < 0.3 else value
    made.add("Concat", [value.name, second.name], value.kind, value.rank, axis=int(made.random.integers(value.rank)))


def _gather(made: _Maker) -> None:
    value = made.pick(lambda value: bool(value.rank))
    if value is not None and value.rank is not None:
        some = made.random.random() < 0.5
        axis = int(made.random.integers(value.rank))
        index = made.constant([] if made.random.random() < 0.3 else [0]) if some else made.constant(0)
        made.add("Gather", [value.name, index], value.kind, value.rank if some else value.rank - 1, axis=axis)


def _cast(made: _Maker) -> None:
    value = made.pick(lambda value: value.kind in ("bool", "int32", "int64"))
    if value is not None:
        kind = made.one_of("float32", "int64", "int32", "float64")
        made.add("Cast", [value.name], kind, value.rank, to=helper.np_dtype_to_tensor_dtype(np.dtype(kind)))


def _nonzero(made: _Maker) -> None:
    value = made.pick(lambda value: value.kind in ("float32", "bool", "int64", "int32") and value.rank != 0)
    if value is not None:
        made.add("NonZero", [value.name], "int64", 2)


def _slice(made: _Maker) -> None:
    value = made.pick(lambda value: bool(value.rank))
    if value is not None and value.rank is not None:
        first, last = sorted(int(n) for n in made.random.integers(0, 4, 2))
        axis = int(made.random.integers(value.rank))
        ends = [made.constant([n]) for n in (first, last, axis)]
        made.add("Slice", [value.name, *ends], value.kind, value.rank)


def _where(made: _Maker) -> None:
    value = made.pick(lambda value: value.kind in ("float32", "int64", "int32"))
    if value is not None:
        above = made.add("Greater", [value.name, made.constant(0, value.kind)], "bool", value.rank)
        made.add("Where", [above.name, value.name, made.constant(7, value.kind)], value.kind, value.rank)


def _expand(made: _Maker) -> None:
    value = made.pick(lambda value: value.kind in ("float32", "int64", "int32", "bool"))
    if value is not None and value.rank is not None:
        sizes = [int(made.random.integers(0, 3)), *[1] * value.rank]
        made.add("Expand", [value.name, made.constant(sizes)], value.kind, value.rank + 1)


def _unsqueeze(made: _Maker) -> None:
    value = made.pick(lambda value: value.rank is not None and value.rank < 4)
    if value is not None and value.rank is not None:
        axis = int(made.random.integers(value.rank + 1))
        made.add("Unsqueeze", [value.name, made.constant([axis])], value.kind, value.rank + 1)


def _matmul(made: _Maker) -> None:
    value = made.pick(lambda value: value.kind in ("float32", "int32") and value.rank == 2)
    if value is not None:
        turned = made.add("Transpose", [value.name], value.kind, 2)
        pair = [value.name, turned.name] if made.random.random() < 0.5 else [turned.name, value.name]
        made.add("MatMul", pair, value.kind, 2)


def _condition(made: _Maker) -> str:
    value = made.pick(lambda value: value.kind == "bool" and value.rank == 0)
    if value is not None and made.random.random() < 0.5:
        return value.name
    size = made.add("Size", [made.values[made.random.integers(len(made.values))].name], "int64", 0)
    return made.add("Greater", [size.name, made.constant(1)], "bool", 0).name


def _if(made: _Maker) -> None:
    target = made.pick()
    assert target is not None
    condition = _condition(made)
    branches = []
    for name in ("yes", "no"):
        inner = made.inner([])
        for _ in range(made.random.integers(4)):
            inner.step()
        out = inner.like(target)
        branches.append(helper.make_graph(inner.nodes, name, [], [_info(out, target.kind)]))
    made.add("If", [condition], target.kind, target.rank, then_branch=branches[0], else_branch=branches[1])


def _loop(made: _Maker) -> None:
    state = made.pick()
    assert state is not None
    index, go, inside = (_Value(made.new(), *row) for row in (("int64", 0), ("bool", 0), (state.kind, state.rank)))
    inner = made.inner([index, inside])
    for _ in range(made.random.integers(1, 4)):
        inner.step()
    after, each, on = inner.like(inside), inner.values[-1], inner.new()
    inner.nodes.append(helper.make_node("Identity", [go.name], [on]))
    scanned = inner.new()
    inner.nodes.append(helper.make_node("Identity", [each.name], [scanned]))
    body = helper.make_graph(
        inner.nodes,
        "body",
        [_info(index.name, "int64", ()), _info(go.name, "bool", ()), _info(inside.name, state.kind)],
        [_info(on, "bool", ()), _info(after, state.kind), _info(scanned, each.kind)],
    )
    trips = made.constant(int(made.random.integers(0, 4)))
    values = _Value(made.new(), state.kind, state.rank), _Value(made.new(), each.kind, None)
    going = _condition(made) if made.random.random() < 0.3 else ""
    made.nodes.append(helper.make_node("Loop", [trips, going, state.name], [v.name for v in values], body=body))
    made.values.extend(values)


def _scan(made: _Maker) -> None:
    state = made.pick(lambda value: value.rank is not None)
    over = made.pick(lambda value: bool(value.rank))
    if state is None or over is None or over.rank is None:
        return
    inside, row = _Value(made.new(), state.kind, state.rank), _Value(made.new(), over.kind, over.rank - 1)
    inner = _Maker(made.random, made.counter, [inside, row], made.depth + 2)
    for _ in range(made.random.integers(1, 3)):
        inner.step()
    after, out = inner.new(), inner.new()
    inner.nodes.append(helper.make_node("Identity", [inside.name], [after]))
    each = inner.values[-1]
    inner.nodes.append(helper.make_node("Identity", [each.name], [out]))
    body = helper.make_graph(
        inner.nodes,
        "body",
        [_info(inside.name, state.kind), _info(row.name, over.kind)],
        [_info(after, state.kind), _info(out, each.kind)],
    )
    last, rows = made.new(), _Value(made.new(), each.kind, None if each.rank is None else each.rank + 1)
    made.nodes.append(
        helper.make_node("Scan", [state.name, over.name], [last, rows.name], body=body, num_scan_inputs=1)
    )
    made.values.append(rows)  # of no steps, ONNX Runtime leaves the last state unwritten


def example(seed: int) -> Example:
    """Return the graph of a seed."""
    random = np.random.default_rng(seed)
    made = _Maker(random, [0], [])
    declared: list[Any] = []
    every: list[dict[str, Array]] = [{} for _ in range(random.integers(1, 4))]
    for _ in range(random.integers(1, 4)):
        kind, rank = str(random.choice(_KINDS)), int(random.integers(0, 4))
        value = _Value(made.new(), kind, rank)
        fixed = [int(random.choice([0, 1, 2, 3], p=[0.1, 0.3, 0.3, 0.3])) for _ in range(rank)]
        shape = [made.one_of(size, None, f"d{random.integers(3)}") for size in fixed]
        rows = list(zip(fixed, shape, strict=True))
        for arrays in every:
            sizes = [size if isinstance(want, int) else int(random.integers(4)) for size, want in rows]
            flat = random.integers(-3, 4, math.prod(sizes)).astype(kind)
            arrays[value.name] = flat.reshape(sizes)
        declared.append(_info(value.name, kind, None if random.random() < 0.15 else shape))
        made.values.append(value)
    inputs = list(made.values)
    for _ in range(random.integers(2, 10)):
        made.step()
    made_here = made.values[len(inputs) :] or made.values
    chosen = [made_here[i] for i in sorted({int(i) for i in random.integers(0, len(made_here), 3)})]
    outputs = []
    for value in chosen:
        rank = int(random.integers(0, 3)) if value.rank is None or random.random() < 0.1 else value.rank
        shape = made.one_of(None, [None] * rank, [f"o{i}" for i in range(rank)], [made.one_of(None, "d0", 3)] * rank)
        outputs.append(_info(value.name, value.kind, shape))
    graph = helper.make_graph(made.nodes, "fuzz", declared, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    return Example(model.SerializeToString(), every)
