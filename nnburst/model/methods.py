"""A method of `ModelBuilder` for each row of the operation table: `b.mean(x, [1, 2])`, `b.gather(x, 0, indices)`.

A method takes the inputs of the operation under the names of its row. Tensors are operands, arrays, lists or numbers;
where the row asks for a scalar, numbers become one of its type; what may be omitted is None. `methods.pyi` says the
same to type checkers; both come from the table (`make tables`), and a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
from msgspec import Struct

from ..errors import InvalidArgument
from ..options import ActivationName
from .constants import ConstantBuilder, type_of_dtype
from .operand import Operand
from .operand_types import OPERANDS, OperandType, operand_info
from .operation_types import FusedActivation, OperationType
from .operation_view import Param
from .operations import OPERATIONS
from .signature import types_of

_BY_HAND = {
    OperationType.AVERAGE_POOL_2D,
    OperationType.CONV_2D,
    OperationType.DEPTHWISE_CONV_2D,
    OperationType.FULLY_CONNECTED,
    OperationType.L2_POOL_2D,
    OperationType.MAX_POOL_2D,
    OperationType.SOFTMAX,
}
_CONTROL_FLOW = (OperationType.IF, OperationType.WHILE)
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("keep", "time_major", "merge", "align_corners", "half_pixel"), False),
    **dict.fromkeys(("cell_clip", "proj_clip"), 0.0),
    **dict.fromkeys(("begin_mask", "end_mask", "shrink_mask"), 0),
    "act": None,
    "axis": -1,
    "nchw": False,
}
"""What an input is when it is not given; `axis` only where the row makes it an option."""

_ACTIVATIONS: dict[str | None, FusedActivation] = {
    None: FusedActivation.NONE,
    **{activation.name.lower(): activation for activation in FusedActivation},
}


def activation_code(name: ActivationName | None) -> int:
    """Return the code of a fused activation; `InvalidArgument` if there is none of that name."""
    if not isinstance(name, str | None) or name not in _ACTIVATIONS:
        raise InvalidArgument(f"activation is {name!r}; it must be one of {list(_ACTIVATIONS)}")
    return int(_ACTIVATIONS[name])


class Output(TypedDict, total=False):
    """What is said of an output where it is not inferred.

    ``dimensions``: 0 for unknown ones. ``scale`` and ``zero_point`` are for quantised types.
    """

    type: OperandType | int | None
    dimensions: Sequence[int] | None
    scale: float | None
    zero_point: int | None


class MethodArgument(Struct, frozen=True):
    """One parameter of a method.

    Attributes:
        param: The input that it becomes.
        is_option: Whether the row has a shorter form without it.
    """

    param: Param
    is_option: bool

    @property
    def name(self) -> str:
        return {"act": "activation"}.get(self.param.name, self.param.name)

    @property
    def kind(self) -> str:
        """The first kind of the row's language that stands there."""
        return self.param.kinds[0][0]

    @property
    def has_default(self) -> bool:
        """Whether a call may leave it out."""
        if self.param.name == "axis":
            return self.is_option
        return self.param.may_be_omitted or self.is_option or self.param.name in _DEFAULTS

    @property
    def default(self) -> Any:
        """What it is then."""
        return None if self.param.may_be_omitted else _DEFAULTS.get(self.param.name)


class Method(Struct, frozen=True):
    """A method that is made from a row."""

    operation: OperationType
    name: str
    arguments: tuple[MethodArgument, ...]
    is_single: bool

    @property
    def doc(self) -> str:
        return f"Add a {self.operation.name}: {', '.join(argument.name for argument in self.arguments)}."

    def inputs(self, builder: OperationMethods, given: dict[str, Any]) -> list[Any]:
        """Return operands for the arguments of a call; trailing options that say what is the default are left out."""
        unknown = given.keys() - {argument.name for argument in self.arguments}
        missing = [a.name for a in self.arguments if a.name not in given and not a.has_default]
        if unknown or missing:
            raise TypeError(f"{self.name}(): missing {missing}, unexpected {sorted(unknown)}")
        values = [given.get(argument.name, argument.default) for argument in self.arguments]
        rows = list(zip(self.arguments, values, strict=True))
        while rows and rows[-1][0].is_option and rows[-1][1] == rows[-1][0].default:
            rows.pop()
        data_type = self._data_type(builder, rows)
        operands: list[Any] = []
        for argument, value in rows:
            for each in value if argument.param.variadic else (value,):
                operands.append(builder._operand_for(argument, each, data_type))
        return operands

    def _data_type(self, builder: OperationMethods, rows: list[tuple[MethodArgument, Any]]) -> OperandType | None:
        """Return the type of the first operand or array among the values that are of type T."""
        for argument, value in rows:
            for each in value if argument.param.variadic else (value,):
                found = builder._type_of_value(each) if argument.kind == "T" else None
                if found is not None:
                    return found
        return None


def _methods() -> Iterator[Method]:
    for operation in OperationType:
        row = OPERATIONS[operation].signature
        if row is None or operation in _BY_HAND or operation in _CONTROL_FLOW:
            continue
        first = row.forms[0]
        longest = max((form for form in row.forms if form[: len(first)] == first), key=len)
        arguments = tuple(MethodArgument(param, place >= len(first)) for place, param in enumerate(longest))
        single = len(row.outputs) == 1 and len(row.outputs[0]) == 1 and not row.outputs[0][0].variadic
        yield Method(operation, operation.name.lower(), arguments, single)


METHODS: tuple[Method, ...] = tuple(_methods())
"""Every method that is made from the table."""


class OperationMethods(ConstantBuilder):
    """The methods. `ModelBuilder` has more, with defaults and spellings of their own."""

    def _type_of_value(self, value: Any) -> OperandType | None:
        if isinstance(value, Operand):
            return _known(self._operands[value._index_in(self)].type)
        return type_of_dtype(value.dtype) if isinstance(value, np.ndarray) else None

    def _operand_for(self, argument: MethodArgument, value: Any, data_type: OperandType | None) -> Any:
        """Return an operand or array for one value."""
        types = types_of(argument.kind, data_type)
        if value is None and argument.param.may_be_omitted:
            return self.omitted(types[0] if types else OperandType.TENSOR_FLOAT32)
        if isinstance(value, Operand | np.ndarray):
            return value
        if argument.param.name == "act":
            return self.scalar(activation_code(value))
        info = OPERANDS.get(types[0]) if types else None
        if info is not None and info.is_scalar and info.dtype is not None and argument.kind != "T":
            return self.scalar(bool(value) if info.type is OperandType.BOOL else value, info.type)
        if argument.kind == "T" and data_type is None and isinstance(value, int | float):
            return self.scalar(value)
        return self._tensor_of(value, None if info is None else info.type, argument.name)

    def _tensor_of(self, value: Any, kind: OperandType | None, what: str) -> Operand:
        """Return a constant of what Python's lists and numbers say."""
        if isinstance(value, str | bytes | dict) or value is None:
            raise InvalidArgument(f"{what}={value!r}; give an Operand, an array, a list of numbers or a number")
        if kind is not None and operand_info(kind).is_quantised:
            raise InvalidArgument(
                f"{what}={value!r} beside {kind.name} has no scale; give"
                f" constant(np.array(…, np.{operand_info(kind).dtype}), scale=…, zero_point=…)"
            )
        return self.constant(np.atleast_1d(value).tolist() if np.ndim(value) == 0 else value, kind)


def _known(code: int) -> OperandType | None:
    return OperandType(code) if code in OPERANDS else None


def _made(method: Method) -> Callable[..., Any]:
    names = [argument.name for argument in method.arguments]

    def call(self: Any, *values: Any, **options: Any) -> Any:
        given = dict(zip(names, values, strict=False))
        if len(values) > len(names) or given.keys() & options.keys():
            raise TypeError(f"{method.name}() takes {names}, each once")
        outputs = {name: options.pop(name) for name in _OUTPUTS[method.is_single] if name in options}
        inputs = method.inputs(self, given | options)
        if method.is_single:
            return self._one(method.operation, inputs, **outputs)
        return self.operation(method.operation, *inputs, **outputs)

    call.__name__ = call.__qualname__ = method.name
    call.__doc__ = method.doc
    return call


_OUTPUTS = {True: ("type", "dimensions", "scale", "zero_point"), False: ("outputs",)}

for _method in METHODS:
    setattr(OperationMethods, _method.name, _made(_method))
