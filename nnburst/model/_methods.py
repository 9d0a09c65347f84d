"""A method of `ModelBuilder` for each row of the operation table: `b.mean(x, [1, 2])`, `b.gather(x, 0, indices)`.

A method takes the inputs of the operation under the names of its row. Tensors are operand indexes or arrays, numbers
become scalars of the type that the row asks for, and what may be omitted is None. `_methods.pyi` says the same to type
checkers; both come from the table, and a test compares them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from ..errors import InvalidArgument
from ._constants import ConstantBuilder
from ._operand_types import OPERANDS, OperandType
from ._operation_types import FusedActivation, OperationType
from ._operations import OPERATIONS
from ._signature import Param, types_of

_BY_HAND = {
    OperationType.AVERAGE_POOL_2D,
    OperationType.CONV_2D,
    OperationType.DEPTHWISE_CONV_2D,
    OperationType.FULLY_CONNECTED,
    OperationType.L2_POOL_2D,
    OperationType.MAX_POOL_2D,
    OperationType.RESHAPE,
    OperationType.SOFTMAX,
}
_NAMES = {OperationType.ADD: "plus"}
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


def activation_code(name: str | None) -> int:
    """Return the code of a fused activation.

    Raises:
        InvalidArgument: There is no such function.
    """
    if not isinstance(name, str | None) or name not in _ACTIVATIONS:
        raise InvalidArgument(f"activation is {name!r}; it must be one of {list(_ACTIVATIONS)}")
    return int(_ACTIVATIONS[name])


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
        """Its name in Python."""
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

    @property
    def annotation(self) -> str:
        """Its type in the stub."""
        scalars = {"i32": "int", "bool": "bool", "fx": "float", "f32": "float", "fill": "float"}
        if self.param.variadic:
            return "Sequence[Value]"
        if self.name == "activation" and self.param.name == "act":
            return "str | None"
        plain = scalars.get(self.kind, "Value | Sequence[int]" if self.kind == "I32" else "Value")
        return plain + (" | None" if self.param.may_be_omitted else "")


class Method(Struct, frozen=True):
    """A method that is made from a row."""

    operation: OperationType
    name: str
    arguments: tuple[MethodArgument, ...]
    is_single: bool

    @property
    def doc(self) -> str:
        """Its docstring."""
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
            if argument.param.variadic:
                operands += list(value)
            else:
                operands.append(builder._operand_for(argument, value, data_type))
        return operands

    def _data_type(self, builder: OperationMethods, rows: list[tuple[MethodArgument, Any]]) -> OperandType | None:
        for argument, value in rows:
            if argument.kind == "T" and value is not None:
                first = value[0] if argument.param.variadic else value
                return builder._type_of_value(first)
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
        yield Method(operation, _NAMES.get(operation, operation.name.lower()), arguments, single)


METHODS: tuple[Method, ...] = tuple(_methods())
"""Every method that is made from the table."""


class OperationMethods(ConstantBuilder):
    """The methods. `ModelBuilder` has more, with defaults and spellings of their own."""

    def _type_of_value(self, value: Any) -> OperandType | None:
        if isinstance(value, bool | float | np.generic):
            return None
        index = self.constant(value) if isinstance(value, np.ndarray) else value
        return OperandType(self._operands[index].type) if index < len(self._operands) else None

    def _operand_for(self, argument: MethodArgument, value: Any, data_type: OperandType | None) -> Any:
        """Return an operand index or array for one value."""
        types = types_of(argument.kind, data_type)
        if value is None and argument.param.may_be_omitted:
            return self.omitted(types[0] if types else OperandType.TENSOR_FLOAT32)
        if argument.param.name == "act":
            return self.scalar(activation_code(value))
        info = OPERANDS.get(types[0]) if types else None
        if argument.kind == "T" and isinstance(value, float):
            return self.scalar(value)
        if info is not None and info.is_scalar and info.dtype is not None and argument.kind != "T":
            return self.scalar(bool(value) if info.type is OperandType.BOOL else value, info.type)
        if argument.kind == "I32" and not isinstance(value, int | np.integer | np.ndarray):
            return np.array(value, np.int32)
        return value


def _made(method: Method) -> Callable[..., Any]:
    names = [argument.name for argument in method.arguments]

    def call(self: Any, *values: Any, **options: Any) -> Any:
        given = dict(zip(names, values, strict=False))
        if len(values) > len(names) or given.keys() & options.keys():
            raise TypeError(f"{method.name}() takes {names}, each once")
        outputs = {name: options.pop(name) for name in _OUTPUTS[method.is_single] if name in options}
        inputs = method.inputs(self, given | options)
        return (self.add if method.is_single else self.add_all)(method.operation, inputs, **outputs)

    call.__name__ = call.__qualname__ = method.name
    call.__doc__ = method.doc
    return call


_OUTPUTS = {True: ("type", "dimensions", "scale", "zero_point"), False: ("count", "dimensions", "quantisations")}

for _method in METHODS:
    setattr(OperationMethods, _method.name, _made(_method))


_STUB_HEAD = """# Made from the operation table by `render_stub` in _methods.py; a test compares them.

from collections.abc import Sequence
from typing import Any, TypedDict

from typing_extensions import Unpack

from ._constants import ConstantBuilder
from ._operand_types import OperandType
from ._operation_types import OperationType

Value = Any

class Method:
    operation: OperationType
    name: str

METHODS: tuple[Method, ...]

def activation_code(name: str | None) -> int: ...
def render_stub() -> str: ...

class _One(TypedDict, total=False):
    type: OperandType | None
    dimensions: Sequence[int] | None
    scale: float | None
    zero_point: int | None

class _Several(TypedDict, total=False):
    count: int | None
    dimensions: Sequence[Sequence[int]] | None
    quantisations: Sequence[tuple[float | None, int | None]]

class OperationMethods(ConstantBuilder):
"""


def render_stub() -> str:
    """Return the text of `_methods.pyi`."""
    lines = [_STUB_HEAD]
    for method in METHODS:
        parameters, optional = ["self"], False
        for argument in method.arguments:
            if argument.has_default and not optional:
                parameters.append("*")
                optional = True
            default = f" = {argument.default!r}" if argument.has_default else ""
            parameters.append(f"{argument.name}: {argument.annotation}{default}")
        parameters.append(f"**output: Unpack[{'_One' if method.is_single else '_Several'}]")
        result = "int" if method.is_single else "tuple[int, ...]"
        inside = " ".join(f"{parameter},".replace(" ", "\0") for parameter in parameters).removesuffix(",")
        text = f"def {method.name}({inside}) -> {result}: ...".replace(") -> ", ")\0->\0").replace(": ...", ":\0...")
        indents = {"initial_indent": " " * 4, "subsequent_indent": " " * 8}
        lines.append("\n".join(textwrap.wrap(text, 120, break_on_hyphens=False, **indents)).replace("\0", " ") + "\n")
    return "".join(lines)
