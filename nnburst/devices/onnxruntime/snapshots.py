"""Arguments of a graph that are copied around each run, because their client could change them during it.

ONNX Runtime checks a value and then uses it, as if no other process could write there. Where a value is only data, a
change in between makes a wrong result for the one that made it. Where it is an index, a size, a condition or what
decides the order of a sort, the change leads outside of an array. So arguments lie where the client put them if all
operators of the graph are known to take them as mere data, and are copied otherwise. Integers of 32 and 64 bits and
booleans, which is what ONNX has for indices and sizes, are copied in any case.
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
"""Operators for which an element type other than an index type is data and nothing else."""

_DIVISIONS = frozenset(("Div", "Mod"))
"""Operators of that kind, unless the elements are integers: these are looked at for zeros first."""

_FIRST_IS_DATA = frozenset(("GridSample", "MaxRoiPool", "Resize", "RoiAlign", "Upsample"))
"""Operators of that kind for the first input; the others are coordinates and sizes."""

_STANDARD = ("", "ai.onnx")

_FLOATS = frozenset((1, 10, 11, 16, 17, 18, 19, 20))
"""Numbers of the floating-point types in ONNX."""


def copied_always(element: ElementType) -> bool:
    """Return True if elements of a type may be indices, sizes or conditions."""
    return element.name in _INDEX_TYPES


def exposed_arguments(proto: Any) -> frozenset[str]:
    """Return the inputs and outputs of a model that are copied although their type alone does not require it."""
    functions = {function.name for function in proto.functions}  # whatever their domain
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
