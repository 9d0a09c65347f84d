"""The gateway under load while what it is made of ends, is told to end, and loads other models, at random.

A request is *accepted* once the gateway reads it, and then owned by that process: it is answered, or refused with a
hint when to ask again, unless that very process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import aiohttp
import grpc
import onnx
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as stubs

import nnburst
from support.gateways import MARKS, ended, gateway_of
from support.processes import stop
from support.services import Shared, save_scaling
from support.waiting import PATIENCE, until

pytestmark = [pytest.mark.check, *MARKS]
CLIENTS = 32
SLOW = """
import pathlib, time
from nnburst.devices.function import Needs, Tensor, declare

here = pathlib.Path(__file__).parent
x, y = ([Tensor(name, "float32", ("n", 4))] for name in "xy")

@declare(inputs=x, outputs=y, needs=Needs(read=[str(here)]))
def slow(x):
    while x[0, 0] < 0 and not (here / "told").exists():
        time.sleep(0.01)
    time.sleep(max(0.0, float(x[0, 0])))
    return 3 * x
"""
REFUSED = "refused with a hint"


class Lost(Exception):
    """The connection ended without an answer."""


class Load:
    """Clients that ask all the time, and what becomes of each request."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.url = {protocol: f"127.0.0.1:{port}" for protocol, port in ports.items()}
        self.outcomes: Counter[str] = Counter()
        self.lost: list[tuple[float, float]] = []
        """When each request that got no answer began and ended."""
        self.told = [0.0] * CLIENTS
        """When the last request of each client began that was answered or refused."""
        self.is_over = False

    async def client(self, number: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if number % 2:
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(self.url["grpc"], options))
                call = stubs.GRPCInferenceServiceStub(channel).ModelInfer
                ask: Callable[..., Awaitable[tuple[str, Any]]] = lambda *what: over_grpc(call, *what)  # noqa: E731
            else:
                session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{self.url['rest']}"))
                ask = lambda *what: over_rest(session, *what)  # noqa: E731
            chosen = random.Random(number)
            while not self.is_over:
                model, version = chosen.choice([("scale", ""), ("scale", "1"), ("scale", "2"), ("slow", "")])
                x = np.array([[chosen.uniform(0, 0.05), chosen.random(), number, 1]] * chosen.randint(1, 3), np.float32)
                began = time.monotonic()
                try:
                    answered, y = await ask(model, version, x)
                except Lost:
                    self.lost.append((began, time.monotonic()))
                    self.outcomes["lost"] += 1
                    await asyncio.sleep(0.05)
                    continue
                self.told[number] = began
                if answered == REFUSED:
                    self.outcomes[REFUSED] += 1
                    await asyncio.sleep(0.05)
                    continue
                factor = 3 if model == "slow" else int(answered)
                is_right = version in ("", answered) and np.array_equal(y, factor * x)
                self.outcomes["right" if is_right else f"wrong: {model} {version!r} {answered!r} {x} {y}"] += 1

    async def goes_on(self) -> float:
        """Wait until each client has heard of a request that begins from now on; return when that is."""
        since, deadline = time.monotonic(), time.monotonic() + 4 * PATIENCE
        while min(self.told) < since:
            assert time.monotonic() < deadline, "a client hears nothing any more"
            await asyncio.sleep(0.01)
        return time.monotonic()


async def over_grpc(call: Any, model: str, version: str, x: Any) -> tuple[str, Any]:
    request = pb.ModelInferRequest(model_name=model, model_version=version, raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    try:
        answer = await call(request, timeout=2 * PATIENCE)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        if ("grpc-retry-pushback-ms", "1000") in list(error.trailing_metadata() or ()):
            return REFUSED, None
        raise Lost from error
    return answer.model_version, np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(x.shape)


async def over_rest(session: Any, model: str, version: str, x: Any) -> tuple[str, Any]:
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}]}
    try:
        async with session.post(path, json=body) as answer:
            said = await answer.json()
            if answer.status == 503:
                assert answer.headers["Retry-After"] == "1"
                return REFUSED, None
            assert answer.status == 200, (answer.status, said)
            return said["model_version"], np.array(said["outputs"][0]["data"], np.float32).reshape(x.shape)
    except aiohttp.ClientConnectionError as error:
        raise Lost from error


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for version in (1, 2):
        (tmp_path / "models" / "scale" / str(version)).mkdir(parents=True)
        put(tmp_path / "models", version, 0)
    (tmp_path / "functions.py").write_text(SLOW)
    return tmp_path / "models"


def put(models: Path, version: int, edition: int) -> None:
    """Put a version's file there that answers like the one before, and is another one nevertheless."""
    path = models / "scale" / str(version) / "model.onnx"
    made = onnx.load(save_scaling(path.with_suffix(".new"), version))
    made.doc_string = str(edition)
    onnx.save(made, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def started(models: Path, *options: str, before: str = "pass") -> Shared:
    listen = ("--oip", "127.0.0.1:0", "--oip-rest", "127.0.0.1:0", "--oip-control")
    function = f"{models.parent / 'functions.py'}:slow"
    return Shared(models.parent, "--models", str(models), *listen, *options, function, before=before)


def worker_of(shared: Shared) -> int:
    with nnburst.connect(shared.address) as service:
        return service.pid


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [10.0, pytest.param(180.0, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
def test_every_accepted_request_is_answered_or_refused_with_a_hint(models: Path, seconds: float) -> None:
    shared, seed = started(models), random.randrange(1 << 32)
    editions = itertools.count(1)
    killed: list[tuple[float, float]] = []
    """When a gateway was killed, and when each client had heard of another one."""
    told_to_end: list[tuple[float, float]] = []

    async def order(change: str) -> None:
        """Load or unload, as often as clients do what are told to come again."""
        async with aiohttp.ClientSession(f"http://127.0.0.1:{shared.ready['oip']['rest']}") as session:
            status = 503
            while status == 503:
                async with session.post(f"/v2/repository/models/scale/{change}") as answer:
                    status, said = answer.status, await answer.text()
            assert status == 200, said

    async def end_gateway(load: Load, number: int) -> None:
        at_work = await asyncio.to_thread(until, lambda: gateway_of(shared.pid), "no gateway listens", 4 * PATIENCE)
        began = time.monotonic()
        await asyncio.to_thread(ended, at_work, number)
        (killed if number == signal.SIGKILL else told_to_end).append((began, await load.goes_on()))

    async def reload(load: Load) -> None:
        put(models, 2, next(editions))
        shared.process.send_signal(signal.SIGHUP)

    async def unload(load: Load) -> None:
        await order("unload")
        await load.goes_on()
        put(models, 1, next(editions))
        await order("load")

    async def kill_worker(load: Load) -> None:
        with contextlib.suppress(nnburst.NNBurstError):  # the one before has just ended
            os.kill(await asyncio.to_thread(worker_of, shared), signal.SIGKILL)

    async def main() -> Load:
        load, chosen = Load(shared.ready["oip"]), random.Random(seed)
        clients = [asyncio.ensure_future(load.client(number)) for number in range(CLIENTS)]
        events: list[Callable[[Load], Awaitable[None]]] = [
            lambda load: end_gateway(load, signal.SIGTERM),
            lambda load: end_gateway(load, signal.SIGKILL),
            reload, unload, kill_worker,
        ]  # fmt: skip
        end, is_first = time.monotonic() + seconds, True
        await load.goes_on()
        while is_first or time.monotonic() < end:
            for event in chosen.sample(events, len(events)):
                await event(load)
                await load.goes_on()
                await asyncio.sleep(chosen.uniform(0, 0.3))
                for client in clients:
                    if client.done():
                        client.result()
            is_first = False
        began = time.monotonic()
        ending = asyncio.ensure_future(asyncio.to_thread(shared.end))
        while not ending.done():
            await asyncio.sleep(0.01)
        await ending
        told_to_end.append((began, time.monotonic()))
        load.is_over = True
        await asyncio.gather(*clients)
        return load

    try:
        load = asyncio.run(main())
    finally:
        shared.end()
    print(seed, dict(load.outcomes), f"{len(killed)} gateways killed, {len(told_to_end)} told to end")
    assert load.outcomes.keys() <= {"right", REFUSED, "lost"}, load.outcomes
    for began, end in load.lost:
        by_kill = any(began <= after and end >= before for before, after in killed)
        came_late = any(before <= began <= after for before, after in told_to_end)
        assert by_kill or came_late or began > told_to_end[-1][0], (began, end, killed, told_to_end)


def pending(shared: Shared, model: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{shared.ready['oip']['rest']}/metrics", timeout=PATIENCE) as page:
        lines = page.read().decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if line.startswith("nv_inference_pending_request_count{"))
    return sum(int(value) for labels, _, value in rows if f'model="{model}"' in labels)


@pytest.mark.parametrize("protocol", ["grpc", "rest"])
def test_request_whose_worker_is_killed_is_repeated_unless_a_function_has_begun(models: Path, protocol: str) -> None:
    shared = started(models)

    async def ask(model: str, first: float) -> tuple[str, Any]:
        x = np.full((1, 4), first, np.float32)
        async with contextlib.AsyncExitStack() as stack:
            if protocol == "rest":
                url = f"http://127.0.0.1:{shared.ready['oip']['rest']}"
                return await over_rest(await stack.enter_async_context(aiohttp.ClientSession(url)), model, "", x)
            address = f"127.0.0.1:{shared.ready['oip']['grpc']}"
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            return await over_grpc(stubs.GRPCInferenceServiceStub(channel).ModelInfer, model, "", x)

    async def main() -> None:
        for model, wanted in (("scale", "2"), ("slow", REFUSED)):
            for each in ("scale", "slow"):  # they are open
                await ask(each, 0.0)
            worker = await asyncio.to_thread(worker_of, shared)
            await asyncio.to_thread(stop, worker)
            asked = asyncio.ensure_future(ask(model, 1.0))
            await asyncio.to_thread(until, lambda name=model: pending(shared, name), "it does not come")
            await asyncio.to_thread(ended, worker, signal.SIGKILL)
            answered, y = await asked
            assert answered == wanted
            assert y is None or np.array_equal(y, np.full((1, 4), 2, np.float32))

    try:
        asyncio.run(main())
    finally:
        shared.end()


def test_run_that_takes_long_is_waited_for_and_others_are_refused_meanwhile(models: Path) -> None:
    before = "from nnburst.cli.serve import children; children._ENDING_S = 0.0"  # but for the drain
    shared = started(models, "--oip-drain", "60", before=before)

    async def main() -> None:
        url = f"http://127.0.0.1:{shared.ready['oip']['rest']}"
        async with aiohttp.ClientSession(url) as session, aiohttp.ClientSession(url) as other:
            x = np.full((1, 4), -1, np.float32)  # until it is told
            asked = asyncio.ensure_future(over_rest(session, "slow", "", x))
            await asyncio.to_thread(until, lambda: pending(shared, "slow"), "it does not come")
            await over_rest(other, "scale", "", x)
            shared.process.send_signal(signal.SIGTERM)
            while (await over_rest(other, "scale", "", x))[0] != REFUSED:
                await asyncio.sleep(0.01)
            assert not asked.done()
            (models.parent / "told").touch()
            answered, y = await asked
            assert answered == "1"
            assert np.array_equal(y, 3 * x)

    try:
        asyncio.run(main())
        assert shared.process.wait(PATIENCE) == 0
    finally:
        shared.end()


def test_run_that_takes_longer_than_it_may_is_given_up_when_the_service_is_stopped(models: Path) -> None:
    before = "from nnburst.service.process import launch; launch._END_OF_A_WORKER = 0.1"
    shared = started(models, "--oip-drain", "0.2", before=before)

    async def main() -> None:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{shared.ready['oip']['rest']}") as session:
            asked = asyncio.ensure_future(over_rest(session, "slow", "", np.full((1, 4), 3600, np.float32)))
            await asyncio.to_thread(until, lambda: pending(shared, "slow"), "it does not come")
            shared.process.send_signal(signal.SIGTERM)
            assert (await asked)[0] == REFUSED

    try:
        asyncio.run(main())
    finally:
        shared.end()
