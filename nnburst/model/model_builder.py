"""Building a model from NumPy arrays: outputs are inferred, scalars and padding are spelled for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
from msgspec.structs import replace

from .._core.errno import whole
from ..errors import InvalidArgument
from ..options import ActivationName, PaddingName, TensorLayout
from .builder import as_array
from .methods import OperationMethods, Output, activation_code
from .operand import Operand, Value
from .operand_types import OPERANDS, OperandType, checked_type
from .operation_types import OperationType, PaddingScheme, operation_name, require_operation
from .operation_view import OperationView, OutputSpec, UnknownYet
from .operations import view_operation
from .types import Array, Model, Operation, SymmPerChannelQuantParams

if TYPE_CHECKING:
    from typing import Unpack

Pair = int | tuple[int, int]
Padding = PaddingName | tuple[tuple[int, int], tuple[int, int]]

_SCHEMES = {"same": PaddingScheme.SAME, "valid": PaddingScheme.VALID}


class PoolOptions(TypedDict, total=False):
    """What is said of a pool: the size is its stride, too, unless another is given; the rest as for a convolution."""

    stride: Pair | None
    padding: Padding
    activation: ActivationName | None
    layout: TensorLayout


class ModelBuilder(OperationMethods):
    """Builds a model from arrays.

    Methods return operands, which are the arguments of later calls and have operators; arrays become constants.

    There is a method for each operation; docs/operations.md lists them with the names of their arguments. Calls such as
    `add_operand` and `add_operation` work on indexes, as those of the NDK do; an operand is taken for its index there,
    and `operand` makes one of an index.

    Args:
        pool_factory: Makes the pool for constants above `inline_limit`; default: a sealed memfd.
        relaxed: Permit float32 computations with the range or precision of float16.
        inline_limit: Constants of up to so many bytes (0 … 65536) are copied into the model; larger ones are gathered
            in one pool, of which only the handle crosses to a service.

    Example:
        >>> b = nnburst.ModelBuilder()
        >>> x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 3))
        >>> b.output("y", b.softmax(2 * x + 1))
        >>> b.build().output_names
        ('y',)
    """

    # -- operands ---------------------------------------------------------------------------------------------

    def input(
        self,
        name: str,
        type: OperandType | int,
        dimensions: Sequence[int] = (),
        *,
        scale: float = 0.0,
        zero_point: int = 0,
    ) -> Operand:
        """Add an input of the model and return it.

        Args:
            name: For people; inputs of a request are in the order of these calls.
            type: Operand type.
            dimensions: Sizes, 0 where only the request knows.
            scale, zero_point: For quantised types.

        Raises:
            InvalidArgument: The name is taken or the operand is not legal.
        """
        if not isinstance(name, str):
            raise InvalidArgument(f"the name of an input is text, not {name!r}")
        if name in self._named_inputs:
            raise InvalidArgument(f"there is an input {name!r} already; choose another name")
        index = self.add_operand(type, dimensions, scale=scale, zero_point=zero_point)
        self._named_inputs[name] = index
        return Operand(self, index)

    def output(self, name: str, operand: Operand) -> None:
        """Make an operand an output of the model.

        Args:
            name: For people; outputs of a request are in the order of these calls.
            operand: The result of an operation.

        Raises:
            InvalidArgument: The name is taken, or the operand is an input, a constant or an output already.
        """
        self._require_open()
        if not isinstance(operand, Operand):
            raise InvalidArgument(f"expected an Operand as output {name!r}, got {operand!r}")
        index = operand._index_in(self)
        if not isinstance(name, str):
            raise InvalidArgument(f"the name of an output is text, not {name!r}")
        if name in self._named_outputs:
            raise InvalidArgument(f"there is an output {name!r} already; choose another name")
        if index in self._named_inputs.values() or index in self._named_outputs.values() or index in self._values:
            raise InvalidArgument(f"output {name!r}: operand {index} must be the result of an operation, and only once")
        self._named_outputs[name] = index

    # -- operations -------------------------------------------------------------------------------------------

    def operation(
        self,
        operation: OperationType | str,
        *inputs: Operand | Array,
        number: int = 0,
        outputs: Sequence[Output] | int | None = None,
    ) -> tuple[Operand, ...]:
        """Add an operation that is named by a value: one of an extension, or any of the table.

        An operation of the table has a method of its own, which takes numbers and options by name. An extension's is
        described by its outputs::

            (y,) = b.operation("com.example.blur", x, outputs=[{"type": x.type, "dimensions": x.shape}])

        Args:
            operation: A member of `OperationType`, or the name of an extension.
            inputs: Operands (scalars through `scalar`) or arrays, in the order of the signature.
            number: Of the operation within its extension.
            outputs: For each output the values that are not inferred: type, dimensions, scale, zero_point; or a number.
                Default: the fewest that the operation has. Types of extensions are made by `extension_code`.

        Returns:
            An operand for each output.

        Raises:
            InvalidArgument: The inputs do not fit the operation, or something cannot be inferred.
        """
        if isinstance(operation, str) and "." in operation:
            code, name = self.extension_code(operation, number), f"{operation} {number}"
        else:
            code = require_operation(operation)
            name = operation_name(code)
        return self._added(code, name, inputs, outputs)

    def _one(self, operation: OperationType, inputs: Sequence[Value], **output: Any) -> Operand:
        """Add an operation with one output."""
        (made,) = self._added(operation, operation.name, inputs, [cast(Output, output)])
        return made

    def _added(
        self, operation: int, name: str, inputs: Sequence[Value], outputs: Sequence[Output] | int | None
    ) -> tuple[Operand, ...]:
        self._require_open()
        given = _checked_outputs(outputs)
        indexes = self._indexes(inputs)
        try:
            specs = self._inferred(operation, indexes, given)
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
            made = tuple(range(before, len(self._operands)))
            self.add_operation(operation, indexes, made)
        except InvalidArgument:
            del self._operands[before:]
            raise
        return tuple(Operand(self, index) for index in made)

    def branch(self, condition: Value, then: Model, otherwise: Model, values: Sequence[Value]) -> tuple[Operand, ...]:
        """Add an IF and return its results.

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
    ) -> tuple[Operand, ...]:
        """Add a WHILE and return its results.

        Args:
            condition: Says from the values, by a TENSOR_BOOL8 of one element, whether the body runs once more.
            body: Makes the first of the next values from the values.
            values: At the beginning, as many as both models have inputs.
            outputs: How many of the body's outputs are results; default: all.
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
        activation: ActivationName | None = None,
        layout: TensorLayout = "NHWC",
        scale: float | None = None,
        zero_point: int | None = None,
    ) -> Operand:
        """Add a CONV_2D and return its result.

        Args:
            x: Image [batch, height, width, depth], or [batch, depth, height, width] for ``layout="NCHW"``.
            filter: [depth out, height, width, depth in].
            bias: [depth out]; None for zeros. A float array is quantised when x is.
            padding: "same", "valid" or ((top, bottom), (left, right)).
            stride, dilation: Steps as (vertical, horizontal) or one number.
            activation: None, "relu", "relu1" or "relu6".
            layout: "NHWC" or "NCHW", of x and of the result.
            scale, zero_point: Of a quantised result.
        """
        x, filter = self._operand(x), self._operand(filter)
        inputs = [x, filter, self._bias(x, filter, bias, 0), *self._window(padding, stride)]
        inputs += [self.scalar(activation_code(activation)), *self._layout(layout, dilation)]
        return self._one(OperationType.CONV_2D, inputs, scale=scale, zero_point=zero_point)

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
            multiplier: `filter` is [1, height, width, depth x multiplier].
        """
        x, filter = self._operand(x), self._operand(filter)
        inputs = [x, filter, self._bias(x, filter, bias, 3), *self._window(padding, stride), self.scalar(multiplier)]
        inputs += [self.scalar(activation_code(activation)), *self._layout(layout, dilation)]
        return self._one(OperationType.DEPTHWISE_CONV_2D, inputs, scale=scale, zero_point=zero_point)

    def max_pool_2d(self, x: Value, size: Pair, **options: Unpack[PoolOptions]) -> Operand:
        """Add a MAX_POOL_2D and return its result.

        Args:
            x: An image, as for `conv_2d`.
            size: (height, width) or one number.
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
        return self._one(operation, [*inputs, *self._layout(layout, 1)])

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
            x: Rank 2 to 4, flattened to [count / inputs, inputs].
            weights: [units, inputs].
            bias: [units]; None for zeros. A float array is quantised when x is.
            activation: None, "relu", "relu1" or "relu6".
            scale, zero_point: Of a quantised result.
        """
        x, weights = self._operand(x), self._operand(weights)
        inputs = [x, weights, self._bias(x, weights, bias, 0), self.scalar(activation_code(activation))]
        return self._one(OperationType.FULLY_CONNECTED, inputs, scale=scale, zero_point=zero_point)

    def softmax(self, x: Value, beta: float = 1.0, axis: int | None = None) -> Operand:
        """Add a SOFTMAX and return its result.

        Args:
            x: Rank 1 to 4.
            beta: What `x` is multiplied by.
            axis: Whose elements add up to 1; None for the last.
        """
        x = self._operand(x)
        half = x.type == OperandType.TENSOR_FLOAT16
        inputs = [x, self.scalar(beta, OperandType.FLOAT16 if half else OperandType.FLOAT32)]
        return self._one(OperationType.SOFTMAX, inputs if axis is None else [*inputs, self.scalar(axis)])

    def build(self) -> Model:
        """Return the finished, validated model with the inputs and outputs in the order of their calls.

        Raises:
            InvalidArgument: There is no output, or a rule of the model is violated.
        """
        self._require_open()
        if not self._named_outputs:
            raise InvalidArgument("the model has no output; name one with output()")
        self.identify_inputs_and_outputs(list(self._named_inputs.values()), list(self._named_outputs.values()))
        names = {"input_names": tuple(self._named_inputs), "output_names": tuple(self._named_outputs)}
        return replace(self.finish(), **names)

    # -- helpers ----------------------------------------------------------------------------------------------

    def _index(self, value: Value) -> int:
        if isinstance(value, Operand):
            return value._index_in(self)
        if isinstance(value, np.ndarray | list | tuple):
            return self.constant(value).index
        raise InvalidArgument(
            f"expected an Operand or an array, got {value!r}; scalar() makes an operand of a number, operand() of an"
            " index"
        )

    def _indexes(self, values: Sequence[Value]) -> tuple[int, ...]:
        return tuple(self._index(value) for value in _listed(values, "operands"))

    def _inferred(
        self, operation: int, inputs: tuple[int, ...], given: tuple[Output, ...] | int | None
    ) -> list[OutputSpec]:
        view = view_operation(
            Operation(operation, inputs, ()),
            self._operands,
            value_of=self._constant_value,
            with_outputs=False,
        )
        said = given if isinstance(given, tuple) else ()
        shapes = [output["dimensions"] for output in said if output.get("dimensions") is not None]
        all_shapes = bool(said) and len(shapes) == len(said)
        if view is None:
            if not all_shapes or any(output.get("type") is None for output in said):
                raise InvalidArgument(
                    "its outputs cannot be inferred; give outputs=[{'type': …, 'dimensions': …}], one for each"
                )
            specs = [OutputSpec(OperandType.TENSOR_FLOAT32, ())] * len(said)
        else:
            count = given if isinstance(given, int) else len(said)
            try:
                view.check_ranks()
                specs = list(view.infer())[: count or _fewest_outputs(view)]
            except UnknownYet:
                if not all_shapes:
                    raise
                specs = [OutputSpec(view.data_type, (), *view.output_quantisation())] * len(said)
        if said and len(said) != len(specs):
            raise InvalidArgument(f"outputs describes {len(said)}, but it has {len(specs)}")
        return [_described(spec, output) for spec, output in zip(specs, said or [Output()] * len(specs), strict=True)]

    def _subgraph(self, model: Model) -> int:
        index = self.add_operand(OperandType.SUBGRAPH)
        self.set_operand_value_from_model(index, model)
        return index

    def _with_outputs_of(
        self, operation: OperationType, inputs: Sequence[int], model: Model, count: int
    ) -> tuple[Operand, ...]:
        inner = [model.main.operands[index] for index in model.main.output_indexes[:count]]
        outputs = [self.add_operand(o.type, o.dimensions, scale=o.scale, zero_point=o.zero_point) for o in inner]
        self.add_operation(operation, inputs, outputs)
        return tuple(Operand(self, index) for index in outputs)

    def _operand(self, value: Value) -> Operand:
        return Operand(self, self._index(value))

    def _bias(self, x: Operand, filter: Operand, bias: Value | None, channel_dim: int) -> Operand:
        """Return a bias of the type and scale that x and the filter ask for."""
        if isinstance(bias, Operand):
            return bias
        x_info, weights = OPERANDS[x.type], self.describe(filter.index)
        units = weights.dimensions[channel_dim] if len(weights.dimensions) > channel_dim else 0
        if bias is None and units == 0:
            raise InvalidArgument(f"{filter!r} has no known depth; give a bias")
        if not x_info.is_quantised:
            if bias is None:
                return self.constant([0.0] * units, x_info.type)
            given = _numbers(bias, "bias")
            if given.dtype.kind == "f" and isinstance(bias, np.ndarray):
                return self.constant(given)
            return self.constant(given.astype(x_info.dtype), x_info.type)
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
        return [self.scalar(whole(n, "a padding or stride")) for n in numbers]

    def _layout(self, layout: str, dilation: Pair) -> list[Operand]:
        if layout not in ("NHWC", "NCHW"):
            raise InvalidArgument(f"layout is {layout!r}; it must be 'NHWC' or 'NCHW'")
        dilation_h, dilation_w = _pair(dilation)
        if (dilation_h, dilation_w) != (1, 1):
            return [self.scalar(layout == "NCHW"), self.scalar(dilation_w), self.scalar(dilation_h)]
        return [self.scalar(True)] if layout == "NCHW" else []


def _padding_numbers(padding: Padding) -> list[int]:
    """Return the scheme, or left, right, top and bottom."""
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
    """Return how many outputs an operation has at least, None if that depends on its inputs."""
    forms = view.row.outputs
    return None if any(param.variadic for param in forms[0]) else min(len(form) for form in forms)


def _checked_outputs(outputs: Any) -> tuple[Output, ...] | int | None:
    """Return how outputs are described, or how many there are, after looking at it."""
    if outputs is None:
        return None
    if isinstance(outputs, int | np.integer):
        if outputs < 1:
            raise InvalidArgument(f"outputs is {outputs}; an operation has at least one")
        return int(outputs)
    checked: list[Output] = []
    for output in _listed(outputs, "outputs"):
        unknown = set(output) - set(Output.__annotations__) if isinstance(output, Mapping) else {repr(output)}
        if unknown:
            raise InvalidArgument(
                f"outputs has {', '.join(sorted(map(str, unknown)))}; give a dict for each, of"
                f" {', '.join(Output.__annotations__)}"
            )
        kind, dimensions = output.get("type"), output.get("dimensions")
        if kind is not None:
            checked_type(kind)
        if dimensions is not None:
            output = {**output, "dimensions": _listed(dimensions, "dimensions")}
        checked.append(output)
    return tuple(checked)


def _described(spec: OutputSpec, said: Output) -> OutputSpec:
    """Return the inferred values, replaced by those that were given."""
    return replace(spec, **{name: value for name, value in said.items() if value is not None})


def _listed(values: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise InvalidArgument(f"{what}={values!r}; give a list")
    return tuple(values)


def _numbers(values: Any, what: str) -> Array:
    array = as_array(values, what)
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"{what}={values!r}; give an array of numbers, or an Operand")
    return array


def _pair(value: Pair) -> tuple[int, int]:
    height, width = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    what = "a size, stride or dilation"
    return whole(height, what, " or a pair of them"), whole(width, what, " or a pair of them")
