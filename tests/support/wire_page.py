"""A reader of docs/WIRE.md, which makes types of the described messages, and finds the examples."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Union

import msgspec

from support import ROOT

PAGE = ROOT / "docs" / "WIRE.md"
INTEGERS = {"u32": (0, 2**32 - 1), "u64": (0, None), "i32": (-(2**31), 2**31 - 1), "int": (None, None)}
BLOCK = re.compile(r"^(\w[\w.]*)\n((?:    .+\n)*)(?=\n|\w|#|```)", re.MULTILINE)
FIELD = re.compile(r"^    (\w+): (.+?)(\?| = .+)?$", re.MULTILINE)
CODE = re.compile(r"^- `(\w+)`: ((?:\d+ \w+,?\s*)+)$", re.MULTILINE)
WORDS = re.compile(r"^- `(\w+)`, a string: ((?:\w+,?\s*)+)$", re.MULTILINE)
EXAMPLE = re.compile(r"^([{].*\n(?:\S.*\n)*)((?:  [0-9a-f]+\n)+)", re.MULTILINE)
TOKEN = re.compile(r"\s*([\w.-]+|[≤…/,:{}\[\]])")


@cache
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@cache
def tables() -> dict[str, list[tuple[str, str, str]]]:
    """Return the fields of each message and type. A field is (name, type, default value, or "" if required)."""
    found = {}
    for name, lines in BLOCK.findall(page()):
        assert name not in found, f"{name} is there twice"
        fields = [line for line in lines.splitlines() if not line.startswith("    #")]
        parts = [match.groups(default="") for line in fields if (match := FIELD.match(line))]
        nil = " / nil", "null"
        found[name] = [
            (n, k + nil[0], nil[1]) if end == "?" else (n, k, end.removeprefix(" = ")) for n, k, end in parts
        ]
        assert len(found[name]) == len(fields), f"a field of {name} cannot be read"
    return found


@cache
def struct(name: str) -> type[msgspec.Struct]:
    """Return a type for a message or type of the page, by name."""
    fields = [
        (field, Type(text).whole(), msgspec.field(default_factory=lambda said=said: default(said)))
        if said
        else (field, Type(text).whole())
        for field, text, said in tables()[name]
    ]
    is_message = name[0].islower()
    options: dict[str, Any] = {"tag_field": "call", "tag": name} if is_message else {}
    return msgspec.defstruct(name.replace(".", "_"), fields, kw_only=True, **options)


def default(said: str) -> Any:
    """Parse a value in the notation of the page: JSON, or bytes as h'…' in hexadecimal."""
    return bytes.fromhex(said[2:-1]) if said.startswith("h'") else json.loads(said)


@cache
def codes(name: str) -> type[enum.Enum]:
    """Return an enumeration of the page, by name."""
    for found, said in WORDS.findall(page()):
        if found == name:
            return enum.StrEnum(name, {word: word for word in re.findall(r"\w+", said)})
    (said,) = (said for found, said in CODE.findall(page()) if found == name)
    return enum.IntEnum(name, {each.split()[1]: int(each.split()[0]) for each in said.split(",")})


def examples() -> Iterator[tuple[str, bytes]]:
    """Yield each example of the page: a message as text, and its bytes."""
    for said, digits in EXAMPLE.findall(page()):
        yield " ".join(said.split()), bytes.fromhex("".join(digits.split()))


class Type:
    """A type in the notation of the page."""

    def __init__(self, text: str) -> None:
        self.tokens = TOKEN.findall(text)
        assert "".join(self.tokens) == text.replace(" ", ""), text

    def whole(self) -> Any:
        kind = self._either()
        assert not self.tokens
        return kind

    def _take(self, *expected: str) -> str:
        if expected and (not self.tokens or self.tokens[0] not in expected):
            return ""
        return str(self.tokens.pop(0))

    def _either(self) -> Any:
        kinds = [self._one()]
        while self._take("/"):
            kinds.append(self._one())
        return Union[tuple(kinds)]  # noqa: UP007

    def _one(self) -> Any:
        if self._take("["):
            items = [self._either()]
            while self._take(","):
                items.append(self._either())
            if self._take("…"):
                assert self._take("]")
                return self._limited(tuple[items[0], ...], "length")
            assert self._take("]")
            return tuple[tuple(items)]
        if self._take("{"):
            key = self._either()
            assert self._take(":")
            value = self._either()
            assert self._take("}")
            return self._limited(dict[key, value], "length")
        name = self._take()
        if name in INTEGERS:
            return self._limited(int, "", *INTEGERS[name])
        plain = {"float": float, "bool": bool, "nil": None, "str": str, "bin": bytes, "any": msgspec.Raw}
        if name in plain:
            return self._limited(plain[name], "length" if name in ("str", "bin") else "")
        return struct(name) if name in tables() else codes(name)

    def _limited(self, kind: Any, what: str, least: int | None = None, most: int | None = None) -> Any:
        if self._take("≤"):
            most = int(self._take())
        elif self.tokens and re.fullmatch(r"-?[\d.]+", self.tokens[0]):
            least = int(self._take())
            assert self._take("…")
            most = int(self._take())
        if least is None and most is None:
            return kind
        limits = {"min_length": least, "max_length": most} if what else {"ge": least, "le": most}
        return Annotated[kind, msgspec.Meta(**limits)]
