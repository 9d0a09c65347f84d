"""The model builder. Its methods take arrays and operands, or, like NNAPI's, indexes of operands."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from .._core.errno import as_int, is_real
from .._options import ActivationName, PaddingName, TensorLayout
from ..errors import BadState, InvalidArgument
from .extensions import extension_code
from .operand import Operand, Output, Outputs, Value
from .operand_types import (
    BASE_MAXIMUM,
    OPERANDS,
    OperandType,
    check_type,
    is_extension,
    operand_info,
    operand_nbytes,
    type_name,
)
from .operation_methods import OperationMethods
from .operation_types import FusedActivation, OperationType, PaddingScheme, operation_name, require_operation
from .operation_view import OperationView, OutputSpec, Param, UnknownYet
from .operations import view_operation
from .pools import make_pool
from .rows import OPERATIONS
from .signature import types_of
from .types import (
    Array,
    DataLocation,
    Lifetime,
    MemoryLike,
    Model,
    OperandDesc,
    Operation,
    Subgraph,
    SymmPerChannelQuantParams,
)
from .validate import check_operand, validate_model

if TYPE_CHECKING:
    from typing import Unpack

INLINE_LIMIT = 128
"""Largest size in bytes of a constant inside the model. Larger constants are in a shared pool."""

_MOST_LOOKED_AT = 4096
"""Limit in bytes: shape inference does not read larger constants in a caller's memory."""

_ALIGNMENT = 64
_NOWHERE = DataLocation()
_EXTENSION_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
_TYPE_OF_DTYPE = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "int32": OperandType.TENSOR_INT32,
    "int64": OperandType.TENSOR_INT32,
    "bool": OperandType.TENSOR_BOOL8,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "int16": OperandType.TENSOR_QUANT16_SYMM,
    "uint16": OperandType.TENSOR_QUANT16_ASYMM,
}
_SCALAR_TYPES = {bool: OperandType.BOOL, int: OperandType.INT32, float: OperandType.FLOAT32}

_ACTIVATIONS: dict[str | None, FusedActivation] = {
    None: FusedActivation.NONE,
    **{activation.name.lower(): activation for activation in FusedActivation},
}
_SCHEMES = {"same": PaddingScheme.SAME, "valid": PaddingScheme.VALID}

Pair = int | tuple[int, int]
Padding = PaddingName | tuple[tuple[int, int], tuple[int, int]]


class Quantisation(TypedDict, total=False):
    """Options that quantise a constant. ``scale`` is required, except with ``channel_scales``."""

    scale: float | None
    zero_point: int
    channel_scales: npt.ArrayLike | None
    channel_dim: int


class PoolOptions(TypedDict, total=False):
    """Options of a pooling operation. The default stride is the window's size."""

    stride: Pair | None
    padding: Padding
    activation: ActivationName | None
    layout: TensorLayout


class ModelBuilder(OperationMethods):
    """A builder that makes a `Model`, operation by operation.

    Methods return operands. An operand is an argument of later calls, and supports operators such as ``+``. Arrays
    become constants.

    Each operation has a method; docs/operations.md lists all methods and arguments. `add_operand`, `add_operation` and
    some other methods work with operand indexes, as in Android's NDK, and also accept an `Operand` as an index.
    `operand` returns the `Operand` of an index. After a call of `build` or `finish`, even one that failed, every later
    call raises `BadState`.

    Args:
        relaxed: Permit float32 computations with the range or precision of float16.

    Example:
        >>> b = nnburst.ModelBuilder()
        >>> x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 3))
        >>> b.output("y", b.softmax(2 * x + 1))
        >>> b.build().output_names
        ('y',)
    """

    def __init__(self, *, relaxed: bool = False) -> None:
        self._relaxed = relaxed
        self._operands: list[OperandDesc] = []
        self._operations: list[Operation] = []
        self._arrays: dict[int, Array] = {}  # The values are here until `finish` places them.
        self._pools: list[MemoryLike] = []
        self._models: list[Model] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._named_inputs: dict[str, int] = {}
        self._named_outputs: dict[str, int] = {}
        self._scalars: dict[tuple[OperandType, bytes], int] = {}
        self._prefixes: dict[str, int] = {}
        self._finished = False

    # -- operands ---------------------------------------------------------------------------------------------

    def input(
        self,
        name: str,
        type: OperandType | npt.DTypeLike | int,
        dimensions: Sequence[int] = (),
        *,
        scale: float = 0.0,
        zero_point: int = 0,
    ) -> Operand:
        """Add an input of the model. Return its operand.

        Args:
            name: Name for `Session.run`. The order of these calls is the order of the inputs.
            type: Operand type, or a dtype such as ``"float32"``; uint8 and int8 become the asymmetric types.
            dimensions: Sizes; 0 for a size that each request gives.
            scale, zero_point: Quantisation of a quantised type.

        Raises:
            InvalidArgument: The name is taken, or type, dimensions and quantisation contradict each other.
        """
        if not isinstance(name, str):
            raise InvalidArgument(f"the name of an input is text, not {name!r}")
        if name in self._named_inputs:
            raise InvalidArgument(f"there is an input {name!r} already; choose another name")
        code = type if isinstance(type, int) else _type_of_input(name, type)
        index = self.add_operand(code, dimensions, scale=scale, zero_point=zero_point)
        self._named_inputs[name] = index
        return Operand(self, index)

    def output(self, name: str, operand: Operand) -> None:
        """Make an operand an output of the model.

        Args:
            name: Name for `Session.run`. The order of these calls is the order of the outputs.
            operand: The result of an operation.

        Raises:
            InvalidArgument: The name is taken, or the operand is an input, a constant or already an output.
        """
        self._require_open()
        if not isinstance(operand, Operand):
            raise InvalidArgument(f"expected an Operand as output {name!r}, got {operand!r}")
        index = operand._index_in(self)
        if not isinstance(name, str):
            raise InvalidArgument(f"the name of an output is text, not {name!r}")
        if name in self._named_outputs:
            raise InvalidArgument(f"there is an output {name!r} already; choose another name")
        made = self._operands[index].lifetime == Lifetime.TEMPORARY_VARIABLE
        if not made or index in self._named_inputs.values() or index in self._named_outputs.values():
            raise InvalidArgument(f"output {name!r}: operand {index} must be the result of an operation, and only once")
        self._named_outputs[name] = index

    # -- constants --------------------------------------------------------------------------------------------

    def constant(
        self,
        value: npt.ArrayLike,
        type: OperandType | npt.DTypeLike | None = None,
        **quantisation: Unpack[Quantisation],
    ) -> Operand:
        """Add a constant tensor. Return its operand.

        Args:
            value: Array of rank 1 or more, or a list of numbers. int64 becomes int32 if no number is too large. Python
                floats become float32. A float64 array would lose digits, so it is accepted only if `type` is given.
            type: Operand type or dtype; default: the array's dtype. uint8 and int8 become the asymmetric types.
            quantisation: ``scale`` (required) and ``zero_point`` of a quantised type. ``channel_scales`` makes an
                int8 array TENSOR_QUANT8_SYMM_PER_CHANNEL, with one scale per index along ``channel_dim`` (default 0).

        Raises:
            InvalidArgument: No operand type has the dtype, the value does not fit the type, or a scale is missing.
        """
        if isinstance(value, Operand):
            raise InvalidArgument(
                f"{value!r} is an operand already; a constant is made of an array or a list of numbers"
            )
        array = _as_array(value, "a constant")
        if array.ndim == 0:
            raise InvalidArgument("a constant tensor has rank 1 or more; use scalar() for a scalar")
        is_array = isinstance(value, np.ndarray)
        if type is None:
            floats = not is_array and array.dtype == np.float64
            type = np.float32 if floats else array.dtype
        kind, index = self._constant_operand(type, array.shape, **quantisation)
        self.set_operand_value(index, _narrow(array, operand_info(kind).dtype) if is_array else value)
        return Operand(self, index)

    def constant_from_memory(
        self,
        memory: MemoryLike,
        dimensions: Sequence[int],
        type: OperandType | npt.DTypeLike = OperandType.TENSOR_FLOAT32,
        *,
        offset: int = 0,
        **quantisation: Unpack[Quantisation],
    ) -> Operand:
        """Add a constant tensor whose values are in a memory, such as weights in a file. Return its operand.

        This call does not read the values, and a service gets only the memory's handle. The device copies the values
        once, when it prepares the model, so that they cannot change later::

            with open("weights.bin", "rb") as file:
                weights = Memory.mmap_fd(file.fileno(), size, prot=PROT_READ)
            w = b.constant_from_memory(weights, (64, 128), offset=4096)

        Args:
            memory: Memory with the values in C order and the machine's byte order. The memory must outlive the model.
            dimensions: Sizes, without a 0.
            type: Operand type, or the values' dtype; uint8 and int8 become the asymmetric types.
            offset: Position of the first byte, of any alignment.
            quantisation: See `constant`.

        Raises:
            InvalidArgument: The region is outside the memory, or a scale is missing.
        """
        kind, index = self._constant_operand(type, dimensions, **quantisation)
        nbytes = operand_nbytes(kind, tuple(dimensions))
        self.set_operand_value_from_memory(index, memory, offset, nbytes)
        return Operand(self, index)

    def _constant_operand(
        self,
        type: OperandType | npt.DTypeLike,
        dimensions: Sequence[int],
        scale: float | None = None,
        zero_point: int = 0,
        channel_scales: npt.ArrayLike | None = None,
        channel_dim: int = 0,
    ) -> tuple[OperandType, int]:
        kind = type if isinstance(type, OperandType) else _type_of(np.dtype(type), channel_scales)
        if operand_info(kind).is_quantised and scale is None:
            raise InvalidArgument(f"a constant of {kind.name} needs scale= (and zero_point=)")
        extra = None
        if channel_scales is not None:
            scales = tuple(float(s) for s in np.asarray(channel_scales).reshape(-1))
            extra = SymmPerChannelQuantParams(scales, channel_dim)
        scale = scale or 0.0
        return kind, self.add_operand(kind, dimensions, scale=scale, zero_point=zero_point, extra_params=extra)

    def scalar(self, value: bool | int | float, type: OperandType | None = None) -> Operand:
        """Add a scalar constant and return its operand. Equal scalars of one type share an operand.

        Args:
            value: A bool, int or float.
            type: Type of the scalar; default: BOOL for a bool, INT32 for an int, FLOAT32 for a float.

        Raises:
            InvalidArgument: `type` is not a scalar type, or the value does not fit it.
        """
        if type is None:
            kind = bool if isinstance(value, bool | np.bool_) else int if isinstance(value, int | np.integer) else float
            type = _SCALAR_TYPES[kind]
        info = operand_info(type)
        if not info.is_scalar or info.dtype is None:
            raise InvalidArgument(f"expected a scalar type, got {type.name}")
        try:
            array = np.asarray(value).astype(info.dtype) if info.is_float else np.array(int(value), info.dtype)
        except (OverflowError, TypeError, ValueError):
            raise InvalidArgument(f"{value!r} does not fit into {type.name}") from None
        key = (type, array.tobytes())
        if key not in self._scalars:
            index = self.add_operand(type)
            self.set_operand_value(index, array)
            self._scalars[key] = index
        return Operand(self, self._scalars[key])

    def omitted(self, type: OperandType) -> Operand:
        """Return a new operand for an optional input that has no value.

        Args:
            type: Type of the missing value.
        """
        index = self.add_operand(type, scale=1.0 if operand_info(type).is_quantised else 0.0)
        self.set_operand_value(index, None)
        return Operand(self, index)

    def operand(self, index: int) -> Operand:
        """Return the operand at an index.

        Args:
            index: An index from `add_operand`.
        """
        return Operand(self, self._index_of(index))

    # -- operations -------------------------------------------------------------------------------------------

    def operation(
        self, operation: OperationType | str, *inputs: Value, number: int = 0, outputs: Outputs = None
    ) -> tuple[Operand, ...]:
        """Add an operation by its code or by the name of its extension. Return its results.

        Each NNAPI operation also has its own method, with named options. For an extension's operation, describe all
        outputs::

            (y,) = b.operation("com.example.blur", x, outputs=[{"type": x.type, "dimensions": x.shape}])

        Args:
            operation: A member of `OperationType`, or the name of an extension.
            inputs: Operands or arrays, in the order of the signature. For numbers, use `scalar`.
            number: Number of the operation in its extension.
            outputs: For each output, the properties that cannot be inferred: type, dimensions, scale, zero_point.
                Default: the smallest number of outputs, fully inferred. For an extension's type, give the code from
                `extension_code`.

        Returns:
            One operand for each output.

        Raises:
            InvalidArgument: The inputs do not fit the operation, or a property of an output is missing.
        """
        self._require_open()
        if isinstance(operation, str) and "." in operation:
            code, name = self.extension_code(operation, number), f"{operation} {number}"
        else:
            code = require_operation(operation)
            name = operation_name(code)
        described = _check_outputs(outputs)
        indexes = [self._operand(value).index for value in _listed(inputs, "operands")]
        try:
            specs = self._infer(Operation(code, tuple(indexes), ()), described)
        except UnknownYet as error:
            raise InvalidArgument(f"{name}: {error}; give dimensions= (0 for unknown ones)") from None
        except InvalidArgument as error:
            raise InvalidArgument(f"{name}: {error}") from None
        before = len(self._operands)
        try:
            for spec in specs:
                info = OPERANDS.get(spec.type)
                if info is not None and info.is_quantised and spec.scale is None:
                    raise InvalidArgument(
                        f"{name}: an output of {info.type.name} needs scale= (and zero_point=), as in"
                        f" {name.lower()}(…, scale=0.5)"
                    )
                self.add_operand(spec.type, spec.dimensions, scale=spec.scale or 0.0, zero_point=spec.zero_point or 0)
            made = range(before, len(self._operands))
            self.add_operation(code, indexes, made)
        except InvalidArgument:
            del self._operands[before:]
            raise
        return tuple(Operand(self, index) for index in made)

    def branch(self, condition: Value, then: Model, otherwise: Model, values: Sequence[Value]) -> tuple[Operand, ...]:
        """Add an IF. Return its results.

        Args:
            condition: TENSOR_BOOL8 of one element.
            then: Model that runs if `condition` is true. Its inputs are `values`; its outputs are the results.
            otherwise: Model that runs if `condition` is false, with the same inputs and outputs.
            values: Inputs of the model that runs.
        """
        inputs = [condition, self._subgraph(then), self._subgraph(otherwise), *_listed(values, "operands")]
        return self.operation(OperationType.IF, *inputs, outputs=_outputs_of(then))

    def loop(
        self, condition: Model, body: Model, values: Sequence[Value], outputs: int | None = None
    ) -> tuple[Operand, ...]:
        """Add a WHILE. Return its results.

        Args:
            condition: Model that computes a TENSOR_BOOL8 of one element from the values. The loop ends when the result
                is false.
            body: Model that computes the next values. If it has fewer outputs than there are values, the other values
                stay as they are.
            values: Initial values, one for each input of both models.
            outputs: Number of results, which are the body's first outputs; default: all.
        """
        inputs = [self._subgraph(condition), self._subgraph(body), *_listed(values, "operands")]
        return self.operation(OperationType.WHILE, *inputs, outputs=_outputs_of(body)[: outputs or None])

    def conv_2d(
        self,
        x: Value,
        filter: Value,
        bias: Value | None = None,
        *,
        padding: Padding = "valid",
        stride: Pair = 1,
        dilation: Pair = 1,
        activation: ActivationName | None = None,
        layout: TensorLayout = "NHWC",
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> Operand:
        """Add a CONV_2D and return its result.

        Args:
            x: Image [batch, height, width, depth], or [batch, depth, height, width] for ``layout="NCHW"``.
            filter: [depth out, height, width, depth in].
            bias: [depth out]; None for zeros. If x is quantised, this method quantises a bias of floats.
            padding: "same", "valid" or ((top, bottom), (left, right)).
            stride, dilation: (vertical, horizontal), or one number for both.
            activation: None, "relu", "relu1" or "relu6".
            layout: "NHWC" or "NCHW", for x and the result.
            scale, zero_point: Quantisation of a quantised result.
        """
        x, filter = self._operand(x), self._operand(filter)
        inputs = [x, filter, self._bias(x, filter, bias, 0), *self._window(padding, stride)]
        inputs += [self.scalar(activation_code(activation)), *self._layout(layout, dilation)]
        return self._single(OperationType.CONV_2D, inputs, {"scale": scale, "zero_point": zero_point})

    def depthwise_conv_2d(
        self,
        x: Value,
        filter: Value,
        bias: Value | None = None,
        *,
        multiplier: int = 1,
        padding: Padding = "valid",
        stride: Pair = 1,
        dilation: Pair = 1,
        activation: ActivationName | None = None,
        layout: TensorLayout = "NHWC",
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> Operand:
        """Add a DEPTHWISE_CONV_2D and return its result. Other arguments as for `conv_2d`.

        Args:
            multiplier: Results per channel of `x`. `filter` has shape [1, height, width, depth * multiplier].
        """
        x, filter = self._operand(x), self._operand(filter)
        inputs = [x, filter, self._bias(x, filter, bias, 3), *self._window(padding, stride), self.scalar(multiplier)]
        inputs += [self.scalar(activation_code(activation)), *self._layout(layout, dilation)]
        return self._single(OperationType.DEPTHWISE_CONV_2D, inputs, {"scale": scale, "zero_point": zero_point})

    def max_pool_2d(self, x: Value, size: Pair, **options: Unpack[PoolOptions]) -> Operand:
        """Add a MAX_POOL_2D and return its result.

        Args:
            x: An image, as for `conv_2d`.
            size: Size of the window as (height, width), or one number for both.
            options: ``stride``, by default `size`; ``padding``, ``activation`` and ``layout`` as for `conv_2d`.
        """
        return self._pool(OperationType.MAX_POOL_2D, x, size, **options)

    def average_pool_2d(self, x: Value, size: Pair, **options: Unpack[PoolOptions]) -> Operand:
        """Add an AVERAGE_POOL_2D and return its result; arguments as for `max_pool_2d`."""
        return self._pool(OperationType.AVERAGE_POOL_2D, x, size, **options)

    def l2_pool_2d(self, x: Value, size: Pair, **options: Unpack[PoolOptions]) -> Operand:
        """Add an L2_POOL_2D and return its result; arguments as for `max_pool_2d`."""
        return self._pool(OperationType.L2_POOL_2D, x, size, **options)

    def _pool(
        self,
        operation: OperationType,
        x: Value,
        size: Pair,
        *,
        stride: Pair | None = None,
        padding: Padding = "valid",
        activation: ActivationName | None = None,
        layout: TensorLayout = "NHWC",
    ) -> Operand:
        inputs = [self._operand(x), *self._window(padding, size if stride is None else stride)]
        height, width = _pair(size)
        inputs += [self.scalar(number) for number in (width, height, activation_code(activation))]
        return self._single(operation, [*inputs, *self._layout(layout, 1)], {})

    def fully_connected(
        self,
        x: Value,
        weights: Value,
        bias: Value | None = None,
        *,
        activation: ActivationName | None = None,
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> Operand:
        """Add a FULLY_CONNECTED and return its result.

        Args:
            x: Tensor of rank 2 to 4, which the operation reshapes to [rows, inputs].
            weights: [units, inputs].
            bias: [units]; None for zeros. If x is quantised, this method quantises a bias of floats.
            activation: None, "relu", "relu1" or "relu6".
            scale, zero_point: Quantisation of a quantised result.
        """
        x, weights = self._operand(x), self._operand(weights)
        inputs = [x, weights, self._bias(x, weights, bias, 0), self.scalar(activation_code(activation))]
        return self._single(OperationType.FULLY_CONNECTED, inputs, {"scale": scale, "zero_point": zero_point})

    def softmax(self, x: Value, beta: float = 1.0, axis: int | None = None) -> Operand:
        """Add a SOFTMAX and return its result.

        Args:
            x: Tensor of rank 1 to 4.
            beta: Factor of `x` before the softmax.
            axis: Axis along which the sum of the results is 1; None for the last.
        """
        x = self._operand(x)
        half = x.type == OperandType.TENSOR_FLOAT16
        inputs = [x, self.scalar(beta, OperandType.FLOAT16 if half else OperandType.FLOAT32)]
        return self._single(OperationType.SOFTMAX, inputs if axis is None else [*inputs, self.scalar(axis)], {})

    def build(self) -> Model:
        """Validate and return the model.

        Raises:
            InvalidArgument: The model has no output, or breaks a rule.
        """
        self._require_open()
        if not self._named_outputs:
            raise InvalidArgument("the model has no output; name one with output()")
        self.identify_inputs_and_outputs(list(self._named_inputs.values()), list(self._named_outputs.values()))
        names = {"input_names": tuple(self._named_inputs), "output_names": tuple(self._named_outputs)}
        return replace(self.finish(), **names)

    # -- operands and operations by index ---------------------------------------------------------------------

    def add_operand(
        self,
        type: int,
        dimensions: Sequence[int] = (),
        *,
        scale: float = 0.0,
        zero_point: int = 0,
        extra_params: SymmPerChannelQuantParams | bytes | None = None,
    ) -> int:
        """Add an operand and return its index.

        Args:
            type: An `OperandType`.
            dimensions: Sizes; 0 for an unknown size, ``()`` for a scalar or an unknown rank.
            scale: Scale of a quantised type: real value = (stored value - zero point) x scale.
            zero_point: See `scale`.
            extra_params: Channel scales of TENSOR_QUANT8_SYMM_PER_CHANNEL, or the bytes that an extension type needs.

        Raises:
            InvalidArgument: Type, dimensions and quantisation contradict each other.
        """
        self._require_open()
        check_type(type)
        if not isinstance(dimensions, Iterable):
            raise InvalidArgument(f"dimensions={dimensions!r}; give a list of sizes")
        if not is_real(scale):
            raise InvalidArgument(f"scale={scale!r}; give a number")
        dims = tuple(as_int(size, "a dimension") for size in dimensions)
        operand = OperandDesc(type, dims, 0, float(scale), as_int(zero_point, "zero_point"), extra_params=extra_params)
        try:
            check_operand(operand)
        except InvalidArgument as error:
            raise InvalidArgument(f"operand {len(self._operands)} ({type_name(type)}): {error}") from None
        self._operands.append(operand)
        return len(self._operands) - 1

    def describe(self, index: int) -> OperandDesc:
        """Return an operand's type, dimensions and quantisation.

        Args:
            index: Index of the operand.
        """
        return self._operands[self._index_of(index)]

    def set_operand_value(self, operand: int | Operand, value: npt.ArrayLike | Model | None) -> None:
        """Make an operand a constant, or mark it as omitted.

        Args:
            operand: Index of the operand.
            value: Array or scalar with the operand's dimensions and dtype; None to omit an optional input; a model for
                an operand of type SUBGRAPH. An array of more than 128 bytes must not change until `finish`, which
                copies it.

        Raises:
            InvalidArgument: The value does not fit the operand.
        """
        index = self._open_operand(operand)
        if value is None:
            self._set_constant(index, Lifetime.NO_VALUE)
        elif isinstance(value, Model):
            if self._operands[index].type != OperandType.SUBGRAPH:
                raise InvalidArgument(f"operand {index} is {type_name(self._operands[index].type)}, no SUBGRAPH")
            number = 0
            for known in self._models:
                if known is value:
                    break
                number += 1 + len(known.referenced)
            else:
                self._models.append(value)
            self._set_constant(index, Lifetime.SUBGRAPH, DataLocation(0, number, 0))
        else:
            array = self._fitting(index, value)
            small = array.nbytes <= INLINE_LIMIT
            self._set_constant(index, Lifetime.CONSTANT_COPY if small else Lifetime.CONSTANT_REFERENCE)
            self._arrays[index] = array.copy() if small else array

    def set_operand_value_from_memory(
        self, operand: int | Operand, memory: MemoryLike, offset: int, length: int
    ) -> None:
        """Make an operand a constant whose value is in a memory. The value is not copied.

        Args:
            operand: Index of the operand.
            memory: The memory, which must outlive the model.
            offset: Position of the first byte.
            length: Size of the value in bytes.

        Raises:
            InvalidArgument: The region is outside the memory or has the wrong length.
        """
        index = self._open_operand(operand)
        desc = self._operands[index]
        needed = operand_nbytes(desc.type, desc.dimensions)
        if length != needed or needed == 0:
            raise InvalidArgument(
                f"operand {index} ({type_name(desc.type)} {list(desc.dimensions)}) needs {needed} bytes,"
                f" not {length}; its dimensions must be known"
            )
        if offset < 0 or offset + length > memory.size:
            raise InvalidArgument(f"operand {index}: bytes {offset} … {offset + length} are not in {memory.size}")
        location = DataLocation(_position(self._pools, memory), offset, length)
        self._set_constant(index, Lifetime.CONSTANT_REFERENCE, location)

    def _fitting(self, index: int, value: npt.ArrayLike) -> Array:
        operand = self._operands[index]
        info = operand_info(operand.type)
        place = f"operand {index} ({info.type.name} {list(operand.dimensions)})"
        if info.dtype is None:
            raise InvalidArgument(f"{place} cannot have an array as its value")
        array = _as_array(value, "a constant")
        if (array.dtype == np.bool_ and info.dtype == np.uint8) or not isinstance(value, np.ndarray | np.generic):
            converted = array.astype(info.dtype)
            if not np.array_equal(converted, array) and not info.is_float:
                raise InvalidArgument(f"{place}: {value!r} does not fit into {info.dtype}")
            array = converted
        if array.dtype != info.dtype:
            raise InvalidArgument(f"{place} needs dtype {info.dtype}, not {array.dtype}; convert it with astype()")
        if array.shape != operand.dimensions or 0 in array.shape:
            raise InvalidArgument(
                f"{place} cannot have a value of shape {list(array.shape)}; a constant has all its dimensions known"
            )
        return np.ascontiguousarray(array)

    def add_operation(self, type: int, inputs: Sequence[int | Operand], outputs: Sequence[int | Operand]) -> None:
        """Add an operation. Operations can be added in any order.

        Args:
            type: An `OperationType`.
            inputs: Operand indexes in the order of the operation's signature.
            outputs: Operand indexes of the results, in the order of the signature.

        Raises:
            InvalidArgument: An index is unknown, or the operands do not fit the operation.
        """
        self._require_open()
        require_operation(type)
        operation = Operation(type, tuple(map(self._index_of, inputs)), tuple(map(self._index_of, outputs)))
        try:
            view = view_operation(operation, self._operands)
            if view is not None:
                view.check()
        except InvalidArgument as error:
            raise InvalidArgument(f"operation {len(self._operations)} ({operation_name(type)}): {error}") from None
        self._operations.append(operation)

    def identify_inputs_and_outputs(self, inputs: Sequence[int | Operand], outputs: Sequence[int | Operand]) -> None:
        """Set the inputs and outputs of the model, in order.

        Args:
            inputs: Indexes of the operands that a request supplies.
            outputs: Indexes of the operands that a request receives.

        Raises:
            InvalidArgument: An operand appears twice or is a constant, or this method was called before.
        """
        self._require_open()
        if self._inputs or self._outputs:
            raise InvalidArgument("inputs and outputs are identified already")
        ins, outs = ([self._index_of(operand) for operand in side] for side in (inputs, outputs))
        operands = list(self._operands)
        for side, lifetime in ((ins, Lifetime.SUBGRAPH_INPUT), (outs, Lifetime.SUBGRAPH_OUTPUT)):
            for index in side:
                if operands[index].lifetime != Lifetime.TEMPORARY_VARIABLE:
                    raise InvalidArgument(f"operand {index} is a constant, or an input or output twice")
                operands[index] = replace(operands[index], lifetime=lifetime)
        self._operands, self._inputs, self._outputs = operands, ins, outs

    def finish(self) -> Model:
        """Sort the operations, store the constants, validate the model and return it.

        The builder cannot be used afterwards, even if the model is invalid.

        Raises:
            InvalidArgument: The operations form a cycle, or a rule is violated.
        """
        self._require_open()
        self._finished = True
        operations = self._sort_operations()
        operands, inline, pools = self._place_constants()
        consumers = Counter(index for operation in operations for index in operation.inputs)
        for index, operand in enumerate(operands):
            operands[index] = replace(operand, number_of_consumers=consumers[index])
        referenced, inline, pools = _link(self._models, inline, pools, self._prefix)
        model = Model(
            referenced=referenced,
            main=Subgraph(tuple(operands), tuple(operations), tuple(self._inputs), tuple(self._outputs)),
            operand_values=inline,
            pools=pools,
            relax_computation_float32_to_float16=self._relaxed,
            extension_name_to_prefix=self._prefixes,
        )
        validate_model(model)
        return model

    def _sort_operations(self) -> list[Operation]:
        producer = {index: n for n, operation in enumerate(self._operations) for index in operation.outputs}
        sorter = TopologicalSorter(
            {
                position: {producer[index] for index in operation.inputs if index in producer}
                for position, operation in enumerate(self._operations)
            }
        )
        try:
            sorter.prepare()
        except CycleError:
            raise InvalidArgument("the operations form a cycle") from None
        ready: list[int] = []
        ordered: list[Operation] = []
        while sorter.is_active():
            for position in sorter.get_ready():
                heapq.heappush(ready, position)
            first = heapq.heappop(ready)
            ordered.append(self._operations[first])
            sorter.done(first)
        return ordered

    def _place_constants(self) -> tuple[list[OperandDesc], bytes, tuple[MemoryLike, ...]]:
        """Store the constants. Return operands with their locations, the bytes of small constants, and all pools."""
        operands, inline, large_end = list(self._operands), bytearray(), 0
        large: list[tuple[int, Array]] = []
        for index, value in sorted(self._arrays.items()):
            if value.nbytes <= INLINE_LIMIT:
                inline.extend(bytes(-len(inline) % 4))
                location = DataLocation(0, len(inline), value.nbytes)
                inline.extend(value.tobytes())
            else:
                large_end += -large_end % _ALIGNMENT
                large.append((large_end, value))
                location = DataLocation(len(self._pools), large_end, value.nbytes)
                large_end += value.nbytes
            operands[index] = replace(operands[index], location=location)
        if not large:
            return operands, bytes(inline), tuple(self._pools)
        pool = make_pool(large_end)
        for offset, value in large:
            pool.array(value.dtype, value.shape, offset)[...] = value
        return operands, bytes(inline), (*self._pools, pool)

    # -- extensions -------------------------------------------------------------------------------------------

    def extension_code(self, name: str, number: int) -> int:
        """Return the code that an extension's operand type or operation has in this model.

        Args:
            name: Name of the extension, such as ``"com.example.fibonacci"``.
            number: Number of the type or operation in the extension, 0 … 65535.

        Raises:
            InvalidArgument: An extension cannot have this name or number.
        """
        number = as_int(number, "the number of an extension's type or operation")
        if not 0 <= number <= BASE_MAXIMUM:
            raise InvalidArgument(f"{name} {number}: types and operations of extensions have the numbers 0 … 65535")
        return extension_code(self._prefix(name), number)

    def _prefix(self, name: str) -> int:
        if not isinstance(name, str) or not _EXTENSION_NAME.fullmatch(name):
            raise InvalidArgument(
                f"{name!r} is no name of an extension: lower-case letters, digits, _ and at least one dot, such as"
                " 'com.example.fibonacci'"
            )
        return self._prefixes.setdefault(name, len(self._prefixes) + 1)

    # -- helpers ----------------------------------------------------------------------------------------------

    def _operand(self, value: Value) -> Operand:
        if isinstance(value, Operand):
            return Operand(self, value._index_in(self))
        if isinstance(value, np.ndarray | list | tuple):
            return self.constant(value)
        raise InvalidArgument(
            f"expected an Operand or an array, got {value!r}; scalar() makes an operand of a number, operand() of an"
            " index"
        )

    def _single(self, operation: OperationType, inputs: Sequence[Value], output: Output) -> Operand:
        return self.operation(operation, *inputs, outputs=[output])[0]

    def _one(self, operation: OperationType, output: Output, *values: Any) -> Operand:
        if unknown := output.keys() - Output.__annotations__.keys():
            raise TypeError(f"{operation.name.lower()}() got unexpected arguments: {', '.join(sorted(unknown))}")
        return self._single(operation, self._arguments(operation, values), output)

    def _several(self, operation: OperationType, outputs: Outputs, *values: Any) -> tuple[Operand, ...]:
        return self.operation(operation, *self._arguments(operation, values), outputs=outputs)

    def _arguments(self, operation: OperationType, values: Sequence[Any]) -> list[Any]:
        """Convert a method's arguments to operands or arrays. Trailing options with default values are left out."""
        row = OPERATIONS[operation]
        first = row.forms[0]
        form = max((form for form in row.forms if form[: len(first)] == first), key=len)
        pairs = list(zip(form, values, strict=True))
        while len(pairs) > len(first) and _is_default(*pairs[-1]):
            pairs.pop()
        each = [(param, value) for param, some in pairs for value in (some if param.variadic else (some,))]
        known = (self._type_of_value(value) for param, value in each if param.kinds[0][0] == "T")
        data_type = next((kind for kind in known if kind is not None), None)
        return [self._argument(param, value, data_type) for param, value in each]

    def _type_of_value(self, value: Any) -> OperandType | None:
        if isinstance(value, Operand):
            code = self._operands[value._index_in(self)].type
            return OperandType(code) if code in OPERANDS else None
        return _TYPE_OF_DTYPE.get(value.dtype.name) if isinstance(value, np.ndarray) else None

    def _argument(self, param: Param, value: Any, data_type: OperandType | None) -> Any:
        kind = param.kinds[0][0]
        types = types_of(kind, data_type)
        if value is None and param.may_be_omitted:
            return self.omitted(types[0] if types else OperandType.TENSOR_FLOAT32)
        if isinstance(value, Operand | np.ndarray):
            return value
        if param.name == "act":
            return self.scalar(activation_code(value))
        info = OPERANDS.get(types[0]) if types else None
        if info is not None and info.is_scalar and kind != "T":
            return self.scalar(bool(value) if info.type is OperandType.BOOL else value, info.type)
        if kind == "T" and data_type is None and isinstance(value, int | float):
            return self.scalar(value)
        if isinstance(value, str | bytes | dict) or value is None:
            raise InvalidArgument(f"{param.name}={value!r}; give an Operand, an array, a list of numbers or a number")
        if info is not None and info.is_quantised:
            raise InvalidArgument(
                f"{param.name}={value!r} beside {info.type.name} has no scale; give"
                f" constant(np.array(…, np.{info.dtype}), scale=…, zero_point=…)"
            )
        return self.constant([value] if np.ndim(value) == 0 else value, None if info is None else info.type)

    def _infer(self, operation: Operation, outputs: tuple[Output, ...]) -> list[OutputSpec]:
        view = view_operation(operation, self._operands, value_of=self._constant_value, with_outputs=False)
        shapes = [output["dimensions"] for output in outputs if output.get("dimensions") is not None]
        all_shapes = bool(outputs) and len(shapes) == len(outputs)
        if view is None:
            if not all_shapes or any(output.get("type") is None for output in outputs):
                raise InvalidArgument(
                    "its outputs cannot be inferred; give outputs=[{'type': …, 'dimensions': …}], one for each"
                )
            specs = [OutputSpec(OperandType.TENSOR_FLOAT32, ())] * len(outputs)
        else:
            try:
                view.check_ranks()
                specs = list(view.infer())[: len(outputs) or _fewest_outputs(view)]
            except UnknownYet:
                if not all_shapes:
                    raise
                specs = [OutputSpec(view.data_type, (), *view.output_quantisation())] * len(outputs)
        if outputs and len(outputs) != len(specs):
            raise InvalidArgument(f"outputs describes {len(outputs)}, but it has {len(specs)}")
        return [
            replace(spec, **{name: value for name, value in output.items() if value is not None})
            for spec, output in zip(specs, outputs or [Output()] * len(specs), strict=True)
        ]

    def _subgraph(self, model: Model) -> Operand:
        if not isinstance(model, Model):
            raise InvalidArgument(f"expected a Model, got {type(model).__name__}")
        index = self.add_operand(OperandType.SUBGRAPH)
        self.set_operand_value(index, model)
        return Operand(self, index)

    def _bias(self, x: Operand, filter: Operand, bias: Value | None, channel_dim: int) -> Operand:
        """Return a bias as an operand. Numbers get the type and scale that x and the filter require. None: zeros."""
        if isinstance(bias, Operand):
            return bias
        x_info, weights = OPERANDS[x.type], self.describe(filter.index)
        units = weights.dimensions[channel_dim] if len(weights.dimensions) > channel_dim else 0
        if bias is None and units == 0:
            raise InvalidArgument(f"{filter!r} has no known depth; give a bias")
        if not x_info.is_quantised:
            if bias is None:
                return self.constant([0.0] * units, x_info.type)
            numbers = _numbers(bias, "bias")
            if numbers.dtype.kind == "f" and isinstance(bias, np.ndarray):
                return self.constant(numbers)
            return self.constant(numbers.astype(x_info.dtype), x_info.type)
        values = np.zeros(units) if bias is None else _numbers(bias, "bias")
        params = weights.extra_params
        if isinstance(params, SymmPerChannelQuantParams):
            scale, steps = 0.0, x.scale * np.array(params.scales)
        else:
            scale = x.scale * weights.scale
            steps = np.array(scale)
        if values.dtype.kind == "f":
            values = np.clip(np.rint(values / steps), -(2**31), 2**31 - 1)
        return self.constant(values.astype(np.int32), OperandType.TENSOR_INT32, scale=scale)

    def _window(self, padding: Padding, stride: Pair) -> list[Operand]:
        stride_h, stride_w = _pair(stride)
        numbers = (*_padding_numbers(padding), stride_w, stride_h)
        return [self.scalar(as_int(n, "a padding or stride")) for n in numbers]

    def _layout(self, layout: str, dilation: Pair) -> list[Operand]:
        if layout not in ("NHWC", "NCHW"):
            raise InvalidArgument(f"layout is {layout!r}; it must be 'NHWC' or 'NCHW'")
        dilation_h, dilation_w = _pair(dilation)
        if (dilation_h, dilation_w) != (1, 1):
            return [self.scalar(layout == "NCHW"), self.scalar(dilation_w), self.scalar(dilation_h)]
        return [self.scalar(True)] if layout == "NCHW" else []

    def _set_constant(self, index: int, lifetime: Lifetime, location: DataLocation = _NOWHERE) -> None:
        self._arrays.pop(index, None)
        self._operands[index] = replace(self._operands[index], lifetime=lifetime, location=location)

    def _constant_value(self, index: int) -> Array | None:
        operand = self._operands[index]
        if index in self._arrays or operand.lifetime != Lifetime.CONSTANT_REFERENCE:
            return self._arrays.get(index)
        dtype = operand_info(operand.type).dtype
        if dtype is None or operand.location.length > _MOST_LOOKED_AT:
            return None
        memory = self._pools[operand.location.pool_index]
        read = getattr(memory, "read", memory.array)  # `Memory.read` returns a private copy.
        values: Array = read(dtype, operand.dimensions, operand.location.offset)
        return values

    def _require_open(self) -> None:
        if self._finished:
            raise BadState("the model is finished; a change needs a new builder")

    def _index_of(self, operand: int | Operand) -> int:
        if isinstance(operand, Operand):
            return operand._index_in(self)
        if isinstance(operand, bool) or not isinstance(operand, int | np.integer):
            raise InvalidArgument(f"expected the index of an operand, or an Operand, got {operand!r}")
        if not 0 <= operand < len(self._operands):
            raise InvalidArgument(f"there is no operand {operand!r}; {len(self._operands)} were added")
        return int(operand)

    def _open_operand(self, operand: int | Operand) -> int:
        self._require_open()
        index = self._index_of(operand)
        if index in self._inputs or index in self._outputs:
            raise InvalidArgument(f"operand {index} is an input or output; it cannot be a constant")
        return index


def _padding_numbers(padding: Padding) -> list[int]:
    """Return the scalar inputs that describe a padding: the scheme, or left, right, top and bottom."""
    problem = InvalidArgument(f"padding is {padding!r}; it must be 'same', 'valid' or ((t, b), (l, r))")
    if isinstance(padding, str):
        if padding not in _SCHEMES:
            raise problem
        return [int(_SCHEMES[padding])]
    try:
        (top, bottom), (left, right) = padding
    except (TypeError, ValueError):
        raise problem from None
    return [left, right, top, bottom]


def _fewest_outputs(view: OperationView) -> int | None:
    """Return an operation's smallest number of outputs; None if the number depends on the inputs."""
    forms = view.row.outputs
    return None if any(param.variadic for param in forms[0]) else min(len(form) for form in forms)


def _check_outputs(outputs: Any) -> tuple[Output, ...]:
    checked: list[Output] = []
    for output in () if outputs is None else _listed(outputs, "outputs"):
        unknown = set(output) - set(Output.__annotations__) if isinstance(output, Mapping) else {repr(output)}
        if unknown:
            raise InvalidArgument(
                f"outputs has {', '.join(sorted(map(str, unknown)))}; give a dict for each, of"
                f" {', '.join(Output.__annotations__)}"
            )
        kind, dimensions = output.get("type"), output.get("dimensions")
        if kind is not None:
            check_type(kind)
        if dimensions is not None:
            output = {**output, "dimensions": _listed(dimensions, "dimensions")}
        checked.append(output)
    return tuple(checked)


def _is_default(param: Param, value: object) -> bool:
    return value is None or (isinstance(value, int) and value == (-1 if param.name == "axis" else 0))


def _outputs_of(model: Model) -> list[Output]:
    return [
        Output(type=o.type, dimensions=o.dimensions, scale=o.scale, zero_point=o.zero_point)
        for o in (model.main.operands[index] for index in model.main.output_indexes)
    ]


def _listed(values: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise InvalidArgument(f"{what}={values!r}; give a list")
    return tuple(values)


def _numbers(values: Any, what: str) -> Array:
    array = _as_array(values, what)
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"{what}={values!r}; give an array of numbers, or an Operand")
    return array


def _pair(value: Pair) -> tuple[int, int]:
    height, width = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    what = "a size, stride or dilation"
    return as_int(height, what, " or a pair of them"), as_int(width, what, " or a pair of them")


def _as_array(value: npt.ArrayLike, what: str) -> Array:
    """Convert a value to an array. Raises `InvalidArgument` for lists of different lengths."""
    try:
        return np.asarray(value)
    except ValueError:
        raise InvalidArgument(f"{what}={value!r}; its lists have different lengths") from None


def _type_of(dtype: np.dtype[Any], channel_scales: npt.ArrayLike | None) -> OperandType:
    found = _TYPE_OF_DTYPE.get(dtype.name)
    if dtype == np.float64:
        raise InvalidArgument(
            "a float64 array would lose digits: no operand type holds them all; write array.astype(np.float32), or"
            " constant(array, np.float32)"
        )
    if found is None:
        raise InvalidArgument(f"no operand type holds dtype {dtype}; convert it, e.g. to float32")
    return found if channel_scales is None else OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL


def _type_of_input(name: str, type: npt.DTypeLike) -> OperandType:
    try:
        dtype = np.dtype(type)
    except TypeError:
        raise InvalidArgument(f"input {name!r} has type {type!r}; give an OperandType, or a dtype: 'float32'") from None
    if dtype.name in ("float64", "int64"):  # Only constants are converted.
        raise InvalidArgument(f"input {name!r}: no operand type holds {dtype}; give {dtype.name.replace('64', '32')!r}")
    return _type_of(dtype, None)


def _narrow(array: Array, dtype: np.dtype[Any] | None) -> Array:
    """Convert float64 and int64 to `dtype`. Return other arrays unchanged."""
    if dtype is not None and array.dtype.name in ("float64", "int64") and dtype.kind == array.dtype.kind:
        with np.errstate(over="ignore"):
            narrow = array.astype(dtype)
        if dtype.kind == "i" and not np.array_equal(narrow, array):
            raise InvalidArgument(f"a constant has values outside {dtype}")
        return narrow
    return array


def activation_code(name: ActivationName | None) -> int:
    """Return the code of a fused activation. Raises `InvalidArgument` if the name is unknown."""
    if not isinstance(name, str | None) or name not in _ACTIVATIONS:
        raise InvalidArgument(f"activation is {name!r}; it must be one of {list(_ACTIVATIONS)}")
    return int(_ACTIVATIONS[name])


def _link(
    models: Sequence[Model], inline: bytes, pools: tuple[MemoryLike, ...], prefix: Callable[[str], int]
) -> tuple[tuple[Subgraph, ...], bytes, tuple[MemoryLike, ...]]:
    """Combine `models`. Return renumbered subgraphs, and `inline` and `pools` with the models' constants added."""
    subgraphs: list[Subgraph] = []
    for model in models:
        inline += bytes(-len(inline) % 4)
        shifts = {
            Lifetime.CONSTANT_COPY: DataLocation(0, len(inline), 0),
            Lifetime.CONSTANT_REFERENCE: DataLocation(len(pools), 0, 0),
            Lifetime.SUBGRAPH: DataLocation(0, len(subgraphs) + 1, 0),
        }
        prefixes = {number: prefix(name) for name, number in model.extension_name_to_prefix.items()}

        def renumber(code: int, prefixes: Mapping[int, int] = prefixes) -> int:
            return extension_code(prefixes[code >> 16], code & BASE_MAXIMUM) if is_extension(code) else code

        for subgraph in (model.main, *model.referenced):
            operands = []
            for operand in subgraph.operands:
                at, by = operand.location, shifts.get(Lifetime(operand.lifetime), _NOWHERE)
                location = DataLocation(at.pool_index + by.pool_index, at.offset + by.offset, at.length)
                operands.append(replace(operand, type=renumber(operand.type), location=location))
            operations = tuple(replace(each, type=renumber(each.type)) for each in subgraph.operations)
            subgraphs.append(replace(subgraph, operands=tuple(operands), operations=operations))
        inline += model.operand_values
        pools += model.pools
    return tuple(subgraphs), inline, pools


def _position(pools: list[MemoryLike], memory: MemoryLike) -> int:
    for position, pool in enumerate(pools):
        if pool is memory:
            return position
    pools.append(memory)
    return len(pools) - 1
