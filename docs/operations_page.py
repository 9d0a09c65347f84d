"""The page of the operations that models are made of: what they take, and which devices run them."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from nnburst import ModelBuilder, OperationType
from nnburst.devices.onnxruntime.operations import LOWERED
from nnburst.devices.reference.device import RUNS
from nnburst.model.operand_types import OPERANDS
from nnburst.model.operation_types import operation_name, operation_since
from nnburst.model.operation_view import Param
from nnburst.model.rows import OPERATIONS

_WIDTH = 118


@dataclass(frozen=True, slots=True)
class OperationRow:
    """What there is to know about one operation.

    Attributes:
        name: Of the operation.
        code: Its number in a model.
        since: First HAL version that has it.
        types: Data types that T may be, with their first version if it is a later one.
        inputs: Every input list; options in brackets are expanded.
        outputs: Every output list.
        zero_sized: Whether inputs may have a dimension of size 0.
        method: Of `ModelBuilder`; empty for control flow.
        devices: That run it.
    """

    name: str
    code: int
    since: str
    types: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    zero_sized: bool
    method: str
    devices: tuple[str, ...]


def operation_rows() -> list[OperationRow]:
    """Return a row for every operation of the table, by name."""
    methods = {OperationType.IF: "branch", OperationType.WHILE: "loop"}
    devices, rows = {"nnburst-reference": RUNS, "nnburst-onnxruntime": LOWERED.keys()}, []
    for operation, row in OPERATIONS.items():
        name, since = operation_name(operation), operation_since(OperationType(operation))
        made = methods.get(OperationType(operation), name.lower())
        kinds = [
            OPERANDS[kind].short + (f" ({_version(first)})" if first > since else "")
            for kind, first in row.types.items()
        ]
        rows.append(
            OperationRow(
                name,
                int(operation),
                _version(since),
                ("any",) if len(kinds) > 16 else tuple(kinds),
                tuple(" ".join(map(_text, form)) for form in row.forms),
                tuple(" ".join(map(_text, form)) for form in row.outputs),
                row.zero_sized,
                made if hasattr(ModelBuilder, made) else "",
                tuple(device for device, runs in devices.items() if operation in runs),
            )
        )
    return sorted(rows, key=lambda row: row.name)


def _version(number: int) -> str:
    return f"{number // 10}.{number % 10}"


def _text(param: Param) -> str:
    kinds = "|".join(kind for kind, _ in param.kinds)
    suffix = "?" if param.may_be_omitted else ("+" if param.least else "*") if param.variadic else ""
    return f"{param.name}:{kinds}{suffix}"


_PAGE = """# Operations

Made by `make tables` from the operation table in `nnburst/model/rows/`; a test compares the two.

Every operation below runs on the reference device, `nnburst-reference`. Those with a dot under "ONNX" are also run by
`nnburst-onnxruntime`, in the same data types, where all dimensions and parameters are known: see
[devices.md](devices.md#nnapis-operations-on-onnx-runtime).

Types are written short: F32, F16, I32 and B8 are tensors of floats, halves, integers and truth values; Q8 and Q8S are
bytes with scale and zero point, unsigned and signed; Q8Y, Q8C, Q16S and Q16A are the symmetric, per-channel and 16-bit
ones. Small letters (f32, f16, i32, bool) are scalars. A number in brackets is the first HAL version with a type, if it
is later than the operation. Results may take 64 times the bytes of a request and of the constants of its model, and
256 MiB in any case, with those of all models that it runs inside; more is RESOURCE_EXHAUSTED.

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

* Methods return an `Operand`, or a tuple of them, and take those of the same builder: one of another is refused. It has
  `shape`, `type`, `dtype`, `scale` and `zero_point`.
* `+ - * /` and the unary `-` are ADD, SUB, MUL, DIV and NEG. Quantised results need `scale=`, so there the methods are
  called: `b.add(x, y, scale=0.5)`.
* A tensor may also be an array, a list or a number: it becomes a constant. An array keeps its dtype, and float64 is
  refused, because no operand holds its digits: write `array.astype(np.float32)`, or `b.constant(array, np.float32)`.
  Lists and numbers get the type of the operand beside them.
* `b.operation(operation, *inputs, outputs=…)` takes the operation as a value. That is how operations of extensions are
  added, for devices that have them: `b.operation("com.example.blur", x, outputs=[{"type": x.type, "dimensions":
  x.shape}])`.
* `add_operand`, `add_operation` and the like are the layer below, which has indexes as the NDK does: an `Operand`
  stands for its index there, and `b.operand(index)` makes one of an index.

## The table

"method" is that of `ModelBuilder`, whose arguments have the names of the list below. A dot under "0" says that inputs
may have a dimension of size 0.

| operation | code | since | data types | 0 | ONNX | method |
|---|---|---|---|---|---|---|
"""

_LISTS = """
## Inputs and outputs

`T` is the data type; `fx` is f16 if that is F16, else f32; `W` a filter (also Q8C), `B` a bias (I32 if quantised);
`box` are coordinates (Q16A if quantised), `anchor` likewise Q16S. `?` may be omitted, `+` is one or more, `*` none or
more. The longest list is shown where trailing inputs are options.

```text
"""


def render_page() -> str:
    """Return the text of `docs/operations.md`."""
    lines, lists = [_PAGE], [_LISTS]
    for row in operation_rows():
        types, zero, lowered = ", ".join(row.types), "·" if row.zero_sized else "", "·" if row.devices[1:] else ""
        lines.append(f"| {row.name} | {row.code} | {row.since} | {types} | {zero} | {lowered} | {row.method} |\n")
        longest = [form for form in row.inputs if not any(other.startswith(form + " ") for other in row.inputs)]
        for form in longest:
            text = f"{row.name}: {form} → {max(row.outputs, key=len)}"
            lists += textwrap.wrap(text, _WIDTH, subsequent_indent="    ") + [""]
    return "".join(lines) + lists[0] + "\n".join(line for line in lists[1:] if line) + "\n```\n"
