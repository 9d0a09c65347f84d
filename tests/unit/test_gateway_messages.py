"""The gateway's description of the protocol agrees with that of another client, and with what was compiled of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

grpc_messages = pytest.importorskip("nnburst.gateway.grpc", reason="needs the extra nnburst[oip]")


def types_in(file: Any) -> dict[str, Any]:
    """Return the messages of a file by their full names, those within others too."""
    found, ahead = {}, list(file.message_types_by_name.values())
    while ahead:
        message = ahead.pop()
        found[message.full_name] = message
        ahead += message.nested_types
    return found


def fields_of(message: Any) -> dict[str, tuple[Any, ...]]:
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type and field.message_type.full_name,
            field.enum_type and {value.name: value.number for value in field.enum_type.values},
            field.containing_oneof and field.containing_oneof.name,
        )
        for field in message.fields
    }


def test_messages_and_calls_are_those_of_another_client() -> None:
    service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2", reason="needs the extra nnburst[test]")
    from tritonclient.grpc import model_config_pb2

    calls = grpc_messages._CALLS
    ours = types_in(calls.file)
    theirs = types_in(service_pb2.DESCRIPTOR) | types_in(model_config_pb2.DESCRIPTOR)
    assert len(ours) > 40
    for name, message in ours.items():
        other = fields_of(theirs[name])
        assert {field: other.get(field) for field in fields_of(message)} == fields_of(message), name
    there = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for call in calls.methods:
        for part in ("client_streaming", "server_streaming"):
            assert getattr(call, part) == getattr(there[call.name], part)
        assert call.input_type.full_name == there[call.name].input_type.full_name
        assert call.output_type.full_name == there[call.name].output_type.full_name


def test_compiled_description_is_that_of_the_file_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs the extra nnburst[dev]")
    from protocol import COMPILED, compile_to

    compile_to(tmp_path / "now")
    assert (tmp_path / "now").read_bytes() == COMPILED.read_bytes(), "run python packaging/protocol.py"
