"""docs/WIRE.md says what the messages are: its types are those of the classes, its bytes those of the codec."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.inspect import type_info

from nnburst.model.types import Subgraph
from nnburst.service.wire import protocol
from nnburst.service.wire.protocol import CALLS, Call, Done, ErrorReply, Message
from support import wire_page
from support.messages import shown

MESSAGES: tuple[type[Message], ...] = (*(cls for call in CALLS for cls in (call.request, call.reply)), ErrorReply)


def tag(cls: type[Message]) -> str:
    return str(cls.__struct_config__.tag)


def outline(kind: Any) -> Any:
    """Return what a type of `msgspec.inspect` lets through, without the class that it makes of that."""
    if isinstance(kind, msgspec.inspect.StructType):
        fields = {field.encode_name: (outline(field.type), field.required) for field in kind.fields}
        return kind.tag_field, kind.tag, fields
    if isinstance(kind, msgspec.inspect.EnumType):
        return [each.value for each in kind.cls]
    if isinstance(kind, msgspec.inspect.IntType):
        return "int", kind.ge, kind.lt - 1 if kind.lt is not None else kind.le
    parts = {name: getattr(kind, name) for name in kind.__struct_fields__}
    for name, part in parts.items():
        if isinstance(part, tuple):
            parts[name] = [outline(each) for each in part]
        elif isinstance(part, msgspec.inspect.Type):
            parts[name] = outline(part)
    return type(kind).__name__, parts


@pytest.mark.parametrize("cls", [*MESSAGES, Subgraph], ids=lambda cls: cls.__name__)
def test_fields_and_types_of_the_page_are_those_of_the_messages(cls: type[msgspec.Struct]) -> None:
    name = str(cls.__struct_config__.tag or cls.__name__)
    assert outline(type_info(wire_page.struct(name))) == outline(type_info(cls))


def test_example_bytes_of_the_page_are_those_of_the_codec() -> None:
    by_tag: dict[str, tuple[Call, type[Message]]] = {}
    for call in CALLS:
        by_tag[tag(call.request)] = call, call.request
        by_tag[tag(call.reply)] = call, call.reply
    shown_tags = set()
    for said, body in wire_page.examples():
        plain = msgspec.msgpack.decode(body)
        assert " ".join(shown(plain).split()) == said
        name = plain["call"]
        shown_tags.add(name)
        if name == "error":
            message: Message = protocol.decode_error(body)
        else:
            call, cls = by_tag[name]
            is_request = cls is call.request
            message = protocol.decode_request(body, call.side)[1] if is_request else protocol.decode_reply(call, body)
        assert protocol.encode(message) == body
        page_message = msgspec.msgpack.decode(body, type=wire_page.struct(name), strict=True)
        assert type(page_message).__name__ == name.replace(".", "_")
    assert shown_tags == {tag(cls) for cls in MESSAGES}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_message_that_brings_descriptors_says_so(call: Call) -> None:
    for cls, count in ((call.request, call.request_fds), (call.reply, call.reply_fds)):
        if cls is Done:
            continue
        says = "escriptor" in (cls.__dict__.get("__doc__") or "")
        assert says is (count is not protocol._none), cls
