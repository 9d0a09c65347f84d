"""Generate docs/operations.md: the operations, their inputs and outputs, and the devices that run them."""

from __future__ import annotations

import re
import textwrap
from itertools import groupby, takewhile

from nnburst import OperationType
from nnburst.devices.onnxruntime.operations import LOWERED
from nnburst.model.operand_types import OPERANDS
from nnburst.model.operation_types import operation_name, operation_since
from nnburst.model.operation_view import Param, Signature
from nnburst.model.rows import OPERATIONS

_WIDTH = 118


def operation_lines(code: int, row: Signature) -> tuple[str, list[str]]:
    """Return an operation's first line (name, code, first version, types, marks), and the lines of its operands."""
    since = operation_since(OperationType(code))
    kinds = [
        OPERANDS[kind].short + (f":{_version(first)}" if first > since else "") for kind, first in row.types.items()
    ]
    marks = ",".join(["zero"] * row.zero_sized + ["onnx"] * (code in LOWERED))
    head = [operation_name(code), str(int(code)), _version(since), "any" if len(kinds) > 16 else ",".join(kinds)]
    forms, outputs = ([" ".join(map(_text, form)) for form in lists] for lists in (row.forms, row.outputs))
    longest = [form for form in forms if not any(other.startswith(form + " ") for other in forms)]
    text = f"{_alternatives([_braced(form) for form in longest])} → {max(outputs, key=len)}".removesuffix(" → out:T")
    lines = textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="        ")
    return " ".join(head) + f" [{marks}]" * bool(marks), lines


def _version(number: int) -> str:
    return f"{number // 10}.{number % 10}"


def _text(param: Param) -> str:
    kinds = "|".join(kind for kind, _ in param.kinds)
    suffix = "?" if param.may_be_omitted else ("+" if param.least else "*") if param.variadic else ""
    return f"{param.name}:{kinds}{suffix}"


_NAMED = re.compile(r"([a-z]+_)?(\w+):([\w|]+)([?+*]?)")


def _braced(form: str) -> str:
    """Shorten a list of inputs: stride_w:i32 stride_h:i32 becomes stride_{w,h}:i32."""
    parts = [match.groups(default="") for match in _NAMED.finditer(form)]
    found = []
    for (prefix, kind), group in groupby(parts, key=lambda part: (part[0], part[2])):
        names = [(name, mark) for _, name, _, mark in group]
        if prefix and len(names) > 1:
            found.append(f"{prefix}{{{','.join(map(''.join, names))}}}:{kind}")
        else:
            found += [f"{prefix}{name}:{kind}{mark}" for name, mark in names]
    return " ".join(found)


def _alternatives(forms: list[str]) -> str:
    """Merge lists of inputs into one text. Different parts become alternatives: ``(a | b)``."""
    lists = [form.split() for form in forms]
    if len(lists) == 1:
        return forms[0]
    first, last = _common(lists), _common([words[::-1] for words in lists])
    parts = [" ".join(words[first : len(words) - last]) for words in lists]
    return " ".join([*lists[0][:first], f"({' | '.join(parts)})", *lists[0][len(lists[0]) - last :]])


def _common(lists: list[list[str]]) -> int:
    """Return the number of words at the beginning that all lists share."""
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False)))


_PAGE = """# Operations

Made by `make tables` from the operation table in `nnburst/model/rows/`; a test compares the two.

## Building models

```python
import numpy as np
import nnburst

b = nnburst.ModelBuilder()
x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))
h = b.tanh(b.fully_connected(x, np.eye(4, dtype=np.float32)))
b.output("y", b.softmax((x + h) / 2))
model = b.build()
```

- A method takes and returns operands. An `Operand` has `shape`, `type`, `dtype`, `scale` and `zero_point`.
- `+ - * /` and unary `-` are ADD, SUB, MUL, DIV and NEG. Quantised results need `scale=`: `b.add(x, y, scale=0.5)`.
- Arrays, lists and numbers become constants. Lists and numbers get the type of the operation's other inputs. An array
  keeps its dtype; float64 is refused, so write `array.astype(np.float32)` or `b.constant(array, np.float32)`.
- `b.operation` takes any operation, also one of an extension:
  `b.operation("com.example.blur", x, outputs=[{"type": x.type, "dimensions": x.shape}])`.
- `add_operand` and `add_operation` work on indexes. An `Operand` can be used as an index; `b.operand(index)` returns
  the `Operand`.

## The table

An entry begins with the operation's name, its number, the first version of NNAPI's HAL with this operation, and the
types that T stands for. `F16:1.2` means float16 from version 1.2 on. The method of `ModelBuilder` has the operation's
name in lower case, but IF and WHILE are `branch` and `loop`. `[zero]` means that inputs can have a dimension of size
zero. `[onnx]` means that `nnburst-onnxruntime` runs the operation
([limits](devices.md#nnapis-operations-on-onnx-runtime)). `nnburst-reference` runs all operations.

An indented line has the inputs and outputs of the operations above the line. Without an arrow, the output is `out:T`.
`x?` is an optional operand, `x+` is one operand or more, `x*` any number. `(a | b)` is `a` or `b`. `stride_{w,h}:i32`
is short for `stride_w:i32 stride_h:i32`.

| type | meaning |
|---|---|
| `F32`, `F16`, `I32`, `B8` | tensors of float32, float16, int32, bool |
| `f32`, `f16`, `i32`, `bool` | scalars |
| `Q8`, `Q8S` | tensors of unsigned and of signed bytes, with scale and zero point |
| `Q8Y`, `Q8C` | tensors of signed bytes with one scale, and with one scale for each channel |
| `Q16S`, `Q16A` | tensors of int16 with a scale, and of uint16 with scale and zero point |
| `fx` | `f16` if T is F16, else `f32` |
| `W` (filter) | T; also Q8C if T is quantised |
| `B` (bias) | I32 if T is quantised, else T |
| `box` | Q16A if T is quantised, else T |
| `anchor` | Q16S if T is quantised, else T |
| `delta` | Q8 or Q8S if T is Q16A, else T |
| `fill` | i32 if T is quantised, else the scalar of T |
| `filled` | a tensor of T |
| `cast` | F32, F16, I32 or Q8 |
| `sub` | a subgraph |
| `any` | each type |

```text
"""


def render_page() -> str:
    """Return the text of `docs/operations.md`."""
    rows = sorted(OPERATIONS.items(), key=lambda item: operation_name(item[0]))
    text = _PAGE
    for lists, entries in groupby((operation_lines(*row) for row in rows), key=lambda entry: entry[1]):
        text += "\n".join([*(head for head, _ in entries), *lists, ""])
    return text + "```\n"
