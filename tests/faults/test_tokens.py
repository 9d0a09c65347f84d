"""Who may ask the gateway and for metrics: sockets of this user's own, and tokens."""

from __future__ import annotations

import http.client
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnburst._core.tokens import EVERYONE, Tokens
from nnburst.errors import InvalidArgument
from support.services import save_scaling, shared_service
from support.waiting import PATIENCE

TOKEN, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(f"# those who may\nscraper:{TOKEN}\n\ncamera:{OTHER}\n")
    file.chmod(0o600)
    return file


def test_token_of_the_file_is_admitted_and_nothing_else(tokens: Path) -> None:
    known = Tokens(str(tokens))
    assert known.admit(f"Bearer {TOKEN}")
    assert known.admit(f"bearer  {OTHER} ")
    for shown in (
        None,
        "",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer scraper:{TOKEN}",
        "Bearer ü",
        "Bearer",
    ):
        assert not known.admit(shown), shown
    assert EVERYONE.admit(None)


def test_file_that_is_read_again_replaces_the_tokens_or_leaves_them(tokens: Path) -> None:
    known = Tokens(str(tokens))
    tokens.write_text(f"camera:{OTHER}\n")
    known.renew()
    assert not known.admit(f"Bearer {TOKEN}")
    tokens.write_text("camera:short\n")
    with pytest.raises(InvalidArgument, match="line 1: write NAME:TOKEN"):
        known.renew()
    assert known.admit(f"Bearer {OTHER}")


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("a:0123456789abcdef", 0o644, "chmod 600"),
        ("a:0123456789abcdef\na:0123456789abcdeg", 0o600, "line 2"),
        ("0123456789abcdef", 0o600, "line 1"),
        (":0123456789abcdef", 0o600, "line 1"),
    ],
)
def test_file_that_cannot_be_is_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(InvalidArgument, match=message):
        Tokens(str(file))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Tokens(str(tmp_path / "none"))


def ask(path: Path, target: str, token: str = "", body: bytes | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(PATIENCE)
        connection.sock.connect(str(path))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET" if body is None else "POST", target, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def served(tmp_path: Path, tokens: Path) -> Iterator[dict[str, Path]]:
    for module in ("prometheus_client", "grpc", "tritonclient", "aiohttp", "onnx", "onnxruntime"):
        pytest.importorskip(module)
    places = {name: tmp_path / f"{name}.sock" for name in ("metrics", "oip", "oip-rest")}
    model = save_scaling(tmp_path / "double.onnx", 2.0)
    options = [f"--{name}=unix:{path}" for name, path in places.items()]
    with shared_service(tmp_path, "--model", f"double={model}", f"--token-file={tokens}", *options) as shared:
        assert shared.ready["oip"] == {"grpc": f"unix:{places['oip']}", "rest": f"unix:{places['oip-rest']}"}
        yield places
    assert not [path for path in places.values() if path.exists()]


@pytest.mark.check
def test_sockets_are_of_this_user_alone(served: dict[str, Path]) -> None:
    for path in served.values():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert path.stat().st_uid == os.geteuid()


@pytest.mark.check
def test_metrics_are_for_those_with_a_token(served: dict[str, Path]) -> None:
    assert ask(served["metrics"], "/metrics")[0] == 401
    assert ask(served["metrics"], "/metrics", "wrong")[0] == 401
    status, text = ask(served["metrics"], "/metrics", TOKEN)
    assert (status, "nnburst_open_models 1.0" in text or "nnburst_open_models 0.0" in text) == (200, True)


@pytest.mark.check
def test_rest_answers_those_with_a_token_and_tells_its_health_to_all(served: dict[str, Path]) -> None:
    path = served["oip-rest"]
    assert ask(path, "/v2/health/ready")[0] == 200
    status, text = ask(path, "/v2/models/double")
    assert (status, "Authorization: Bearer TOKEN" in text) == (401, True)
    assert ask(path, "/v2/models/double/infer", "x" * 32, b"{}")[0] == 401
    body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
    status, text = ask(path, "/v2/models/double/infer", OTHER, body)
    assert (status, "[2.0,4.0,6.0,8.0]" in text.replace(" ", "")) == (200, True), text


@pytest.mark.check
def test_grpc_answers_those_with_a_token_and_tells_its_health_to_all(served: dict[str, Path]) -> None:
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    client: Any = triton.InferenceServerClient(f"unix:{served['oip']}")
    try:
        assert client.is_server_ready()
        given = triton.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(np.ones((1, 4), np.float32))
        for headers in ({}, {"authorization": f"Bearer {TOKEN[1:]}"}):
            with pytest.raises(InferenceServerException, match="asks for a token"):
                client.infer("double", [given], headers=headers)
            with pytest.raises(InferenceServerException, match="asks for a token"):
                client.get_model_metadata("double", headers=headers)
        answer = client.infer("double", [given], headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.as_numpy("y").tolist() == [[2.0] * 4]
    finally:
        client.close()


@pytest.mark.check
def test_health_of_a_model_is_told_to_those_with_a_token(served: dict[str, Path]) -> None:
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    shown = [("authorization", f"Bearer {TOKEN}")]
    with grpc.insecure_channel(f"unix:{served['oip']}") as channel:
        check = HealthStub(channel).Check
        assert check(HealthCheckRequest()).status == HealthCheckResponse.SERVING
        assert check(HealthCheckRequest(service="double"), metadata=shown).status == HealthCheckResponse.SERVING
        for name in ("double", "other"):
            with pytest.raises(grpc.RpcError) as info:
                check(HealthCheckRequest(service=name))
            assert info.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "double" not in info.value.details()
