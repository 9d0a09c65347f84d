"""The Open Inference Protocol, spoken by the client that people use; and clients that mean harm."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import posix_ipc
import pytest

from support.waiting import PATIENCE, until

onnx = pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import aiohttp  # noqa: E402 (they may be absent)
import grpc  # noqa: E402
import tritonclient.grpc as triton_grpc  # noqa: E402
import tritonclient.grpc.aio as triton_aio  # noqa: E402
import tritonclient.http as triton_http  # noqa: E402
import tritonclient.http.aio as triton_http_aio  # noqa: E402
from tritonclient.grpc import service_pb2 as pb  # noqa: E402
from tritonclient.grpc import service_pb2_grpc as stubs  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402
from tritonclient.utils import shared_memory as region  # noqa: E402

from nnburst.cli.serve import supervised  # noqa: E402
from nnburst.errors import DeadObject, DeviceUnavailable, InvalidArgument, MissedDeadline  # noqa: E402
from nnburst.gateway import Models, OutputTensor, Regions  # noqa: E402
from nnburst.gateway import grpc as gateway_grpc  # noqa: E402
from nnburst.gateway import rest as gateway_rest  # noqa: E402
from nnburst.gateway.budget import Budget  # noqa: E402
from nnburst.gateway.inference import BRISK, Inference, InputTensor, Terms, extensions, infer  # noqa: E402
from nnburst.gateway.tensors import _DTYPES, ModelTensor  # noqa: E402
from nnburst.model import Priority  # noqa: E402

pytestmark = [pytest.mark.leaks("gRPC keeps threads and descriptors"), pytest.mark.filterwarnings("ignore")]

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
Y = np.maximum(X, 0)
PROTOCOLS = {"grpc": triton_grpc, "rest": triton_http}


class Gateway:
    """A running `nnburst serve --oip`."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "run").mkdir(mode=0o700)
        environment = os.environ | {"XDG_RUNTIME_DIR": str(folder / "run")}
        command = [sys.executable, "-m", "nnburst", "serve", "--name", "gate", "--json"]
        for make in (relu, types, compress, total):
            command += ["--model", f"{make.__name__}={make(folder)}"]
        command += ["--oip", "127.0.0.1:0", "--oip-rest", "127.0.0.1:0", *options]
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.ports = json.loads(self.process.stdout.readline())["oip"]

    def url(self, protocol: str) -> str:
        return f"127.0.0.1:{self.ports[protocol]}"

    def client(self, protocol: str) -> Any:
        return PROTOCOLS[protocol].InferenceServerClient(self.url(protocol))

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


def relu(folder: Path) -> Path:
    value = [onnx.helper.make_tensor_value_info(name, 1, ["n", 8]) for name in ("x", "y")]
    return model(folder / "relu.onnx", [("Relu", ["x"], ["y"])], value[:1], value[1:])


def types(folder: Path) -> Path:
    """One input and output of each type, by way of Identity."""
    kinds = {"f2": 10, "f8": 11, "i1": 3, "u1": 2, "i4": 6, "i8": 7, "b": 9}
    value = {
        side: [onnx.helper.make_tensor_value_info(side + name, kind, [3]) for name, kind in kinds.items()]
        for side in ("in_", "out_")
    }
    nodes = [("Identity", ["in_" + name], ["out_" + name]) for name in kinds]
    return model(folder / "types.onnx", nodes, value["in_"], value["out_"])


def compress(folder: Path) -> Path:
    """The rows of x that c chooses. The model says that there are as many as before."""
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["n", 8]) for name in ("x", "y"))
    c = onnx.helper.make_tensor_value_info("c", 9, ["n"])
    return model(folder / "compress.onnx", [("Compress", ["x", "c"], ["y"])], [x, c], [y], axis=0)


def total(folder: Path) -> Path:
    """The sum of x, which has no dimensions."""
    x, y = (onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", ["n", "m"]), ("y", [])))
    return model(folder / "total.onnx", [("ReduceSum", ["x"], ["y"])], [x], [y], keepdims=0)


def model(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], **attributes: int) -> Path:
    made = [onnx.helper.make_node(*node, **attributes) for node in nodes]
    graph = onnx.helper.make_graph(made, path.stem, inputs, outputs)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("gateway"), "--oip-shared-memory")
    yield gateway
    gateway.close()


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(gateway: Gateway, protocol: str) -> Iterator[Any]:
    client = gateway.client(protocol)
    yield client
    client.close()


def tensor(protocol: Any, name: str, array: Any, datatype: str = "FP32", **options: Any) -> Any:
    given = protocol.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, **options)
    return given


# ---- every call that a model on a CPU needs ------------------------------------------------------------------------


def test_health_and_metadata(client: Any, protocol: str) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("relu")
    assert client.is_model_ready("relu", "1")
    options = {"as_json": True} if protocol == "grpc" else {}
    assert client.get_server_metadata(**options)["name"] == "nnburst"
    metadata = client.get_model_metadata("relu", **options)
    assert metadata["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": ["-1", "8"] if protocol == "grpc" else [-1, 8]}
    ]
    index = client.get_model_repository_index(**options)
    assert {row["name"] for row in (index["models"] if protocol == "grpc" else index)} == {
        "relu",
        "types",
        "compress",
        "total",
    }


def test_inference_gives_the_bits_of_the_model(client: Any, protocol: str) -> None:
    kind = PROTOCOLS[protocol]
    answer = client.infer("relu", [tensor(kind, "x", X)], request_id="7")
    assert answer.as_numpy("y").tobytes() == Y.tobytes()
    asked = client.infer("relu", [tensor(kind, "x", X)], outputs=[kind.InferRequestedOutput("y")])
    assert asked.as_numpy("y").tobytes() == Y.tobytes()


def test_python_function_is_served_as_a_model(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from nnburst.devices.function import Tensor, declare\n"
        "@declare(inputs=[Tensor('x', 'float32', ('n', 8))], outputs=[Tensor('y', 'float32', ('n', 8))])\n"
        "def double(x):\n    return x * 2\n"
    )
    gateway = Gateway(tmp_path, "app.py:double")
    try:
        for protocol, kind in PROTOCOLS.items():
            with gateway.client(protocol) as client:
                answer = client.infer("double", [tensor(kind, "x", X)]).as_numpy("y")
            np.testing.assert_array_equal(answer, 2 * X)
    finally:
        gateway.close()


def test_output_without_dimensions_keeps_its_shape(client: Any, protocol: str) -> None:
    sent = tensor(PROTOCOLS[protocol], "x", np.ones((3, 8), np.float32))
    for _ in range(2):
        answer = client.infer("total", [sent]).as_numpy("y")
        assert answer.shape == ()
        assert answer == 24


def test_output_without_elements_is_answered(client: Any, protocol: str) -> None:
    for _ in range(2):
        answer = client.infer("relu", [tensor(PROTOCOLS[protocol], "x", np.ones((0, 8), np.float32))]).as_numpy("y")
        assert answer.shape == (0, 8)


def test_input_without_elements_is_taken(client: Any, protocol: str) -> None:
    sent = tensor(PROTOCOLS[protocol], "x", np.ones((0, 8), np.float32))
    assert client.infer("total", [sent]).as_numpy("y") == 0


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


def test_tensors_as_json(gateway: Gateway) -> None:
    client = gateway.client("rest")
    wanted = [triton_http.InferRequestedOutput("y", binary_data=False)]
    answer = client.infer("relu", [tensor(triton_http, "x", X, binary_data=False)], outputs=wanted)
    np.testing.assert_array_equal(answer.as_numpy("y"), Y)
    client.close()


def test_many_requests_at_once(client: Any, protocol: str) -> None:
    kind = PROTOCOLS[protocol]
    if protocol == "grpc":
        got: queue.Queue[Any] = queue.Queue()
        for i in range(20):
            client.async_infer(
                "relu", [tensor(kind, "x", X * i)], callback=lambda result, error: got.put((result, error))
            )
        answers = [got.get(timeout=60) for _ in range(20)]
        assert [error for _, error in answers if error] == []
        sums = sorted(float(answer.as_numpy("y").sum()) for answer, _ in answers)
    else:
        pending = [client.async_infer("relu", [tensor(kind, "x", X * i)]) for i in range(20)]
        sums = sorted(float(one.get_result().as_numpy("y").sum()) for one in pending)
    assert sums == sorted(float(np.maximum(X * i, 0).sum()) for i in range(20))


def test_stream_answers_in_order_and_goes_on_after_an_error(gateway: Gateway) -> None:
    client, got = gateway.client("grpc"), queue.Queue[Any]()
    client.start_stream(lambda result, error: got.put((result, error)))
    for name in ("relu", "nothing", "relu"):
        client.async_stream_infer(name, [tensor(triton_grpc, "x", X)])
    first, second, third = (got.get(timeout=60) for _ in range(3))
    client.stop_stream()
    client.close()
    assert first[0].as_numpy("y").tobytes() == third[0].as_numpy("y").tobytes() == Y.tobytes()
    assert "no model 'nothing'" in str(second[1])


def test_asyncio_client(gateway: Gateway) -> None:
    async def main() -> list[Any]:
        async with triton_aio.InferenceServerClient(gateway.url("grpc")) as client:
            runs = [client.infer("relu", [tensor(triton_aio, "x", X * i)]) for i in range(10)]
            return [answer.as_numpy("y") for answer in await asyncio.gather(*runs)]

    for i, y in enumerate(asyncio.run(main())):
        np.testing.assert_array_equal(y, np.maximum(X * i, 0))


def test_statistics_count(gateway: Gateway, client: Any, protocol: str) -> None:
    def count(name: str) -> int:
        options = {"as_json": True} if protocol == "grpc" else {}
        stats = {one["name"]: one for one in client.get_inference_statistics(name, **options)["model_stats"]}
        return int(stats["relu"].get("inference_count", 0))

    before = count("relu")
    client.infer("relu", [tensor(PROTOCOLS[protocol], "x", X)])
    assert count("relu") == count("") == before + 1
    with pytest.raises(InferenceServerException, match="no model 'nothing'"):
        client.get_inference_statistics("nothing")


CLIENTS = [triton_grpc, triton_http, triton_aio, triton_http_aio]
OF_THE_CLIENT = {"plugin", "register_plugin", "unregister_plugin"}
"""Calls that ask no server."""
REFUSED: dict[str, Callable[[Any], Any]] = {
    "get_model_config": lambda client: client.get_model_config("relu"),
    "load_model": lambda client: client.load_model("relu"),
    "unload_model": lambda client: client.unload_model("relu"),
    "get_trace_settings": lambda client: client.get_trace_settings(),
    "update_trace_settings": lambda client: client.update_trace_settings(),
    "get_log_settings": lambda client: client.get_log_settings(),
    "update_log_settings": lambda client: client.update_log_settings({}),
    "register_cuda_shared_memory": lambda client: client.register_cuda_shared_memory("all", b"", 0, 64),
}
"""Calls of Triton's own, or that need a GPU."""


@pytest.mark.parametrize(
    "kind", [triton_grpc, triton_http, triton_aio, triton_http_aio], ids=lambda kind: kind.__name__
)
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
        for name in ("get_model_metadata", "get_inference_statistics"):
            assert await ask(name, "relu")
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


def asked(**more: Any) -> dict[str, Any]:
    given = {"name": "x", "shape": [2, 8], "datatype": "FP32", "data": X.ravel().tolist()}
    return {"inputs": [given], **more}


def test_health_and_server_over_http_say_so_in_their_bodies(gateway: Gateway) -> None:
    assert got(gateway, "/v2/health/live") == {"live": True}
    assert got(gateway, "/v2/health/ready") == {"ready": True}
    assert got(gateway, "/v2/models/relu/ready") == {"name": "relu", "ready": True}
    assert got(gateway, "/v2/models/relu/versions/1/ready") == {"name": "relu", "ready": True}
    assert got(gateway, "/v2/") == got(gateway, "/v2")


@pytest.mark.parametrize("number", ["seven", "", 7, 0])
def test_answer_over_http_has_the_id_of_its_request(gateway: Gateway, number: object) -> None:
    assert got(gateway, "/v2/models/relu/infer", asked(id=number))["id"] == number


def test_id_that_is_none_is_refused(gateway: Gateway) -> None:
    url = f"http://{gateway.url('rest')}/v2/models/relu/infer"
    for number in (1.5, True, [7], {}):
        assert "id is a string or a whole number" in refused(url, json.dumps(asked(id=number)).encode())


def test_shared_memory_is_an_extension_only_where_it_is_allowed(client: Any, protocol: str) -> None:
    metadata = client.get_server_metadata()
    said = metadata["extensions"] if protocol == "rest" else metadata.extensions
    assert {"system_shared_memory", "schedule_policy", "statistics"} <= set(said)
    assert extensions(Regions(False)) == ["schedule_policy", "statistics"]


def test_version_that_a_model_has_not_is_refused(client: Any) -> None:
    for ask in (client.get_model_metadata, client.get_inference_statistics):
        assert ask("relu", "1")
        with pytest.raises(InferenceServerException, match="model 'relu' has the version 1, not '2'"):
            ask("relu", "2")


def test_sequence_is_refused(client: Any, protocol: str) -> None:
    sent = [tensor(PROTOCOLS[protocol], "x", X)]
    for number in (7, "seven"):
        with pytest.raises(InferenceServerException, match="sequences are not served"):
            client.infer("relu", sent, sequence_id=number, sequence_start=True)


def test_timeout_and_priority_of_a_request_are_those_of_its_run() -> None:
    given = {"timeout": 2500, "priority": 1}

    async def main() -> None:
        models: Any = SlowModels()
        models.go_on.set()
        server, port = await gateway_grpc.serve(models, Regions(False), Budget(), "127.0.0.1:0")
        runner, rest_port = await gateway_rest.serve(models, Regions(False), Budget(), "127.0.0.1:0")
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, aiohttp.ClientSession() as http:
                request = raw(1)
                for name, value in given.items():
                    request.parameters[name].int64_param = value
                await stubs.GRPCInferenceServiceStub(channel).ModelInfer(request)
                assert (models.asked, models.runs.get_nowait()) == (Priority.HIGH, 0.0025)
                url = f"http://127.0.0.1:{rest_port}/v2/models/slow/infer"
                async with http.post(url, json={"inputs": [], "parameters": given | {"priority": 3}}) as answer:
                    assert answer.status == 200
                assert (models.asked, models.runs.get_nowait()) == (Priority.LOW, 0.0025)
        finally:
            await server.stop(None)
            await runner.cleanup()

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


def test_input_that_comes_twice_is_refused(gateway: Gateway) -> None:
    request = pb.ModelInferRequest(model_name="relu", raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    request.inputs[0].contents.SetInParent()  # with nothing in it
    with grpc.insecure_channel(gateway.url("grpc")) as channel:
        stub = stubs.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(request).raw_output_contents[0] == Y.tobytes()
        request.inputs[0].contents.fp32_contents[:] = X.ravel()
        with pytest.raises(grpc.RpcError) as info:
            stub.ModelInfer(request)
        assert info.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "comes twice, in raw_input_contents and in contents" in str(info.value.details())
    body = asked()
    body["inputs"][0]["parameters"] = {"binary_data_size": X.nbytes}
    head = json.dumps(body).encode()
    url = f"http://{gateway.url('rest')}/v2/models/relu/infer"
    said = refused(url, head + X.tobytes(), **{"Inference-Header-Content-Length": str(len(head))})
    assert "comes twice, as data and as bytes or in a region" in said


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


# ---- shared memory -------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Any]:
    memory = region.create_shared_memory_region("tensors", f"/nnburst-test-{os.getpid()}", 4096)
    yield memory
    region.destroy_shared_memory_region(memory)


def placed(kind: Any, offset: int = 0, size: int = X.nbytes, name: str = "tensors") -> Any:
    given = kind.InferInput("x", list(X.shape), "FP32")
    given.set_shared_memory(name, size, offset)
    return given


def test_tensors_in_shared_memory(client: Any, protocol: str, memory: Any) -> None:
    kind = PROTOCOLS[protocol]
    client.register_system_shared_memory("tensors", f"/nnburst-test-{os.getpid()}", 4096)
    try:
        region.set_shared_memory_region(memory, [X])
        wanted = kind.InferRequestedOutput("y")
        wanted.set_shared_memory("tensors", Y.nbytes, 1024)
        client.infer("relu", [placed(kind)], outputs=[wanted])
        assert region.get_contents_as_numpy(memory, np.float32, [2, 8], 1024).tobytes() == Y.tobytes()
        status = client.get_system_shared_memory_status(**({"as_json": True} if protocol == "grpc" else {}))
        assert "tensors" in str(status)
    finally:
        client.unregister_system_shared_memory("tensors")
    with pytest.raises(InferenceServerException, match="no region 'tensors'"):
        client.infer("relu", [placed(kind)])


HOSTILE: dict[str, Callable[[Any, str], None]] = {
    "path out of the folder": lambda client, key: client.register_system_shared_memory("r", "/../../etc/passwd", 16),
    "folder": lambda client, key: client.register_system_shared_memory("r", "/..", 16),
    "no name": lambda client, key: client.register_system_shared_memory("", key, 16),
    "long name": lambda client, key: client.register_system_shared_memory("r" * 5000, key, 16),
    "not there": lambda client, key: client.register_system_shared_memory("r", "/nnburst-not-there", 16),
    "too large": lambda client, key: client.register_system_shared_memory("r", key, 4097),
    "beyond the end": lambda client, key: client.register_system_shared_memory("r", key, 4096, offset=1),
    "huge": lambda client, key: client.register_system_shared_memory("r", key, 2**63 - 1, offset=2**62),
    "empty": lambda client, key: client.register_system_shared_memory("r", key, 0),
}


REFUSALS = {
    "path out of the folder": "is no name of a POSIX shared memory",
    "folder": "is no name of a POSIX shared memory",
    "no name": "the name of a region has 1 to 255 characters, got 0",
    "long name": "the name of a region has 1 to 255 characters, got 5000",
    "not there": "region 'r': cannot open the shared memory '/nnburst-not-there'",
    "too large": "has 4096 bytes, not 0 \\+ 4097",
    "beyond the end": "has 4096 bytes, not 1 \\+ 4096",
    "huge": f"has 4096 bytes, not {2**62} \\+ {2**63 - 1}",
    "empty": "offset 0 and size 0 are no part of a memory",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_region_that_is_none_is_refused(what: str, client: Any, protocol: str, memory: Any) -> None:
    said = "404" if (what, protocol) == ("no name", "rest") else REFUSALS[what]  # its URL has no such path
    with pytest.raises(InferenceServerException, match=said):
        HOSTILE[what](client, f"/nnburst-test-{os.getpid()}")
    status = client.get_system_shared_memory_status()
    assert len(status if isinstance(status, list) else status.regions) == 0


@pytest.mark.parametrize(("offset", "size"), [(4096, 64), (4090, 64), (0, 63), (0, 4097), (2**62, 64)])
def test_part_that_is_none_of_a_region_is_refused(
    client: Any, protocol: str, memory: Any, offset: int, size: int
) -> None:
    client.register_system_shared_memory("tensors", f"/nnburst-test-{os.getpid()}", 4096)
    try:
        with pytest.raises(InferenceServerException):
            client.infer("relu", [placed(PROTOCOLS[protocol], offset, size)])
    finally:
        client.unregister_system_shared_memory("")


def test_memory_that_its_owner_cuts_fails_the_request_only(gateway: Gateway, client: Any, protocol: str) -> None:
    key = f"/nnburst-cut-{os.getpid()}"
    shared = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096)
    try:
        client.register_system_shared_memory("cut", key, 4096)
        os.ftruncate(shared.fd, 16)
        wanted = PROTOCOLS[protocol].InferRequestedOutput("y")
        wanted.set_shared_memory("cut", Y.nbytes, 1024)
        with pytest.raises(InferenceServerException, match="its owner cut it"):
            client.infer("relu", [placed(PROTOCOLS[protocol], name="cut")])
        with pytest.raises(InferenceServerException, match="its owner cut it"):
            client.infer("relu", [tensor(PROTOCOLS[protocol], "x", X)], outputs=[wanted])
    finally:
        client.unregister_system_shared_memory("cut")
        shared.close_fd()
        shared.unlink()
    assert client.infer("relu", [tensor(PROTOCOLS[protocol], "x", X)]).as_numpy("y").tobytes() == Y.tobytes()


def test_region_that_is_forgotten_while_requests_use_it(
    gateway: Gateway, client: Any, protocol: str, memory: Any
) -> None:
    kind, url, key = PROTOCOLS[protocol], gateway.url(protocol), f"/nnburst-test-{os.getpid()}"
    region.set_shared_memory_region(memory, [X])
    wanted = kind.InferRequestedOutput("y")
    wanted.set_shared_memory("tensors", Y.nbytes, 1024)
    ended = threading.Event()

    def come_and_go() -> None:
        other = kind.InferenceServerClient(url)
        while not ended.is_set():
            other.register_system_shared_memory("tensors", key, 4096)
            other.unregister_system_shared_memory("tensors")
        other.close()

    goes = threading.Thread(target=come_and_go)
    goes.start()
    answers = refusals = 0
    try:
        while answers < 5 or refusals < 5:
            region.set_shared_memory_region(memory, [np.zeros_like(Y)], 1024)
            try:
                client.infer("relu", [placed(kind)], outputs=[wanted])
            except InferenceServerException as error:
                assert "no region 'tensors' is registered" in str(error)
                refusals += 1
            else:
                assert region.get_contents_as_numpy(memory, np.float32, [2, 8], 1024).tobytes() == Y.tobytes()
                answers += 1
    finally:
        ended.set()
        goes.join()


def test_memory_that_is_cut_while_it_is_used_voids_the_request() -> None:
    regions = Regions(True)
    shared = posix_ipc.SharedMemory(f"/nnburst-cut-{os.getpid()}", posix_ipc.O_CREX, size=1 << 20)
    try:
        regions.register("cut", f"/nnburst-cut-{os.getpid()}", 4096, (1 << 20) - 4096)
        part = regions.part("cut", 4096, 8192)
        assert not part.bytes.any()
        part.check()
        os.ftruncate(shared.fd, 4096)
        regions.unregister("cut")
        assert not part.bytes.any()
        with pytest.raises(InvalidArgument, match="its owner cut it"):
            part.check()
    finally:
        shared.close_fd()
        shared.unlink()
        regions.close()


def test_memory_is_refused_unless_it_was_allowed(tmp_path: Path, memory: Any) -> None:
    gateway = Gateway(tmp_path)
    client = gateway.client("grpc")
    with pytest.raises(InferenceServerException, match="--oip-shared-memory"):
        client.register_system_shared_memory("tensors", f"/nnburst-test-{os.getpid()}", 4096)
    client.close()
    gateway.close()


# ---- errors --------------------------------------------------------------------------------------------------------


def test_wrong_requests_say_what_is_wrong(client: Any, protocol: str) -> None:
    kind = PROTOCOLS[protocol]
    for name, inputs, said in (
        ("nothing", [tensor(kind, "x", X)], "no model 'nothing'"),
        ("relu", [tensor(kind, "z", X)], "input 'z' is unknown"),
        ("relu", [], r"inputs \['x'\] are missing; this model takes \['x'\]"),
        ("relu", [tensor(kind, "x", X[:, :7].copy())], "reshape"),
        ("relu", [tensor(kind, "x", X.astype(np.float64), "FP64")], "is FP32, got FP64"),
    ):
        with pytest.raises(InferenceServerException, match=said):
            client.infer(name, inputs)
    with pytest.raises(InferenceServerException, match="output 'z' is unknown"):
        client.infer("relu", [tensor(kind, "x", X)], outputs=[kind.InferRequestedOutput("z")])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"inputs": 1}',
        b'{"inputs": [{"name": "x", "shape": [2, 8], "datatype": "FP32"}]}',
        b'{"inputs": [{"name": "x", "shape": [-2, -8], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1, "2", [3]]}]}',
        b'{"inputs": [{"name": "x", "shape": ["a"], "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "parameters": {"binary_data_size": 99}}]}',
        b'{"inputs": [{"name": "x", "shape": [9999999999999, 8], "datatype": "FP32", "data": []}]}',
    ],
    ids=range(11),
)
def test_malformed_json_is_refused_with_a_sentence(gateway: Gateway, body: bytes) -> None:
    url = f"http://{gateway.url('rest')}/v2/models/relu/infer"
    with pytest.raises(urllib.error.HTTPError) as info:
        urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=60)
    with info.value as answer:
        assert answer.code == 400
        assert len(json.loads(answer.read())["error"]) > 10


@pytest.mark.parametrize(
    "shape", [[10**4000] * 400, [1] * 70, [2**70, 0], [-1]], ids=["huge", "deep", "wide", "negative"]
)
def test_shape_that_no_array_has_is_refused_before_any_arithmetic(gateway: Gateway, shape: list[int]) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": [1.0]}]}
    url = f"http://{gateway.url('rest')}/v2/models/relu/infer"
    with pytest.raises(urllib.error.HTTPError) as info:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), method="POST"), timeout=60)
    with info.value as answer:
        assert answer.code == 400
        assert "dimensions" in json.loads(answer.read())["error"]


def refused(url: str, body: bytes, **headers: str) -> str:
    """Return the sentence with which a request over HTTP is refused."""
    with pytest.raises(urllib.error.HTTPError) as info:
        urllib.request.urlopen(urllib.request.Request(url, body, headers, method="POST"), timeout=60)
    with info.value as answer:
        assert answer.code == 400
        said: str = json.loads(answer.read())["error"]
        return said


@pytest.mark.parametrize(
    "length", ["9" * 5000, "-1", "1e3", "\u0663", "99"], ids=["long", "negative", "real", "other", "more"]
)
def test_length_of_the_header_that_is_none_is_refused(gateway: Gateway, length: str) -> None:
    url = f"http://{gateway.url('rest')}/v2/models/relu/infer"
    quoted = length.encode().decode("latin-1")
    assert "Inference-Header-Content-Length" in refused(url, b"{}", **{"Inference-Header-Content-Length": quoted})


def test_numbers_that_json_has_not_are_refused_on_both_ways(gateway: Gateway) -> None:
    url = f"http://{gateway.url('rest')}/v2/models/relu/infer"
    for constant in ("NaN", "Infinity", "-Infinity"):
        given = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [float(constant)] * 8}
        body = json.dumps({"inputs": [given]})
        assert "as NaN and Infinity, go as binary data" in refused(url, body.encode())
    client = gateway.client("rest")
    infinite = tensor(triton_http, "x", np.full((1, 8), np.inf, np.float32))
    with pytest.raises(InferenceServerException, match="ask for binary data"):
        client.infer("relu", [infinite], outputs=[triton_http.InferRequestedOutput("y", binary_data=False)])
    answer = client.infer("relu", [infinite], outputs=[triton_http.InferRequestedOutput("y", binary_data=True)])
    assert np.isinf(answer.as_numpy("y")).all()
    client.close()


def test_size_of_a_part_is_compared_before_it_is_read(gateway: Gateway, client: Any, protocol: str) -> None:
    key = f"/nnburst-sparse-{os.getpid()}"
    shared = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=1 << 40)
    try:
        client.register_system_shared_memory("sparse", key, 1 << 40)
        with pytest.raises(InferenceServerException, match=f"takes {X.nbytes} bytes, got {1 << 40}"):
            client.infer("relu", [placed(PROTOCOLS[protocol], size=1 << 40, name="sparse")])
        huge = PROTOCOLS[protocol].InferInput("x", [1 << 31, 8], "FP32")
        huge.set_shared_memory("sparse", 1 << 36)
        with pytest.raises(InferenceServerException, match="is larger than"):
            client.infer("relu", [huge])
    finally:
        client.unregister_system_shared_memory("sparse")
        shared.close_fd()
        shared.unlink()


def conversions(datatype: str) -> ModelTensor:
    return ModelTensor("x", datatype, _DTYPES[datatype], (-1,))


@pytest.mark.parametrize(
    ("datatype", "elements", "said"),
    [
        ("FP32", ["1.5", 1.0], "the elements are FP32, got a str"),
        ("FP32", [1.0, True], "the elements are FP32, got a bool"),
        ("FP32", [None, 1.0], "the elements are FP32, got a NoneType"),
        ("FP32", [1e39, 0], "a number is too large for FP32"),
        ("FP64", [10**400, 0], "a number is too large for FP64"),
        ("FP64", json.loads("[1e999, 0]"), "a number is too large for FP64"),
        ("FP16", [65520, 0], "a number is too large for FP16"),
        ("INT32", [1.5, 2], "the elements are INT32, got a float"),
        ("INT32", [2**31, 0], "2147483648 is not from -2147483648 to 2147483647"),
        ("UINT8", [0, -1], "-1 is not from 0 to 255"),
        ("UINT64", [10**4000, 0], "a number of more than 64 bits is not from 0 to 18446744073709551615"),
        ("UINT8", np.array([300, 0], "u4"), "300 is not from 0 to 255"),
        ("BOOL", [1, 0], "the elements are BOOL, got a int"),
        ("INT32", [[1], [2, 3]], "lists of one level have different lengths"),
        ("INT32", [[1], 2], "the elements are INT32, got a list"),
        ("INT32", [1], "of shape [2] takes 2 elements, got 1"),
    ],
)
def test_elements_that_are_none_of_the_datatype_are_refused(datatype: str, elements: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        conversions(datatype).array_of(datatype, (2,), elements)
    assert str(info.value).removeprefix("input 'x'").lstrip(": ") == said


@pytest.mark.parametrize(
    ("datatype", "elements"),
    [
        ("FP16", [65504, -0.5]),
        ("FP32", [[1], [2.5]]),
        ("FP32", np.array([np.nan, np.inf], "f4")),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", np.array([-128, 127], "i4")),
        ("BOOL", [True, False]),
    ],
)
def test_elements_of_the_datatype_keep_their_values(datatype: str, elements: Any) -> None:
    array = conversions(datatype).array_of(datatype, (2,), elements)
    assert array.dtype == _DTYPES[datatype]
    np.testing.assert_array_equal(array, np.ravel(elements))


def test_request_that_is_nearly_like_the_last_is_looked_at_anew(gateway: Gateway) -> None:
    def request() -> Any:
        request = pb.ModelInferRequest(model_name="relu", raw_input_contents=[X.tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=X.shape)
        return request

    with grpc.insecure_channel(gateway.url("grpc")) as channel:
        infer = stubs.GRPCInferenceServiceStub(channel).ModelInfer

        def refused(wrong: Any) -> str:
            for _ in range(2):
                assert infer(request()).raw_output_contents[0] == Y.tobytes()
            with pytest.raises(grpc.RpcError) as info:
                infer(wrong)
            assert info.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            return str(info.value.details())

        wrong = request()
        wrong.inputs[0].shape[:] = [1, 16]
        assert "has shape" in refused(wrong)
        wrong = request()
        wrong.inputs[0].datatype = "INT32"
        assert "is FP32" in refused(wrong)
        wrong = request()
        wrong.raw_input_contents[0] = X.tobytes()[:-4]
        assert "takes 64 bytes" in refused(wrong)
        wrong = request()
        wrong.raw_input_contents.append(b"")
        assert "belong to no input" in refused(wrong)
        wrong = request()
        wrong.model_version = "2"
        assert "has the version 1" in refused(wrong)
        wrong = request()
        wrong.outputs.add(name="z")
        assert "is unknown" in refused(wrong)
        wrong = request()
        wrong.inputs[0].parameters["shared_memory_region"].string_param = "nothing"
        assert "a region needs" in refused(wrong)
        other = request()
        other.inputs[0].shape[0] = 1
        other.raw_input_contents[0] = X[1:].tobytes()
        for number, asked in enumerate((other, request(), other, other, other, request(), request(), request())):
            asked.id = str(number)
            answer = infer(asked)
            assert answer.id == str(number)
            assert list(answer.outputs[0].shape) == list(asked.inputs[0].shape)
            assert answer.raw_output_contents[0] == Y[-answer.outputs[0].shape[0] :].tobytes()


@pytest.mark.parametrize("nbytes", [0, 1, 0x7F, 0x80, 0x3FFF, 0x4000, 0x1FFFFF, 0x200000])
def test_elements_of_an_answer_stand_behind_what_protobuf_puts_before_them(nbytes: int) -> None:
    whole = pb.ModelInferResponse(raw_output_contents=[bytes(nbytes)]).SerializeToString()
    assert gateway_grpc._before_elements(nbytes) == whole[: len(whole) - nbytes]


def test_output_of_another_shape_is_answered_for_a_request_that_is_like_those_before(gateway: Gateway) -> None:
    with grpc.insecure_channel(gateway.url("grpc")) as channel:
        stub = stubs.GRPCInferenceServiceStub(channel)
        for chosen in (2, 2, 2, 1, 2, 0):
            request = pb.ModelInferRequest(model_name="compress")
            request.raw_input_contents[:] = [X.tobytes(), (np.arange(2) < chosen).tobytes()]
            request.inputs.add(name="x", datatype="FP32", shape=X.shape)
            request.inputs.add(name="c", datatype="BOOL", shape=[2])
            answer = stub.ModelInfer(request)
            assert list(answer.outputs[0].shape) == [chosen, 8]
            assert answer.raw_output_contents[0] == X[:chosen].tobytes()
        counts = stub.ModelStatistics(pb.ModelStatisticsRequest(name="compress")).model_stats[0].inference_stats
        assert (counts.success.count, counts.fail.count) == (6, 0)


def test_requests_that_come_at_once_have_an_answer_each(gateway: Gateway) -> None:
    numbers = np.random.default_rng(7).normal(size=(400, 2, 8)).astype(np.float32)

    def request(i: int) -> Any:
        rows = 1 + i // 2 % 2  # two of one shape, two of another
        given = pb.ModelInferRequest(model_name="relu", raw_input_contents=[numbers[i, :rows].tobytes()])
        given.inputs.add(name="x", datatype="FP32", shape=(rows, 8))
        return given

    async def main() -> None:
        async with grpc.aio.insecure_channel(gateway.url("grpc")) as channel:
            infer = stubs.GRPCInferenceServiceStub(channel).ModelInfer
            answers = await asyncio.gather(*[infer(request(i)) for i in range(len(numbers))])
        for i, answer in enumerate(answers):
            assert list(answer.outputs[0].shape) == [1 + i // 2 % 2, 8]
            assert answer.raw_output_contents[0] == np.maximum(numbers[i, : 1 + i // 2 % 2], 0).tobytes()

    asyncio.run(main())


def test_stream_says_which_request_failed_if_it_is_like_those_before(gateway: Gateway) -> None:
    def request(number: int) -> Any:
        request = pb.ModelInferRequest(model_name="relu", id=str(number), raw_input_contents=[X.tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=X.shape)
        if number == 4:
            request.inputs[0].name = "y"
        return request

    with grpc.insecure_channel(gateway.url("grpc")) as channel:
        answers = list(stubs.GRPCInferenceServiceStub(channel).ModelStreamInfer(map(request, range(6))))
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(6)]
    assert [bool(answer.error_message) for answer in answers] == [number == 4 for number in range(6)]


def test_contents_of_another_datatype_are_refused(gateway: Gateway) -> None:
    def infer(name: str, datatype: str, **contents: Any) -> Any:
        tensors = pb.InferTensorContents(**contents)
        given = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[3], contents=tensors)
        return stub.ModelInfer(pb.ModelInferRequest(model_name="types", inputs=[given]), timeout=60)

    with grpc.insecure_channel(gateway.url("grpc")) as channel:
        stub = stubs.GRPCInferenceServiceStub(channel)
        for name, datatype, contents, said in (
            ("u1", "UINT8", {"int_contents": [1, 2, 3]}, "UINT8 comes in uint_contents, not in int_contents"),
            ("u1", "UINT8", {"uint_contents": [1, 2, 300]}, "300 is not from 0 to 255"),
            ("f2", "FP16", {"fp32_contents": [1, 2, 3]}, "FP16 comes in raw_input_contents, not in fp32_contents"),
            ("f8", "FP64", {"fp32_contents": [1, 2, 3]}, "FP64 comes in fp64_contents, not in fp32_contents"),
        ):
            with pytest.raises(grpc.RpcError) as info:
                infer("in_" + name, datatype, **contents)
            assert info.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert info.value.details() == f"input 'in_{name}': {said}"


# ---- too much at once ------------------------------------------------------------------------------------------------


class SlowModels:
    """One model that runs until it is told, and says how long it was given."""

    names = ("slow",)

    def __init__(self) -> None:
        self.model = SimpleNamespace(inputs={"x": conversions("UINT8")}, outputs={}, run=self.run)
        self.runs: asyncio.Queue[float | None] = asyncio.Queue()
        self.go_on = asyncio.Event()

    def ready(self, name: str, priority: Priority) -> Any:
        self.asked = priority
        return self.model

    async def take(self, name: str, priority: Priority) -> Any:
        return self.model

    def give_back(self, model: Any) -> None:
        assert model is self.model

    async def run(self, inputs: Any, timeout: float | None) -> list[Any]:
        self.runs.put_nowait(timeout)
        await self.go_on.wait()
        return []


def raw(size: int) -> Any:
    request = pb.ModelInferRequest(model_name="slow", raw_input_contents=[bytes(size)])
    request.inputs.add(name="x", datatype="UINT8", shape=[size])
    return request


@pytest.mark.parametrize(
    ("budget", "said"),
    [((1, 1 << 30), "1 requests are under way"), ((8, 1000), "requests of 1000 bytes are under way")],
    ids=["requests", "bytes"],
)
def test_what_is_beyond_the_budget_is_refused_until_something_has_ended(budget: tuple[int, int], said: str) -> None:
    async def main() -> None:
        models, shared = SlowModels(), Budget(*budget)
        server, port = await gateway_grpc.serve(models, Regions(False), shared, "127.0.0.1:0")  # type: ignore[arg-type]
        runner, rest_port = await gateway_rest.serve(models, Regions(False), shared, "127.0.0.1:0")  # type: ignore[arg-type]
        url = f"http://127.0.0.1:{rest_port}/v2/models/slow/infer"
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, aiohttp.ClientSession() as http:
                stub = stubs.GRPCInferenceServiceStub(channel)
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
                await stub.ModelInfer(raw(600))
                async with http.post(url, data=b'{"inputs": []}' + b" " * 600) as answer:
                    assert answer.status == 200
        finally:
            await server.stop(None)
            await runner.cleanup()

    asyncio.run(main())


def first_line_of_answer(sent: bytes) -> bytes:
    """What the REST gateway answers to bytes on a fresh connection."""

    async def main() -> bytes:
        models: Any = SlowModels()
        runner, port = await gateway_rest.serve(models, Regions(False), Budget(), "127.0.0.1:0")
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
    monkeypatch.setattr(gateway_rest, "_PATIENCE_S", 0.01)
    cut_off = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
    assert b" 408 " in first_line_of_answer(cut_off)


@pytest.mark.parametrize("sent", [b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n"])
def test_client_that_speaks_no_http_leaves_no_traceback(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert b" 400 " in first_line_of_answer(sent)
    assert not caplog.records


def test_what_is_under_way_is_finished_and_nothing_else_is_begun() -> None:
    async def main() -> None:
        budget = Budget()
        with budget.request():
            finishing = asyncio.ensure_future(budget.finish(60))
            await asyncio.sleep(0)
            with pytest.raises(DeviceUnavailable, match="being stopped"):
                budget.request()
            assert not finishing.done()
        await finishing
        await budget.finish(60)  # nothing is under way
        slow = Budget()
        with slow.request():
            await slow.finish(0.01)

    asyncio.run(main())


def test_request_whose_body_is_coming_when_the_service_is_stopped_is_answered(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    body = json.dumps(
        {"inputs": [{"name": "x", "shape": [2, 8], "datatype": "FP32", "data": X.ravel().tolist()}]}
    ).encode()

    async def main() -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{gateway.url('rest')}/v2/models/relu/ready", timeout=60):
            pass
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.ports["rest"])
        writer.write(b"POST /v2/models/relu/infer HTTP/1.1\r\nHost: x\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body[:9])
        await writer.drain()
        while b"nothing" not in await asyncio.to_thread(said):  # the body is being read
            pass
        gateway.process.send_signal(signal.SIGTERM)
        while b"being stopped" not in await asyncio.to_thread(said):
            pass
        writer.write(body[9:])
        answer = await reader.read()
        writer.close()
        assert b" 200 " in answer.partition(b"\r\n")[0]
        return json.loads(answer.partition(b"\r\n\r\n")[2])  # type: ignore[no-any-return]

    def said() -> bytes:
        url = f"http://{gateway.url('rest')}/v2/models/nothing/infer"
        try:
            urllib.request.urlopen(urllib.request.Request(url, b'{"inputs": []}', method="POST"), timeout=60)
        except urllib.error.HTTPError as error:
            with error:
                return error.read()
        raise AssertionError

    try:
        assert asyncio.run(main())["outputs"][0]["data"] == Y.ravel().tolist()
    finally:
        gateway.close()


def test_body_that_cannot_be_read_is_refused_with_a_sentence(gateway: Gateway) -> None:
    url = f"http://{gateway.url('rest')}/v2/models/relu/infer"
    assert "cannot be read" in refused(url, b"{}", **{"Content-Encoding": "gzip"})


def test_time_that_a_client_gives_is_that_of_the_run(services: list[FakeService]) -> None:
    async def main() -> None:
        models = SlowModels()
        models.go_on.set()
        server, port = await gateway_grpc.serve(models, Regions(False), Budget(), "127.0.0.1:0")  # type: ignore[arg-type]
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await stubs.GRPCInferenceServiceStub(channel).ModelInfer(raw(8), timeout=600)
        finally:
            await server.stop(None)
        assert 0 < (await models.runs.get() or 0) <= 601  # gRPC rounds what it sends up

        async def arun(names: Any, inputs: Any) -> Any:
            await asyncio.Event().wait()

        model = Models("there", ["a"]).open("a")
        model.session.arun = arun  # type: ignore[method-assign]
        with pytest.raises(MissedDeadline, match=r"no answer within the 0\.01 s that the client gave it"):
            await model.run({}, 0.01)

    asyncio.run(main())


def test_request_is_answered_while_long_json_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, answered = threading.Event(), threading.Event()
    read = gateway_rest._object
    meanwhile: list[bool] = []

    def slow(data: bytes) -> Any:
        if len(data) > BRISK:
            reading.set()
            meanwhile.append(answered.wait(20))
        return read(data)

    monkeypatch.setattr(gateway_rest, "_object", slow)

    async def main() -> None:
        models = SlowModels()
        models.go_on.set()
        runner, port = await gateway_rest.serve(models, Regions(False), Budget(), "127.0.0.1:0")  # type: ignore[arg-type]
        url = f"http://127.0.0.1:{port}/v2/models/slow/infer"

        async def status(size: int) -> int:
            async with http.post(url, data=b'{"inputs": []}' + b" " * size) as answer:
                return answer.status

        try:
            async with aiohttp.ClientSession() as http:
                long = asyncio.ensure_future(status(BRISK))
                assert await asyncio.to_thread(reading.wait, 60)
                assert await status(0) == 200
                answered.set()
                assert await long == 200
        finally:
            await runner.cleanup()

    asyncio.run(main())
    assert meanwhile == [True]


def test_json_beyond_its_limits_is_refused(gateway: Gateway) -> None:
    url = f"http://{gateway.url('rest')}/v2/models/relu/infer"
    assert "send tensors as binary data" in refused(url, b'{"inputs": []}' + b" " * gateway_rest._MOST_JSON)
    answers = [(OutputTensor("y"), "INT8", np.zeros(gateway_rest._MOST_NUMBERS + 1, np.int8))]
    with pytest.raises(InvalidArgument, match="output 'y' has 1048577 elements"):
        gateway_rest._response("relu", None, answers, {"": False})
    assert gateway_rest._response("relu", None, answers, {"": True}).status == 200
    half = np.zeros(gateway_rest._MOST_NUMBERS // 2, np.int8)
    several = [(OutputTensor(name), "INT8", half) for name in "abc"]
    assert gateway_rest._response("relu", None, several[:2], {"": False}).status == 200
    with pytest.raises(InvalidArgument, match=r"output 'c' has 524288 elements.* 0 are left"):
        gateway_rest._response("relu", None, several, {"": False})


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
    assert (
        refused(url, bomb, **headers) == "a compressed body inflates to at most 16777216 bytes: send this one as it is"
    )
    for broken in (bomb[:100], bomb[:2] + bomb, pack(b"{}") + b"x", b"{}", b""):
        assert "the body cannot be read" in refused(url, broken, **headers)


def test_body_in_an_unknown_encoding_is_refused(gateway: Gateway) -> None:
    request = urllib.request.Request(
        f"http://{gateway.url('rest')}/v2/models/relu/infer", b"{}", {"Content-Encoding": "br"}
    )
    with pytest.raises(urllib.error.HTTPError) as info:
        urllib.request.urlopen(request, timeout=60)
    with info.value as answer:
        assert answer.code == 415
        assert "send it in gzip, deflate or plain" in json.loads(answer.read())["error"]


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


def test_output_that_is_asked_for_twice_is_refused(gateway: Gateway) -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8}
    body = json.dumps({"inputs": [given], "outputs": [{"name": "y"}] * 2}).encode()
    url = f"http://{gateway.url('rest')}/v2/models/relu/infer"
    assert refused(url, body) == "output 'y' is asked for twice"


# ---- the process ---------------------------------------------------------------------------------------------------


def gateway_processes(gateway: Gateway) -> list[int]:
    """The one that works, and the one that stands by."""
    children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split()
    for task in Path(f"/proc/{gateway.process.pid}/task").iterdir():
        children += (task / "children").read_text().split()
    return sorted(map(int, set(children)), key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().split()[21]))


def killed(pid: int) -> None:
    """Kill a process and wait until nothing of it is there."""
    with open(os.pidfd_open(pid), "rb", buffering=0) as pidfd:
        signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
        assert select.select([pidfd], [], [], 60)[0], "it does not end"


def test_gateway_that_was_killed_has_one_that_answers_at_once_and_another_stands_by(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)

    def infer(protocol: str) -> None:
        client = gateway.client(protocol)
        sent = [tensor(PROTOCOLS[protocol], "x", X)]
        assert client.infer("relu", sent).as_numpy("y").tobytes() == Y.tobytes()
        client.close()

    def both() -> list[int]:
        processes = gateway_processes(gateway)
        return processes if len(processes) > 1 and all(map(listens, processes)) else []

    try:
        seen: set[int] = set()
        for _ in range(2):
            processes = until(both, "no other gateway stands by", 2 * PATIENCE)
            seen.update(processes)
            for protocol in PROTOCOLS:
                infer(protocol)
            killed(processes[0])
            for protocol in PROTOCOLS:  # the first try succeeds
                infer(protocol)
        assert len(seen) == 3
    finally:
        gateway.close()


def listens(pid: int) -> bool:
    """Whether a process has a listening socket for each protocol."""
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in sockets for row in rows) >= len(PROTOCOLS)


def test_connections_go_to_the_gateway_that_has_listened_longer(gateway: Gateway) -> None:
    first, second = gateway_processes(gateway)

    def connections(pid: int) -> int:
        links = (f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))
        return sum(os.readlink(link).startswith("socket:") for link in links if os.path.lexists(link))

    before = connections(first), connections(second)
    with contextlib.ExitStack() as stack:
        for port in gateway.ports.values():
            for _ in range(16):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        until(lambda: connections(first) >= before[0] + 32, "connections went elsewhere", 2 * PATIENCE)
        assert connections(second) == before[1]


@pytest.mark.parametrize("option", ["--oip", "--oip-rest"])
def test_port_that_others_listen_at_is_refused_also_if_they_are_gateways(
    gateway: Gateway, tmp_path: Path, option: str
) -> None:
    serve = [sys.executable, "-m", "nnburst", "serve", "--socket", str(tmp_path / "s"), "--model"]
    serve.append(f"relu={relu(tmp_path)}")
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port in (other.getsockname()[1], *gateway.ports.values()):
            done = subprocess.run(
                [*serve, option, f"127.0.0.1:{port}"], capture_output=True, text=True, timeout=100, check=False
            )
            assert done.returncode == 1
            assert f"cannot listen at 127.0.0.1:{port}" in done.stderr


def test_clients_that_ask_again_and_again_see_answers_or_unavailable_when_the_service_is_stopped(
    tmp_path: Path,
) -> None:
    gateway = Gateway(tmp_path)
    answers: queue.Queue[None] = queue.Queue()
    request = pb.ModelInferRequest(model_name="relu", raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)

    def ask() -> set[Any]:
        codes = set()
        with grpc.insecure_channel(gateway.url("grpc")) as channel:
            infer = stubs.GRPCInferenceServiceStub(channel).ModelInfer
            while gateway.process.poll() is None:
                try:
                    assert infer(request, timeout=60).raw_output_contents[0] == Y.tobytes()
                    answers.put(None)
                except grpc.RpcError as error:
                    codes.add(error.code())
        return codes

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask) for _ in range(8)]
        for _ in range(200):
            answers.get(timeout=60)
        gateway.close()
        assert set().union(*(one.result(60) for one in asking)) <= {grpc.StatusCode.UNAVAILABLE}


def test_model_that_was_loaded_again_is_served_by_the_gateway_that_runs(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    try:
        client = gateway.client("grpc")
        assert client.infer("relu", [tensor(triton_grpc, "x", X)]).as_numpy("y").tobytes() == Y.tobytes()
        processes = gateway_processes(gateway)
        value = [onnx.helper.make_tensor_value_info(name, 1, ["n", 8]) for name in ("x", "y")]
        model(tmp_path / "relu.onnx", [("Abs", ["x"], ["y"])], value[:1], value[1:])
        gateway.process.send_signal(signal.SIGHUP)
        until(
            lambda: client.infer("relu", [tensor(triton_grpc, "x", X)]).as_numpy("y").tobytes() == np.abs(X).tobytes(),
            "the old model is still served",
            2 * PATIENCE,
        )
        client.close()
        assert gateway_processes(gateway) == processes
    finally:
        gateway.close()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[Any]:
    """What the next gateways run instead: the arguments of a command, or an exception. Pauses are short."""
    commands: queue.Queue[Any] = queue.Queue()

    def command(module: str) -> list[str]:
        given = commands.get()
        if isinstance(given, Exception):
            raise given
        return [sys.executable, "-c", *given]

    monkeypatch.setattr(supervised, "safe_command", command)
    monkeypatch.setattr(supervised, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervised, "_ENDING_S", 0.2)
    return commands


SPEAKS = "import sys; print(sys.argv[1], flush=True); sys.stdin.read()"
PORTS = '{"grpc": 8001}'
GATEWAY = ("the gateway", "--oip", "nnburst.gateway.run")


def test_gateway_is_started_again_whatever_a_start_met(commands: queue.Queue[Any]) -> None:
    options = {"grpc": "127.0.0.1:0"}
    commands.put((SPEAKS, PORTS))
    process = supervised.SupervisedProcess(*GATEWAY, options)
    try:
        assert process.ports == {"grpc": 8001}
        first = process._process.pid
        for what in (OSError(11, "no processes left"), (SPEAKS, "{")):
            commands.put(what)
        commands.put((SPEAKS, PORTS))
        os.kill(first, signal.SIGKILL)
        until(commands.empty, "no more gateways are started", 2 * PATIENCE)
    finally:
        process.close()
    assert not process._watcher.is_alive()


@pytest.mark.parametrize("line", ["", "{", "[]", "7", '{"a": "b"}', "[" * 100_000], ids=range(6))
def test_first_line_that_is_none_is_an_error_of_the_service(commands: queue.Queue[Any], line: str) -> None:
    commands.put((SPEAKS, line))
    with pytest.raises(DeviceUnavailable, match="not its ports"):
        supervised.SupervisedProcess(*GATEWAY, {"grpc": "127.0.0.1:0"})


def test_gateway_that_does_not_become_ready_is_an_error(
    commands: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "_STARTING_S", 0.2)
    commands.put(("import sys; print('{', end='', flush=True); sys.stdin.read()",))
    with pytest.raises(DeviceUnavailable, match=r"not ready within 0\.2 s"):
        supervised.SupervisedProcess(*GATEWAY, {"grpc": "127.0.0.1:0"})


def test_close_ends_a_gateway_that_hangs_before_its_first_line(commands: queue.Queue[Any], tmp_path: Path) -> None:
    commands.put((SPEAKS, PORTS))
    process = supervised.SupervisedProcess(*GATEWAY, {"grpc": "127.0.0.1:0"})
    os.mkfifo(tmp_path / "there")
    commands.put(("import sys, time; open(sys.argv[1], 'w').close(); time.sleep(3600)", str(tmp_path / "there")))
    os.kill(process._process.pid, signal.SIGKILL)
    (tmp_path / "there").read_text()
    process.close()
    assert process._process.returncode == -signal.SIGKILL
    assert not process._watcher.is_alive()


class FakeSession:
    """A session of a service that is not there."""

    device = SimpleNamespace(name="none")

    def __init__(self, service: Any, **options: Any) -> None:
        self.service = service
        self.options = options
        self.closed = 0

    def get_inputs(self) -> list[Any]:
        return []

    get_outputs = get_inputs

    def close(self) -> None:
        self.closed += 1
        if not self.service.alive:
            raise DeadObject("the service has ended")


class FakeService:
    """A service that can die."""

    def __init__(self) -> None:
        self.alive = True
        self.closed = 0
        self.sessions: list[FakeSession] = []

    def session(self, name: str, **options: Any) -> FakeSession:
        self.sessions.append(FakeSession(self, **options))
        return self.sessions[-1]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> list[FakeService]:
    """Those that `Models` have connected to."""
    services: list[FakeService] = []

    def connect(address: str) -> FakeService:
        services.append(FakeService())
        return services[-1]

    monkeypatch.setattr("nnburst.gateway.models.connect", connect)
    return services


def test_each_session_of_a_dead_service_is_closed(services: list[FakeService]) -> None:
    models = Models("there", ["a", "b"])
    models.open("a")
    models.open("b")
    services[0].alive = False
    models.open("a")
    assert [session.closed for session in services[0].sessions] == [1, 1]
    assert [service.closed for service in services] == [1, 0]


def test_old_model_is_closed_when_its_last_run_has_ended(services: list[FakeService]) -> None:
    models = Models("there", ["a"])

    async def main() -> None:
        old, same = await models.take("a"), await models.take("a")
        assert same is old
        models.renew()
        models.give_back(same)
        new = await models.take("a")
        assert new is not old
        models.give_back(new)
        assert services[0].sessions[0].closed == 0
        models.give_back(old)
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(main())
    assert [session.closed for session in services[0].sessions] == [1, 0]
    models.renew()
    assert [session.closed for session in services[0].sessions] == [1, 1]


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "nnburst", "serve", "--socket", str(tmp_path / "s")]
    for options, said in (
        (["--oip", "127.0.0.1:8001"], "--model"),
        (["--oip", "8001"], "HOST:PORT"),
        (["--oip-shared-memory"], "needs --oip"),
    ):
        done = subprocess.run([*serve, *options], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 1
        assert said in done.stderr
