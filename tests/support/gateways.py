"""A running gateway of the Open Inference Protocol, its models, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import aiohttp
import grpc
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as stubs

from nnburst.gateway import grpc as gateway_grpc
from nnburst.gateway import rest as gateway_rest
from nnburst.gateway.budget import Budget
from nnburst.gateway.models import ModelCounts
from nnburst.gateway.regions import Regions
from nnburst.gateway.tensors import _DTYPES, ModelTensor
from nnburst.model import Priority
from nnburst.service.process.command import service_environment
from support.onnx_models import FLOAT, graph, node, save
from support.processes import beside, open_files

MARKS = [pytest.mark.leaks("gRPC keeps threads and descriptors"), pytest.mark.filterwarnings("ignore")]


@contextlib.contextmanager
def shared_memory(key: str, size: int) -> Iterator[int]:
    """Create a client's POSIX shared memory. Yield its descriptor."""
    path = f"/dev/shm{key}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)
        os.unlink(path)


X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
Y = np.maximum(X, 0)
PROTOCOLS = {"grpc": triton_grpc, "rest": triton_http}


class Gateway:
    """A running `nnburst serve --oip`."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "run").mkdir(mode=0o700)
        environment = service_environment(os.environ | {"XDG_RUNTIME_DIR": str(folder / "run")})
        command = [sys.executable, "-m", "nnburst", "serve", "--name", "gate", "--json"]
        for make in (relu, types, compress, total):
            command += ["--model", f"{make.__name__}={save(make(), folder / f'{make.__name__}.onnx')}"]
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


def relu() -> Any:
    return graph([node("Relu", ["x"], ["y"])], [("x", FLOAT, ("n", 8))], [("y", FLOAT, ("n", 8))])


def types() -> Any:
    """Return a model that copies an input of each type to an output."""
    kinds = {"f2": 10, "f8": 11, "i1": 3, "u1": 2, "i4": 6, "i8": 7, "b": 9}
    inputs, outputs = ([(side + name, kind, (3,)) for name, kind in kinds.items()] for side in ("in_", "out_"))
    return graph([node("Identity", ["in_" + name], ["out_" + name]) for name in kinds], inputs, outputs)


def compress() -> Any:
    """Return a model that keeps the rows of x that c selects. It declares as many output rows as input rows."""
    inputs = [("x", FLOAT, ("n", 8)), ("c", 9, ("n",))]
    return graph([node("Compress", ["x", "c"], ["y"], axis=0)], inputs, [("y", FLOAT, ("n", 8))])


def total() -> Any:
    """Return a model that sums x; its output has no dimensions."""
    return graph([node("ReduceSum", ["x"], ["y"], keepdims=0)], [("x", FLOAT, ("n", "m"))], [("y", FLOAT, ())])


def tensor(protocol: Any, name: str, array: Any, datatype: str = "FP32", **options: Any) -> Any:
    given = protocol.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, **options)
    return given


def asked(**more: Any) -> dict[str, Any]:
    given = {"name": "x", "shape": [2, 8], "datatype": "FP32", "data": X.ravel().tolist()}
    return {"inputs": [given], **more}


def placed(kind: Any, offset: int = 0, size: int = X.nbytes, name: str = "tensors") -> Any:
    given = kind.InferInput("x", list(X.shape), "FP32")
    given.set_shared_memory(name, size, offset)
    return given


def refused(url: str, body: bytes, **headers: str) -> str:
    """Send a request over HTTP. Fail unless the gateway refuses the request; return the error message."""
    with pytest.raises(urllib.error.HTTPError) as info:
        urllib.request.urlopen(urllib.request.Request(url, body, headers, method="POST"), timeout=60)
    with info.value as answer:
        assert answer.code == 400
        said: str = json.loads(answer.read())["error"]
        return said


def request_of(x: Any = X, model: str = "relu", **more: Any) -> Any:
    """Return a gRPC request with a float input as raw bytes."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[x.tobytes()], **more)
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    return request


def refused_by_grpc(call: Any, request: Any) -> str:
    """Send a request over gRPC. Fail unless the gateway refuses the request; return the error message."""
    with pytest.raises(grpc.RpcError) as info:
        call(request, timeout=60)
    assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(info.value.details())


def conversions(datatype: str) -> ModelTensor:
    return ModelTensor("x", datatype, _DTYPES[datatype], (-1,))


def gateway_of(service: int) -> int:
    """Return the process id of a service's gateway, or 0 before the gateway listens."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        return next((pid for pid in beside(service) if listens(pid)), 0)
    return 0


def listens(pid: int) -> bool:
    """Return True if a process has a listening socket for each protocol."""
    sockets = open_files(pid)
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in sockets for row in rows) >= len(PROTOCOLS)


def ended(pid: int, number: int) -> None:
    """Send a signal to a process, and wait until the process has ended."""
    with open(os.pidfd_open(pid), "rb", buffering=0) as pidfd:
        signal.pidfd_send_signal(pidfd.fileno(), number)
        assert select.select([pidfd], [], [], 60)[0], "it does not end"


class SlowModels:
    """A set with one model. Its runs put their timeouts into `runs`, wait for `go_on`, and return `answers`."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(
            version="1", inputs={"x": conversions("UINT8")}, optional={}, outputs={}, run=self.run, counts=ModelCounts()
        )
        self.runs: asyncio.Queue[float | None] = asyncio.Queue()
        self.go_on = asyncio.Event()
        self.answers: list[Any] = []

    async def open(self, name: str, version: str, priority: Priority) -> Any:
        self.asked = priority
        return self.model

    async def run(self, inputs: Any, timeout: float | None) -> list[Any]:
        self.runs.put_nowait(timeout)
        await self.go_on.wait()
        return self.answers


def raw(size: int) -> Any:
    request = pb.ModelInferRequest(model_name="slow", raw_input_contents=[bytes(size)])
    request.inputs.add(name="x", datatype="UINT8", shape=[size])
    return request


@contextlib.asynccontextmanager
async def ports(models: Any, budget: Budget | None = None, **options: Any) -> AsyncIterator[tuple[int, int]]:
    """Start a gateway in this process. Yield its ports of gRPC and HTTP."""
    shared, place = budget or Budget(), "127.0.0.1:0"
    server, port = await gateway_grpc.serve(models, Regions(False), shared, place, **options)
    runner, rest_port = await gateway_rest.serve(models, Regions(False), shared, place, **options)
    try:
        yield int(port), int(rest_port)
    finally:
        await server.stop(None)
        await runner.cleanup()


@contextlib.asynccontextmanager
async def both_protocols(models: Any, budget: Budget | None = None) -> AsyncIterator[tuple[Any, aiohttp.ClientSession]]:
    """Start a gateway in this process. Yield a gRPC stub and an HTTP session that are connected to it."""
    async with ports(models, budget) as (port, rest_port):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        async with channel, aiohttp.ClientSession(f"http://127.0.0.1:{rest_port}") as http:
            yield stubs.GRPCInferenceServiceStub(channel), http
