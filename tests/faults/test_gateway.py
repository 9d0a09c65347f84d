"""The Open Inference Protocol, spoken by the clients that people use."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as region

from nnburst.errors import InvalidArgument
from nnburst.gateway.inference import Inference, InputTensor, Terms, extensions, infer
from nnburst.gateway.models import Models
from nnburst.gateway.regions import Regions
from nnburst.model import Priority
from support.gateways import (
    MARKS,
    PROTOCOLS,
    Gateway,
    SlowModels,
    X,
    Y,
    asked,
    both_protocols,
    raw,
    refused,
    refused_by_grpc,
    request_of,
    tensor,
)

pytestmark = MARKS


# ---- every call that a model on a CPU needs ------------------------------------------------------------------------


def test_output_without_dimensions_keeps_its_shape(client: Any, protocol: str) -> None:
    sent = tensor(PROTOCOLS[protocol], "x", np.ones((3, 8), np.float32))
    for _ in range(2):
        answer = client.infer("total", [sent]).as_numpy("y")
        assert answer.shape == ()
        assert answer == 24


def test_input_without_elements_is_taken_and_output_without_elements_is_answered(client: Any, protocol: str) -> None:
    sent = [tensor(PROTOCOLS[protocol], "x", np.ones((0, 8), np.float32))]
    for _ in range(2):
        assert client.infer("relu", sent).as_numpy("y").shape == (0, 8)
    assert client.infer("total", sent).as_numpy("y") == 0


def test_each_type_comes_back_as_it_went(client: Any, protocol: str) -> None:
    kind = PROTOCOLS[protocol]
    arrays = {
        "f2": ("FP16", np.array([0.5, -2, 65504], np.float16)),
        "f8": ("FP64", np.array([0.1, -1e300, np.pi])),
        "i1": ("INT8", np.array([-128, 0, 127], np.int8)),
        "u1": ("UINT8", np.array([0, 1, 255], np.uint8)),
        "i4": ("INT32", np.array([-(2**31), 0, 2**31 - 1], np.int32)),
        "i8": ("INT64", np.array([-(2**63), 0, 2**63 - 1])),
        "b": ("BOOL", np.array([True, False, True])),
    }
    inputs = [tensor(kind, "in_" + name, array, datatype) for name, (datatype, array) in arrays.items()]
    answer = client.infer("types", inputs)
    for name, (_, array) in arrays.items():
        assert answer.as_numpy("out_" + name).tobytes() == array.tobytes(), name


CLIENTS = [triton_grpc, triton_http, triton_aio, triton_http_aio]
OF_THE_CLIENT = {"plugin", "register_plugin", "unregister_plugin"}
"""Calls that ask no server."""
REFUSED: dict[str, Callable[[Any], Any]] = {
    "load_model": lambda client: client.load_model("relu"),
    "unload_model": lambda client: client.unload_model("relu"),
    "get_trace_settings": lambda client: client.get_trace_settings(),
    "update_trace_settings": lambda client: client.update_trace_settings(),
    "get_log_settings": lambda client: client.get_log_settings(),
    "update_log_settings": lambda client: client.update_log_settings({}),
    "register_cuda_shared_memory": lambda client: client.register_cuda_shared_memory("all", b"", 0, 64),
}
"""Calls of Triton's own, or that need a GPU."""


@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)
def test_every_call_of_the_client(gateway: Gateway, memory: Any, kind: Any) -> None:
    of_http = kind in (triton_http, triton_http_aio)

    async def main() -> None:
        client = kind.InferenceServerClient(gateway.url("rest" if of_http else "grpc"))
        asked: set[str] = set()

        async def ask(name: str, *args: Any, **options: Any) -> Any:
            asked.add(name)
            answer = getattr(client, name)(*args, **options)
            return await answer if asyncio.iscoroutine(answer) else answer

        assert await ask("is_server_live")
        assert await ask("is_server_ready")
        assert await ask("is_model_ready", "relu")
        for name in ("get_server_metadata", "get_model_repository_index"):
            assert await ask(name)
        for name in ("get_model_config", "get_inference_statistics"):
            assert await ask(name, "relu")
        described = (await ask("get_model_metadata", "relu", **({} if of_http else {"as_json": True})))["inputs"]
        assert described == [{"name": "x", "datatype": "FP32", "shape": [-1, 8] if of_http else ["-1", "8"]}]
        await ask("register_system_shared_memory", "all", f"/nnburst-test-{os.getpid()}", 4096)
        assert await ask("get_system_shared_memory_status", "all")
        given, wanted = tensor(kind, "x", X), kind.InferRequestedOutput("y")
        assert (await ask("infer", "relu", [given])).as_numpy("y").tobytes() == Y.tobytes()
        for compressed in ("gzip", "deflate"):
            sent = {"request_compression_algorithm": compressed} if of_http else {"compression_algorithm": compressed}
            answer = await ask("infer", "relu", [given], outputs=[wanted], **sent)
            assert answer.as_numpy("y").tobytes() == Y.tobytes()
            assert answer.get_output("y") is not None
            assert answer.get_response()
        region.set_shared_memory_region(memory, [X])
        given.set_shared_memory("all", X.nbytes)
        wanted.set_shared_memory("all", Y.nbytes, offset=1024)
        await ask("infer", "relu", [given], outputs=[wanted])
        assert region.get_contents_as_numpy(memory, np.float32, list(Y.shape), 1024).tobytes() == Y.tobytes()
        wanted.unset_shared_memory()
        assert (await ask("infer", "relu", [given], outputs=[wanted])).as_numpy("y").tobytes() == Y.tobytes()
        given.set_data_from_numpy(X)
        await ask("unregister_system_shared_memory", "all")
        if kind is triton_http:
            assert client.async_infer("relu", [given]).get_result().as_numpy("y").tobytes() == Y.tobytes()
        if kind is triton_grpc:
            got: queue.Queue[Any] = queue.Queue()
            client.async_infer("relu", [given], callback=lambda result, error: got.put(result))
            client.start_stream(lambda result, error: got.put(result))
            client.async_stream_infer("relu", [given], enable_empty_final_response=True)
            assert [got.get(timeout=60).as_numpy("y").tobytes() for _ in range(2)] == [Y.tobytes()] * 2
            client.stop_stream()
        if kind is triton_aio:

            async def requests() -> Any:
                for _ in range(3):
                    yield {"model_name": "relu", "inputs": [given]}

            answers = [result.as_numpy("y") async for result, _ in client.stream_infer(requests())]
            assert [answer.tobytes() for answer in answers] == [Y.tobytes()] * 3
        if of_http:
            body, length = client.generate_request_body([given])
            assert body[:length].startswith(b"{")
        else:
            await ask("get_cuda_shared_memory_status")
            await ask("unregister_cuda_shared_memory")
        for call in REFUSED.values():
            with pytest.raises(InferenceServerException):
                answer = call(client)
                await answer if asyncio.iscoroutine(answer) else answer
        await ask("close")
        others = {"async_infer", "start_stream", "async_stream_infer", "stop_stream", "stream_infer"}
        others |= {"generate_request_body", "parse_response_body"}
        others |= {"get_cuda_shared_memory_status", "unregister_cuda_shared_memory"} if of_http else set()
        public = {name for name in dir(client) if name[0] != "_" and callable(getattr(client, name))}
        assert public - asked - others - OF_THE_CLIENT == set(REFUSED)

    asyncio.run(main())


# ---- what the protocol says in detail ------------------------------------------------------------------------------


def got(gateway: Gateway, path: str, body: Any = None) -> Any:
    """What the REST gateway answers to a GET, or to a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{gateway.url('rest')}{path}", data)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_health_and_server_over_http_say_so_in_their_bodies(gateway: Gateway) -> None:
    assert got(gateway, "/v2/health/live") == {"live": True}
    assert got(gateway, "/v2/health/ready") == {"ready": True}
    assert got(gateway, "/v2/models/relu/ready") == {"name": "relu", "ready": True}
    assert got(gateway, "/v2/models/relu/versions/1/ready") == {"name": "relu", "ready": True}
    assert got(gateway, "/v2/") == got(gateway, "/v2")


@pytest.mark.parametrize("number", ["seven", "", 7, 0])
def test_answer_over_http_has_the_id_of_its_request(gateway: Gateway, number: object) -> None:
    assert got(gateway, "/v2/models/relu/infer", asked(id=number))["id"] == number


def test_id_that_is_none_is_refused(infer_url: str) -> None:
    for number in (1.5, True, [7], {}):
        said = refused(infer_url, json.dumps(asked(id=number)).encode())
        assert "Expected `int | str | null`" in said
        assert "at `$.id`" in said


def test_shared_memory_is_an_extension_only_where_it_is_allowed(client: Any, protocol: str) -> None:
    metadata = client.get_server_metadata()
    said = metadata["extensions"] if protocol == "rest" else metadata.extensions
    assert {"system_shared_memory", "schedule_policy", "statistics"} <= set(said)
    assert extensions(Models("there"), Regions(False)) == ["model_configuration", "schedule_policy", "statistics"]
    more = {"model_repository", "system_shared_memory"}
    assert more < set(extensions(Models("there", may_change=True), Regions(True)))


def test_timeout_and_priority_of_a_request_are_those_of_its_run() -> None:
    given = {"timeout": 2500, "priority": 1}

    async def main() -> None:
        models = SlowModels()
        models.go_on.set()
        async with both_protocols(models) as (stub, http):
            request = raw(1)
            for name, value in given.items():
                request.parameters[name].int64_param = value
            await stub.ModelInfer(request)
            assert (models.asked, models.runs.get_nowait()) == (Priority.HIGH, 0.0025)
            await stub.ModelInfer(raw(1), timeout=600)
            assert 0 < (models.runs.get_nowait() or 0) <= 601  # gRPC rounds what it sends up
            body = {"inputs": [], "parameters": given | {"priority": 3}}
            async with http.post("/v2/models/slow/infer", json=body) as answer:
                assert answer.status == 200
            assert (models.asked, models.runs.get_nowait()) == (Priority.LOW, 0.0025)

    asyncio.run(main())


def test_each_priority_of_a_request_is_served(client: Any, protocol: str) -> None:
    sent = [tensor(PROTOCOLS[protocol], "x", X)]
    for priority in (0, 1, 2, 3, 1000):
        assert client.infer("relu", sent, priority=priority).as_numpy("y").tobytes() == Y.tobytes()


def test_terms_of_a_request_are_those_of_its_parameters() -> None:
    assert Terms.of({}) == Terms.of({"timeout": 0, "priority": 0, "sequence_id": 0}) == Terms(None, Priority.MEDIUM)
    assert Terms.of({"timeout": 2500, "unknown": "x"}).timeout == 0.0025
    assert [Terms.of({"priority": n}).priority for n in (1, 2, 3, 99)] == [
        Priority.HIGH,
        Priority.MEDIUM,
        Priority.LOW,
        Priority.LOW,
    ]
    for name in ("timeout", "priority"):
        for wrong in (-1, 1.5, "1", True, None, 1 << 64, [1]):
            with pytest.raises(InvalidArgument, match=f"{name} is a whole number"):
                Terms.of({name: wrong})


def test_run_has_the_least_of_the_times_that_it_was_given() -> None:
    async def main() -> list[float | None]:
        models: Any = SlowModels()
        models.go_on.set()
        for own, of_call in ((None, None), (2.0, None), (2.0, 1.0), (1.0, 2.0), (None, 3.0)):
            given = [InputTensor("x", "UINT8", (1,), b"x")]
            request = Inference("slow", "", given, terms=Terms(own, Priority.HIGH))
            await infer(models, Regions(False), request, of_call)
            assert models.asked == Priority.HIGH
        return [models.runs.get_nowait() for _ in range(5)]

    assert asyncio.run(main()) == [None, 2.0, 1.0, 1.0, 3.0]


def test_input_that_comes_twice_is_refused(stub: Any, infer_url: str) -> None:
    request = request_of()
    request.inputs[0].contents.SetInParent()  # with nothing in it
    assert stub.ModelInfer(request).raw_output_contents[0] == Y.tobytes()
    request.inputs[0].contents.fp32_contents[:] = X.ravel()
    assert "comes twice, as elements and as bytes or in a region" in refused_by_grpc(stub.ModelInfer, request)
    body = asked()
    body["inputs"][0]["parameters"] = {"binary_data_size": X.nbytes}
    head = json.dumps(body).encode()
    said = refused(infer_url, head + X.tobytes(), **{"Inference-Header-Content-Length": str(len(head))})
    assert "comes twice, as elements and as bytes or in a region" in said


KSERVE = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)

def request(binary):
    given = InferInput("x", list(x.shape), "FP32")
    given.set_data_from_numpy(x, binary_data=binary)
    return InferRequest(model_name="relu", infer_inputs=[given], request_id="7")

async def main():
    url, port = "http://" + sys.argv[1], sys.argv[2]
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    told = [await rest.is_server_live(url), await rest.is_server_ready(url), await rest.is_model_ready(url, "relu")]
    answers = [await rest.infer(url, request(binary), model_name="relu") for binary in (False, True)]
    async with InferenceGRPCClient(port) as grpc:
        told += [await grpc.is_server_live(), await grpc.is_server_ready(), await grpc.is_model_ready("relu")]
        answers += [await grpc.infer(request(binary)) for binary in (False, True)]
    await rest.close()
    assert {answer.id for answer in answers} == {"7"}
    print(json.dumps([told, [answer.outputs[0].as_numpy().tolist() for answer in answers]]))

asyncio.run(main())
"""


@pytest.mark.skipif(find_spec("kserve") is None, reason="needs pip install kserve, which brings 60 packages along")
def test_client_of_kserve(gateway: Gateway) -> None:
    """In a process of its own: two packages with the same messages cannot be in one."""
    command = [sys.executable, "-c", KSERVE, gateway.url("rest"), gateway.url("grpc")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    told, answers = json.loads(done.stdout.splitlines()[-1])
    assert told == [True] * 6
    for answer in answers:
        np.testing.assert_array_equal(np.float32(answer), Y)
