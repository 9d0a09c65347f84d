"""Building a model from NumPy arrays: outputs are inferred, scalars and padding are spelled for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from msgspec.structs import replace

from .._core._errno import whole
from ..errors import InvalidArgument
from ._builder import INLINE_LIMIT, PoolFactory
from ._lookup import view_operation
from ._methods import OperationMethods, activation_code
from ._operand_types import OPERANDS, OperandType, checked_type, operand_info, type_name
from ._operation_types import OperationType, PaddingScheme, operation_name, require_operation
from ._operation_view import OperationView, OutputSpec, UnknownYet
from ._types import Model, Operation, SymmPerChannelQuantParams

Array = np.ndarray[Any, np.dtype[Any]]
Value = int | Array
"""An operand index, or an array that becomes a constant."""
Pair = int | tuple[int, int]
Padding = str | tuple[tuple[int, int], tuple[int, int]]

_SCHEMES = {"same": PaddingScheme.SAME, "valid": PaddingScheme.VALID}


class ModelBuilder(OperationMethods):
    """Builds a model from arrays.

    Methods return operand indexes, which are the arguments of later calls; arrays become constants::

        b = ModelBuilder()
        x = b.input("image", OperandType.TENSOR_FLOAT32, (1, 8, 8, 1))
        x = b.conv_2d(x, weights, bias, padding="same", activation="relu")
        b.output("features", x)
        model = b.build()

    Args:
        pool_factory: Makes the pool for constants above `inline_limit`; default: a sealed memfd.
        relaxed: Permit float32 computations with the range or precision of float16.
        inline_limit: Constants of up to so many bytes (0 … 65536) are copied into the model; larger ones are gathered
            in one pool, of which only the handle crosses to a service.
    """

    def __init__(
        self,
        *,
        pool_factory: PoolFactory | None = None,
        relaxed: bool = False,
        inline_limit: int = INLINE_LIMIT,
    ) -> None:
        super().__init__(pool_factory=pool_factory, relaxed=relaxed, inline_limit=inline_limit)
        self._named_inputs: dict[str, int] = {}
        self._named_outputs: dict[str, int] = {}

    # -- operands ---------------------------------------------------------------------------------------------

    def input(
        self,
        name: str,
        type: OperandType,
        dimensions: Sequence[int] = (),
        *,
        scale: float = 0.0,
        zero_point: int = 0,
    ) -> int:
        """Add an input of the model.

        Args:
            name: For people; inputs of a request are in the order of these calls.
            type: Operand type.
            dimensions: Sizes, 0 where only the request knows.
            scale: For quantised types.
            zero_point: For quantised types.

        Raises:
            InvalidArgument: The name is taken or the operand is not legal.
        """
        if not isinstance(name, str):
            raise InvalidArgument(f"the name of an input is text, not {name!r}")
        if name in self._named_inputs:
            raise InvalidArgument(f"there is an input {name!r} already; choose another name")
        index = self.add_operand(type, dimensions, scale=scale, zero_point=zero_point)
        self._named_inputs[name] = index
        return index

    def output(self, name: str, index: int) -> None:
        """Make an operand an output of the model.

        Raises:
            InvalidArgument: The name is taken, or the operand is an input, a constant or an output already.
        """
        self._require_open()
        self._require_index(index)
        if not isinstance(name, str):
            raise InvalidArgument(f"the name of an output is text, not {name!r}")
        if name in self._named_outputs:
            raise InvalidArgument(f"there is an output {name!r} already; choose another name")
        if index in self._named_inputs.values() or index in self._named_outputs.values() or index in self._values:
            raise InvalidArgument(f"output {name!r}: operand {index} must be the result of an operation, and only once")
        self._named_outputs[name] = index

    # -- operations -------------------------------------------------------------------------------------------

    def add(
        self,
        operation: OperationType,
        inputs: Sequence[Value],
        *,
        type: OperandType | None = None,
        dimensions: Sequence[int] | None = None,
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> int:
        """Add an operation with one output, which is inferred.

        Args:
            operation: What to compute.
            inputs: Operand indexes (scalars through `scalar`) or arrays, in the order of the signature.
            type: Output type if the operation leaves a choice.
            dimensions: Output dimensions if they cannot be inferred; 0 for unknown ones.
            scale: Output scale if the operation leaves a choice.
            zero_point: Output zero point likewise.

        Returns:
            The output's operand index.

        Raises:
            InvalidArgument: The inputs do not fit the operation, it has several outputs, or something cannot be
                inferred.
        """
        given = None if dimensions is None else (dimensions,)
        outputs = self.add_all(operation, inputs, types=(type,), dimensions=given, quantisations=((scale, zero_point),))
        if len(outputs) != 1:
            raise InvalidArgument(f"{operation_name(operation)} has {len(outputs)} outputs; use add_all()")
        return outputs[0]

    def add_all(
        self,
        operation: OperationType,
        inputs: Sequence[Value],
        *,
        count: int | None = None,
        types: Sequence[OperandType | None] = (),
        dimensions: Sequence[Sequence[int]] | None = None,
        quantisations: Sequence[tuple[float | None, int | None]] = (),
    ) -> tuple[int, ...]:
        """Add an operation with any number of outputs, which are inferred.

        Args:
            operation: What to compute.
            inputs: Operand indexes (scalars through `scalar`) or arrays, in the order of the signature.
            count: Number of outputs, if the operation leaves a choice; default: the fewest.
            types: Output types; None or missing: what is inferred.
            dimensions: Output dimensions if they cannot be inferred; 0 for unknown ones.
            quantisations: Scale and zero point of each output, where the operation leaves a choice.

        Returns:
            The operand index of each output.

        Raises:
            InvalidArgument: The inputs do not fit the operation, or something cannot be inferred.
        """
        require_operation(operation)
        indexes, name = self._indexes(inputs), operation_name(operation)
        pairs = [_listed(pair, "a quantisation", 2) for pair in _listed(quantisations, "quantisations")]
        try:
            specs = self._inferred(operation, indexes, types, dimensions, count)
        except UnknownYet as error:
            raise InvalidArgument(f"{name}: {error}; give dimensions= (0 for unknown ones)") from None
        except InvalidArgument as error:
            raise InvalidArgument(f"{name}: {error}") from None
        before = len(self._operands)
        try:
            for spec, (scale, zero_point) in zip_longest(specs, pairs[: len(specs)], fillvalue=(None, None)):
                assert isinstance(spec, OutputSpec)
                scale = spec.scale if scale is None else scale
                zero_point = spec.zero_point if zero_point is None else zero_point
                if operand_info(spec.type).is_quantised and scale is None:
                    raise InvalidArgument(f"{name}: an output of {spec.type.name} needs scale= (and zero_point=)")
                self.add_operand(spec.type, spec.dimensions, scale=scale or 0.0, zero_point=zero_point or 0)
            outputs = tuple(range(before, len(self._operands)))
            self.add_operation(operation, indexes, outputs)
        except InvalidArgument:
            del self._operands[before:]
            raise
        return outputs

    def branch(self, condition: Value, then: Model, otherwise: Model, values: Sequence[Value]) -> tuple[int, ...]:
        """Add an IF.

        Args:
            condition: TENSOR_BOOL8 of one element.
            then: Runs if it is true; its inputs are the values, its outputs the results.
            otherwise: Runs if it is false; the same inputs and outputs.
            values: As many as the models have inputs.
        """
        operands = [self._index(condition), *map(self._subgraph, (then, otherwise)), *self._indexes(values)]
        return self._with_outputs_of(OperationType.IF, operands, then, len(then.main.output_indexes))

    def loop(
        self, condition: Model, body: Model, values: Sequence[Value], outputs: int | None = None
    ) -> tuple[int, ...]:
        """Add a WHILE.

        Args:
            condition: Says from the values, by a TENSOR_BOOL8 of one element, whether the body runs once more.
            body: Makes the first of the next values from the values.
            values: At the beginning, as many as both models have inputs.
            outputs: How many of what the body makes are results; default: all.
        """
        operands = [*map(self._subgraph, (condition, body)), *self._indexes(values)]
        return self._with_outputs_of(OperationType.WHILE, operands, body, outputs or len(body.main.output_indexes))

    def conv_2d(
        self,
        x: Value,
        filter: Value,
        bias: Value | None = None,
        *,
        padding: Padding = "valid",
        stride: Pair = 1,
        dilation: Pair = 1,
        activation: str | None = None,
        layout: str = "NHWC",
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> int:
        """Add a CONV_2D.

        Args:
            x: Image [batch, height, width, depth], or [batch, depth, height, width] for ``layout="NCHW"``.
            filter: [depth out, height, width, depth in].
            bias: [depth out]; None for zeros. A float array is quantised when x is.
            padding: "same", "valid" or ((top, bottom), (left, right)).
            stride: Steps as (vertical, horizontal) or one number.
            dilation: Likewise.
            activation: None, "relu", "relu1" or "relu6".
            layout: "NHWC" or "NCHW", of x and of the result.
            scale: Of a quantised result.
            zero_point: Of a quantised result.
        """
        x, filter = self._index(x), self._index(filter)
        inputs = [x, filter, self._bias(x, filter, bias, 0), *self._window(padding, stride)]
        inputs += [self._activation(activation), *self._layout(layout, dilation)]
        return self.add(OperationType.CONV_2D, inputs, scale=scale, zero_point=zero_point)

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
        activation: str | None = None,
        layout: str = "NHWC",
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> int:
        """Add a DEPTHWISE_CONV_2D: filter [1, height, width, depth x multiplier]; the rest as `conv_2d`."""
        x, filter = self._index(x), self._index(filter)
        inputs = [x, filter, self._bias(x, filter, bias, 3), *self._window(padding, stride), self.scalar(multiplier)]
        inputs += [self._activation(activation), *self._layout(layout, dilation)]
        return self.add(OperationType.DEPTHWISE_CONV_2D, inputs, scale=scale, zero_point=zero_point)

    def max_pool_2d(self, x: Value, size: Pair, **options: Any) -> int:
        """Add a MAX_POOL_2D; see `_pool` for the options."""
        return self._pool(OperationType.MAX_POOL_2D, x, size, **options)

    def average_pool_2d(self, x: Value, size: Pair, **options: Any) -> int:
        """Add an AVERAGE_POOL_2D; see `_pool` for the options."""
        return self._pool(OperationType.AVERAGE_POOL_2D, x, size, **options)

    def l2_pool_2d(self, x: Value, size: Pair, **options: Any) -> int:
        """Add an L2_POOL_2D; see `_pool` for the options."""
        return self._pool(OperationType.L2_POOL_2D, x, size, **options)

    def _pool(
        self,
        operation: OperationType,
        x: Value,
        size: Pair,
        *,
        stride: Pair | None = None,
        padding: Padding = "valid",
        activation: str | None = None,
        layout: str = "NHWC",
    ) -> int:
        """Add a pool of `size` = (height, width) or one number; `stride` defaults to `size`."""
        inputs = [self._index(x), *self._window(padding, size if stride is None else stride)]
        height, width = _pair(size)
        inputs += [self.scalar(width), self.scalar(height), self._activation(activation), *self._layout(layout, 1)]
        return self.add(operation, inputs)

    def fully_connected(
        self,
        x: Value,
        weights: Value,
        bias: Value | None = None,
        *,
        activation: str | None = None,
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> int:
        """Add a FULLY_CONNECTED.

        Args:
            x: Rank 2 to 4, flattened to [count / inputs, inputs].
            weights: [units, inputs].
            bias: [units]; None for zeros. A float array is quantised when x is.
            activation: None, "relu", "relu1" or "relu6".
            scale: Of a quantised result.
            zero_point: Of a quantised result.
        """
        x, weights = self._index(x), self._index(weights)
        inputs = [x, weights, self._bias(x, weights, bias, 0), self._activation(activation)]
        return self.add(OperationType.FULLY_CONNECTED, inputs, scale=scale, zero_point=zero_point)

    def softmax(self, x: Value, beta: float = 1.0, axis: int | None = None) -> int:
        """Add a SOFTMAX over `axis` (default: the last)."""
        x = self._index(x)
        half = self._operands[x].type == OperandType.TENSOR_FLOAT16
        inputs = [x, self.scalar(beta, OperandType.FLOAT16 if half else OperandType.FLOAT32)]
        return self.add(OperationType.SOFTMAX, inputs if axis is None else [*inputs, self.scalar(axis)])

    def reshape(self, x: Value, shape: Sequence[int]) -> int:
        """Add a RESHAPE; one entry of `shape` may be -1."""
        return self.add(OperationType.RESHAPE, [x, np.array(shape, np.int32)])

    def concatenate(
        self, xs: Sequence[Value], axis: int, *, scale: float | None = None, zero_point: int | None = None
    ) -> int:
        """Add a CONCATENATION."""
        return self.add(
            OperationType.CONCATENATION, [*self._indexes(xs), self.scalar(axis)], scale=scale, zero_point=zero_point
        )

    def binary(
        self,
        operation: OperationType,
        a: Value,
        b: Value,
        *,
        activation: str | None = None,
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> int:
        """Add an ADD, MUL or SUB with broadcasting."""
        inputs = [a, b, self._activation(activation)]
        return self.add(operation, inputs, scale=scale, zero_point=zero_point)

    def build(self) -> Model:
        """Return the finished, validated model with the inputs and outputs in the order of their calls.

        Raises:
            InvalidArgument: There is no output, or a rule of the model is violated.
        """
        self._require_open()
        if not self._named_outputs:
            raise InvalidArgument("the model has no output; name one with output()")
        self.identify_inputs_and_outputs(list(self._named_inputs.values()), list(self._named_outputs.values()))
        self._input_names, self._output_names = tuple(self._named_inputs), tuple(self._named_outputs)
        return self.finish()

    # -- helpers ----------------------------------------------------------------------------------------------

    def _index(self, value: Value) -> int:
        if isinstance(value, np.ndarray):
            return self.constant(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(
                f"expected an operand, got {value!r}; use scalar() for a number, np.array() for a list"
            )
        self._require_index(value)
        return value

    def _indexes(self, values: Sequence[Value]) -> tuple[int, ...]:
        if not isinstance(values, Iterable):
            raise InvalidArgument(f"expected a list of operands, got {values!r}")
        return tuple(self._index(value) for value in values)

    def _inferred(
        self,
        operation: OperationType,
        inputs: tuple[int, ...],
        types: Sequence[OperandType | None],
        dimensions: Sequence[Sequence[int]] | None,
        count: int | None,
    ) -> list[OutputSpec]:
        kinds = [kind if kind is None else checked_type(kind) for kind in _listed(types, "types")]
        shapes = (
            None if dimensions is None else [_listed(dims, "dimensions") for dims in _listed(dimensions, "dimensions")]
        )
        if count is not None and whole(count, "count") < 1:
            raise InvalidArgument(f"count is {count}; an operation has at least one output")
        view = view_operation(
            Operation(operation, inputs, ()),
            self._current_operands(),
            value_of=self._constant_value,
            with_outputs=False,
        )
        specs: list[OutputSpec] = []
        try:
            if view is not None:
                view.check_ranks()
                specs = list(view.infer())[: count or _fewest_outputs(view)]
        except UnknownYet:
            if shapes is None:
                raise
        if view is None and (shapes is None or not kinds or None in kinds):
            raise InvalidArgument("its output cannot be inferred; give type= and dimensions=")
        if shapes is not None:
            known = specs or [OutputSpec(_output_type(view), (), *_quantisation(view))] * len(shapes)
            if len(shapes) != len(known):
                raise InvalidArgument(f"dimensions has {len(shapes)} shapes for {len(known)} outputs")
            specs = [replace(spec, dimensions=dims) for spec, dims in zip(known, shapes, strict=True)]
        chosen = [*kinds, *[None] * len(specs)]
        return [replace(spec, type=kind or spec.type) for spec, kind in zip(specs, chosen, strict=False)]

    def _subgraph(self, model: Model) -> int:
        index = self.add_operand(OperandType.SUBGRAPH)
        self.set_operand_value_from_model(index, model)
        return index

    def _with_outputs_of(
        self, operation: OperationType, inputs: Sequence[int], model: Model, count: int
    ) -> tuple[int, ...]:
        inner = [model.main.operands[index] for index in model.main.output_indexes[:count]]
        outputs = [self.add_operand(o.type, o.dimensions, scale=o.scale, zero_point=o.zero_point) for o in inner]
        self.add_operation(operation, inputs, outputs)
        return tuple(outputs)

    def _bias(self, x: int, filter: int, bias: Value | None, channel_dim: int) -> int:
        """Return a bias of the type and scale that x and the filter ask for."""
        if isinstance(bias, int):
            return self._index(bias)
        x_info, weights = OPERANDS[self._operands[x].type], self._operands[filter]
        units = weights.dimensions[channel_dim] if len(weights.dimensions) > channel_dim else 0
        if bias is None and units == 0:
            raise InvalidArgument(f"operand {filter} ({type_name(weights.type)}) has no known depth; give a bias")
        values = np.zeros(units) if bias is None else _numbers(bias, "bias")
        if not x_info.is_quantised:
            return self.constant(values.astype(x_info.dtype), x_info.type)
        params = weights.extra_params
        if isinstance(params, SymmPerChannelQuantParams):
            scale, steps = 0.0, self._operands[x].scale * np.array(params.scales)
        else:
            scale = self._operands[x].scale * weights.scale
            steps = np.array(scale)
        if values.dtype.kind == "f":
            values = np.clip(np.rint(values / steps), -(2**31), 2**31 - 1)
        return self.constant(values.astype(np.int32), OperandType.TENSOR_INT32, scale=scale)

    def _activation(self, activation: str | None) -> int:
        return self.scalar(activation_code(activation))

    def _window(self, padding: Padding, stride: Pair) -> list[int]:
        stride_h, stride_w = _pair(stride)
        if isinstance(padding, str):
            if padding not in _SCHEMES:
                raise InvalidArgument(f"padding is {padding!r}; it must be 'same', 'valid' or ((t, b), (l, r))")
            numbers = [int(_SCHEMES[padding])]
        else:
            try:
                (top, bottom), (left, right) = padding
            except (TypeError, ValueError):
                raise InvalidArgument(
                    f"padding is {padding!r}; it must be 'same', 'valid' or ((t, b), (l, r))"
                ) from None
            numbers = [left, right, top, bottom]
        return [self.scalar(whole(n, "a padding or stride")) for n in (*numbers, stride_w, stride_h)]

    def _layout(self, layout: str, dilation: Pair) -> list[int]:
        if layout not in ("NHWC", "NCHW"):
            raise InvalidArgument(f"layout is {layout!r}; it must be 'NHWC' or 'NCHW'")
        dilation_h, dilation_w = _pair(dilation)
        if (dilation_h, dilation_w) != (1, 1):
            return [self.scalar(layout == "NCHW"), self.scalar(dilation_w), self.scalar(dilation_h)]
        return [self.scalar(True)] if layout == "NCHW" else []


def _fewest_outputs(view: OperationView) -> int | None:
    """Return how many outputs an operation has at least, None if that depends on its inputs."""
    forms = view.row.outputs
    return None if any(param.variadic for param in forms[0]) else min(len(form) for form in forms)


def _output_type(view: OperationView | None) -> OperandType:
    return OperandType.TENSOR_FLOAT32 if view is None else view.data_type


def _quantisation(view: OperationView | None) -> tuple[float | None, int | None]:
    return (None, None) if view is None else view.output_quantisation()


def _listed(values: Any, what: str, length: int | None = None) -> tuple[Any, ...]:
    """Return what is given in a list, of so many if that is known."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise InvalidArgument(f"{what}={values!r}; give a list")
    listed = tuple(values)
    if length is not None and len(listed) != length:
        raise InvalidArgument(f"{what}={values!r}; give a list of {length}")
    return listed


def _numbers(values: Any, what: str) -> Array:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"{what}={values!r}; give an array of numbers, or the index of an operand")
    return array


def _pair(value: Pair) -> tuple[int, int]:
    height, width = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    what = "a size, stride or dilation"
    return whole(height, what, " or a pair of them"), whole(width, what, " or a pair of them")
