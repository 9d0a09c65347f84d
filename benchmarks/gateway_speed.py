"""Measure the cost of the gateway: gRPC inference against a gRPC echo, and shared memory against bytes.

``python benchmarks/gateway_speed.py [--seconds S]`` starts a shared service with its gateway, and an echo:
a ``grpc.aio`` server with the same stubs. The echo answers an empty request with an empty response, and any other
request with a response as large as the model's response. One client with a blocking stub calls the gateway and the echo
in turns. Exits with 1 if a ratio exceeds its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from onnx_speed import mlp
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as stubs
from tritonclient.utils import shared_memory
from turns import in_turns

MOST_OF_ECHO = 1.3
LEAST_OF_BYTES = 5.0
SHAPE = (1, 3, 640, 640)
"""Shape of an image: 4.9 MB of float32."""
WIDTH = 64


class Echo(stubs.GRPCInferenceServiceServicer):
    """Server that answers each request with the tensors that it contains."""

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        answer = pb.ModelInferResponse(model_name=request.model_name, raw_output_contents=request.raw_input_contents)
        for tensor in request.inputs:
            answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return answer


async def echo() -> None:
    """Print the port, then serve until the end of standard input."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    stubs.add_GRPCInferenceServiceServicer_to_server(Echo(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    await ended.wait()
    await server.stop(None)


def image_model(path: Path) -> None:
    """Write a model whose input is an image and whose output is the mean of each channel."""
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, SHAPE)
    mean = helper.make_tensor_value_info("mean", TensorProto.FLOAT, (1, 3, 1, 1))
    graph = helper.make_graph([helper.make_node("GlobalAveragePool", ["image"], ["mean"])], "image", [image], [mean])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[int]:
    """Serve two models through a gateway. Yield its port."""
    (folder / "run").mkdir(mode=0o700)
    mlp(WIDTH, 4, folder / "mlp.onnx")
    image_model(folder / "image.onnx")
    command = [sys.executable, "-m", "nnburst", "serve", "--name", "speed", "--json"]
    command += ["--model", f"mlp={folder / 'mlp.onnx'}", "--model", f"image={folder / 'image.onnx'}"]
    command += ["--oip", "127.0.0.1:0", "--oip-shared-memory"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder / "run")}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["oip"]["grpc"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextlib.contextmanager
def echo_server() -> Iterator[int]:
    """Start the echo server. Yield its port."""
    command = [sys.executable, __file__, "--echo"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def small(port: int, echo_port: int, seconds: float) -> dict[str, float]:
    """Measure an MLP against the echo."""
    x = np.linspace(-1, 1, WIDTH, dtype=np.float32)[None]
    request = pb.ModelInferRequest(model_name="mlp", raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as ours, grpc.insecure_channel(f"127.0.0.1:{echo_port}") as other:
        infer = stubs.GRPCInferenceServiceStub(ours).ModelInfer
        empty = stubs.GRPCInferenceServiceStub(other).ModelInfer
        assert len(infer(request).raw_output_contents[0]) == x.nbytes
        nothing = pb.ModelInferRequest()
        return in_turns(
            {
                "an empty echo": lambda: empty(nothing),
                "an echo of the same sizes": lambda: empty(request),
                "an MLP": lambda: infer(request),
            },
            seconds,
        )


def images(port: int, seconds: float) -> dict[str, float]:
    """Measure images sent as bytes against images in shared memory. The client copies each image."""
    frame = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    key = f"/nnburst-speed-{os.getpid()}"
    region = shared_memory.create_shared_memory_region("frames", key, frame.nbytes)
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    try:
        client.register_system_shared_memory("frames", key, frame.nbytes)
        placed = triton.InferInput("image", list(SHAPE), "FP32")
        placed.set_shared_memory("frames", frame.nbytes)

        def by_bytes() -> Any:
            sent = triton.InferInput("image", list(SHAPE), "FP32")
            sent.set_data_from_numpy(frame)
            return client.infer("image", [sent]).as_numpy("mean")

        def by_memory() -> Any:
            shared_memory.set_shared_memory_region(region, [frame])
            return client.infer("image", [placed]).as_numpy("mean")

        def in_place() -> Any:
            return client.infer("image", [placed]).as_numpy("mean")

        assert by_bytes().tobytes() == by_memory().tobytes()
        calls = {"an image as bytes": by_bytes, "in shared memory, copied there": by_memory, "lying there": in_place}
        return in_turns(calls, seconds)
    finally:
        client.unregister_system_shared_memory("frames")
        client.close()
        shared_memory.destroy_shared_memory_region(region)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each row")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        asyncio.run(echo())
        return 0
    with tempfile.TemporaryDirectory(prefix="nnburst-gateway-") as folder:
        with gateway(Path(folder)) as port, echo_server() as echo_port:
            laps = small(port, echo_port, options.seconds) | images(port, options.seconds)
    for name, seconds in laps.items():
        print(f"{name:32} {seconds * 1e6:10,.0f} us")
    of_echo = laps["an MLP"] / laps["an empty echo"]
    of_sizes = laps["an MLP"] / laps["an echo of the same sizes"]
    of_bytes = laps["an image as bytes"] / laps["in shared memory, copied there"]
    print(f"{'pass' if of_echo <= MOST_OF_ECHO else 'MISS'}  {of_echo:.2f} x the empty echo, at most {MOST_OF_ECHO}")
    print(f"      {of_sizes:.2f} x the echo of the same sizes")
    print(f"{'pass' if of_bytes >= LEAST_OF_BYTES else 'MISS'}  {of_bytes:.1f} x faster, at least {LEAST_OF_BYTES}")
    return int(of_echo > MOST_OF_ECHO or of_bytes < LEAST_OF_BYTES)


if __name__ == "__main__":
    sys.exit(main())
