"""Snapshots: copies of arguments around each run, because a client could change its memory during the run.

ONNX Runtime checks a value, and then uses the value again. If the client changes data in between, the client gets a
wrong result. After a change of an index, a size, a condition or a sort key, ONNX Runtime would access memory outside
an array. So a run uses the client's memory only if all operators of the graph are known to use elements only as data.
Arguments of ONNX's index types (32-bit and 64-bit integers, booleans) are always copied.
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
"""Operators that use elements only as data, except for elements of the index types."""

_DIVISIONS = frozenset(("Div", "Mod"))
"""Operators that use floats only as data, but check integers for zero."""

_FIRST_IS_DATA = frozenset(("GridSample", "MaxRoiPool", "Resize", "RoiAlign", "Upsample"))
"""Operators whose first input is only data, and whose other inputs are coordinates and sizes."""

_STANDARD = ("", "ai.onnx")

_FLOATS = frozenset((1, 10, 11, 16, 17, 18, 19, 20))
"""ONNX's numbers of the floating-point types."""


def must_copy(element: ElementType) -> bool:
    """Return True if arrays of a type must be copied, because they may contain indices, sizes or conditions."""
    return element.name in _INDEX_TYPES


def exposed_arguments(proto: Any) -> frozenset[str]:
    """Return the names of inputs and outputs that must be copied because of the graph's operators."""
    functions = {function.name for function in proto.functions}  # Nodes of all domains are compared with them.
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
