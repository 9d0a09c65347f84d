"""The message table of the control plane, and that docs/WIRE.md says what the messages are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.inspect import type_info

from nnburst.errors import GeneralFailure, InvalidArgument
from nnburst.model import RunOptions
from nnburst.model.types import OperandDesc, Subgraph
from nnburst.service.connection import callbacks
from nnburst.service.host import host
from nnburst.service.host.host import ServiceHost
from nnburst.service.wire import protocol
from nnburst.service.wire.marshal import model_from_wire
from nnburst.service.wire.packets import FdBundle
from nnburst.service.wire.protocol import (
    CALL_BY_REQUEST,
    CALLS,
    Call,
    Done,
    ErrorReply,
    Malformed,
    Message,
    Side,
    referenced_from_wire,
)
from support import wire_page
from support.messages import ERROR, MODEL, QUEUE, REQUEST, SAMPLES, shown


def test_every_call_of_the_table_has_a_sample_here() -> None:
    assert [type(request) for request, _ in SAMPLES] == [call.request for call in CALLS]


@pytest.mark.parametrize(("request_", "reply"), SAMPLES, ids=[call.name for call in CALLS])
def test_messages_survive_the_round_trip(request_: protocol.Message, reply: protocol.Message) -> None:
    call = CALL_BY_REQUEST[type(request_)]
    assert protocol.decode_request(protocol.encode(request_), call.side) == (call, request_)
    assert protocol.decode_reply(call, protocol.encode(reply)) == reply


def test_numbers_of_descriptors_follow_from_the_message() -> None:
    counts = {CALL_BY_REQUEST[type(q)].name: CALL_BY_REQUEST[type(q)].request_fds(q) for q, _ in SAMPLES}
    expected = {
        "get_supported_operations": 1,
        "import_model": 1,
        "prepare_model": 4,
        "prepare_model_from_cache": 3,
        "execute": 2,
        "execute_fenced": 5,
        "configure_execution_burst": 2,
        "copy_to": 1,
        "copy_from": 1,
        "take_client": 2,
        "publish_model": 1,
    }
    assert counts == dict.fromkeys(counts, 0) | expected
    reply_counts = {CALL_BY_REQUEST[type(q)].name: CALL_BY_REQUEST[type(q)].reply_fds(r) for q, r in SAMPLES}
    assert reply_counts == dict.fromkeys(reply_counts, 0) | {"execute_fenced": 1, "get_memories": 1}


def test_every_row_has_a_handler_on_its_side_and_a_name_of_its_own() -> None:
    assert len({call.name for call in CALLS}) == len(CALLS)
    sides = {Side.SERVICE: host.Client, Side.CLIENT: callbacks.CallbackRegistry}
    for call in CALLS:
        if call.side is Side.BROKER:  # see test_broker.py
            continue
        assert callable(getattr(sides[call.side], call.handler))
    assert ServiceHost is host.ServiceHost


def test_a_request_to_the_wrong_side_is_malformed() -> None:
    with pytest.raises(Malformed, match="not a call to the client"):
        protocol.decode_request(protocol.encode(protocol.Goodbye()), Side.CLIENT)


@pytest.mark.parametrize(
    "bad",
    [
        {"call": "no_such_call"},
        {"call": "goodbye", "extra": 1},
        {"call": "free_memory", "burst": 1},
        {"call": "free_memory", "burst": -1, "slot": 0},
        {"call": "free_memory", "burst": 1, "slot": 2**31},
        {"call": "free_memory", "burst": "1", "slot": 0},
        {"call": "hello", "version": [1], "pid": 1},
        {"call": "hello", "version": [1, 0], "pid": 1, "own": "yes"},
        {"call": "release"},
        ["release", 1],
        None,
    ],
)
def test_messages_that_break_the_schema_are_malformed(bad: object) -> None:
    with pytest.raises(Malformed):
        protocol.decode_request(msgspec.msgpack.encode(bad), Side.SERVICE)


@pytest.mark.parametrize("window", [float("nan"), float("inf"), -1.0, 61.0])
def test_an_impossible_polling_window_is_malformed(window: float) -> None:
    body = protocol.encode(protocol.ConfigureBurst(1, 2, QUEUE, QUEUE, window))
    with pytest.raises(Malformed):
        protocol.decode_request(body, Side.SERVICE)


MANY = protocol.MAX_OPERANDS + 1
OPERAND = {"type": 0}


def _model_with(**main: object) -> object:
    encoded = msgspec.msgpack.decode(protocol.encode(protocol.GetSupportedOperations(0, MODEL)))
    encoded["model"]["main"].update(main)
    return encoded


def _request_with(**changes: object) -> object:
    encoded = msgspec.msgpack.decode(protocol.encode(protocol.Execute(1, REQUEST, RunOptions())))
    encoded["request"].update(changes)
    return encoded


TOO_MUCH = {
    "operands": lambda: _model_with(operands=[OPERAND] * MANY),
    "axes of an operand": lambda: _model_with(operands=[{**OPERAND, "dimensions": [1] * 65}]),
    "operations": lambda: _model_with(operations=[{"type": 0, "inputs": [], "outputs": []}] * MANY),
    "inputs of an operation": lambda: _model_with(operations=[{"type": 0, "inputs": [0] * MANY, "outputs": []}]),
    "outputs of an operation": lambda: _model_with(operations=[{"type": 0, "inputs": [], "outputs": [0] * MANY}]),
    "inputs of a model": lambda: _model_with(input_indexes=[0] * MANY),
    "outputs of a model": lambda: _model_with(output_indexes=[0] * MANY),
    "pools": lambda: _request_with(pools=[_POOL] * (protocol.MAX_FDS + 1)),
    "inputs of a request": lambda: _request_with(inputs=[{}] * MANY),
    "axes of an argument": lambda: _request_with(inputs=[{"dimensions": [1] * 65}]),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_counts_beyond_the_limits_are_malformed(what: str) -> None:
    with pytest.raises(Malformed, match="length"):
        protocol.decode_request(msgspec.msgpack.encode(TOO_MUCH[what]()), Side.SERVICE)


def test_counts_at_the_limits_are_read() -> None:
    operands = [{**OPERAND, "dimensions": [1] * 64}] + [OPERAND] * (protocol.MAX_OPERANDS - 1)
    for good in (_model_with(operands=operands), _request_with(inputs=[{"dimensions": [1] * 64}])):
        protocol.decode_request(msgspec.msgpack.encode(good), Side.SERVICE)


def test_axes_of_a_shape_that_a_service_tells_are_limited() -> None:
    execute = protocol.CALL_BY_REQUEST[protocol.Execute]
    reply = {"call": "execute.reply", "status": 0, "timing": {"time_on_device": 0, "time_in_driver": 0}}
    for count in (64, 65):
        body = msgspec.msgpack.encode({**reply, "output_shapes": [{"dimensions": [1] * count}]})
        if count == 64:
            protocol.decode_reply(execute, body)
        else:
            with pytest.raises(Malformed, match="length"):
                protocol.decode_reply(execute, body)


_POOL = {"kind": "", "size": 0, "prot": 0, "offset": 0}


def _pool_with(**changes: int) -> object:
    return _request_with(pools=[{**_POOL, **changes}])


EDGES: dict[str, tuple[type[Message] | None, Callable[[int], object], int, int]] = {
    "buffer of a pool": (None, lambda n: _pool_with(buffer=n), 0, 2**31 - 1),
    "rights of a pool": (None, lambda n: _pool_with(prot=n), 0, 255),
    "descriptors of a pool": (None, lambda n: _pool_with(n_fds=n), 0, 8),
    "status of an execution": (
        protocol.Execute,
        lambda n: {"call": "execute.reply", "status": n, "output_shapes": [], "timing": {}},
        0,
        8,
    ),
    "status of memories": (protocol.GetMemories, lambda n: {"call": "get_memories.reply", "status": n}, 0, 8),
    "id": (protocol.Allocate, lambda n: {"call": "allocate.reply", "buffer": 1, "id": n}, 1, 2**31 - 1),
    "number": (protocol.Allocate, lambda n: {"call": "allocate.reply", "buffer": n, "id": 1}, 0, 2**32 - 1),
}
"""The request that a message answers, None for a request; how it is made of a number; the least and the most."""


@pytest.mark.parametrize("what", EDGES)
def test_numbers_are_read_up_to_their_limits(what: str) -> None:
    answered, make, least, most = EDGES[what]

    def decode(number: int) -> None:
        body = msgspec.msgpack.encode(make(number))
        if answered is None:
            protocol.decode_request(body, Side.SERVICE)
        else:
            protocol.decode_reply(CALL_BY_REQUEST[answered], body)

    for number in (least, most):
        decode(number)
    for number in (least - 1, most + 1):
        with pytest.raises(Malformed):
            decode(number)


def test_status_of_an_error_is_one_that_may_be_sent() -> None:
    for status in range(1, 9):
        protocol.decode_error(protocol.encode(protocol.ErrorReply(status, "")))
    for status in (0, 9):
        with pytest.raises(Malformed):
            protocol.decode_error(protocol.encode(protocol.ErrorReply(status, "")))


def test_text_of_an_error_is_whole_or_ends_where_it_was_cut() -> None:
    for length in (0, 1, 4096):
        assert protocol.error_reply(GeneralFailure("x" * length)).message == "x" * length
    cut = protocol.error_reply(GeneralFailure("x" * 4097)).message
    assert (len(cut), cut[:-1], cut[-1]) == (4096, "x" * 4095, "…")


def _peak(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_refused_takes_no_memory_first() -> None:
    """A short message could else make the service allocate twenty times its size."""
    million = 1_000_000
    bodies = {
        "operands": msgspec.msgpack.encode(_model_with(operands=[OPERAND] * million)),
        "axes": msgspec.msgpack.encode(_model_with(operands=[{**OPERAND, "dimensions": [1] * million}])),
    }
    for body in bodies.values():

        def refused(body: bytes = body) -> None:
            with pytest.raises(Malformed):
                protocol.decode_request(body, Side.SERVICE)

        assert _peak(refused) < 1 << 20


def test_subgraphs_are_decoded_until_there_are_too_many_operands() -> None:
    graph = {"operands": [OPERAND] * 30_000, "operations": [], "input_indexes": [], "output_indexes": []}
    encoded: Any = _model_with()
    encoded["model"]["referenced"] = [graph] * 30
    _, message = protocol.decode_request(msgspec.msgpack.encode(encoded), Side.SERVICE)
    assert isinstance(message, protocol.GetSupportedOperations)

    def refused() -> None:
        with pytest.raises(InvalidArgument, match="subgraphs"):
            model_from_wire(message.model, FdBundle())

    some = _peak(lambda: referenced_from_wire(message.model.referenced[:2]))
    assert _peak(refused) < 2 * some
    with pytest.raises(InvalidArgument, match="subgraph 1 cannot be read"):
        referenced_from_wire((message.model.referenced[0], msgspec.Raw(msgspec.msgpack.encode({"operands": 1}))))


def test_numpy_scalars_in_a_model_are_sent_as_numbers() -> None:
    graph = Subgraph((OperandDesc(3, (np.int64(2),), scale=np.float32(0.5)),), (), (), ())  # type: ignore[arg-type]
    model = protocol.WireModel(graph, (), b"", (), False, {}, (), ())
    _, back = protocol.decode_request(protocol.encode(protocol.GetSupportedOperations(0, model)), Side.SERVICE)
    assert isinstance(back, protocol.GetSupportedOperations)
    assert back.model.main.operands[0].dimensions == (2,)
    assert back.model.main.operands[0].scale == 0.5


def _decode_all(body: bytes) -> None:
    for side in Side:
        try:
            protocol.decode_request(body, side)
        except Malformed:
            pass
    for call in CALLS:
        try:
            protocol.decode_reply(call, body)
        except Malformed:
            pass
    try:
        protocol.decode_error(body)
    except Malformed:
        pass


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_malformed(body: bytes) -> None:
    _decode_all(body)


def test_deep_nesting_is_malformed() -> None:
    with pytest.raises(Malformed):
        protocol.decode_request(b"\x91" * 100_000, Side.SERVICE)


@given(st.data())
def test_damaged_messages_decode_or_are_malformed(data: st.DataObject) -> None:
    body = bytearray(protocol.encode(data.draw(st.sampled_from([m for pair in SAMPLES for m in pair]))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _decode_all(bytes(body[: data.draw(st.integers(0, len(body)))]))


# ---- docs/WIRE.md --------------------------------------------------------------------------------------------------


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


def test_messages_are_read_as_the_page_says() -> None:
    for message in (*(each for pair in SAMPLES for each in pair), ERROR):
        name = tag(type(message))
        read = msgspec.msgpack.decode(protocol.encode(message), type=wire_page.struct(name), strict=True)
        assert type(read).__name__ == name.replace(".", "_")


def test_example_bytes_of_the_page_are_those_of_the_codec() -> None:
    samples = {protocol.encode(each) for pair in SAMPLES for each in pair} | {protocol.encode(ERROR)}
    examples = list(wire_page.examples())
    assert len(examples) > 3
    for said, body in examples:
        assert " ".join(shown(msgspec.msgpack.decode(body)).split()) == said
        assert body in samples


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_message_that_brings_descriptors_says_so(call: Call) -> None:
    for cls, count in ((call.request, call.request_fds), (call.reply, call.reply_fds)):
        if cls is Done:
            continue
        says = "escriptor" in (cls.__dict__.get("__doc__") or "")
        assert says is (count is not protocol._none), cls
