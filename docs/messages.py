"""The messages of the control plane, for docs/WIRE.md: types from their classes, bytes from the codec.

tests/support/wire_page.py reads the page's types, and makes messages from them.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.inspect import type_info

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from nnburst.errors import ErrorStatus
from nnburst.model.operand_types import OperandType
from nnburst.model.types import Lifetime, Subgraph
from nnburst.service.wire.protocol import CALLS, Done, ErrorReply, GetMemories, Hello, Side, encode
from support.messages import ERROR, SAMPLES, shown

WIDTH = 119
SHOWN = (Hello, GetMemories)
"""Calls whose bytes the page shows."""
NOTES = re.compile(r"^`\w+`: .*(?:\n.+)*", re.MULTILINE)
"""A paragraph of a docstring that explains fields."""
NOTE = re.compile(r"`(\w+)`: ((?:.|\n)+?)(?=; `\w+`: |$(?!\n))")
INTEGERS = {(0, 2**32 - 1): "u32", (0, None): "u64", (-(2**31), 2**31 - 1): "i32", (None, None): "int"}


def notation(kind: Any) -> str:
    """Return a type of `msgspec.inspect` in the page's notation."""
    return str(globals()["_" + type(kind).__name__](kind))


def _limited(name: str, least: Any, most: Any) -> str:
    if most is None:
        return name
    return f"{name} {least}…{most}" if least else f"{name}≤{most}"


def _IntType(kind: Any) -> str:
    most = kind.lt - 1 if kind.lt is not None else kind.le
    return INTEGERS.get((kind.ge, most)) or _limited("int", str(kind.ge), most)


def _FloatType(kind: Any) -> str:
    return _limited("float", str(kind.ge), kind.le)


def _BoolType(kind: Any) -> str:
    return "bool"


def _NoneType(kind: Any) -> str:
    return "nil"


def _StrType(kind: Any) -> str:
    return _limited("str", kind.min_length, kind.max_length)


def _BytesType(kind: Any) -> str:
    return _limited("bin", kind.min_length, kind.max_length)


def _RawType(kind: Any) -> str:
    return "any"


def _EnumType(kind: Any) -> str:
    return str(kind.cls.__name__)


def _StructType(kind: Any) -> str:
    return str(kind.cls.__name__)


def _UnionType(kind: Any) -> str:
    return " / ".join(map(notation, kind.types))


def _VarTupleType(kind: Any) -> str:
    return _limited(f"[{notation(kind.item_type)} …]", kind.min_length, kind.max_length)


def _TupleType(kind: Any) -> str:
    return f"[{', '.join(map(notation, kind.item_types))}]"


def _DictType(kind: Any) -> str:
    return _limited(f"{{{notation(kind.key_type)}: {notation(kind.value_type)}}}", kind.min_length, kind.max_length)


# -- the parts of the page -----------------------------------------------------------------------------------------


def messages() -> str:
    """Return the description of every message: its purpose and its fields."""
    served = {Side.CLIENT: "Served by the client.", Side.BROKER: "Served by the broker."}
    blocks: list[list[str]] = []
    for call in CALLS:
        block = schema(call.request, served.get(call.side, ""))
        is_new = call.reply is not Done and not any(tag(call.reply) in each for each in blocks)
        blocks.append(block + schema(call.reply) * is_new)
    return fenced([*blocks, schema(Done), schema(ErrorReply)])


def bytes_of_messages() -> str:
    """Return the messages of `SHOWN` and an error, each with its bytes."""
    return example(*(message for pair in SAMPLES if isinstance(pair[0], SHOWN) for message in pair), ERROR)


def types() -> str:
    """Return the description of every struct inside messages."""
    return fenced(schema(cls) for cls in inner() if issubclass(cls, msgspec.Struct))


def codes() -> str:
    """Return the values of every enumeration in messages, and of the status."""
    known = [cls for cls in (*inner(), OperandType, Lifetime) if issubclass(cls, enum.Enum)]
    words = [(f"`{cls.__name__}`, a string", cls) for cls in known if issubclass(cls, str)]
    rows = [(name, [each.value for each in cls]) for name, cls in words]
    numbers = [(f"`{cls.__name__}`", cls) for cls in known if not issubclass(cls, str)]
    rows += [(name, [f"{each.value} {each.name}" for each in cls]) for name, cls in numbers]
    rows.append(("`status`", [f"{each.value} {each.name}" for each in ErrorStatus if each <= 8]))
    items = (f"- {name}: {', '.join(values)}" for name, values in rows)
    return "\n".join(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for text in items)


@cache
def inner() -> tuple[Any, ...]:
    """Return the structs and enumerations inside messages, in the order of their first use."""
    found: dict[Any, None] = {}

    def look(kind: Any) -> None:
        parts = [getattr(kind, name, ()) for name in ("types", "item_types")]
        parts.append([getattr(kind, name) for name in ("item_type", "key_type", "value_type") if hasattr(kind, name)])
        if hasattr(kind, "cls"):
            if kind.cls in found:
                return
            found[kind.cls] = None
            parts.append([field.type for field in getattr(kind, "fields", ())])
        for part in parts:
            for each in part:
                look(each)

    outer = [cls for call in CALLS for cls in (call.request, call.reply)] + [ErrorReply]
    for cls in (*outer, Subgraph):
        look(type_info(cls))
    return tuple(cls for cls in found if cls not in outer)


def tag(cls: Any) -> str:
    """Return a message's name on the wire."""
    return str(cls.__struct_config__.tag or cls.__name__)


def schema(cls: Any, before: str = "") -> list[str]:
    """Return the lines that describe a message or type: docstring, name, and fields with their default values."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    if text.startswith(cls.__name__ + "("):  # a class without a docstring gets this one
        text = ""
    summary, _, attributes = text.partition("\n\nExample:")[0].partition("Attributes:\n")
    about = dict(re.findall(r"^(\w+): (.*(?:\n .*)*)", textwrap.dedent(attributes), re.MULTILINE))
    about |= {name: words for part in NOTES.findall(summary) for name, words in NOTE.findall(part)}
    about = {name: f"{words[0].upper()}{words[1:].rstrip('.')}." for name, words in about.items()}
    summary = re.sub(r"^The reply to `\w+`\.", "", NOTES.sub("", summary))  # the name says the same
    lines = [*comment(f"{before} {summary}"), tag(cls)]
    info: Any = type_info(cls)
    for each in info.fields:
        lines += comment(about.get(each.name, ""), "    ")
        lines.append(f"    {each.encode_name}: {notation(each.type)}{absent(each)}".replace(" / nil = null", "?"))
    return lines


def comment(text: str, indent: str = "") -> list[str]:
    """Return a text as comments, without the marks of Markdown."""
    return textwrap.wrap(" ".join(text.replace("`", "").split()), WIDTH, initial_indent=f"{indent}# ",
                         subsequent_indent=f"{indent}# ", break_on_hyphens=False)  # fmt: skip


def fenced(blocks: Iterable[list[str]]) -> str:
    """Return blocks of lines as one block of code."""
    return "\n".join(["```text", "\n\n".join("\n".join(lines) for lines in blocks), "```"])


def absent(field: Any) -> str:
    """Return a field's default value as text; empty for a required field. `{}` is a map without any field."""
    if field.required:
        return ""
    default = field.default
    return " = {}" if isinstance(default, msgspec.Struct) else f" = {shown(default)}"


def example(*samples: Any) -> str:
    """Return messages and their bytes."""
    return "\n".join(["```text", *_lines(encode(sample) for sample in samples), "```"])


def _lines(bodies: Iterable[bytes]) -> Iterator[str]:
    for body in bodies:
        yield from textwrap.wrap(shown(msgspec.msgpack.decode(body)), WIDTH, break_on_hyphens=False)
        text = body.hex()
        yield from (f"  {text[i : i + 112]}" for i in range(0, len(text), 112))
