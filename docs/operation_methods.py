"""Generate the methods of `ModelBuilder` from the operation table. `make tables` runs this."""

from __future__ import annotations

import textwrap
from typing import Any

from nnburst import OperationType
from nnburst.model.operation_view import Param
from nnburst.model.rows import OPERATIONS

BY_HAND = (
    "AVERAGE_POOL_2D CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED IF L2_POOL_2D MAX_POOL_2D OEM_OPERATION SOFTMAX WHILE"
).split()
"""Operations without a generated method. `ModelBuilder` itself defines their methods; OEM_OPERATION has no method."""

SCALARS = {"i32": "Int", "bool": "Bool", "fx": "Float", "f32": "Float", "fill": "Float"}
"""Type annotations for scalar inputs, by kind. The generated module defines these types."""

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("keep", "time_major", "merge", "align_corners", "half_pixel"), False),
    **dict.fromkeys(("cell_clip", "proj_clip"), 0.0),
    **dict.fromkeys(("begin_mask", "end_mask", "shrink_mask"), 0),
    "act": None,
    "nchw": False,
}
"""Default values of inputs, by name."""

HEAD = '''"""Methods of `ModelBuilder`, one for each row of the operation table: `b.mean(x, [1, 2])`.

`make tables` (docs/operation_methods.py) generates this module. A method's arguments are the inputs in the operation's
row, by name. A tensor is an operand, an array, a list or a number. The row determines the type of a number for a scalar
input. None omits an input that can be omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .._options import ActivationName
from .operand import Operand, Output, Outputs, Value
from .operation_types import OperationType as O

if TYPE_CHECKING:
    from typing import Unpack

Int = int | Operand
Float = float | Operand
Bool = bool | Operand
Maybe = Value | None


class OperationMethods:
    """The methods of `ModelBuilder` that are generated from the operation table."""

    _one: Callable[..., Operand]
    _several: Callable[..., tuple[Operand, ...]]
'''


def render_module() -> str:
    """Return the text of `nnburst/model/operation_methods.py`."""
    return HEAD + "".join(method(operation) for operation in OperationType if operation.name not in BY_HAND)


def method(operation: OperationType) -> str:
    """Return the text of a method."""
    row = OPERATIONS[operation]
    first = row.forms[0]
    longest = max((form for form in row.forms if form[: len(first)] == first), key=len)
    single = len(row.outputs) == 1 and len(row.outputs[0]) == 1 and not row.outputs[0][0].variadic
    defaults = [_default(param, is_option=place >= len(first)) for place, param in enumerate(longest)]
    parameters = [
        f"{_name(param)}: {_annotation(param)}{default}" for param, default in zip(longest, defaults, strict=True)
    ]
    if defaults != sorted(defaults, key=bool):  # a required parameter comes after an optional one
        parameters.insert(defaults.index(next(filter(None, defaults))), "*")
    if single:
        parameters.append("**output: Unpack[Output]")
    else:
        parameters += ["outputs: Outputs = None"] if "*" in parameters else ["*", "outputs: Outputs = None"]
    parameters.insert(0, "self")
    result = "Operand" if single else "tuple[Operand, ...]"
    call = "_one" if single else "_several"
    values = [f"O.{operation.name}", "output" if single else "outputs", *map(_name, longest)]
    return (
        "\n"
        + _wrapped(f"    def {operation.name.lower()}({_unbroken(parameters)})\0->\0{result.replace(' ', chr(0))}:")
        + f'        """Add the operation {operation.name}."""\n'
        + _wrapped(f"        return self.{call}({_unbroken(values)})")
    )


def _name(param: Param) -> str:
    return {"act": "activation"}.get(param.name, param.name)


def _default(param: Param, *, is_option: bool) -> str:
    """Return the source text of a parameter's default value, such as `` = None``; empty for a required parameter."""
    if param.may_be_omitted:
        return " = None"
    if param.name == "axis":
        return " = -1" if is_option else ""
    return f" = {DEFAULTS[param.name]!r}" if param.name in DEFAULTS else ""


def _annotation(param: Param) -> str:
    if param.variadic:
        return "Sequence[Value]"
    if param.name == "act":
        return "ActivationName | None"
    return "Maybe" if param.may_be_omitted else SCALARS.get(param.kinds[0][0], "Value")


def _unbroken(parts: list[str]) -> str:
    """Join parameters so that a line breaks only between two of them."""
    return ", ".join(part.replace(" ", "\0") for part in parts)


def _wrapped(text: str) -> str:
    indent = " " * (len(text) - len(text.lstrip()))
    lines = textwrap.wrap(
        text.strip().replace("def ", "def\0").replace("return ", "return\0"),
        119,
        initial_indent=indent,
        subsequent_indent=indent + " " * 8,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ") + "\n"
