"""Lowering: conversion of a model of NNAPI operations to an ONNX graph.

Every operand becomes a value of the graph, stored as in NNAPI. Only signed 8-bit elements are changed: the lowering
adds 128 to elements and zero point, so all functions here work on unsigned elements. On processors with VNNI, constant
filters become signed, which makes ONNX Runtime much faster. Without VNNI, ONNX Runtime's sums of signed products
saturate at 16 bits.

An operation reads and writes either stored values or real values, which are float32: see `LoweredCall`. Quantised
arithmetic is float32 between DequantizeLinear and QuantizeLinear, which ONNX Runtime often replaces by integer
kernels. The kernels round halves to even, NNAPI away from 0. So where halves are frequent, a result's scale is reduced
by a few units in the last place. A result can still differ by 1 from the result of the reference device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...errors import GeneralFailure, InvalidArgument, NNBurstError
from ...memory.staging import read_constant
from ...model.dimensions import combine_dimensions, is_fully_specified
from ...model.operand_types import HalVersion, OperandType, operand_info, operand_nbytes
from ...model.operation_types import operation_name
from ...model.operation_view import Match, OperationView, Signature
from ...model.rows import OPERATIONS
from ...model.signature import match_signature
from ...model.types import Array, Lifetime, Model, OperandDesc, Operation
from ..caching import cpu_features
from ..common import activation_limits
from ..encoded import Bytes
from .library import onnx

OPSET = 18
_IR_VERSION = 8
_FILE = "weights"
_LARGE = 1024
"""Minimum size in bytes of a weight in the external file. Smaller weights are in the model file."""
_AWAY = 1 - 2.0**-21
"""Factor for scales, so that ONNX Runtime rounds halves away from 0 instead of to even."""
_LARGEST_RESULT = 256 << 20
_CONSTANT = (Lifetime.CONSTANT_COPY, Lifetime.CONSTANT_REFERENCE)
_T = OperandType
_SIGNED = (_T.TENSOR_QUANT8_ASYMM_SIGNED, _T.TENSOR_QUANT8_SYMM_PER_CHANNEL)


class Lowering:
    """A model during its conversion to a graph. Weights are read only when the graph is written.

    Attributes:
        reasons: For each operation of the main subgraph, why it cannot be lowered; empty if it can.
        copies: Private copies of the constants read so far, keyed by operand.
    """

    def __init__(self, model: Model, functions: Mapping[int, Callable[[LoweredCall], None]]) -> None:
        self.copies: dict[int, Array] = {}
        self.operands = tuple(map(_unsigned, model.main.operands))
        self.values: dict[int, str] = {}
        """By operand: name of the graph's value with the stored elements."""
        self._model = model
        self._nodes: list[tuple[str, tuple[str, ...], tuple[str, ...], str, dict[str, Any]]] = []
        """(operator, inputs, outputs, name for ONNX Runtime's messages, attributes) of each node."""
        self._weights: dict[str, Callable[[], Array]] = {}
        self._written: dict[int, tuple[int, ...]] = {}
        self._name = ""
        for index in model.main.input_indexes:
            name = self.values[index] = f"x{index}"
            if self.is_signed(index):
                self.values[index] = self._flip_sign(name, np.int8, np.uint8)
        self.reasons: list[str] = []
        for position, each in enumerate(model.main.operations):
            self._name = f"operation {position} ({operation_name(each.type)})"
            self.reasons.append(self._lower(each, functions.get(each.type)))

    def _lower(self, operation: Operation, function: Callable[[LoweredCall], None] | None) -> str:
        row = OPERATIONS.get(operation.type)
        if function is None or row is None:
            return "it is not lowered to ONNX"
        try:
            match = match_signature(row, operation, self.operands, HalVersion.V1_3)
            call = LoweredCall(self, operation, row, match)
            call.require_known()
            function(call)
        except NNBurstError as error:
            return str(error)
        except (ArithmeticError, ValueError) as error:  # The model has unusable numbers.
            return f"{type(error).__name__}: {error}"
        return ""

    # -- nodes of operations ---------------------------------------------------------------------------------------

    def nodes(self, count: int, kind: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        outputs = tuple(f"n{len(self._nodes)}_{i}" for i in range(count))
        self._nodes.append((kind, inputs, outputs, f"{self._name}, node {len(self._nodes)}", attributes))
        return outputs

    def weight(self, name: str, make: Callable[[], Array]) -> str:
        self._weights.setdefault(name, make)
        return name

    def array(self, values: Any, dtype: Any = np.int64) -> str:
        array = np.asarray(values, dtype)
        return self.weight(f"{array.dtype}{list(array.shape)}{array.tobytes().hex()}", lambda: array)

    def stored_value(self, index: int) -> str:
        if self.operands[index].lifetime in _CONSTANT:
            return self.weight(f"c{index}", lambda: self.read(index))
        return self.values.get(index, f"x{index}")  # An operand without a name comes from another device.

    def read(self, index: int) -> Array:
        """Return a private copy of a constant, made at the first call."""
        operand, location = self._model.main.operands[index], self._model.main.operands[index].location
        dtype = operand_info(operand.type).dtype
        if index not in self.copies and operand.lifetime == Lifetime.CONSTANT_COPY:
            raw = self._model.operand_values[location.offset : location.offset + location.length]
            self.copies[index] = np.frombuffer(raw, dtype).reshape(operand.dimensions)
        elif index not in self.copies:
            pool = self._model.pools[location.pool_index]
            self.copies[index] = read_constant(pool, dtype or np.uint8, operand.dimensions, location.offset)
        found = self.copies[index]
        return (found ^ np.int8(-128)).view(np.uint8) if self.is_signed(index) else found

    def is_signed(self, index: int) -> bool:
        """Return True if an operand's stored elements are int8. The graph adds 128 to them and computes with uint8."""
        return self._model.main.operands[index].type in _SIGNED

    def set_result(self, index: int, value: str, dims: tuple[int, ...]) -> None:
        """Record which value of the graph is an operation's result, and the result's dimensions."""
        self.values[index], self._written[index] = value, dims

    def dims(self, index: int) -> tuple[int, ...]:
        return self._written.get(index, self.operands[index].dimensions)

    def _flip_sign(self, name: str, source: Any, target: Any) -> str:
        (bits,) = self.nodes(1, "BitwiseXor", name, self.array(-128 if source is np.int8 else 128, source))
        return self.nodes(1, "Cast", bits, to=_number(target))[0]

    # -- the graph -------------------------------------------------------------------------------------------------

    def graph(self) -> tuple[bytes, dict[str, Bytes]]:
        """Return the model file and the external files. Raises `GeneralFailure` if an operation cannot be lowered."""
        main, helper = self._model.main, onnx().helper
        if any(self.reasons):
            raise GeneralFailure(next(filter(None, self.reasons)))
        outputs = []
        for index in main.output_indexes:
            name = self.values[index]
            if self.is_signed(index):
                name = self._flip_sign(name, np.uint8, np.int8)
            (last,) = self.nodes(1, "Identity", name)
            outputs.append(_argument(last, main.operands[index], self._written[index]))
        inputs = [_argument(f"x{i}", main.operands[i], main.operands[i].dimensions) for i in main.input_indexes]
        used = {name for _, names, *_ in self._nodes for name in names}
        weights: list[Any] = []
        pieces: list[bytes] = []
        end = 0
        for name, make in self._weights.items():
            if name not in used:
                continue
            array = make()
            tensor = onnx().TensorProto(name=name, dims=array.shape, data_type=_number(array.dtype))
            if array.nbytes < _LARGE:
                tensor.raw_data = array.tobytes()
            else:
                tensor.data_location = onnx().TensorProto.EXTERNAL
                for key, value in (("location", _FILE), ("offset", end), ("length", array.nbytes)):
                    tensor.external_data.add(key=key, value=str(value))
                pieces += [array.tobytes(), bytes(-array.nbytes % 64)]
                end += array.nbytes + len(pieces[-1])
            weights.append(tensor)
        nodes = [helper.make_node(*node, **attributes) for *node, attributes in self._nodes]
        graph = helper.make_graph(nodes, "lowered", inputs, outputs, weights)
        sets = [helper.make_opsetid("", OPSET)]
        data: bytes = helper.make_model(graph, opset_imports=sets, ir_version=_IR_VERSION).SerializeToString()
        return data, {_FILE: np.frombuffer(b"".join(pieces), np.uint8)} if pieces else {}


class LoweredCall(OperationView):
    """An operation during its lowering. Methods append nodes to the graph, and refer to its values by name."""

    partial = False

    def __init__(self, lowering: Lowering, operation: Operation, row: Signature, match: Match) -> None:
        super().__init__(operation, lowering.operands, row, match)
        self._lowering = lowering
        self.array = lowering.array
        self.outputs: list[tuple[int, ...]] = []

    def _dims_of(self, index: int) -> tuple[int, ...]:
        return self._lowering.dims(index)

    def _value_of(self, index: int) -> Array | None:
        return self._lowering.read(index) if self._operands[index].lifetime in _CONSTANT else None

    def require_known(self) -> None:
        """Raise `GeneralFailure` if dimensions are unknown, and `InvalidArgument` if they are inconsistent."""
        for position, index in enumerate(self.operation.inputs):
            operand, dims = self._lowering.operands[index], self._lowering.dims(index)
            if operand.lifetime == Lifetime.NO_VALUE:
                if position not in self.match.omittable:
                    raise GeneralFailure(f"input {position} has no value, but the operation needs one")
                continue
            if operand.lifetime == Lifetime.SUBGRAPH_INPUT and position in self.match.omittable:
                raise GeneralFailure(f"a request may omit input {position}")
            if not (operand.is_scalar or is_fully_specified(dims)):
                raise GeneralFailure(f"dimensions {list(dims)} of input {position} are not all known")
        self.check_ranks()
        for index, spec in zip(self.operation.outputs, self.infer(), strict=True):
            operand = self._lowering.operands[index]
            if 0 in combine_dimensions(operand.dimensions, spec.dimensions):
                raise GeneralFailure("its result has no elements")
            if operand_nbytes(operand.type, spec.dimensions) > _LARGEST_RESULT:
                raise GeneralFailure(f"its result takes more than {_LARGEST_RESULT} bytes")
            self.outputs.append(spec.dimensions)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self._lowering.nodes(1, kind, *inputs, **attributes)[0]

    def nodes(self, count: int, kind: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        return self._lowering.nodes(count, kind, *inputs, **attributes)

    def cast(self, value: str, dtype: Any) -> str:
        return self.node("Cast", value, to=_number(dtype))

    def reshape(self, value: str, dims: Sequence[int]) -> str:
        return self.node("Reshape", value, self.array(dims))

    def transpose(self, value: str, axes: Sequence[int]) -> str:
        return value if tuple(axes) == tuple(range(len(axes))) else self.node("Transpose", value, perm=list(axes))

    def clip(self, value: str, low: float | None, high: float | None, dtype: Any = np.float32) -> str:
        """Append a node that clips a value to limits (None for no limit); return the clipped value."""
        if (low, high) == (0, None) and dtype is np.float32:
            return self.node("Relu", value)
        limits = ["" if limit is None else self.array(limit, dtype) for limit in (low, high)]
        return self.node("Clip", value, *limits) if any(limits) else value

    # -- input values ----------------------------------------------------------------------------------------------

    def is_signed(self, name: str, which: int = 0) -> bool:
        return self._lowering.is_signed(self.index(name, which))

    def is_constant(self, name: str) -> bool:
        return self.operand(name).lifetime in _CONSTANT

    def stored_value(self, name: str, which: int = 0) -> str:
        return self._lowering.stored_value(self.index(name, which))

    def as_bool(self, name: str) -> str:
        return self.cast(self.stored_value(name), np.bool_)

    def real(self, name: str, which: int = 0, axes: Sequence[int] = ()) -> str:
        """Return the name of an input's dequantised values in float32, with the axes in the order `axes`."""
        index, operand, channels = self.index(name, which), self.operand(name, which), self.channel_scales(name)
        info, value = operand_info(operand.type), self.stored_value(name, which)
        dtype: Any = np.uint8 if self.is_signed(name, which) else info.dtype
        turned = name == "filter" and dtype == np.uint8 and self.is_constant(name) and _multiplies_signed()
        if (axes or turned) and self.is_constant(name):
            read, order = self._lowering.read, axes or range(len(operand.dimensions))

            def make() -> Array:
                array = read(index).transpose(order)
                return (array ^ np.uint8(128)).view(np.int8) if turned else array

            value = self._lowering.weight(f"c{index}{list(order)}{turned}", make)
        elif axes:
            value = self.transpose(value, axes)
        if not info.is_quantised and channels is None:
            return value if dtype == np.float32 else self.cast(value, np.float32)
        scales, axis = channels or (operand.scale, 0)
        zero_points = np.full_like(scales, operand.zero_point if channels is None else 128, int) - 128 * turned
        steps, zeros = self.array(scales, np.float32), self.array(zero_points, np.int8 if turned else dtype)
        return self.node("DequantizeLinear", value, steps, zeros, axis=list(axes).index(axis) if axes else axis)

    # -- output values ---------------------------------------------------------------------------------------------

    def set_result(self, value: str, which: int = 0) -> None:
        self._lowering.set_result(self.operation.outputs[which], value, self.outputs[which])

    def store_result(self, value: str, which: int = 0, axes: Sequence[int] = (), *, halves: bool = True) -> None:
        """Store a result's real values after activation, quantisation and reordering of the axes.

        With `halves`, the scale of quantised results is changed a little, so that results half-way between two stored
        values are rounded away from zero.
        """
        operand, code = self.output(which), self.integer("act") if self.count("act") else 0
        info, limits = operand_info(operand.type), activation_limits(operand, code)
        if info.is_quantised:
            scale = self.array(operand.scale * (_AWAY if halves else 1), np.float32)
            value = self.node("QuantizeLinear", value, scale, self.array(operand.zero_point, info.dtype))
            low, high = (limit if limit != bound else None for limit, bound in zip(limits, (0, 255), strict=True))
            value = self.clip(value, low, high, dtype=info.dtype)
        else:
            value = self.clip(value, *limits)
            value = value if info.dtype == np.float32 else self.cast(value, info.dtype)
        self.set_result(self.transpose(value, axes) if axes else value, which)


@cache
def _multiplies_signed() -> bool:
    """Return True if ONNX Runtime multiplies unsigned by signed bytes without saturation."""
    return not {"avx_vnni", "avx512_vnni"}.isdisjoint(cpu_features().split())


def _unsigned(operand: OperandDesc) -> OperandDesc:
    if operand.type != _T.TENSOR_QUANT8_ASYMM_SIGNED:
        return operand
    return replace(operand, type=int(_T.TENSOR_QUANT8_ASYMM), zero_point=operand.zero_point + 128)


def _number(dtype: Any) -> int:
    return int(onnx().helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _argument(name: str, operand: OperandDesc, dims: tuple[int, ...]) -> Any:
    dtype = operand_info(operand.type).dtype
    if dtype is None:
        raise InvalidArgument("an argument is of a type without defined contents")
    return onnx().helper.make_tensor_value_info(name, _number(dtype), [size or None for size in dims])
