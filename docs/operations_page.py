"""The page of the operations that models are made of: what they take, and which devices run them."""

from __future__ import annotations

import textwrap

from nnburst import OperationType
from nnburst.devices.onnxruntime.operations import LOWERED
from nnburst.model.operand_types import OPERANDS
from nnburst.model.operation_types import operation_name, operation_since
from nnburst.model.operation_view import Param, Signature
from nnburst.model.rows import OPERATIONS

_WIDTH = 118


def operation_lines(code: int, row: Signature) -> list[str]:
    """Return the lines of an operation: its name, code, first version, types and marks; its lists, options expanded."""
    since = operation_since(OperationType(code))
    kinds = [
        OPERANDS[kind].short + (f":{_version(first)}" if first > since else "") for kind, first in row.types.items()
    ]
    marks = " ".join(["zero"] * row.zero_sized + ["onnx"] * (code in LOWERED))
    head = [operation_name(code), str(int(code)), _version(since), *(["any"] if len(kinds) > 16 else kinds)]
    forms, outputs = ([" ".join(map(_text, form)) for form in lists] for lists in (row.forms, row.outputs))
    longest = [form for form in forms if not any(other.startswith(form + " ") for other in forms)]
    lines = [" ".join(head) + f" [{marks}]" * bool(marks)]
    for form in longest:
        text = f"{form} → {max(outputs, key=len)}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="        ")
    return lines


def _version(number: int) -> str:
    return f"{number // 10}.{number % 10}"


def _text(param: Param) -> str:
    kinds = "|".join(kind for kind, _ in param.kinds)
    suffix = "?" if param.may_be_omitted else ("+" if param.least else "*") if param.variadic else ""
    return f"{param.name}:{kinds}{suffix}"


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

- A method takes and returns operands of its builder: an `Operand` has `shape`, `type`, `dtype`, `scale` and
  `zero_point`.
- `+ - * /` and unary `-` are ADD, SUB, MUL, DIV and NEG. Quantised results need `scale=`: `b.add(x, y, scale=0.5)`.
- Arrays, lists and numbers become constants. Lists and numbers get the type of the operand beside them. An array
  keeps its dtype; float64 is refused, so write `array.astype(np.float32)` or `b.constant(array, np.float32)`.
- `b.operation(operation, *inputs, outputs=…)` takes the operation as a value, also one of an extension:
  `b.operation("com.example.blur", x, outputs=[{"type": x.type, "dimensions": x.shape}])`.
- `add_operand` and `add_operation` work on indexes. An `Operand` stands for its index; `b.operand(index)` returns it.

## The table

Each entry has the name of the operation, its number, the first HAL version with it, and the data types that T may be,
with their first version if it is later. The method of `ModelBuilder` has the name in small letters; those of IF and
WHILE are `branch` and `loop`. `[zero]`: inputs may have a dimension of size 0. `[onnx]`: `nnburst-onnxruntime` runs
it, [where dimensions and parameters are known](devices.md#nnapis-operations-on-onnx-runtime). `nnburst-reference`
runs all.

The lines below it are the inputs and outputs, with the names of the method's arguments; the longest list where
trailing inputs are options. `?` may be omitted, `+` is one or more, `*` none or more.

F32, F16, I32 and B8 are tensors of floats, halves, integers and truth values; Q8 and Q8S bytes with scale and zero
point, unsigned and signed; Q8Y and Q8C symmetric ones, the latter per channel; Q16S and Q16A 16-bit ones. Small
letters are scalars. `fx` is f16 for F16, else f32; `W` a filter (also Q8C); `B` a bias (I32 if quantised); `box`
coordinates (Q16A if quantised); `anchor` the same with Q16S.

Results may take 64 times the bytes of request and constants, and 256 MiB in any case, together with those of models
run inside; more is RESOURCE_EXHAUSTED.

```text
"""


def render_page() -> str:
    """Return the text of `docs/operations.md`."""
    rows = sorted(OPERATIONS.items(), key=lambda item: operation_name(item[0]))
    return _PAGE + "\n".join(line for code, row in rows for line in operation_lines(code, row)) + "\n```\n"
