"""The gateway as a process: killed, replaced, told to read its models again; and who connects to the service."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.waiting import PATIENCE, until

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

from tritonclient.grpc import service_pb2 as pb

from nnburst.cli.serve import children
from nnburst.errors import DeviceUnavailable, InvalidArgument
from nnburst.gateway import grpc as gateway_grpc
from nnburst.gateway import models
from nnburst.gateway.budget import Budget
from nnburst.gateway.models import Models
from nnburst.gateway.regions import Regions
from support.gateways import MARKS, PROTOCOLS, Gateway, X, Y, ended, gateway_of, relu, tensor
from support.onnx_models import save

pytestmark = MARKS


@pytest.mark.check
def test_gateway_that_was_killed_is_started_again_at_its_ports(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    try:
        seen = set[int]()
        for _ in range(3):
            seen.add(pid := until(lambda: gateway_of(gateway.process.pid), "no gateway listens", 2 * PATIENCE))
            for protocol in PROTOCOLS:
                client = gateway.client(protocol)
                sent = [tensor(PROTOCOLS[protocol], "x", X)]
                assert client.infer("relu", sent).as_numpy("y").tobytes() == Y.tobytes()
                client.close()
            ended(pid, signal.SIGKILL)
        assert len(seen) == 3
    finally:
        gateway.close()


@pytest.mark.check
@pytest.mark.parametrize(("option", "protocol"), [("--oip", "grpc"), ("--oip-rest", "rest")])
def test_port_that_others_listen_at_is_refused_also_if_they_are_gateways(
    gateway: Gateway, tmp_path: Path, option: str, protocol: str
) -> None:
    serve = [sys.executable, "-m", "nnburst", "serve", "--socket", str(tmp_path / "s"), "--model"]
    serve.append(f"relu={save(relu(), tmp_path / 'relu.onnx')}")
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port in (other.getsockname()[1], gateway.ports[protocol]):
            done = subprocess.run(
                [*serve, option, f"127.0.0.1:{port}"], capture_output=True, text=True, timeout=100, check=False
            )
            assert done.returncode == 1
            assert f"cannot listen at 127.0.0.1:{port}" in done.stderr


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[Any]:
    """What the next gateways run instead: the arguments of a command, or an exception. Pauses are short."""
    commands: queue.Queue[Any] = queue.Queue()

    def command(module: str) -> list[str]:
        given = commands.get()
        if isinstance(given, Exception):
            raise given
        return [sys.executable, "-c", *given]

    monkeypatch.setattr(children, "safe_command", command)
    monkeypatch.setattr(children, "_PAUSE_S", 0.01)
    monkeypatch.setattr(children, "_ENDING_S", 0.2)
    return commands


SPEAKS = "import sys; print(sys.argv[1], flush=True); sys.stdin.read()"
PORTS = '{"grpc": 8001}'


def started() -> children.Child:
    return children.Child("the gateway", "--oip", {"grpc": "127.0.0.1:0"})


def test_gateway_is_started_again_at_its_port_whatever_a_start_met(commands: queue.Queue[Any]) -> None:
    commands.put((SPEAKS, PORTS))
    process = started()
    try:
        assert process.ports == {"grpc": 8001}
        assert process.options == {"grpc": "127.0.0.1:8001"}
        first = process._process.pid
        met = OSError(11, "no processes left"), (SPEAKS, '{"error": "the port is taken"}'), (SPEAKS, "no ports")
        for what in (*met, (SPEAKS, PORTS)):
            commands.put(what)
        os.kill(first, signal.SIGKILL)
        until(commands.empty, "no more gateways are started", 2 * PATIENCE)
    finally:
        process.close()
    assert not process._watcher.is_alive()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"error": "the port is taken"}', "--oip: the port is taken"),
        ("Hello", "--oip: the gateway did not say its ports"),
        ("7", "--oip: the gateway did not say its ports"),
        (None, "it ended; see what it wrote above"),
    ],
    ids=["error", "text", "number", "none"],
)
def test_gateway_that_cannot_start_is_an_error_of_the_service(
    commands: queue.Queue[Any], line: str | None, said: str
) -> None:
    commands.put(("pass",) if line is None else (SPEAKS, line))
    with pytest.raises(DeviceUnavailable, match=said):
        started()


def test_gateway_that_does_not_become_ready_is_an_error(
    commands: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_STARTING_S", 0.2)
    commands.put(("import sys; sys.stdin.read()",))
    with pytest.raises(DeviceUnavailable, match=r"not ready within 0\.2 s"):
        started()


def test_close_ends_a_gateway_that_hangs_before_its_first_line(commands: queue.Queue[Any], tmp_path: Path) -> None:
    commands.put((SPEAKS, PORTS))
    process = started()
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

    def get_inputs(self) -> list[Any]:
        return []

    get_outputs = get_overridable_initializers = get_inputs

    def close(self) -> None:
        pass


class FakeService:
    """A service, and each connection to it."""

    alive = True

    def __init__(self) -> None:
        self.sessions: list[weakref.ref[FakeSession]] = []
        self.digests = {"a": "", "b": ""}

    def session(self, name: str, **options: Any) -> FakeSession:
        session = FakeSession()
        self.sessions.append(weakref.ref(session))
        return session

    def list_models(self) -> dict[str, str]:
        return self.digests

    def close(self) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    """What `Models` connect to."""
    service = FakeService()
    monkeypatch.setattr(models, "ServiceConnection", FakeService)
    for name in ("connect", "connect_to"):
        monkeypatch.setattr(models, name, lambda address: service)
    return service


class Hanging:
    """Calls of a service that take their time: one for the model a waits until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        session = FakeService.session

        def opened(service: FakeService, name: str, **options: Any) -> FakeSession:
            if name == "a":
                self.begun.set()
                assert self.go_on.wait(PATIENCE)
            return session(service, name)

        monkeypatch.setattr(FakeService, "session", opened)

    async def has_begun(self) -> None:
        while not self.begun.is_set():
            await asyncio.sleep(0.001)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    hanging = Hanging(monkeypatch)
    yield hanging
    hanging.go_on.set()


def in_loop(main: Callable[[], Any], threads: int = 4) -> None:
    """Run a test with so many threads for what waits."""

    async def limited() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
        await asyncio.wait_for(main(), PATIENCE)
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(limited())


async def has_gone(session: weakref.ref[FakeSession]) -> None:
    while session() is not None:  # the thread that opened it lets go of it a moment later
        await asyncio.sleep(0.001)


def test_model_that_hangs_while_it_is_opened_holds_up_nothing_else(service: FakeService, hanging: Hanging) -> None:
    async def main() -> None:
        models = Models("there")
        waits = [asyncio.ensure_future(models.open("a")) for _ in range(20)]
        await hanging.has_begun()
        waits.pop().cancel()
        assert (await models.open("b")).version == "1"
        assert [name for name, _, _ in await models.counts()] == ["a", "b"]
        await models.renew()
        await models.close()
        assert not any(each.done() for each in waits)
        hanging.go_on.set()
        assert len(set(await asyncio.gather(*waits))) == 1

    in_loop(main, threads=2)


def test_model_that_two_wait_for_is_opened_once_and_another_one_anew(service: FakeService, hanging: Hanging) -> None:
    async def main() -> None:
        models = Models("there")
        waits = [asyncio.ensure_future(models.open("a")) for _ in range(2)]
        await hanging.has_begun()
        service.digests["a"] = "another"
        await models.renew()
        hanging.go_on.set()
        first, second = await asyncio.gather(*waits)
        assert first is second
        assert first.digest == "another"
        await has_gone(service.sessions[0])
        assert [session() for session in service.sessions] == [None, first.session]

    in_loop(main)


def test_questions_that_wait_leave_threads_to_others(
    service: FakeService, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnburst.gateway.models.send_order", lambda address, message: hanging.go_on.wait(PATIENCE))
    servicer = gateway_grpc.Servicer(Models("there", may_change=True), Regions(False), Budget())

    async def main() -> None:
        calls = (
            (servicer.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name="b")),
            (servicer.ServerReady, pb.ServerReadyRequest()),
            (servicer.ModelReady, pb.ModelReadyRequest(name="a")),
            (servicer.ModelMetadata, pb.ModelMetadataRequest(name="a")),
        )
        waits = [asyncio.create_task(call(asked)) for call, asked in calls for _ in range(20)]
        await hanging.has_begun()
        assert await servicer.ModelReady(pb.ModelReadyRequest(name="b")) == {"ready": True}
        assert (await servicer.ModelMetadata(pb.ModelMetadataRequest(name="b")))["versions"] == ["1"]
        assert await servicer.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest()) == {"regions": {}}
        hanging.go_on.set()
        await asyncio.gather(*waits)

    in_loop(main, threads=3)


def test_old_model_goes_when_its_last_run_has_ended(service: FakeService) -> None:
    async def main() -> None:
        models = Models("there")
        old = await models.open("a")
        assert await models.open("a") is old
        service.digests["a"] = "another"
        await models.renew()
        new = await models.open("a")
        assert new is not old
        assert [session() for session in service.sessions] == [old.session, new.session]
        await models.renew()  # it is the same one
        del old
        await has_gone(service.sessions[0])
        assert [session() for session in service.sessions] == [None, new.session]

    in_loop(main)


def test_index_says_which_models_are_refused_also_before_they_are_asked_for(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(session: FakeSession) -> list[Any]:
        raise InvalidArgument("no datatype")

    async def main() -> None:
        models = Models("there")
        assert [(row["name"], row["state"]) for row in await models.index()] == [("a", "READY"), ("b", "READY")]
        monkeypatch.setattr(FakeSession, "get_inputs", refuse)
        service.digests["a"] = "another"
        await models.renew()
        assert [(row["name"], row["reason"]) for row in await models.index()] == [("a", "no datatype"), ("b", "")]
        assert [row["name"] for row in await models.index(only_ready=True)] == ["b"]

    in_loop(main)
