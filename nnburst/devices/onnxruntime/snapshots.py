"""Which arguments of a graph are copied around each run, because their client could change them during it.

ONNX Runtime checks a value and then uses it, as if no other process could write there. Where a value is only data, a
change in between makes a wrong result for the one that made it. Where it is an index, a size, a condition or what
decides the order of a sort, the change leads outside of an array. Two rules keep that from happening:

* Integers of 32 and 64 bits and booleans, which is what ONNX has for such purposes, are copied, in and out: an output
  may be read again by other nodes of the graph.
* All others lie where the client put them, unless they reach an operator that is not known to take them as mere data,
  with nothing in between that certainly computes something of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..elements import ElementType
from .importer import constants

_INDEX_TYPES = frozenset(("int32", "int64", "uint32", "uint64", "bool"))

_DATA = frozenset(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization BitwiseAnd BitwiseNot
    BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Compress Concat Constant ConstantOfShape Cos Cosh CumSum
    DepthToSpace DequantizeLinear Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand Flatten Floor GRU Gather
    GatherElements GatherND Gelu GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GroupNormalization
    HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Less
    LessOrEqual Log LogSoftmax LpNormalization LpPool Max MaxPool Mean MeanVarianceNormalization Min Mish Mul Neg Not Or
    PRelu Pad Pow QuantizeLinear RMSNormalization Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape ReverseSequence Round ScatterElements
    ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt
    Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu Tile Transpose Trilu Unsqueeze Where Xor
    """.split()
)
"""Operators for which an element type other than an index type is data and nothing else."""

_DIVISIONS = frozenset(("Div", "Mod"))
"""Likewise, unless the elements are integers: these are looked at for zeros first."""

_FIRST_IS_DATA = frozenset(("GridSample", "MaxRoiPool", "Resize", "RoiAlign", "Upsample"))
"""Likewise for the first input; the others are coordinates and sizes."""

_BARRIERS = frozenset(
    """
    Conv ConvInteger ConvTranspose Gemm LSTM MatMul MatMulInteger QLinearConv QLinearMatMul RNN GRU
    """.split()
)
"""Operators whose inputs are data and whose results have memory of their own, whatever an optimiser does."""

_OWN_RESULTS = _BARRIERS | {
    *("GridSample", "MaxRoiPool", "NonMaxSuppression", "NonZero", "OneHot", "Range", "RoiAlign", "TopK", "Unique")
}
"""All operators of which the latter is known."""

_HARMLESS = _DATA | _BARRIERS
_KNOWN = _HARMLESS | _OWN_RESULTS | _DIVISIONS | _FIRST_IS_DATA
_STANDARD = ("", "ai.onnx")

_FLOATS = frozenset((1, 10, 11, 16, 17, 18, 19, 20))
"""Numbers of the floating-point types in ONNX."""


def copied_always(element: ElementType) -> bool:
    """Whether elements of a type may be indices, sizes or conditions."""
    return element.name in _INDEX_TYPES


def exposed_arguments(proto: Any) -> frozenset[str]:
    """Return the inputs and outputs of a model that are copied although their type alone does not ask for it."""
    flow = _Flow(proto)
    if flow.is_harmless:
        return frozenset()
    names = []
    for is_float in (True, False):
        inputs, outputs = flow.exposed(is_float)
        for values, exposed in ((proto.graph.input, inputs), (proto.graph.output, outputs)):
            names += [
                value.name
                for value in values
                if value.name in exposed and is_float == (value.type.tensor_type.elem_type in _FLOATS)
            ]
    return frozenset(names)


class _Flow:
    """Which values of a graph may share memory, and what reads them.

    An optimiser removes nodes that change nothing and computes equal things once, so a value may lie where another
    one is that it is made of, and where one is that is made in the same way. Everything takes time in proportion to
    the graph, which a client may have made up.

    Attributes:
        is_harmless: There are only operators that take all values as mere data.
    """

    def __init__(self, proto: Any) -> None:
        functions = {function.name for function in proto.functions}  # whatever their domain
        nodes = proto.graph.node
        kinds = [kind if (kind := node.op_type) not in functions and node.domain in _STANDARD else "" for node in nodes]
        self.is_harmless = _HARMLESS.issuperset(kinds)
        if self.is_harmless:
            return
        self._constants = constants(proto) | {""}
        self._inputs = {value.name for value in proto.graph.input} - self._constants
        self._outputs = [value.name for value in proto.graph.output]
        self._nodes: list[tuple[str, list[str], list[str]]] = []
        self._names: dict[str, str] = {}
        self._is_sorted = True
        later = {name for node in nodes for name in node.output}
        made: dict[tuple[Any, ...], str] = {}
        for kind, node in zip(kinds, nodes, strict=True):
            if kind == "Constant":
                self._constants.update(node.output)
            reads = [self._names.get(name, name) for name in _read_by(node)]
            self._is_sorted = self._is_sorted and later.isdisjoint(reads)
            written = [name for name in node.output if name]
            for i, name in enumerate(written):
                self._names[name] = made.setdefault((kind, node.op_type, i, *reads), name)
            later.difference_update(written)
            self._nodes.append((kind, reads, [self._names[name] for name in written]))

    def exposed(self, is_float: bool) -> tuple[set[str], set[str]]:
        """Return the inputs and the outputs whose change during a run may do harm."""
        if not self._is_sorted:
            return self._inputs, set(self._outputs)
        harmful: set[str] = set()  # read by a suspect, as they are or as what may lie in the same place
        for kind, reads, writes in reversed(self._nodes):
            if kind not in _OWN_RESULTS and not harmful.isdisjoint(writes):
                harmful.update(reads)
            if kind not in _KNOWN:  # there is a graph in it, which may read its results, too
                harmful.update(writes)
            harmful.update(_suspects(kind, reads, is_float))
        harmful -= self._constants
        shared = harmful - self._inputs  # where an output may lie; no input ever does
        for kind, reads, writes in self._nodes:
            if kind not in _OWN_RESULTS and not shared.isdisjoint(reads[:1] if kind in _FIRST_IS_DATA else reads):
                shared.update(writes)
        return harmful & self._inputs, {name for name in self._outputs if self._names.get(name, name) in shared}


def _suspects(kind: str, reads: list[str], is_float: bool) -> list[str]:
    """Return which of the values that a node reads it may not take as mere data."""
    if kind in _FIRST_IS_DATA:
        return reads[1:]
    return [] if kind in _HARMLESS or (is_float and kind in _DIVISIONS) else reads


def _read_by(node: Any) -> Iterator[str]:
    """Yield the names that a node reads, and those that the graphs inside it read."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *((attribute.g,) if attribute.HasField("g") else ())):
            for inner in graph.node:
                yield from _read_by(inner)
            yield from (value.name for value in graph.output)
