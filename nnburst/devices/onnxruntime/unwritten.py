"""Nodes whose results ONNX Runtime leaves unwritten where a dimension is 0, made safe before it sees them.

Such a result is memory as it was found: perhaps another client's. Whether a dimension is 0 may show at run time only,
so each of these nodes gets a few others that look at the sizes of what it reads and writes, a number each:

* An integer matrix product or convolution over nothing is zero; a Scan of no steps, in its first version, ends in the
  state it began with.
* Of other results that are not written as a whole, the run fails. ONNX Runtime joins what does not fit together if a
  part is empty, and leaves the gaps as they are.
* Some nodes are not begun without elements of an input (`_NEVER_EMPTY`, Unique along an axis), a convolution not with a
  kernel of size 0, and an Inverse not of what is not square: ONNX Runtime crashes, does not end, or reads and writes
  beyond the matrix.

Nodes whose dimensions are known and not 0 stay as they are. What a file says of shapes inside of a graph may be wrong,
so it is not believed: only inputs, which are checked for each run, weights, and what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from .importer import constants
from .library import onnx

_Shape = tuple[int, ...]
"""-1 where a size is not known."""
_MUCH = 1 << 32
"""A dimension less than nothing, once it is taken off: no tensor has more elements in one dimension."""
_SMALL = 1024
"""Elements of a weight that may say a shape."""
_SCAN_WITHOUT_BATCHES = 9
"""Version of ONNX's operators from which on Scan has no dimension of batches."""
_OPSET = 17
"""For models that import no operators of ONNX's own."""

_MICROSOFT = "com.microsoft"
_DOMAINS = {"ai.onnx": ""}
_FACTORS = {
    ("", "MatMulInteger"): (0, 1),
    ("", "ConvInteger"): (0, 1),
    ("", "QLinearMatMul"): (0, 3),
    (_MICROSOFT, "MatMulIntegerToFloat"): (0, 1),
    (_MICROSOFT, "DynamicQuantizeMatMul"): (0, 1),
    (_MICROSOFT, "QGemm"): (0, 3),
}
"""Which inputs of a product are multiplied. Those of other types are written even if there is nothing to add up."""
_KERNELS = {
    ("", "Conv"): 1,
    ("", "ConvInteger"): 1,
    ("", "QLinearConv"): 3,
    (_MICROSOFT, "FusedConv"): 1,
}
"""Which input of a convolution is its kernel."""
_NEVER_EMPTY: dict[tuple[str, str], dict[int, int | None]] = {
    ("", "ConvTranspose"): {0: 0},
    ("", "Dropout"): {1: None, 2: None},
    ("", "GRU"): {0: None},
    ("", "InstanceNormalization"): {0: 0},
    ("", "LSTM"): {0: None},
    ("", "STFT"): {2: None},
    (_MICROSOFT, "QLinearSoftmax"): dict.fromkeys(range(1, 5)),
    (_MICROSOFT, "QLinearWhere"): dict.fromkeys((2, 3, 5, 6, 7, 8)),
}
"""Which inputs have to have elements, and the axis, if any, along which each may have none."""
_ZERO_POINT_OF_RESULT = {("", "QLinearMatMul"): 7}
_JOINS = {("", "Concat"): (0, 1), (_MICROSOFT, "QLinearConcat"): (2, 3)}
"""From which input on there are parts, and how many inputs each has."""


def write_all(proto: Any) -> None:
    """Change a model so that each result is written, or the run fails."""
    owners = (proto, *proto.functions)
    graphs = (proto.graph, *proto.functions)
    weights = {tensor.name for tensor in _weights(proto) if 0 not in tensor.dims}
    if not any(_is_suspect(node, weights) for graph in graphs for node in _all_nodes(graph)):
        return
    taken = set(_all_names(proto))
    for owner, graph in zip(owners, graphs, strict=True):
        known = _Known.of_model(proto) if owner is proto else _Known({})
        versions = [entry.version for entry in owner.opset_import if entry.domain in ("", "ai.onnx")]
        changed = _Rewriting(graph, known, taken, versions[0] if versions else _OPSET).run()
        if changed and not versions:
            owner.opset_import.add(domain="", version=_OPSET)


def _weights(proto: Any) -> list[Any]:
    fixed = constants(proto)
    return [tensor for tensor in proto.graph.initializer if tensor.name in fixed]


def _is_suspect(node: Any, weights: set[str]) -> bool:
    kind = _kind(node)
    if kind not in _RULES:
        return False
    if kind in _NEVER_EMPTY:
        return any(i < len(node.input) and node.input[i] not in ("", *weights) for i in _NEVER_EMPTY[kind])
    factors: tuple[int, ...] = () if node.domain == _MICROSOFT else _FACTORS.get(kind, ())
    if kind in _KERNELS:
        factors = (_KERNELS[kind],)
    return weights.isdisjoint([node.input[i] for i in factors if i < len(node.input)])


def _kind(node: Any) -> tuple[str, str]:
    return _DOMAINS.get(node.domain, node.domain), node.op_type


def _inner_graphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        yield from attribute.graphs
        if attribute.HasField("g"):
            yield attribute.g


def _all_nodes(graph: Any) -> Iterator[Any]:
    todo = [graph]
    while todo:
        for node in todo.pop().node:
            yield node
            todo.extend(_inner_graphs(node))


class _Known:
    """Shapes by name of the values of a graph and of that around it, as far as they follow from what is sure."""

    def __init__(self, shapes: Mapping[str, _Shape], outer: _Known | None = None) -> None:
        self._shapes, self._outer = shapes, outer
        self.inner: Iterator[_Known] = iter(())
        """Of the graphs in it, in the order of the nodes."""

    @classmethod
    def of_model(cls, proto: Any) -> _Known:
        """Infer shapes; nothing is known if that fails."""
        try:
            graph = onnx().shape_inference.infer_shapes(_skeleton(proto), data_prop=True).graph
        except Exception:  # of several kinds; ONNX Runtime says later what is wrong with the model
            return cls({tensor.name: tuple(tensor.dims) for tensor in _weights(proto)})
        return cls._of_graph(graph, None)

    @classmethod
    def _of_graph(cls, graph: Any, outer: _Known | None) -> _Known:
        shapes: dict[str, _Shape] = {}
        for value in (*graph.value_info, *graph.input, *graph.output):
            kind = value.type.tensor_type
            if kind.HasField("shape"):
                shapes[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
        shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        made = cls(shapes, outer)
        made.inner = iter([cls._of_graph(inner, made) for node in graph.node for inner in _inner_graphs(node)])
        return made

    def shape(self, name: str) -> _Shape | None:
        """Return the shape of a value, None if not even its rank is known."""
        scope: _Known | None = self
        while scope is not None:
            if name in scope._shapes:
                return scope._shapes[name]
            scope = scope._outer
        return None

    def is_filled(self, name: str, axis: int | None = None) -> bool:
        """Whether all sizes of a value, but perhaps that of an axis, are known and not 0."""
        shape = self.shape(name)
        if shape is None or (axis is not None and not -len(shape) <= axis < len(shape)):
            return False
        skipped = None if axis is None else axis % len(shape)
        return all(size > 0 for i, size in enumerate(shape) if i != skipped)


def _skeleton(proto: Any) -> Any:
    """Return a model that says of shapes only what is sure, without its large weights."""
    skeleton = onnx().ModelProto(
        ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions
    )
    graph = skeleton.graph
    graph.name = "graph"
    graph.node.extend(proto.graph.node)
    fixed = constants(proto)
    graph.input.extend(value for value in proto.graph.input if value.name not in fixed)
    for tensor in _weights(proto):
        if len(tensor.dims) <= 1 and sum(tensor.dims) <= _SMALL and not tensor.external_data:
            graph.initializer.append(tensor)
        else:
            graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    for value in proto.graph.output:
        graph.output.add(name=value.name)
    for owner in (graph, *skeleton.functions):
        inner = [each for node in _all_nodes(owner) for each in _inner_graphs(node)]
        for each in (owner, *inner):
            del each.value_info[:]
            for node in each.node:  # ONNX crashes where one of no known type is matched
                if node.op_type == "StringSplit" and node.output:
                    each.value_info.append(
                        onnx().helper.make_tensor_value_info(node.output[0], onnx().TensorProto.STRING, None)
                    )
        for value in (value for each in inner for value in (*each.input, *each.output)):
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
    return skeleton


class _Rewriting:
    """One graph, or function, that is rewritten, with the graphs inside it."""

    def __init__(self, graph: Any, known: _Known, taken: set[str], opset: int) -> None:
        self._graph, self.known, self._taken, self.opset = graph, known, taken, opset
        self._nodes: list[Any] = []
        self._changed = False

    def run(self) -> bool:
        """Rewrite; returns whether anything changed."""
        for node in self._graph.node:
            for inner in _inner_graphs(node):
                known = next(self.known.inner, None) or _Known({}, self.known)
                self._changed |= _Rewriting(inner, known, self._taken, self.opset).run()
            rule = _RULES.get(_kind(node))
            if rule is None or not rule(self, node):
                self._nodes.append(node)
            else:
                self._changed = True
        if self._changed:
            kept = [onnx().NodeProto.FromString(node.SerializeToString()) for node in self._nodes]
            del self._graph.node[:]
            self._graph.node.extend(kept)
        return self._changed

    # -- making nodes ----------------------------------------------------------------------------------------------

    def name(self, like: str = "size") -> str:
        """Return a name that no value has."""
        number = len(self._taken)
        while (made := f"{like}:{number}") in self._taken:
            number += 1
        self._taken.add(made)
        return made

    def add(self, operator: str, *inputs: str, into: str = "", label: str = "", **attributes: Any) -> str:
        into = into or self.name()
        self._nodes.append(onnx().helper.make_node(operator, inputs, [into], label, **attributes))
        return into

    def put(self, node: Any) -> None:
        self._nodes.append(node)

    def number(self, value: int) -> str:
        return self.add("Constant", value=onnx().helper.make_tensor("value", onnx().TensorProto.INT64, (), [value]))

    def renamed(self, node: Any, position: int) -> tuple[str, str]:
        """Give an output of a node another name; returns it and what it was."""
        while len(node.output) <= position:
            node.output.append("")
        was = node.output[position]
        node.output[position] = self.name(was or "size")
        return node.output[position], was

    def total(self, names: Sequence[str]) -> str:
        """Return how many elements several values have together."""
        total = self.add("Size", names[0])
        for name in names[1:]:
            total = self.add("Add", total, self.add("Size", name))
        return total

    def is_zero(self, number: str) -> str:
        return self.add("Equal", number, self.number(0))

    def count(self, condition: str) -> str:
        """Return 1 if something is so, else 0."""
        return self.add("Cast", condition, to=onnx().TensorProto.INT64)

    def passed_on(self, value: str, to: str, missing: str, why: str) -> None:
        """Hand a value on, where it lies, if a number is 0; else the run fails, with a node's label for an error."""
        shape = self.add("Shape", value)
        less = self.add("Mul", missing, self.number(_MUCH))
        self.add("Reshape", value, self.add("Sub", shape, less), into=to, label=self.name(why))

    def guard(self, node: Any, position: int, number: str, why: str) -> None:
        """Have a node get an input only if a number is 0; else the run fails."""
        value = self.name()
        self.passed_on(node.input[position], value, number, why)
        node.input[position] = value

    def chosen(self, condition: str, yes: Any, no: str, to: str) -> None:
        """Make a value what a node makes if something is so, else another value."""
        helper = onnx().helper

        def graph(node: Any) -> Any:
            return helper.make_graph([node], "branch", [], [helper.make_empty_tensor_value_info(node.output[0])])

        other = helper.make_node("Identity", [no], [self.name()])
        self.add("If", condition, into=to, then_branch=graph(yes), else_branch=graph(other))


def _all_names(proto: Any) -> Iterator[str]:
    """Yield the names of all values of a model."""
    todo: list[Any] = [proto.graph, *proto.functions]
    while todo:
        graph = todo.pop()
        for value in (*graph.input, *graph.output, *getattr(graph, "initializer", ())):
            yield value if isinstance(value, str) else value.name
        for node in graph.node:
            yield from node.input
            yield from node.output
            todo.extend(_inner_graphs(node))


# -- rules: each says whether it has appended what replaces a node -----------------------------------------------------


def _title(node: Any) -> str:
    return f"{node.op_type} {node.name[:100]!r}" if node.name else str(node.op_type)


def _product(made: _Rewriting, node: Any) -> bool:
    factors = [node.input[i] for i in _FACTORS[_kind(node)] if i < len(node.input)]
    added = [name for name in node.input if name and name not in factors] if node.domain == _MICROSOFT else []
    if any(map(made.known.is_filled, factors)) and all(map(made.known.is_filled, added)):
        return False
    product = made.add("Size", factors[0])
    for name in (*factors[1:], *added):  # these do not look whether scales are there
        product = made.add("Mul", product, made.add("Size", name))
    is_empty = made.is_zero(product)
    value, to = made.renamed(node, 0)
    made.put(node)
    if node.domain == _MICROSOFT:
        missing = made.add("Mul", made.count(is_empty), made.add("Size", value))
        made.passed_on(value, to, missing, f"{_title(node)} over a dimension of 0")
        return True
    helper, shape, result = onnx().helper, made.add("Shape", value), made.name()
    if _kind(node) in _ZERO_POINT_OF_RESULT:
        yes = helper.make_node("Expand", [node.input[_ZERO_POINT_OF_RESULT[_kind(node)]], shape], [result])
    else:
        zero = helper.make_tensor("value", onnx().TensorProto.INT32, (1,), [0])
        yes = helper.make_node("ConstantOfShape", [shape], [result], value=zero)
    made.chosen(is_empty, yes, value, to)
    return True


def _join(made: _Rewriting, node: Any) -> bool:
    first, step = _JOINS[_kind(node)]
    parts = list(node.input[first::step])
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    if not parts or all(made.known.is_filled(name, axis) for name in parts):
        return False
    _checked_join(made, node, made.total(parts))
    return True


def _join_of_sequence(made: _Rewriting, node: Any) -> bool:
    helper, sequence = onnx().helper, node.input[0]
    index, go, count, part, more, size, total, goes = (made.name() for _ in range(8))
    int64, boolean = onnx().TensorProto.INT64, onnx().TensorProto.BOOL
    info = partial(helper.make_tensor_value_info, shape=())
    body = helper.make_graph(
        [
            helper.make_node("SequenceAt", [sequence, index], [part]),
            helper.make_node("Size", [part], [size]),
            helper.make_node("Add", [count, size], [total]),
            helper.make_node("Identity", [go], [goes]),
        ],
        "sizes",
        [info(index, int64), info(go, boolean), info(count, int64)],
        [info(goes, boolean), info(total, int64)],
    )
    made.add("Loop", made.add("SequenceLength", sequence), "", made.number(0), into=more, body=body)
    _checked_join(made, node, more)
    return True


def _checked_join(made: _Rewriting, node: Any, total: str) -> None:
    value, to = made.renamed(node, 0)
    made.put(node)
    missing = made.add("Sub", made.add("Size", value), total)
    made.passed_on(value, to, missing, f"{_title(node)} of parts that do not fit together")


def _guarded(made: _Rewriting, node: Any, position: int, axis: int | None) -> bool:
    """Fail a run in which an input has no elements, unless its size along an axis is 0; returns whether that may be."""
    name = node.input[position] if position < len(node.input) else ""
    if not name or made.known.is_filled(name, axis):
        return False
    missing = made.count(made.is_zero(made.add("Size", name)))
    if axis is not None:
        missing = made.add("Mul", missing, made.add("Gather", made.add("Shape", name), made.number(axis)))
    made.guard(node, position, missing, f"{_title(node)} of no elements")
    return True


def _never_empty(made: _Rewriting, node: Any) -> bool:
    guarded = [_guarded(made, node, *row) for row in _NEVER_EMPTY[_kind(node)].items()]
    if any(guarded):
        made.put(node)
    return any(guarded)


def _transposed_convolution(made: _Rewriting, node: Any) -> bool:
    kernel = made.known.shape(node.input[1])
    return (kernel is None or len(kernel) == 5) and _never_empty(made, node)  # ONNX Runtime crashes over volumes alone


def _unique(made: _Rewriting, node: Any) -> bool:
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    if axis is None or not _guarded(made, node, 0, axis):
        return False
    made.put(node)
    return True


def _convolution(made: _Rewriting, node: Any) -> bool:
    position = _KERNELS[_kind(node)]
    is_guarded = not made.known.is_filled(node.input[position])
    if is_guarded:  # along one axis: ONNX Runtime refuses others
        size = made.add("Gather", made.add("Shape", node.input[position]), made.number(2))
        made.guard(node, position, made.count(made.is_zero(size)), f"{_title(node)} with a kernel of size 0")
    if _kind(node) in _FACTORS and _product(made, node):
        return True
    if is_guarded:
        made.put(node)
    return is_guarded


def _inverse(made: _Rewriting, node: Any) -> bool:
    shape = made.known.shape(node.input[0]) or ()
    if len(shape) > 1 and shape[-1] == shape[-2] != -1:
        return False
    sizes = made.add("Shape", node.input[0])
    rows, columns = (made.add("Gather", sizes, made.number(axis)) for axis in (-2, -1))
    missing = made.add("Abs", made.add("Sub", rows, columns))
    made.guard(node, 0, missing, f"{_title(node)} of what is not square")
    made.put(node)
    return True


def _scan(made: _Rewriting, node: Any) -> bool:
    count = next((attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs"), 0)
    first = len(node.input) - count
    if made.opset >= _SCAN_WITHOUT_BATCHES or not 0 < count < len(node.input):
        return False  # ONNX Runtime fails if there are no steps
    if any(made.known.is_filled(name) for name in node.input[first:]):
        return False
    steps = made.add("Gather", made.add("Shape", node.input[first]), made.number(1))
    is_empty = made.is_zero(steps)
    states = node.input[1:first]
    results = [(state, *made.renamed(node, i)) for i, state in enumerate(states) if node.output[i]]
    made.put(node)
    for state, value, to in results:
        made.chosen(is_empty, onnx().helper.make_node("Identity", [state], [made.name()]), value, to)
    return True


def _attention(made: _Rewriting, node: Any) -> bool:
    pasts = [name for name in node.input[4:6] if name]
    if not pasts or all(made.known.is_filled(name, 2) for name in pasts):
        return False
    while len(node.output) < 3:
        node.output.append("")
    results = [made.renamed(node, i) for i, name in enumerate(node.output) if name or i in (1, 2)]
    made.put(node)
    missing = made.number(0)
    for now, new, past in zip(node.output[1:3], node.input[1:3], node.input[4:6], strict=False):
        missing = made.add("Add", missing, made.add("Sub", made.add("Size", now), made.total([new, past])))
    for value, to in results:
        if to:
            made.passed_on(value, to, missing, f"{_title(node)} to a past that does not fit")
    return True


_RULES: dict[tuple[str, str], Callable[[_Rewriting, Any], bool]] = {
    **dict.fromkeys(_FACTORS, _product),
    **dict.fromkeys(_KERNELS, _convolution),
    (_MICROSOFT, "Inverse"): _inverse,
    **dict.fromkeys(_JOINS, _join),
    ("", "ConcatFromSequence"): _join_of_sequence,
    **dict.fromkeys(_NEVER_EMPTY, _never_empty),
    ("", "ConvTranspose"): _transposed_convolution,
    ("", "Unique"): _unique,
    ("", "Scan"): _scan,
    ("", "Attention"): _attention,
}
