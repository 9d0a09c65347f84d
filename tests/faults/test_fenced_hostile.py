"""Executions that wait hold up nobody but themselves, and end with their client, their service or their deadline."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from nnburst import Memory
from nnburst.devices import Device
from nnburst.devices.fence import Fence, FenceSignal, FenceState
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.errors import DeadObject, ErrorStatus, GeneralFailure, ResourceExhausted
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.host.quotas import Quotas
from nnburst.service.process.launch import start_child
from support.models import request_on, tiny_model
from support.services import in_process
from support.waiting import PATIENCE

MANY = 24
"""More than the calls that a connection serves at a time."""


@pytest.fixture
def connection() -> Iterator[ServiceConnection]:
    with start_child(devices=("nnburst-reference",)) as connection:
        yield connection


@pytest.fixture
def device(connection: ServiceConnection) -> Device:
    return connection.devices[0]


@pytest.fixture
def gate() -> Iterator[FenceSignal]:
    with FenceSignal() as gate, gate.fence:
        yield gate


def waiters() -> int:
    return sum(thread.name == "nnburst-fenced" for thread in threading.enumerate())


def test_executions_that_wait_keep_no_call_from_being_served(device: Device, gate: FenceSignal) -> None:
    with device.prepare_model(tiny_model(256)) as prepared, Memory.ashmem(512) as pool:
        fences = [prepared.execute_fenced(request_on(pool), [gate.fence]).fence for _ in range(MANY)]
        assert prepared.execute_synchronously(request_on(pool))[0] is ErrorStatus.NONE
        device.prepare_model(tiny_model(256)).close()
        assert {fence.state for fence in fences} == {FenceState.ACTIVE}
        gate.set()
        for fence in fences:
            fence.wait(PATIENCE)
            fence.close()


def test_a_model_that_is_released_serves_what_waits_for_it(device: Device, gate: FenceSignal) -> None:
    with Memory.ashmem(512) as pool:
        with device.prepare_model(tiny_model(256)) as prepared:
            execution = prepared.execute_fenced(request_on(pool), [gate.fence])
        gate.set()
        with execution.fence as fence:
            fence.wait(PATIENCE)
        assert execution.info().status is ErrorStatus.NONE


def test_a_service_that_dies_puts_its_fences_in_error(connection: ServiceConnection, gate: FenceSignal) -> None:
    with (
        start_child(devices=("nnburst-reference",)) as other,
        Memory.ashmem(512) as pool,
        connection.devices[0].prepare_model(tiny_model(256)) as first,
        other.devices[0].prepare_model(tiny_model(256)) as second,
    ):
        dead = first.execute_fenced(request_on(pool), [gate.fence])
        waiting = second.execute_fenced(request_on(pool), [dead.fence])
        os.kill(connection.pid, signal.SIGKILL)
        with waiting.fence as fence, pytest.raises(GeneralFailure):
            fence.wait(PATIENCE)
        assert waiting.info().status is ErrorStatus.GENERAL_FAILURE
        with dead.fence as fence:
            assert fence.state is FenceState.ERROR
        with pytest.raises(DeadObject):
            dead.info()
        with second.execute_fenced(request_on(pool)).fence as fence:
            fence.wait(PATIENCE)


def test_a_client_that_goes_takes_along_what_waits_for_it(gate: FenceSignal) -> None:
    with in_process([ReferenceDevice()]) as (client, _), Memory.ashmem(512) as pool:
        prepared = client.devices[0].prepare_model(tiny_model(256))
        fences = [prepared.execute_fenced(request_on(pool), [gate.fence]).fence.duplicate() for _ in range(3)]
        assert waiters() == 3
        client.close()
        for fence in fences:
            with fence, pytest.raises(GeneralFailure):
                fence.wait(PATIENCE)
    # and the threads are gone: every test checks that


def test_there_is_a_limit_to_what_waits(gate: FenceSignal) -> None:
    with in_process([ReferenceDevice()], quotas=Quotas(requests=2)) as (client, host), Memory.ashmem(512) as pool:
        prepared = client.devices[0].prepare_model(tiny_model(256))
        two = [prepared.execute_fenced(request_on(pool), [gate.fence]) for _ in range(2)]
        with pytest.raises(ResourceExhausted, match="requests=N"):
            prepared.execute_fenced(request_on(pool), [gate.fence])
        (connection,) = host.connections
        before = connection.ledger.used
        gate.set()
        for execution in two:
            with execution.fence as fence:
                fence.wait(PATIENCE)
            execution.close()  # type: ignore[attr-defined]
        prepared.execute_fenced(request_on(pool)).fence.wait(PATIENCE)
        prepared.close()
        client.close()
        assert connection.connection.wait_ended(PATIENCE)
        assert before["requests"] == 2
        assert not any(connection.ledger.used.values())


@pytest.mark.parametrize("closed", [False, True], ids=["waiting", "closed"])
def test_a_refused_request_leaves_nothing_behind(gate: FenceSignal, closed: bool) -> None:
    with in_process([ReferenceDevice()]) as (client, host), Memory.ashmem(512) as pool:
        prepared = client.devices[0].prepare_model(tiny_model(256))
        (connection,) = host.connections
        used = connection.ledger.used
        if closed:
            gate.fail()
        fence = Fence(gate.fence.fileno())
        with fence, pytest.raises(Exception, match=r"wait_for|pool"):
            request = request_on(pool)
            request = type(request)(request.inputs, request.outputs, ()) if not closed else request
            prepared.execute_fenced(request, [fence])
        assert connection.ledger.used == used
        prepared.close()
