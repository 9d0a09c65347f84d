"""Guards for nodes that crash ONNX Runtime, or leave results unwritten, if a dimension is 0.

An unwritten result shows old memory, perhaps another client's. Often only a run finds that a dimension is 0. So a
guard, which is a few more nodes, checks the sizes and makes the run fail:

* If an input that `_NEEDED` lists has no elements, ONNX Runtime crashes, never ends, or writes nothing.
* If the matrix for an Inverse is not square, ONNX Runtime reads and writes beyond the matrix.
* If one part of a concatenation is empty, ONNX Runtime joins parts that do not fit, and leaves gaps unwritten.

A node whose dimensions are known and not 0 gets no guard. A file can give wrong shapes for values inside a graph. So
guards rely only on the shapes of weights and inputs, and on shapes inferred from these. Each run checks the inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from typing import Any

from .functions import inner_graphs
from .importer import constants
from .library import messages, onnx

_Shape = tuple[int, ...]
"""A shape; -1 is an unknown size."""
_MUCH = 1 << 32
"""A number larger than any dimension. A guard subtracts it from dimensions, and a Reshape to negative sizes fails."""
_SMALL = 1024
"""Largest number of elements of a weight that shape inference reads. Such a weight may contain a shape."""
_SCAN_WITHOUT_BATCHES = 9
"""First operator set whose Scan has no batch dimension. This Scan fails cleanly if it has no steps."""
_OPSET = 17
"""Operator set of models that import none."""

_MICROSOFT = "com.microsoft"
_NEEDED: dict[tuple[str, str], dict[int, int | None]] = {
    ("", "Attention"): {1: None, 2: None, 4: 2, 5: 2},
    ("", "Conv"): {1: None},
    ("", "ConvInteger"): {0: 0, 1: None},
    ("", "ConvTranspose"): {0: 0},
    ("", "Dropout"): {1: None, 2: None},
    ("", "GRU"): {0: None},
    ("", "InstanceNormalization"): {0: 0},
    ("", "LSTM"): {0: None},
    ("", "MatMulInteger"): {1: None},
    ("", "QLinearConv"): {3: None},
    ("", "QLinearMatMul"): {3: None},
    ("", "STFT"): {2: None},
    (_MICROSOFT, "DynamicQuantizeMatMul"): dict.fromkeys(range(1, 5)),
    (_MICROSOFT, "FusedConv"): {1: None},
    (_MICROSOFT, "MatMulIntegerToFloat"): dict.fromkeys(range(1, 7)),
    (_MICROSOFT, "QGemm"): dict.fromkeys(range(1, 9)),
    (_MICROSOFT, "QLinearSoftmax"): dict.fromkeys(range(1, 5)),
    (_MICROSOFT, "QLinearWhere"): dict.fromkeys((2, 3, 5, 6, 7, 8)),
}
"""By operator: positions of inputs that must have elements, each with the axis whose size can be 0 (None: no axis)."""
_JOINS = {("", "Concat"): (0, 1), (_MICROSOFT, "QLinearConcat"): (2, 3)}
"""By operator that concatenates: position of the first part, and number of inputs per part."""


def add_guards(proto: Any) -> None:
    """Add guards to a model. A run that would crash ONNX Runtime, or leave results unwritten, then fails."""
    fixed = constants(proto)
    weights = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer if tensor.name in fixed}
    inferred = cache(partial(_infer_shapes, proto, fixed))
    names = map(f"{os.urandom(8).hex()}:{{}}".format, count())  # The file cannot contain random names.
    for owner, graph in ((proto, proto.graph), *((each, each) for each in proto.functions)):
        versions = [entry.version for entry in owner.opset_import if entry.domain in ("", "ai.onnx")]

        def shape(name: str, owner: Any = owner) -> _Shape | None:
            if owner is not proto:
                return None
            return weights[name] if name in weights else inferred().get(name)

        if _Guarding(graph, shape, names, versions[0] if versions else _OPSET).run() and not versions:
            owner.opset_import.add(domain="", version=_OPSET)


def _infer_shapes(proto: Any, fixed: set[str]) -> dict[str, _Shape]:
    """Return the shapes, keyed by name, that follow from inputs and weights; empty if the inference fails."""
    functions = {function.name for function in proto.functions}  # Nodes of all domains are compared with them.
    skeleton = messages().ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    graph = skeleton.graph
    graph.name = "graph"
    for node in proto.graph.node:  # Shape inference crashes for a StringSplit of an unknown type.
        if node.op_type not in ("StringSplit", *functions) and not any(inner_graphs(node)):
            graph.node.append(node)
    graph.input.extend(value for value in proto.graph.input if value.name not in fixed)
    for tensor in proto.graph.initializer:
        if tensor.name not in fixed:
            continue
        if len(tensor.dims) <= 1 and sum(tensor.dims) <= _SMALL and not tensor.external_data:
            graph.initializer.append(tensor)
        else:
            graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    for value in proto.graph.output:
        graph.output.add(name=value.name)
    try:
        graph = onnx().shape_inference.infer_shapes(skeleton, data_prop=True).graph
    except Exception:  # ONNX Runtime reports what is wrong.
        return {}
    kinds = ((value.name, value.type.tensor_type) for value in (*graph.value_info, *graph.input, *graph.output))
    return {
        name: tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
        for name, kind in kinds
        if kind.HasField("shape")
    }


def _title(node: Any) -> str:
    return f"{node.op_type} {node.name[:100]!r}" if node.name else str(node.op_type)


class _Guarding:
    """A pass that adds guards against harmful dimensions to a graph or function, and to its inner graphs."""

    def __init__(self, graph: Any, shape: Callable[[str], _Shape | None], names: Iterator[str], opset: int) -> None:
        self._graph, self._shape, self._names, self._opset = graph, shape, names, opset
        self._nodes: list[Any] = []

    def run(self) -> bool:
        """Add the guards to the graph. Return True if there are any."""
        has_inner = False
        for node in self._graph.node:
            for inner in inner_graphs(node):
                own = {value.name for value in (*inner.input, *inner.initializer)}
                own.update(name for each in inner.node for name in each.output)
                has_inner |= _Guarding(inner, partial(self._outer_shape, own), self._names, self._opset).run()
            self._append(node)
        has_own = len(self._nodes) > len(self._graph.node)
        if has_own:
            kept = [messages().NodeProto.FromString(node.SerializeToString()) for node in self._nodes]
            del self._graph.node[:]
            self._graph.node.extend(kept)
        return has_own or has_inner

    def _outer_shape(self, own: set[str], name: str) -> _Shape | None:
        """Return a value's shape; None if the name is in `own`, the names that an inner graph defines."""
        return None if name in own else self._shape(name)

    def _append(self, node: Any) -> None:
        """Append a node, with guards before or after it."""
        kind = {"ai.onnx": ""}.get(node.domain, node.domain), node.op_type
        if not node.input or not node.output:  # ONNX Runtime refuses the guarded operators without inputs or outputs.
            self._nodes.append(node)
            return
        for position, axis in self._required_inputs(node, kind).items():
            self._require_elements(node, position, axis)
        if kind == (_MICROSOFT, "Inverse"):
            self._require_square(node)
        total = self._elements_of_parts(node, kind)
        if total:
            to, node.output[0] = node.output[0], next(self._names)
            self._nodes.append(node)
            missing = self._add("Sub", self._add("Size", node.output[0]), total)
            self._reshape_or_fail(node.output[0], to, missing, f"{_title(node)} of parts that do not fit together")
        else:
            self._nodes.append(node)

    def _is_filled(self, name: str, axis: int | None = None) -> bool:
        """Return True if all sizes of a value, except along `axis`, are known and not 0."""
        shape = self._shape(name)
        if shape is None or (axis is not None and not -len(shape) <= axis < len(shape)):
            return False
        skipped = None if axis is None else axis % len(shape)
        return all(size > 0 for i, size in enumerate(shape) if i != skipped)

    # -- guards --------------------------------------------------------------------------------------------------------

    def _required_inputs(self, node: Any, kind: tuple[str, str]) -> dict[int, int | None]:
        if kind == ("", "Unique"):
            return {0: axis} if (axis := _integer(node, "axis", None)) is not None else {}
        if kind == ("", "Scan") and self._opset < _SCAN_WITHOUT_BATCHES:
            return {max(len(node.input) - (_integer(node, "num_scan_inputs", 1) or 1), 0): 0}
        if kind == ("", "ConvTranspose") and len(self._shape("".join(node.input[1:2])) or range(5)) != 5:
            return {}  # Only a ConvTranspose in three dimensions crashes.
        return _NEEDED.get(kind, {})

    def _require_elements(self, node: Any, position: int, axis: int | None) -> None:
        name = node.input[position] if position < len(node.input) else ""
        if not name or self._is_filled(name, axis):
            return
        missing = self._add("Cast", self._add("Equal", self._add("Size", name), self._number(0)), to=7)
        if axis is not None:
            missing = self._add("Mul", missing, self._size(name, axis))
        node.input[position] = self._reshape_or_fail(name, next(self._names), missing, f"{_title(node)} of no elements")

    def _require_square(self, node: Any) -> None:
        name = node.input[0]
        shape = self._shape(name) or ()
        if len(shape) > 1 and shape[-1] == shape[-2] != -1:
            return
        missing = self._add("Abs", self._add("Sub", self._size(name, -2), self._size(name, -1)))
        node.input[0] = self._reshape_or_fail(name, next(self._names), missing, f"{_title(node)} of what is not square")

    def _elements_of_parts(self, node: Any, kind: tuple[str, str]) -> str:
        """Add nodes that count the elements of all arrays to join. Return the result's name, or "" for no guard."""
        if kind == ("", "ConcatFromSequence"):
            return self._elements_of_sequence(node.input[0])
        first, step = _JOINS.get(kind, (len(node.input), 1))
        parts = list(node.input[first::step])
        if all(self._is_filled(name, _integer(node, "axis", 0)) for name in parts):
            return ""
        total = self._add("Size", parts[0])
        for name in parts[1:]:
            total = self._add("Add", total, self._add("Size", name))
        return total

    def _elements_of_sequence(self, sequence: str) -> str:
        helper = onnx().helper
        index, go, so_far, part, size, total, goes = (next(self._names) for _ in range(7))
        body = helper.make_graph(
            [
                helper.make_node("SequenceAt", [sequence, index], [part]),
                helper.make_node("Size", [part], [size]),
                helper.make_node("Add", [so_far, size], [total]),
                helper.make_node("Identity", [go], [goes]),
            ],
            "sizes",
            [helper.make_tensor_value_info(name, kind, ()) for name, kind in ((index, 7), (go, 9), (so_far, 7))],
            [helper.make_tensor_value_info(name, kind, ()) for name, kind in ((goes, 9), (total, 7))],
        )
        return self._add("Loop", self._add("SequenceLength", sequence), "", self._number(0), body=body)

    # -- making nodes --------------------------------------------------------------------------------------------------

    def _add(self, operator: str, *inputs: str, into: str = "", label: str = "", **attributes: Any) -> str:
        into = into or next(self._names)
        self._nodes.append(onnx().helper.make_node(operator, inputs, [into], label, **attributes))
        return into

    def _number(self, value: int) -> str:
        return self._add("Constant", value=onnx().helper.make_tensor("value", onnx().TensorProto.INT64, (), [value]))

    def _size(self, name: str, axis: int) -> str:
        return self._add("Gather", self._add("Shape", name), self._number(axis))

    def _reshape_or_fail(self, value: str, to: str, missing: str, why: str) -> str:
        """Append a Reshape that returns `value` if `missing` is 0, and else fails with `why` in its message."""
        less = self._add("Mul", missing, self._number(_MUCH))
        shape = self._add("Sub", self._add("Shape", value), less)
        return self._add("Reshape", value, shape, into=to, label=f"{why}:{next(self._names)}")


def _integer(node: Any, name: str, default: int | None) -> int | None:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)
