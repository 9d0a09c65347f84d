"""Clients of a shared service that stop, flood, fork or send what lingers: they delay no other client."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nnburst
from nnburst.errors import DeviceUnavailable
from nnburst.service.process.limited_log import LINES
from nnburst.service.wire.protocol import ListDevices, encode
from support.hostile import Descriptors
from support.processes import line_of, start_python, stopped
from support.services import Honest, RawConnection, Shared, header, let_pass, shared_service, told_to_pass
from support.waiting import PATIENCE

pytestmark = pytest.mark.check

PROGRAM = """
import itertools, os, signal, sys
import numpy as np
import nnburst
from nnburst import ModelBuilder, OperandType
from nnburst.service.connection.callbacks import CallbackRegistry
from nnburst.service.connection.pending import PendingCall

phase, begun, number = sys.argv[2], False, itertools.count(1)
b = ModelBuilder()
x = b.input("x", OperandType.TENSOR_FLOAT32, (64,))
b.output("y", x + x)
model = b.build()

def stop(*_):
    print(phase, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

wait = PendingCall.wait
def waiting(pending, timeout):
    if begun and (phase == "closing" or phase == f"call {next(number)}"):
        stop()
    return wait(pending, timeout)
PendingCall.wait = waiting

if phase == "asked for memory":
    CallbackRegistry.on_get_memories = stop
begun = phase.startswith("call")
service = nnburst.connect(sys.argv[1])
session = service.session(model)
value = {"x": np.ones(64, np.float32)}
session.run(None, value)
if phase == "in flight":
    future = session.bind().submit()
    stop()
if phase == "full ring":
    executions = [session.burst.bind() for _ in range(64)]
    for execution in executions:
        execution.run()  # now each is a plan of the service
    futures = [execution.submit() for execution in executions]
    stop()
if phase == "closing":
    begun = True
    session.close()
    service.close()
if phase == "forked":
    for _ in range(10):
        if os.fork() == 0:
            signal.pause()
    print(phase, flush=True)
    os._exit(0)
"""
PHASES = ["call 1", "call 4", "asked for memory", "asked for memory", "in flight", "full ring", "closing"]


@pytest.fixture
def gives_all_back(shared: Shared) -> Iterator[None]:
    """The service has no more descriptors in the end than before."""
    before = shared.descriptors()
    yield
    shared.gives_back(before)


@contextlib.contextmanager
def stalled(shared: Shared, phase: str) -> Iterator[subprocess.Popen[str]]:
    """A client that has come to a phase and stopped there. All of its processes are killed in the end."""
    client = start_python(PROGRAM, shared.address, phase, start_new_session=True)
    try:
        assert line_of(client) == f"{phase}\n"
        yield client
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.communicate()


def test_clients_that_are_stopped_at_once_delay_nobody(shared: Shared, honest: Honest, gives_all_back: None) -> None:
    with contextlib.ExitStack() as stack:
        for phase in PHASES:
            client = stack.enter_context(stalled(shared, phase))
            os.waitid(os.P_PID, client.pid, os.WSTOPPED | os.WNOWAIT)
        honest.goes_on()


def test_forked_children_of_a_client_that_is_gone_keep_nothing_open(
    shared: Shared, honest: Honest, gives_all_back: None
) -> None:
    before = shared.descriptors()
    with stalled(shared, "forked") as client:
        client.wait(PATIENCE)
        honest.goes_on()
        shared.gives_back(before)  # though ten processes have copies of the socket


@pytest.fixture
def lingering(tmp_path: Path) -> Iterator[Callable[[RawConnection, int, bytes], None]]:
    """Send a message with so many sockets that linger. No signal after it: that would end the lingering."""
    descriptors = Descriptors(random.Random(1), tmp_path)

    def send(connection: RawConnection, count: int, body: bytes) -> None:
        fds = [descriptors.lingering() for _ in range(count)]
        connection.send(header(1), body, fds)  # as many as it says: none
        descriptors.forget(fds)

    yield send
    descriptors.close()


def test_more_sockets_that_linger_than_there_are_threads_to_close_them_delay_nobody(
    shared: Shared, honest: Honest, gives_all_back: None, lingering: Callable[..., None]
) -> None:
    with RawConnection(shared) as connection:
        connection.greet()
        with stopped(shared.pid):
            lingering(connection, 200, encode(ListDevices()))
        honest.goes_on()


def test_sockets_that_linger_in_connections_that_are_refused_keep_nobody_out(
    lingering: Callable[..., None], tmp_path: Path
) -> None:
    options = ("--device", "nnburst-noop", "--quota", "user.connections=1")
    with shared_service(tmp_path, *options) as shared, RawConnection(shared) as served:
        served.greet()
        with stopped(shared.pid):
            for _ in range(20):  # more than are told why
                with RawConnection(shared) as refused:
                    lingering(refused, 10, b"")  # in all more than there are threads that close
        with RawConnection(shared) as other:  # and is refused in its turn
            other.send(header(1), encode(ListDevices()), [])
            assert b"connections" in other.answer()


def test_sockets_that_linger_in_connections_that_say_no_hello_keep_nobody_out(
    shared: Shared, honest: Honest, gives_all_back: None, lingering: Callable[..., None]
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(RawConnection(shared))
            with stopped(shared.pid):
                lingering(connection, 10, b"rubbish")
                lingering(connection, 10, b"rubbish")
            assert b"malformed message" in connection.answer()
        honest.goes_on()


def test_user_whose_connections_come_too_fast_is_refused_for_some_seconds(tmp_path: Path) -> None:
    options = ("--device", "nnburst-noop", "--quota", "user.new_connections=3")
    with shared_service(tmp_path, *options, before=f"{told_to_pass(tmp_path)}; broker._NEW = 1000.0") as shared:
        for _ in range(3):
            nnburst.connect(shared.address).close()
        refusal = r"user \d+ may have 3 new_connections.*--quota user\.new_connections=N"
        for _ in range(3):
            with pytest.raises(DeviceUnavailable, match=refusal):
                nnburst.connect(shared.address)
        let_pass(tmp_path, 1001)
        nnburst.connect(shared.address).close()


def test_clients_that_send_rubbish_fill_no_log(tmp_path: Path) -> None:
    with shared_service(tmp_path, "--device", "nnburst-noop") as shared:
        for _ in range(100):
            with RawConnection(shared) as connection:
                connection.greet()
                connection.send(header(2), b"rubbish", [])
                assert b"malformed message" in connection.answer()
                assert not connection.answer()
    log = shared.log.read_text()
    counted = [int(number) for number in re.findall(r"(\d+) lines from transport\.py", log)]
    assert counted
    assert (said := log.count("malformed message")) + sum(counted) == 100
    assert said <= LINES * (len(counted) + 1)  # of each period
