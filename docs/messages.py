"""The messages of the control plane, for docs/WIRE.md: types from their classes, bytes from the codec.

What a line says of a type is read again by tests/support/wire_page.py, which makes messages from it.
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
from nnburst.model.types import Subgraph
from nnburst.service.wire.protocol import CALLS, Done, ErrorReply, Side, encode
from support.messages import ERROR, SAMPLES, shown

WIDTH = 119
INTEGERS = {(0, 2**32 - 1): "u32", (0, None): "u64", (-(2**31), 2**31 - 1): "i32", (None, None): "int"}


def notation(kind: Any) -> str:
    """Return a type of `msgspec.inspect` as the page writes it."""
    return str(globals()["_" + type(kind).__name__](kind))


def _limited(name: str, least: Any, most: Any) -> str:
    if most is None:
        return name
    return f"{name} {least}…{most}" if least else f"{name} ≤ {most}"


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
    """Every call: what it is for, its fields, and its bytes."""
    parts = []
    for call, (request, reply) in zip(CALLS, SAMPLES, strict=True):
        side = "service" if call.side is Side.SERVICE else "client"
        parts += [f"### {call.name}", f"Served by the {side}.", *prose(call.request), *fields(call.request)]
        if call.reply is Done:
            parts += [f"Answered by `{tag(Done)}`.", example(request)]
        else:
            parts += [*prose(call.reply), *fields(call.reply), example(request, reply)]
    for name, sample in (("Answers of any call", Done()), ("", ERROR)):
        parts += [f"### {name}"] * bool(name)
        parts += [*prose(type(sample)), *fields(type(sample)), example(sample)]
    return "\n\n".join(parts)


def types() -> str:
    """Every struct that messages are made of."""
    parts: list[str] = []
    for cls in inner():
        if issubclass(cls, msgspec.Struct):
            parts += [f"### {cls.__name__}", *prose(cls), *fields(cls)]
    return "\n\n".join(parts)


def codes() -> str:
    """Every enumeration in messages, and the statuses."""
    known = [cls for cls in inner() if issubclass(cls, enum.Enum)]
    words = [(f"`{cls.__name__}`, a string", cls) for cls in known if issubclass(cls, str)]
    rows = [(name, [each.value for each in cls]) for name, cls in words]
    numbers = [(f"`{cls.__name__}`", cls) for cls in known if not issubclass(cls, str)]
    rows += [(name, [f"{each.value} {each.name}" for each in cls]) for name, cls in numbers]
    rows.append(("`status`", [f"{each.value} {each.name}" for each in ErrorStatus if each <= 8]))
    return "\n".join(_item(f"{name}: {', '.join(values)}") for name, values in rows)


@cache
def inner() -> tuple[Any, ...]:
    """Return the structs and enumerations inside messages, in the order in which they come."""
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
    """Return what a message is called on the wire."""
    return str(cls.__struct_config__.tag or cls.__name__)


def prose(cls: Any) -> Iterator[str]:
    """Yield the paragraphs of a docstring, attributes as a list."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    if text.startswith(cls.__name__ + "("):  # made by a class that has none
        return
    before, _, attributes = text.partition("\n\nExample:")[0].partition("Attributes:\n")
    for paragraph in filter(None, before.strip().split("\n\n")):
        yield textwrap.fill(_plain(paragraph), WIDTH)
    if attributes:
        named = re.findall(r"^(\w+): (.*(?:\n .*)*)", textwrap.dedent(attributes), re.MULTILINE)
        yield "\n".join(_item(f"`{name}`: {_plain(said)}") for name, said in named)


def _plain(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))


def _item(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ")


def fields(cls: Any) -> Iterator[str]:
    """Yield the table of a struct, or that it has no fields."""
    info: Any = type_info(cls)
    if not info.fields:
        yield f"`{tag(cls)}` has no fields."
        return
    rows = [f"| `{tag(cls)}` | type | if absent |", "|---|---|---|"]
    for field in info.fields:
        rows.append(f"| `{field.encode_name}` | {notation(field.type)} | {absent(field)} |")
    yield "\n".join(rows)


def absent(field: Any) -> str:
    """Return what a field is if a message has none; empty if it must have one."""
    if field.required:
        return ""
    return f"`{shown(msgspec.to_builtins(field.default, builtin_types=(bytes,)))}`"


def example(*samples: Any) -> str:
    """Return messages and their bytes."""
    return "\n".join(["```text", *_lines(encode(sample) for sample in samples), "```"])


def _lines(bodies: Iterable[bytes]) -> Iterator[str]:
    for body in bodies:
        yield from textwrap.wrap(shown(msgspec.msgpack.decode(body)), WIDTH, break_on_hyphens=False)
        text = body.hex()
        yield from (f"  {text[i : i + 112]}" for i in range(0, len(text), 112))
