"""Clients that break the rules: their connection ends, nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import Memory
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.registry import create_device
from nnburst.errors import DeadObject, ErrorStatus, ResourceExhausted
from nnburst.model import RunOptions
from nnburst.model.types import DeviceStatus
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.host.host import Client, ServiceHost
from nnburst.service.process.launch import start_child
from nnburst.service.wire.marshal import model_to_wire
from nnburst.service.wire.protocol import CALLS, Execute, PrepareModel, WireMemory, WireRequest, encode
from nnburst.testing import inject
from support.connections import socket_pair
from support.models import counter, request_on, tiny_model
from support.processes import stopped
from support.services import RawConnection, header
from support.waiting import PATIENCE, Background, until


@pytest.fixture
def host() -> Iterator[ServiceHost]:
    host = ServiceHost([create_device("nnburst-reference")])
    yield host
    host.close()


@contextlib.contextmanager
def raw_client(host: ServiceHost) -> Iterator[tuple[RawConnection, Client]]:
    a, b = socket_pair()
    hosted = host.serve(b)
    with RawConnection(a) as client:
        client.greet()
        yield client, hosted


def check_service(host: ServiceHost) -> None:
    """Another client is served as ever."""
    a, b = socket_pair()
    host.serve(b)
    with ServiceConnection(a) as client, Memory.ashmem(512) as pool:
        model = client.devices[0].prepare_model(tiny_model(256))
        assert model.execute_synchronously(request_on(pool))[0] is ErrorStatus.NONE
        model.close()


def test_a_malformed_message_releases_what_its_client_owned_and_disturbs_no_other(host: ServiceHost) -> None:
    a, b = socket_pair()
    host.serve(b)
    with ServiceConnection(a) as bystander, raw_client(host) as (client, hosted), Memory.ashmem(512) as pool:
        model = bystander.devices[0].prepare_model(tiny_model(256))
        wire, fds = model_to_wire(owner := tiny_model(256))
        client.send(header(2, len(fds)), encode(PrepareModel(0, wire, CompileJob())), list(fds))
        assert b"prepare_model.reply" in client.answer()
        assert hosted.ledger.used["models"] == len(owner.pools) == 1
        client.send(header(3), b"\xc1", [])
        assert b"malformed message" in client.answer()
        assert client.answer() == b""
        assert hosted.connection.wait_ended(PATIENCE)
        assert hosted.ledger.used == dict.fromkeys(hosted.ledger.used, 0)
        assert model.execute_synchronously(request_on(pool))[0] is ErrorStatus.NONE
        model.close()


@pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
def test_each_call_with_missing_and_surplus_descriptors(call: object, host: ServiceHost) -> None:
    name = call.name  # type: ignore[attr-defined]
    with raw_client(host) as (client, hosted), Memory.ashmem(64) as pool:
        body = struct.pack("B", 0x81) + b"\xa4call" + struct.pack("B", 0xA0 | len(name)) + name.encode()
        with contextlib.suppress(ConnectionError):
            client.send(header(2, n_fds=3), body, [pool.fds[0]] * 3)
        assert hosted.connection.wait_ended(PATIENCE)
    check_service(host)


def test_descriptors_that_the_service_cannot_take_are_refused() -> None:
    """That it may open no more is not its client's doing; what it already serves goes on."""
    with start_child(["nnburst-noop"]) as service, Memory.ashmem(64) as pool:
        before = len(os.listdir(f"/proc/{service.pid}/fd"))
        limit = before + 4
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (limit, limit))
        message = Execute(1, WireRequest((), (), (WireMemory("ashmem", 64, 3, 0),) * 200), RunOptions())
        for _ in range(3):
            with pytest.raises(ResourceExhausted, match="ulimit"):
                service.connection.call(message, pool.fds * 200, timeout=PATIENCE)
        assert service.devices[0].status is DeviceStatus.AVAILABLE
        until(lambda: len(os.listdir(f"/proc/{service.pid}/fd")) <= before, "descriptors are kept")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run sets up has no more time than the run."""
    monkeypatch.setattr("nnburst.runtime.execution.MIN_SETUP_SECONDS", 0.0)


@pytest.mark.check
def test_a_stopped_service_cannot_block_its_client_for_ever() -> None:
    with start_child(["nnburst-noop"], faults=True) as service:
        fault = inject(service, at="prepare", freeze="interpreter")
        stuck = Background(lambda: service.devices[0].prepare_model(tiny_model(256)))
        fault.wait()  # now nothing in the service reads its socket
        model = tiny_model(256)  # owns the descriptors
        wire, fds = model_to_wire(model)
        errors = set()
        for _ in range(5000):
            try:
                service.connection.call(PrepareModel(0, wire, CompileJob()), fds, timeout=0.0)
            except Exception as error:
                errors.add(type(error).__name__)
                if "read" in str(error) or "under way" in str(error):
                    break
        assert errors == {"MissedDeadline"}
        os.kill(service.pid, 9)
        assert isinstance(stuck.result(), DeadObject)


@pytest.mark.check
@pytest.mark.usefixtures("hasty")
def test_runs_that_need_another_burst_of_a_stopped_service_do_not_outlast_their_timeout() -> None:
    x = np.ones(4, np.float32)

    async def missed(session: nnburst.Session) -> None:
        with pytest.raises(nnburst.MissedDeadline):
            await session.arun(None, {"t": x})

    async def miss_two(session: nnburst.Session) -> None:
        await asyncio.gather(missed(session), missed(session))

    with nnburst.launch(devices=["nnburst-reference"]) as service:
        for use in ("threads", "tasks"):
            with service.session(counter(), timeout=0.1, concurrency=2) as session:
                session.run(None, {"t": x}, PATIENCE)
                with stopped(service.pid):
                    if use == "tasks":
                        asyncio.run(miss_two(session))
                    else:
                        runs = [Background(lambda: session.run(None, {"t": x})) for _ in range(2)]
                        assert [type(run.result()) for run in runs] == [nnburst.MissedDeadline] * 2
                assert session.run(None, {"t": x}, PATIENCE)[0].tolist() == [2.0] * 4


def test_event_loop_goes_on_while_tasks_wait_for_another_burst_of_a_stopped_service() -> None:
    async def released_by_a_task(session: nnburst.Session, pid: int) -> list[Any]:
        runs = [asyncio.ensure_future(session.arun(None, {"t": np.ones(4, np.float32)})) for _ in range(2)]
        await asyncio.sleep(0)  # both have begun
        os.kill(pid, signal.SIGCONT)
        return await asyncio.gather(*runs)

    with nnburst.launch(devices=["nnburst-reference"]) as service:
        with service.session(counter(), timeout=PATIENCE, concurrency=2) as session, stopped(service.pid):
            answers = asyncio.run(released_by_a_task(session, service.pid))
    assert [y.tolist() for (y,) in answers] == [[2.0] * 4] * 2


def test_session_of_short_runs_gets_another_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        with service.session(counter(), timeout=1e-6, concurrency=2) as session:
            monkeypatch.setattr(session._pool, "free", lambda: None)  # the one that there is runs something

            def has_two() -> bool:
                with contextlib.suppress(nnburst.MissedDeadline):
                    session.run(None, {"t": np.ones(4, np.float32)})
                return len(session._pool._bursts) == 2

            until(has_two)  # opening one may take a busy machine more than its second


@pytest.mark.check
@pytest.mark.usefixtures("hasty")
def test_copies_of_a_state_do_not_outlast_their_timeout_in_a_stopped_service() -> None:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        with service.session(counter(), timeout=0.1) as session, session.bind(state={"t_out": "t"}) as execution:
            execution.run(timeout=PATIENCE)
            with stopped(service.pid):
                for attempt in (execution.run, execution.get_state, execution.reset_state):
                    with pytest.raises(nnburst.MissedDeadline):
                        attempt()
