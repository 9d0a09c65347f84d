"""Snapshots: arguments of a graph that are copied around each run, because clients could change them meanwhile.

ONNX Runtime checks a value and then uses it, as if no other process could write there. If a client changes a value
that is only data, it gets a wrong result. If it changes an index, a size, a condition or a key of a sort, ONNX
Runtime accesses memory outside an array. So an argument stays in the client's memory only if all operators of the
graph are known to use it as data; otherwise it is copied. Integers of 32 and 64 bits and booleans, which ONNX has for
indices and sizes, are always copied.
"""

from __future__ import annotations

from typing import Any

from ..elements import ElementType
from .importer import constants

_INDEX_TYPES = frozenset(("int32", "int64", "uint32", "uint64", "bool"))

_HARMLESS = frozenset(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization BitwiseAnd BitwiseNot
    BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Compress Concat Constant ConstantOfShape Conv ConvInteger
    ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Dropout DynamicQuantizeLinear Einsum Elu Equal Erf
    Exp Expand Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool
    GlobalMaxPool Greater GreaterOrEqual GroupNormalization HardSigmoid HardSwish Hardmax Identity
    InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax
    LpNormalization LpPool MatMul MatMulInteger Max MaxPool Mean MeanVarianceNormalization Min Mish Mul Neg Not Or
    PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization RNN Reciprocal ReduceL1 ReduceL2
    ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape
    ReverseSequence Round ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax
    Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu Tile Transpose Trilu
    Unsqueeze Where Xor
    """.split()
)
"""Operators that use elements of other types than the index types only as data."""

_DIVISIONS = frozenset(("Div", "Mod"))
"""Operators that use elements only as data unless they are integers, which are first compared with zero."""

_FIRST_IS_DATA = frozenset(("GridSample", "MaxRoiPool", "Resize", "RoiAlign", "Upsample"))
"""Operators that use only their first input as data; other inputs are coordinates and sizes."""

_STANDARD = ("", "ai.onnx")

_FLOATS = frozenset((1, 10, 11, 16, 17, 18, 19, 20))
"""ONNX's numbers of floating-point types."""


def must_copy(element: ElementType) -> bool:
    """Return True if elements of a type may be indices, sizes or conditions."""
    return element.name in _INDEX_TYPES


def exposed_arguments(proto: Any) -> frozenset[str]:
    """Return the names of inputs and outputs that must be copied although their type alone does not require it."""
    functions = {function.name for function in proto.functions}  # Their domains do not matter.
    fixed = constants(proto) | {""}.union(*(node.output for node in proto.graph.node if node.op_type == "Constant"))

    def is_harmless(node: Any) -> bool:
        if node.op_type in functions or node.domain not in _STANDARD:
            return False
        return node.op_type in _HARMLESS or (node.op_type in _FIRST_IS_DATA and fixed.issuperset(node.input[1:]))

    others = {node.op_type for node in proto.graph.node if not is_harmless(node)}
    return frozenset(
        value.name
        for value in (*proto.graph.input, *proto.graph.output)
        if not others <= (_DIVISIONS if value.type.tensor_type.elem_type in _FLOATS else set())
    ).difference(fixed)
