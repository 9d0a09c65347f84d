"""BYTES and BF16 of the Open Inference Protocol, models that it has no datatypes for, and requests in batches."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import tritonclient.http as triton_http
from onnx import TensorProto
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from tritonclient.utils import shared_memory as region

import nnburst
from nnburst.errors import InvalidArgument
from nnburst.gateway import inference, tensors
from nnburst.gateway.inference import RegionPlace
from nnburst.gateway.regions import Regions
from nnburst.watch import find_services, look
from support.gateways import MARKS, PROTOCOLS, Gateway, SlowModels, X, Y, conversions, refused, refused_by_grpc, tensor
from support.onnx_models import classifier, graph, node, save
from support.waiting import until

pytestmark = MARKS

TEXTS = np.array([["a", ""], ["é", "two words"], ["日本", "x" * 300]], object)
TWICE = [text * 2 for text in TEXTS.ravel()]
BITS = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strings")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[Gateway]:
    def same(name: str, kind: int, shape: tuple[Any, ...], *operation: str) -> str:
        x, y = (("x", kind, shape), ("y", kind, shape))
        made = graph([node(operation[0], list(operation[1:]), ["y"])], [x], [y], opset=20)
        return f"{name}={save(made, folder / f'{name}.onnx')}"

    models = [
        same("twice", TensorProto.STRING, ("n", "m"), "StringConcat", "x", "x"),
        same("bits", TensorProto.BFLOAT16, ("n",), "Identity", "x"),
        same("quarters", TensorProto.FLOAT8E4M3FN, ("n",), "Identity", "x"),
        f"classes={save(classifier(), folder / 'classes.onnx')}",
    ]
    options = [option for model in models for option in ("--model", model)]
    gateway = Gateway(folder, *options, "--oip-shared-memory", "--batch", "relu=8", "--batch-wait", "relu=1s")
    yield gateway
    gateway.close()


def texts(answer: Any) -> list[str]:
    array = answer.as_numpy("y")
    assert array.shape == TEXTS.shape
    return [one if isinstance(one, str) else one.decode() for one in array.ravel()]


def test_strings_go_in_and_out(client: Any, protocol: str) -> None:
    for _ in range(2):
        assert texts(client.infer("twice", [tensor(PROTOCOLS[protocol], "x", TEXTS, "BYTES")])) == TWICE
    options = {"as_json": True} if protocol == "grpc" else {}
    (described,) = client.get_model_metadata("twice", **options)["inputs"]
    assert described["datatype"] == "BYTES"
    assert "TYPE_STRING" in str(client.get_model_config("twice", **options))


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_no_strings_go_in_and_out(client: Any, protocol: str, shape: tuple[int, ...]) -> None:
    answer = client.infer("twice", [tensor(PROTOCOLS[protocol], "x", np.empty(shape, object), "BYTES")])
    assert answer.get_output("y") is not None
    assert list(answer.get_output("y").shape if protocol == "grpc" else answer.get_output("y")["shape"]) == [*shape]


def test_strings_of_json(gateway: Gateway) -> None:
    with gateway.client("rest") as client:
        wanted = [triton_http.InferRequestedOutput("y", binary_data=False)]
        given = tensor(triton_http, "x", TEXTS, "BYTES", binary_data=False)
        answer = client.infer("twice", [given], outputs=wanted)
    assert texts(answer) == TWICE == answer.get_output("y")["data"]


def test_strings_one_by_one_over_grpc(stub: Any) -> None:
    request = pb.ModelInferRequest(model_name="twice")
    given = request.inputs.add(name="x", datatype="BYTES", shape=TEXTS.shape)
    given.contents.bytes_contents.extend(text.encode() for text in TEXTS.ravel())
    (data,) = stub.ModelInfer(request).raw_output_contents
    assert data == serialize_byte_tensor(np.array(TWICE, object)).item()
    given.contents.bytes_contents[0] = b"\xff"
    assert "a string is no UTF-8" in refused_by_grpc(stub.ModelInfer, request)


def test_strings_in_shared_memory(client: Any, protocol: str, memory: Any) -> None:
    kind, sent = PROTOCOLS[protocol], serialize_byte_tensor(TEXTS).item()
    client.register_system_shared_memory("texts", f"/nnburst-test-{os.getpid()}", 4096)
    try:
        region.set_shared_memory_region(memory, [np.frombuffer(sent, np.uint8)])
        given, wanted = kind.InferInput("x", list(TEXTS.shape), "BYTES"), kind.InferRequestedOutput("y")
        given.set_shared_memory("texts", len(sent))
        wanted.set_shared_memory("texts", 2048, 1024)
        client.infer("twice", [given], outputs=[wanted])
        found = region.get_contents_as_numpy(memory, np.object_, [6], 1024)
        assert [text.decode() for text in found.ravel()] == TWICE
        given.set_shared_memory("texts", len(sent) - 1)
        with pytest.raises(InferenceServerException, match="are not 6 strings, each behind its length"):
            client.infer("twice", [given])
        wanted.set_shared_memory("texts", 64, 1024)
        given.set_shared_memory("texts", len(sent))
        with pytest.raises(InferenceServerException, match="bytes does not fit into 64 of region"):
            client.infer("twice", [given], outputs=[wanted])
    finally:
        client.unregister_system_shared_memory("texts")


@pytest.mark.check
def test_many_strings_are_read_beside_the_loop(client: Any, protocol: str) -> None:
    sent = np.array([[f"{i:012}"] for i in range(100_000)], object)
    answer = client.infer("twice", [tensor(PROTOCOLS[protocol], "x", sent, "BYTES")]).as_numpy("y")
    assert [bytes(text).decode() for text in answer[::9999, 0]] == [text * 2 for text in sent[::9999, 0]]


def test_what_is_long_or_strings_is_converted_beside_the_loop() -> None:
    def thread_for(size: int) -> threading.Thread:
        return asyncio.run(tensors.convert_in_thread(size, threading.current_thread))

    assert thread_for(tensors.text_size(np.zeros(1 << 24))) is thread_for(1 << 20) is threading.main_thread()
    assert threading.main_thread() not in (thread_for((1 << 20) + 1), thread_for(tensors.text_size(TEXTS)))


def one(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes are not 2 strings, each behind its length in four bytes"),
        (one(b"a") + one(b"b")[:-1], "9 bytes are not 2 strings, each behind its length in four bytes"),
        (one(b"a") + b"\1\0", "7 bytes are not 2 strings, each behind its length in four bytes"),
        (one(b"a") + one(b"b") + b"c", "11 bytes are not 2 strings, each behind its length in four bytes"),
        (one(b"a") + one(b"b") + one(b"c"), "15 bytes are not 2 strings, each behind its length in four bytes"),
        (one(b"a", 2**32 - 1) + one(b"b"), "10 bytes are not 2 strings, each behind its length in four bytes"),
        (one(b"abcd", 1) + one(b""), "12 bytes are not 2 strings, each behind its length in four bytes"),
        (one(b"a") + one(b"\xc3"), "a string is no UTF-8 ("),
        (["a", b"b".decode(), "c"], "of shape [2] takes 2 elements, got 3"),
        (["a", 1], "the elements are BYTES, got a int"),
        (["a", None], "the elements are BYTES, got a NoneType"),
    ],
)
def test_bytes_that_are_no_strings_are_refused(data: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        conversions("BYTES").array_of("BYTES", (2,), data)
    assert str(info.value).removeprefix("input 'x'").lstrip(": ").startswith(said)


def test_more_strings_than_there_may_be_are_refused_before_any_is_made() -> None:
    with pytest.raises(InvalidArgument, match="has more than 1048576 strings"):
        conversions("BYTES").array_of("BYTES", (1024, 1025), bytes(4 * 1024 * 1025))
    with pytest.raises(InvalidArgument, match="has 268435457 bytes; strings have at most 268435456"):
        conversions("BYTES").check_size("BYTES", (1,), (256 << 20) + 1)
    with pytest.raises(InvalidArgument, match="input 'x' is BYTES, got FP32"):  # before a region is copied
        conversions("BYTES").check_size("FP32", (1,), 4)


def test_input_with_a_negative_size_does_not_bring_others_onto_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[threading.Thread] = []

    def read(*given: Any) -> Any:
        readers.append(threading.current_thread())
        raise InvalidArgument("read")

    monkeypatch.setattr(inference, "_arrays", read)
    negative = inference.InputTensor("w", "BYTES", (1,), RegionPlace("texts", -(1 << 40)))
    long = inference.InputTensor("x", "BYTES", (1,), bytes(tensors._BRISK + 1))
    asked, models = inference.Inference("slow", "", [negative, long]), SlowModels()
    with pytest.raises(InvalidArgument, match="read"):
        asyncio.run(inference.infer(models, Regions(True), asked))  # type: ignore[arg-type]
    assert readers != [threading.main_thread()]


def test_wrong_strings_cost_their_request_only(client: Any, protocol: str) -> None:
    given = tensor(PROTOCOLS[protocol], "x", TEXTS, "BYTES")
    wrong = PROTOCOLS[protocol].InferInput("x", [4, 2], "BYTES")
    wrong.set_data_from_numpy(np.full((4, 2), "x", object))
    wrong.set_shape([3, 2])
    with pytest.raises(InferenceServerException, match="40 bytes are not 6 strings"):
        client.infer("twice", [wrong])
    assert texts(client.infer("twice", [given])) == TWICE


# ---- numbers of the protocol that NumPy has not, and what the protocol has not -------------------------------------


def test_bfloat16_is_bf16(stub: Any) -> None:
    request = pb.ModelInferRequest(model_name="bits", raw_input_contents=[BITS.tobytes()])
    request.inputs.add(name="x", datatype="BF16", shape=BITS.shape)
    answer = stub.ModelInfer(request)
    assert (answer.outputs[0].datatype, answer.raw_output_contents[0]) == ("BF16", BITS.tobytes())


def test_json_has_no_bf16(gateway: Gateway) -> None:
    url = f"http://{gateway.url('rest')}/v2/models/bits/infer"
    body = b'{"inputs": [{"name": "x", "datatype": "BF16", "shape": [%d], "data": [%s]}]}'
    assert refused(url, body % (1, b"1")) == "input 'x' is BF16, which JSON has not: send it as binary data"
    assert refused(url, body % (0, b"")) == "output 'y' is BF16, which JSON has not: ask for binary data"


@pytest.mark.parametrize(
    ("name", "what"),
    [("quarters", "'x' is float8_e4m3fn"), ("classes", r"'scores' is seq\(map\(string,tensor\(float\)\)\)")],
)
def test_model_that_the_protocol_has_no_datatypes_for_is_refused(
    client: Any, protocol: str, name: str, what: str
) -> None:
    said = f"model '{name}' is not served: {what}, which the Open Inference Protocol has no datatype for"
    for call in (client.get_model_metadata, client.get_model_config, lambda name: client.infer(name, [])):
        with pytest.raises(InferenceServerException, match=said) as info:
            call(name)
        assert "INVALID_ARGUMENT" in (info.value.status() or "") or "400" in (info.value.status() or "")
    assert not client.is_model_ready(name)
    assert client.is_server_ready()
    index = client.get_model_repository_index(**({"as_json": True} if protocol == "grpc" else {}))
    rows = {row["name"]: row for row in (index["models"] if protocol == "grpc" else index)}
    assert rows[name]["state"] == "UNAVAILABLE"
    assert rows["twice"]["state"] == "READY"


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.check
def test_requests_of_the_gateway_wait_for_others_and_run_as_one(gateway: Gateway, folder: Path) -> None:
    sent = [tensor(PROTOCOLS["grpc"], "x", X)]
    with ExitStack() as stack:
        service = stack.enter_context(nnburst.connect(f"unix:{folder / 'run' / 'nnburst' / 'gate.sock'}"))
        session = stack.enter_context(service.session("relu", preference="sustained_speed"))
        client, thread = stack.enter_context(gateway.client("grpc")), stack.enter_context(ThreadPoolExecutor(1))

        def counted(name: str) -> int:
            return sum(row.counters[name] for page in find_services(service.pid) for row in look(page).rows)

        client.infer("relu", sent)  # has to be bound, and does not wait
        session.run(None, {"x": X})

        def both_run_as_one() -> bool:  # if both are there within the second
            batched, batches = counted("batched"), counted("batches")
            asked = thread.submit(client.infer, "relu", sent)
            np.testing.assert_array_equal(session.run(None, {"x": -X})[0], np.maximum(-X, 0))
            np.testing.assert_array_equal(asked.result().as_numpy("y"), Y)
            return (counted("batched") - batched, counted("batches") - batches) == (2, 1)

        until(both_run_as_one)
        with pytest.raises(InferenceServerException, match=r"no answer within 0\.\d+ s"):  # nobody else comes
            client.infer("relu", sent, timeout=200_000)
