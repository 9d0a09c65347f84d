"""What operators ask of the gateway: requests with names, a line for each in the log, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import aiohttp
import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as stubs

from nnburst.errors import InvalidArgument
from nnburst.gateway import grpc as gateway_grpc
from nnburst.gateway.budget import Budget
from nnburst.gateway.certificate import Certificate
from nnburst.gateway.listen import note_request
from nnburst.gateway.regions import Regions
from support.gateways import MARKS, PROTOCOLS, Gateway, SlowModels, both_protocols, ports, raw
from support.waiting import PATIENCE, until

pytestmark = MARKS


def test_each_request_has_a_name_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def noted() -> list[Any]:
        return [vars(record)["fields"] for record in caplog.records if record.name == "nnburst.access"]

    async def main() -> list[str]:
        models = SlowModels()
        models.go_on.set()
        names = []
        async with both_protocols(models) as (stub, http):
            for given in ("mine", "x" * 200):
                call = stub.ModelInfer(raw(6), metadata=(("x-request-id", given),))
                await call
                names.append(dict(await call.trailing_metadata())["x-request-id"])
                async with http.get("/v2/none", headers={"X-Request-ID": given}) as answer:
                    names.append(answer.headers["X-Request-ID"])
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await stub.ModelInfer(
                    pb.ModelInferRequest(raw_input_contents=[b"x"]), metadata=(("x-request-id", "bad"),)
                )
            assert dict(info.value.trailing_metadata())["x-request-id"] == "bad"
        return names

    with caplog.at_level(logging.INFO, "nnburst.access"):
        names = asyncio.run(main())
    assert names[:2] == ["mine", "mine"]
    assert [len(name) for name in names[2:]] == [32, 32]  # one that is too long is no name
    infer = "/inference.GRPCInferenceService/ModelInfer"
    assert {(line["call"], line["status"], line["request_id"]) for line in noted()} == {
        (infer, "OK", "mine"),
        ("GET /v2/none", "404", "mine"),
        (infer, "OK", names[2]),
        ("GET /v2/none", "404", names[3]),
        (infer, "INVALID_ARGUMENT", "bad"),
    }


def test_line_of_a_request_is_one_that_a_terminal_may_show(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nnburst.access"):
        note_request("ipv4:127.0.0.1:1", "/x\nforged \x1b[31m\x9b/y", "UNAUTHENTICATED", 0.001, "id")
    assert caplog.messages == ["ipv4:127.0.0.1:1 /x forged  [31m /y: UNAUTHENTICATED in 1.0 ms, request id"]


def test_path_that_is_no_text_ends_no_server() -> None:
    def literal(name: bytes, value: bytes) -> bytes:
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    fields = {b":method": b"POST", b":scheme": b"http", b":path": b"/\xff/x", b":authority": b"here"}
    fields |= {b"content-type": b"application/grpc", b"te": b"trailers"}
    head = b"".join(literal(*field) for field in fields.items())
    asked = frame(4, 0, 0, b"") + frame(1, 4, 1, head) + frame(0, 1, 1, bytes(5))

    async def main() -> bool:
        started: asyncio.Future[Any] = asyncio.Future()
        models = SlowModels()
        first, port = await gateway_grpc.serve(models, Regions(False), Budget(), "127.0.0.1:0")

        async def start() -> None:
            second, _ = await gateway_grpc.serve(models, Regions(False), Budget(), f"127.0.0.1:{port}")
            started.set_result(second)

        again = asyncio.create_task(gateway_grpc.serve_again(start))
        _, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + asked)
        second = await asyncio.wait_for(started, PATIENCE)
        writer.close()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer: Any = await stubs.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest())
        again.cancel()
        await second.stop(None)
        await first.stop(None)
        return bool(answer.live)

    assert asyncio.run(main())


@pytest.fixture
def certify(tmp_path: Path) -> Callable[[Any], tuple[str, str]]:
    """Write another certificate of 127.0.0.1, which is its own authority, and its key; return the files."""

    def write(key: Any) -> tuple[str, str]:
        now = datetime.datetime.now(datetime.UTC)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
        made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        signed = made.add_extension(here, critical=False).sign(key, hashes.SHA256())
        files = tmp_path / "cert.pem", tmp_path / "key.pem"
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
        return str(files[0]), str(files[1])

    return write


def test_both_protocols_have_tls_and_a_new_certificate_counts_for_new_connections(
    certify: Callable[[Any], tuple[str, str]],
) -> None:
    async def asked(port: int, rest_port: int, known: bytes) -> tuple[bool, bool]:
        """Ask each protocol, as a client that knows one certificate; whether it is answered."""
        credentials = grpc.ssl_channel_credentials(known)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            try:
                ready: Any = await stubs.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest())
                by_grpc = bool(ready.live)
            except grpc.aio.AioRpcError:
                by_grpc = False
        context = ssl.create_default_context(cadata=known.decode())
        async with aiohttp.ClientSession() as http:
            try:
                async with http.get(f"https://127.0.0.1:{rest_port}/v2/health/live", ssl=context) as answer:
                    return by_grpc, answer.status == 200
            except aiohttp.ClientConnectorCertificateError:
                return by_grpc, False

    async def main() -> None:
        files = certify(ec.generate_private_key(ec.SECP256R1()))
        certificate, first = Certificate(*files), Path(files[0]).read_bytes()
        async with ports(SlowModels(), certificate=certificate) as (port, rest_port):
            assert await asked(port, rest_port, first) == (True, True)
            certify(rsa.generate_private_key(65537, 2048))
            second = Path(files[0]).read_bytes()
            assert await asked(port, rest_port, second) == (False, False)
            certificate.renew()
            assert await asked(port, rest_port, second) == (True, True)
            assert await asked(port, rest_port, first) == (False, False)
            with pytest.raises(InvalidArgument, match="give both"):
                Certificate(files[0], None)
            Path(files[1]).write_text("no key")
            with pytest.raises(InvalidArgument, match="--oip-key"):
                certificate.renew()
            assert await asked(port, rest_port, second) == (True, True)

    asyncio.run(main())


def test_handshakes_count_towards_the_most_connections(certify: Callable[[Any], tuple[str, str]]) -> None:
    async def main() -> None:
        certificate, budget = Certificate(*certify(ec.generate_private_key(ec.SECP256R1()))), Budget()
        budget.most_connections = 2
        async with ports(SlowModels(), budget, certificate=certificate) as (_, port), aiohttp.ClientSession() as http:
            waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b""
            for each in (writer, *(writer for _, writer in waiting)):
                each.close()
            while True:
                gc.collect()  # Python 3.11 keeps handshakes that have failed
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"https://127.0.0.1:{port}/v2/health/live", ssl=False) as answer:
                        assert answer.status == 200
                        return

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.check
def test_client_that_breaks_off_a_handshake_leaves_no_line_and_sighup_renews_the_certificate(
    certify: Callable[[Any], tuple[str, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = certify(ec.generate_private_key(ec.SECP256R1()))
    gateway = Gateway(tmp_path, "--oip-cert", files[0], "--oip-key", files[1])
    places = [("127.0.0.1", gateway.ports[protocol]) for protocol in PROTOCOLS]
    try:
        for place in places:
            with socket.create_connection(place, PATIENCE) as broken:
                broken.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while broken.recv(4096):
                    pass
        assert capfd.readouterr().err == ""
        certify(ec.generate_private_key(ec.SECP256R1()))
        gateway.process.send_signal(signal.SIGHUP)
        latest = Path(files[0]).read_text()
        until(lambda: all(ssl.get_server_certificate(place) == latest for place in places), "no port has the new one")
    finally:
        gateway.close()
