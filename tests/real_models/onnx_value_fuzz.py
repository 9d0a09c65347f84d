"""Random ONNX graphs, made from a seed, of strings, sequences, maps, optionals, bfloat16, float8 and 4-bit numbers.

Many of them are empty. ONNX Runtime's Python interface has no arrays of the last three, so that a graph with some has a
twin, in which floats of the same value go in and come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper, numpy_helper

_ELEMENTS = {"string": np.dtype(object), "float": np.dtype("f4"), "int64": np.dtype("i8"), "bool": np.dtype("?")}
_NUMBERS = {"string": 8, "float": 1, "int64": 7, "bool": 9}
LACKING = {
    "bfloat16": (16, ml_dtypes.bfloat16),
    "float8_e4m3fn": (17, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (19, ml_dtypes.float8_e5m2),
    "uint4": (21, ml_dtypes.uint4),
    "int4": (22, ml_dtypes.int4),
}
"""Elements that NumPy lacks: numbers, and types that have them."""
_WORDS = ("", "a", "é", "b c", "12", "-3", "a\0b", "word " * 40, "日本")


@dataclass
class Example:
    """A graph and what to run it with, one after the other.

    Attributes:
        model, inputs: Those.
        twin, twin_inputs: The same, as ONNX Runtime's Python interface takes it.
        lacking: Of each output the type of elements that NumPy lacks, if it has some: its twin has floats.
    """

    model: bytes
    inputs: list[dict[str, Any]]
    twin: bytes
    twin_inputs: list[dict[str, Any]]
    lacking: list[str]


@dataclass(frozen=True)
class _Value:
    name: str
    element: str
    rank: int
    of: str = ""
    """What it is of such tensors: "" for itself, seq, optional."""


class _Maker:
    def __init__(self, random: np.random.Generator) -> None:
        self.random, self.count = random, 0
        self.nodes: list[Any] = []
        self.values: list[_Value] = []

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def one_of(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def pick(self, fits: Callable[[_Value], bool]) -> _Value | None:
        found = [value for value in self.values if fits(value)]
        return found[self.random.integers(len(found))] if found else None

    def add(self, operator: str, inputs: list[str], element: str, rank: int, of: str = "", **attributes: Any) -> _Value:
        value = _Value(self.new(), element, rank, of)
        self.nodes.append(helper.make_node(operator, inputs, [value.name], **attributes))
        self.values.append(value)
        return value

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        name = self.new()
        array = numpy_helper.from_array(np.asarray(value, dtype), name)
        self.nodes.append(helper.make_node("Constant", [], [name], value=array))
        return name

    def array(self, element: str, rank: int, sizes: list[int] | None = None) -> Any:
        if sizes is None:
            sizes = [int(n) for n in self.random.choice([0, 1, 2, 3], rank, p=[0.15, 0.3, 0.3, 0.25])]
        count = math.prod(sizes)
        if element == "string":
            flat = np.array([str(self.random.choice(_WORDS)) for _ in range(count)], object)
        else:
            flat = self.random.integers(-3, 4, count).astype(_ELEMENTS[element])
        return flat.reshape(sizes)


def _is_tensor(value: _Value) -> bool:
    return not value.of


def _plain(made: _Maker) -> None:
    """What moves elements, whatever they are."""
    value = made.pick(lambda v: not v.of and v.rank > 0)
    if value is None:
        return
    axis = int(made.random.integers(value.rank))
    name, element, rank = value.name, value.element, value.rank
    which = int(made.random.integers(7))
    if which == 0:
        made.add("Concat", [name, name], element, rank, axis=axis)
    elif which == 1:
        made.add("Transpose", [name], element, rank, perm=[int(n) for n in made.random.permutation(rank)])
    elif which == 2:
        made.add(
            "Slice", [name, *(made.constant([n]) for n in (made.one_of(0, 1), made.one_of(1, 9), axis))], element, rank
        )
    elif which == 3:
        made.add("Gather", [name, made.constant(made.one_of([], [0], [0, -1]))], element, rank, axis=axis)
    elif which == 4:
        made.add("Reshape", [name, made.constant([-1])], element, 1)
    elif which == 5 and rank < 4:
        made.add("Unsqueeze", [name, made.constant([axis])], element, rank + 1)
    else:
        made.add("Shape", [name], "int64", 1)


def _identity(made: _Maker) -> None:
    value = made.pick(lambda v: True)
    if value is not None:
        made.add("Identity", [value.name], value.element, value.rank, value.of)


def _text(made: _Maker) -> None:
    value = made.pick(lambda v: not v.of and v.element == "string")
    if value is None:
        return
    which = int(made.random.integers(5))
    if which == 0:
        made.add("StringConcat", [value.name, value.name], "string", value.rank)
    elif which == 1:
        made.add("RegexFullMatch", [value.name], "bool", value.rank, pattern=made.one_of("[a-z ]*", ".+", "[0-9-]+"))
    elif which == 2:
        made.add(
            "LabelEncoder",
            [value.name],
            "int64",
            value.rank,
            domain="ai.onnx.ml",
            keys_strings=["a", "é", ""],
            values_int64s=[1, 2, 3],
            default_int64=-1,
        )
    elif which == 3:
        split = made.add("StringSplit", [value.name], "string", value.rank + 1, delimiter=made.one_of(" ", "a"))
        made.nodes[-1].output.append(made.new())
        made.values.append(_Value(made.nodes[-1].output[1], "int64", value.rank))
        assert split
    else:
        made.add("Equal", [value.name, value.name], "bool", value.rank)


def _cast(made: _Maker) -> None:
    value = made.pick(lambda v: not v.of and v.element != "string")
    if value is not None:
        to = made.one_of("string", "float", "int64")
        made.add("Cast", [value.name], to, value.rank, to=_NUMBERS[to])


def _sequence(made: _Maker) -> None:
    value = made.pick(_is_tensor)
    if value is None:
        return
    which = int(made.random.integers(4))
    if which == 0:
        made.add("SequenceConstruct", [value.name] * made.one_of(1, 2, 3), value.element, value.rank, "seq")
    elif which == 1:
        made.add("SequenceEmpty", [], value.element, value.rank, "seq", dtype=_NUMBERS[value.element])
    elif value.rank:
        made.add("SplitToSequence", [value.name], value.element, value.rank, "seq", axis=0, keepdims=1)


def _of_sequence(made: _Maker) -> None:
    value = made.pick(lambda v: v.of == "seq")
    if value is None:
        return
    name, element, rank = value.name, value.element, value.rank
    which = int(made.random.integers(5))
    if which == 0:
        made.add("SequenceLength", [name], "int64", 0)
    elif which == 1:
        made.add("SequenceAt", [name, made.constant(made.one_of(0, -1))], element, rank)
    elif which == 2:
        made.add("SequenceErase", [name], element, rank, "seq")
    elif which == 3:
        other = made.pick(lambda v: not v.of and v.element == element)
        if other is not None:
            made.add("SequenceInsert", [name, other.name], element, rank, "seq")
    elif rank:
        made.add("ConcatFromSequence", [name], element, rank, axis=0)


def _optional(made: _Maker) -> None:
    value = made.pick(lambda v: v.of != "seq")
    if value is None:
        return
    if not value.of:
        made.add("Optional", [value.name], value.element, value.rank, "optional")
    elif made.random.random() < 0.6:
        made.add("OptionalHasElement", [value.name], "bool", 0)
    else:
        made.add("OptionalGetElement", [value.name], value.element, value.rank)


def _maps(made: _Maker) -> None:
    value = made.pick(lambda v: not v.of and v.element == "float" and v.rank == 2)
    if value is not None:
        labels: dict[str, Any] = made.one_of({"classlabels_strings": ["a", "é"]}, {"classlabels_int64s": [3, -1]})
        kind = "string" if "classlabels_strings" in labels else "int64"
        made.add("ZipMap", [value.name], kind, 0, "maps", domain="ai.onnx.ml", **labels)


def _of_map(made: _Maker) -> None:
    value = made.pick(lambda v: v.of == "map")
    if value is None:
        return
    if value.element == "int64" and made.random.random() < 0.5:
        made.add("CastMap", [value.name], "float", 2, domain="ai.onnx.ml", map_form="DENSE", cast_to="TO_FLOAT")
        return
    keys: dict[str, Any] = {"int64_vocabulary": [3, -1, 0]}
    if value.element == "string":
        keys = {"string_vocabulary": ["a", "é", ""]}
    made.add("DictVectorizer", [value.name], "float", 2, domain="ai.onnx.ml", **keys)


_RULES = (_plain, _plain, _plain, _identity, _text, _text, _cast, _sequence, _sequence, _of_sequence, _of_sequence)


def _info(made: _Maker, value: _Value, *, is_input: bool) -> Any:
    sizes = [made.one_of(None, f"d{made.random.integers(3)}") for _ in range(value.rank)]
    shape = None if value.of or made.random.random() < (0.15 if is_input else 0.5) else sizes
    kind = helper.make_tensor_type_proto(_NUMBERS[value.element], shape)
    if value.of in ("map", "maps"):
        kind = helper.make_map_type_proto(_NUMBERS[value.element], helper.make_tensor_type_proto(1, None))
    if value.of in ("seq", "maps"):
        kind = helper.make_sequence_type_proto(kind)
    return helper.make_value_info(value.name, helper.make_optional_type_proto(kind) if value.of == "optional" else kind)


def example(seed: int) -> Example:
    """Return the graph of a seed."""
    random = np.random.default_rng(seed)
    made = _Maker(random)
    every: list[dict[str, Any]] = [{} for _ in range(random.integers(1, 4))]
    for _ in range(random.integers(1, 4)):
        element = made.one_of("string", "string", "float", "int64")
        value = _Value(made.new(), element, int(random.integers(0, 3)), made.one_of("", "", "", "seq", "optional"))
        if random.random() < 0.15:
            element = made.one_of("string", "int64")
            value = _Value(made.new(), element, 1, "map")
        for inputs in every:
            if value.of == "map":
                keys = ("a", "é", "", "b") if element == "string" else (3, -1, 0, 7)
                inputs[value.name] = {key: float(random.integers(-3, 4)) for key in keys if random.random() < 0.6}
            elif value.of == "seq":
                inputs[value.name] = [made.array(element, value.rank) for _ in range(random.integers(0, 4))]
            else:
                given = made.array(element, value.rank)
                inputs[value.name] = None if value.of and random.random() < 0.4 else given
        made.values.append(value)
    inputs_of = list(made.values)
    lacking_in = _lacking_input(made, every) if random.random() < 0.3 else ""
    first = len(made.values) - bool(lacking_in)
    for _ in range(random.integers(2, 10)):
        made.one_of(*_RULES, _optional, _maps, _of_map)(made)
    here = made.values[first:] or made.values
    chosen = [here[i] for i in sorted({int(i) for i in random.integers(0, len(here), 3)})]
    inputs = [_info(made, value, is_input=True) for value in inputs_of]
    outputs = [_info(made, value, is_input=False) for value in chosen]
    ours: list[list[Any]] = [[], [], []]
    theirs: list[list[Any]] = [[], [], []]
    twins = [dict(each) for each in every]
    if lacking_in:
        number, dtype = LACKING[lacking_in]
        ours[0].append(helper.make_tensor_value_info("lacking", number, ["lacks"]))
        ours[1].append(helper.make_node("Cast", ["lacking"], ["seen"], to=1))
        theirs[0].append(helper.make_tensor_value_info("lacking", 1, ["lacks"]))
        theirs[1].append(helper.make_node("Identity", ["lacking"], ["seen"]))
        for twin in twins:
            twin["lacking"] = twin["lacking"].astype(dtype).astype(np.float32)
    lacking = [""] * len(chosen)
    floats = [value for value in made.values if not value.of and value.element == "float"]
    if floats and random.random() < 0.3:
        lacking.append(made.one_of(*LACKING))
        number, _ = LACKING[lacking[-1]]
        cast = helper.make_node("Cast", [floats[-1].name], ["lacked"], to=number)
        ours[1].append(cast)
        ours[2].append(helper.make_tensor_value_info("lacked", number, None))
        theirs[1] += [cast, helper.make_node("Cast", ["lacked"], ["shown"], to=1)]
        theirs[2].append(helper.make_tensor_value_info("shown", 1, None))
    return Example(
        _model(
            [*ours[1][:1], *made.nodes, *ours[1][1:]] if lacking_in else [*made.nodes, *ours[1]],
            [*inputs, *ours[0]],
            [*outputs, *ours[2]],
        ),
        every,
        _model(
            [*theirs[1][:1], *made.nodes, *theirs[1][1:]] if lacking_in else [*made.nodes, *theirs[1]],
            [*inputs, *theirs[0]],
            [*outputs, *theirs[2]],
        ),
        twins,
        lacking,
    )


def _lacking_input(made: _Maker, every: list[dict[str, Any]]) -> str:
    """Add an input of elements that NumPy lacks, which the first node makes floats."""
    name = str(made.one_of(*LACKING))
    for inputs in every:
        least = 0 if name == "uint4" else -3
        inputs["lacking"] = made.random.integers(least, 4, made.random.integers(4)).astype(LACKING[name][1])
    made.values.append(_Value("seen", "float", 1))
    return name


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> bytes:
    graph = helper.make_graph(nodes, "values", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
