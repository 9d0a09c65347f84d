"""More for the gateway than it takes: requests, bytes, connections, time."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import socket
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import aiohttp
import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as stubs

from nnburst.errors import DeviceUnavailable, InvalidArgument
from nnburst.gateway import budget as gateway_budget
from nnburst.gateway import grpc as gateway_grpc
from nnburst.gateway import rest as gateway_rest
from nnburst.gateway.budget import Budget
from nnburst.gateway.inference import OutputTensor
from nnburst.gateway.regions import Regions
from support.gateways import MARKS, Gateway, SlowModels, both_protocols, conversions, ports, raw, refused
from support.waiting import PATIENCE

pytestmark = MARKS


async def wait_for_idle(budget: Budget) -> None:
    """Wait until no request counts: a client can have its answer while the gateway still counts the request."""
    while budget._requests:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("limits", "said"),
    [((1, 1 << 30), "1 requests are under way"), ((8, 1000), "requests of 1000 bytes are under way")],
    ids=["requests", "bytes"],
)
def test_what_is_beyond_the_budget_is_refused_until_something_has_ended(limits: tuple[int, int], said: str) -> None:
    async def main() -> None:
        models, budget, url = SlowModels(), Budget(*limits), "/v2/models/slow/infer"
        async with both_protocols(models, budget) as (stub, http):
            first = asyncio.ensure_future(stub.ModelInfer(raw(600)))
            assert await models.runs.get() is None
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await stub.ModelInfer(raw(600))
            assert info.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            async with http.post(url, data=b" " * 600) as answer:
                assert answer.status == 429
                assert said in (await answer.json())["error"]
            models.go_on.set()
            await first
            await wait_for_idle(budget)
            await stub.ModelInfer(raw(600))
            await wait_for_idle(budget)
            async with http.post(url, data=b'{"inputs": []}' + b" " * 600) as answer:
                assert answer.status == 200

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def first_line_of_answer(sent: bytes, keepalive: float = 75) -> bytes:
    """What the REST gateway answers to bytes on a fresh connection."""

    async def main() -> bytes:
        models: Any = SlowModels()
        runner, port = await gateway_rest.serve(models, Regions(False), Budget(), "127.0.0.1:0", keepalive=keepalive)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            try:
                return await reader.readline()
            finally:
                writer.close()
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_body_that_does_not_come_is_waited_for_no_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_budget, "_PATIENCE_S", 0.01)
    cut_off = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
    assert b" 408 " in first_line_of_answer(cut_off)


def test_head_that_does_not_come_is_waited_for_no_longer_than_its_time() -> None:
    assert first_line_of_answer(b"GET /v2 HT", keepalive=0.01) == b""


@pytest.mark.parametrize("protocol", ["grpc", "rest"])
def test_answer_counts_until_it_is_read_but_no_longer_than_its_time(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"parameters": {"binary_data_output": true}}'
    stalled = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    if protocol == "grpc":
        no_window = frame(4, bytes([0, 4, 0, 0, 0, 0]))
        stalled = PREFACE + no_window + frame(1, head("ModelInfer"), 1, 4) + frame(0, bytes(5), 1, 1)

    async def main() -> None:
        models: Any = SlowModels()
        models.go_on.set()
        models.model.outputs, models.answers = {"y": conversions("UINT8")}, [np.zeros(16 << 20, np.uint8)]
        budget = Budget(8, 24 << 20)
        async with ports(models, budget) as (port, rest_port), aiohttp.ClientSession() as http:
            place, url = ("127.0.0.1", port if protocol == "grpc" else rest_port), f"http://127.0.0.1:{rest_port}"

            async def ask() -> int:
                async with http.post(f"{url}/v2/models/slow/infer", data=body) as answer:
                    await answer.read()
                    return answer.status

            with socket.create_connection(place) as client:
                client.sendall(stalled)
                while budget._bytes < 16 << 20:
                    await asyncio.sleep(0.001)
                assert await ask() == 429
            while await ask() != 200:
                pass
            for kind in (gateway_grpc, gateway_rest):
                monkeypatch.setattr(kind, "seconds_for", lambda size: 0.01)
            models.runs = asyncio.Queue()
            with socket.create_connection(place) as client:
                client.sendall(stalled)
                await models.runs.get()
                await wait_for_idle(budget)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert not caplog.records


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def head(call: str) -> bytes:
    """Make the header block of a call over gRPC."""
    fields = {":method": "POST", ":scheme": "http", ":authority": "x", "te": "trailers"}
    fields |= {":path": f"/inference.GRPCInferenceService/{call}", "content-type": "application/grpc"}
    texts = [bytes([len(text)]) + text.encode() for field in fields.items() for text in field]
    return b"".join(b"\0" + name + value for name, value in zip(texts[::2], texts[1::2], strict=True))


def test_streams_that_one_connection_opens_without_pause_cost_no_other_client_a_request() -> None:
    block = head("ModelStreamInfer")
    over = threading.Event()

    def flood(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock, sock.makefile("rb", 0) as answers:
            sock.sendall(PREFACE + frame(4))
            sock.setblocking(False)
            for first in itertools.count(1, 200):
                opened = b"".join(frame(1, block, stream, 4) for stream in range(first, first + 200, 2))
                while opened and not over.is_set():
                    with contextlib.suppress(BlockingIOError):
                        opened = opened[sock.send(opened) :]
                    answers.read(1 << 16)
                if over.is_set():
                    break

    async def main() -> None:
        models: Any = SlowModels()
        server, port = await gateway_grpc.serve(models, Regions(False), Budget(), "127.0.0.1:0")
        attacker = threading.Thread(target=flood, args=(port,))
        attacker.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = stubs.GRPCInferenceServiceStub(channel)
                for _ in range(200):
                    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        finally:
            over.set()
            attacker.join()
            await server.stop(None)

    asyncio.run(main())


def frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    """Make a frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@pytest.mark.parametrize("kind", [gateway_grpc, gateway_rest], ids=["grpc", "rest"])
def test_connections_beyond_the_most_are_ended_and_nothing_is_logged(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sent = PREFACE + frame(4) if kind is gateway_grpc else b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"

    async def ask(port: int) -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            return await asyncio.wait_for(reader.read(9), 60), writer
        return b"", writer

    async def main() -> None:
        budget, models = Budget(), SlowModels()
        budget.most_connections = 1
        server, port = await kind.serve(models, Regions(False), budget, "127.0.0.1:0")
        try:
            first, kept = await ask(port)
            second, _ = await ask(port)
            assert (len(first), len(second)) == (9, 0)
            kept.close()
            while not (await ask(port))[0]:
                pass
        finally:
            await (server.stop(None) if kind is gateway_grpc else server.cleanup())

    asyncio.run(asyncio.wait_for(main(), 60))
    assert not caplog.records


@pytest.mark.parametrize("kind", [gateway_grpc, gateway_rest], ids=["grpc", "rest"])
def test_address_that_is_no_text_is_refused_with_a_sentence(kind: Any) -> None:
    with pytest.raises(DeviceUnavailable, match="cannot listen at"):
        asyncio.run(kind.serve(SlowModels(), Regions(False), Budget(), "\udcff:1"))


@pytest.mark.parametrize("sent", [b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n"])
def test_client_that_speaks_no_http_leaves_no_traceback(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert b" 400 " in first_line_of_answer(sent)
    assert not caplog.records


def test_what_is_under_way_is_finished_and_nothing_else_is_begun() -> None:
    async def main() -> None:
        budget = Budget()
        with budget.request():
            finishing = asyncio.ensure_future(budget.finish(10 * PATIENCE))
            await asyncio.sleep(0)
            with pytest.raises(DeviceUnavailable, match="being stopped"), budget.request():
                pass
            assert not finishing.done()
        await asyncio.wait_for(finishing, PATIENCE)  # with the last one
        await asyncio.wait_for(budget.finish(10 * PATIENCE), PATIENCE)  # nothing is under way
        slow = Budget()
        with slow.request():
            await slow.finish(0.01)

    asyncio.run(main())


def test_body_that_cannot_be_read_is_refused_with_a_sentence(infer_url: str) -> None:
    assert "cannot be read" in refused(infer_url, b"{}", **{"Content-Encoding": "gzip"})


def test_json_beyond_its_limits_is_refused(infer_url: str) -> None:
    assert "send tensors as binary data" in refused(infer_url, b'{"inputs": []}' + b" " * gateway_rest._MOST_JSON)
    many = np.zeros(gateway_rest._MOST_NUMBERS + 1, np.int8)
    answers = [(OutputTensor("y"), "INT8", many.shape, many)]
    with pytest.raises(InvalidArgument, match="output 'y' has 1048577 elements"):
        gateway_rest._response("relu", "1", None, answers, {"": False})
    assert gateway_rest._response("relu", "1", None, answers, {"": True}).status == 200
    half = np.zeros(gateway_rest._MOST_NUMBERS // 2, np.int8)
    several = [(OutputTensor(name), "INT8", half.shape, half) for name in "abc"]
    assert gateway_rest._response("relu", "1", None, several[:2], {"": False}).status == 200
    with pytest.raises(InvalidArgument, match=r"output 'c' has 524288 elements.* 0 are left"):
        gateway_rest._response("relu", "1", None, several, {"": False})


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_body_that_inflates_beyond_its_limit_is_refused(gateway: Gateway, pack: Callable[[bytes], bytes]) -> None:
    def asked(rows: int) -> bytes:
        """So many rows of zeros as binary data, and their sum as JSON."""
        size = {"binary_data_size": 32 * rows}
        head = json.dumps({"inputs": [{"name": "x", "shape": [rows, 8], "datatype": "FP32", "parameters": size}]})
        headers["Inference-Header-Content-Length"] = str(len(head))
        return pack(head.encode() + bytes(32 * rows))

    url = f"http://{gateway.url('rest')}/v2/models/total/infer"
    headers = {"Content-Encoding": "gzip" if pack is gzip.compress else "deflate"}
    with urllib.request.urlopen(urllib.request.Request(url, asked(1 << 18), headers), timeout=60) as answer:
        assert json.loads(answer.read())["outputs"][0]["data"] == [0]
    bomb = asked(1 << 19)
    assert len(bomb) < 1 << 15
    assert "inflates to at most 16777216 bytes: send this one as it is" in refused(url, bomb, **headers)
    for broken in (bomb[:100], bomb[:2] + bomb, pack(b"{}") + b"x", b"{}", b""):
        assert "the body cannot be read" in refused(url, broken, **headers)


def test_message_that_inflates_beyond_the_limit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_grpc, "_MOST_BYTES", 1 << 20)

    async def main() -> None:
        models: Any = SlowModels()
        models.go_on.set()
        server, port = await gateway_grpc.serve(models, Regions(False), Budget(), "127.0.0.1:0")
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", compression=grpc.Compression.Gzip) as channel:
                stub = stubs.GRPCInferenceServiceStub(channel)
                await stub.ModelInfer(raw(1 << 19))
                with pytest.raises(grpc.aio.AioRpcError) as info:
                    await stub.ModelInfer(raw(1 << 21))  # 2 KB of gzip
                assert info.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert models.runs.qsize() == 1
        finally:
            await server.stop(None)

    asyncio.run(main())


def test_output_that_is_asked_for_twice_is_refused(infer_url: str) -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8}
    body = json.dumps({"inputs": [given], "outputs": [{"name": "y"}] * 2}).encode()
    assert refused(infer_url, body) == "output 'y' is asked for twice"
