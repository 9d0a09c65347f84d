"""The gateway as a process: killed, replaced, told to read its models again; and who connects to the service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.processes import children_of_keeper
from support.waiting import PATIENCE, until

onnx = pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import grpc  # noqa: E402
import tritonclient.grpc as triton_grpc  # noqa: E402
from tritonclient.grpc import service_pb2 as pb  # noqa: E402
from tritonclient.grpc import service_pb2_grpc as stubs  # noqa: E402

from nnburst.cli.serve import supervised  # noqa: E402
from nnburst.errors import DeadObject, DeviceUnavailable, MissedDeadline  # noqa: E402
from nnburst.gateway import Models, Regions  # noqa: E402
from nnburst.gateway import grpc as gateway_grpc  # noqa: E402
from nnburst.gateway.budget import Budget  # noqa: E402
from support.gateways import (  # noqa: E402
    PROTOCOLS,
    Gateway,
    SlowModels,
    X,
    Y,
    model,
    raw,
    relu,
    tensor,
)

pytestmark = [pytest.mark.leaks("gRPC keeps threads and descriptors"), pytest.mark.filterwarnings("ignore")]


def gateway_processes(gateway: Gateway) -> list[int]:
    """The one that works, and the one that stands by."""
    found = children_of_keeper(gateway.process.pid)
    return sorted(found, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().split()[21]))


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
