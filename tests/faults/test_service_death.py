"""Kills at every step of the control plane and of a burst, in both directions."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nnburst import Memory
from nnburst.burst import ExecutionBurstController
from nnburst.burst.interfaces import BurstCallback
from nnburst.devices.interfaces import CompileJob
from nnburst.errors import DeadObject, ErrorStatus
from nnburst.fmq import MessageQueue
from nnburst.model.types import DeviceStatus
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.process.launch import start_child
from nnburst.testing import inject
from support.caches import cache_files
from support.models import request_on, tiny_model
from support.processes import Client, wait_gone
from support.waiting import PATIENCE, Background


class Unused(BurstCallback):
    def get_memories(self, slots: Sequence[int]) -> Any:
        raise AssertionError("never called")


def prepare(service: ServiceConnection, pool: Memory) -> Any:
    return service.devices[0].prepare_model(tiny_model(256))


def supported(service: ServiceConnection, pool: Memory) -> Any:
    return service.devices[0].get_supported_operations(tiny_model(256))


def execute(service: ServiceConnection, pool: Memory) -> Any:
    return prepare(service, pool).execute_synchronously(request_on(pool))


def burst(service: ServiceConnection, pool: Memory) -> Any:
    with MessageQueue("V24", 64) as a, MessageQueue("V24", 64) as b:
        return prepare(service, pool).configure_execution_burst(Unused(), a.descriptor, b.descriptor)


def plan(service: ServiceConnection, pool: Memory, window: float | None = None) -> Any:
    with ExecutionBurstController.create(prepare(service, pool), polling_window=window) as controller:
        return controller.compute(request_on(pool))


def polling_plan(service: ServiceConnection, pool: Memory) -> Any:
    return plan(service, pool, 30.0)


def sleeping_plan(service: ServiceConnection, pool: Memory) -> Any:
    return plan(service, pool, 0.0)


def restore(service: ServiceConnection, pool: Memory) -> Any:
    with tempfile.TemporaryDirectory() as directory, cache_files(Path(directory)) as files:
        return service.devices[0].prepare_model_from_cache(files)


def prepare_with_files(service: ServiceConnection, pool: Memory) -> Any:
    with tempfile.TemporaryDirectory() as directory, cache_files(Path(directory)) as files:
        return service.devices[0].prepare_model(tiny_model(256), CompileJob(cache=files))


POINTS: dict[str, tuple[Any, Any]] = {
    "supported": ("supported", supported),
    "REQ_CACHE_065_prepare": ("prepare", prepare),
    "REQ_CACHE_072_restore": ("restore", restore),
    "REQ_CACHE_079_prepare_with_files": ("prepare", prepare_with_files),
    "run": ("run", execute),
    "burst": ("burst", burst),
    "polling": ("run", polling_plan),
    "sleeping": ("run", sleeping_plan),
}


@pytest.mark.parametrize(("point", "use"), POINTS.values(), ids=POINTS)
def test_REQ_MODEL_078_a_killed_service_ends_every_wait(
    point: Any, use: Callable[[ServiceConnection, Memory], Any]
) -> None:
    with start_child(faults=True) as service, Memory.ashmem(512) as pool:
        fault = inject(service, at=point, freeze="call")
        deaths: list[int] = []
        service.link_to_death(lambda: deaths.append(1))
        call = Background(lambda: use(service, pool))
        fault.wait()
        os.kill(service.pid, signal.SIGKILL)
        result = call.result()
        assert isinstance(result, DeadObject), result
        assert result.status is ErrorStatus.DEAD_OBJECT
        assert "was killed by SIGKILL" in str(result)
        assert service.connection.wait_ended(PATIENCE)
        assert deaths == [1]
        assert not service.alive
        assert service.devices[0].status is DeviceStatus.OFFLINE
        with pytest.raises(DeadObject, match="was killed by SIGKILL"):
            service.devices[0].prepare_model(tiny_model(256))
        with pytest.raises(ChildProcessError):  # reaped although nobody called close
            os.waitpid(service.pid, os.WNOHANG)
        service.link_to_death(lambda: deaths.append(2))
        assert deaths == [1, 2]


def test_a_service_killed_while_it_asks_for_memories() -> None:
    with start_child() as service, Memory.ashmem(512) as pool:
        with ExecutionBurstController.create(prepare(service, pool)) as controller:
            callbacks = service.devices[0].place().callbacks._callbacks  # type: ignore[attr-defined]
            ((number, original),) = callbacks.items()

            class Killer(BurstCallback):
                def get_memories(self, slots: Sequence[int]) -> Any:
                    os.kill(service.pid, signal.SIGKILL)
                    return original.get_memories(slots)

            killer = callbacks[number] = Killer()
            call = Background(lambda: controller.compute(request_on(pool)))
            assert isinstance(call.result(), DeadObject)
            assert killer is callbacks[number]


PRELUDE = """
import os, sys, threading
from support.models import *
from support.processes import *
from nnburst.burst import ExecutionBurstController
from nnburst.service.process.launch import start_child
from nnburst.testing import inject
service = start_child(faults=True)
pool = Memory.ashmem(512)

def freeze(at, how, *pids):
    fault = inject(service, at=at, freeze=how)
    def say():
        fault.wait()
        print(service.pid, *pids, flush=True)
    threading.Thread(target=say).start()

"""

BUSY = {
    "idle": "print(service.pid, flush=True); sys.stdin.read()",
    "preparing": "freeze('prepare', 'call'); service.devices[0].prepare_model(tiny_model(256))",
    "holding the interpreter lock": (
        "freeze('prepare', 'interpreter'); service.devices[0].prepare_model(tiny_model(256))"
    ),
    "executing": (
        "m = service.devices[0].prepare_model(tiny_model(256))\n"
        "freeze('run', 'interpreter'); m.execute_synchronously(request_on(pool))"
    ),
    "in a burst": (
        "c = ExecutionBurstController.create(service.devices[0].prepare_model(tiny_model(256)), polling_window=30.0)\n"
        "freeze('run', 'interpreter'); c.compute(request_on(pool))"
    ),
}


@pytest.mark.parametrize("state", BUSY)
def test_a_killed_client_takes_its_service_along(state: str) -> None:
    client = Client(PRELUDE + BUSY[state])
    client.process.kill()
    client.finish()
    wait_gone(client.pidfds[0])


@pytest.mark.parametrize("how", ["call", "interpreter"])
def test_a_forked_child_of_the_client_with_copies_of_everything_keeps_no_service_alive(how: str) -> None:
    program = PRELUDE + (
        "pid = os.fork()\n"
        "if pid == 0:\n    import signal; signal.pause()\n"
        f"freeze('prepare', '{how}', pid); service.devices[0].prepare_model(tiny_model(256))"
    )
    client = Client(program)
    client.process.kill()
    try:
        client.process.wait(PATIENCE)
        wait_gone(client.pidfds[0])
    finally:
        signal.pidfd_send_signal(client.pidfds[1], signal.SIGKILL)
        wait_gone(client.pidfds[1])
        client.finish()


def test_a_client_that_is_replaced_by_another_program_takes_its_service_along() -> None:
    program = PRELUDE + (
        "print(service.pid, flush=True)\nsys.stdin.readline()\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    )
    client = Client(program)
    client.say()
    wait_gone(client.pidfds[0])
    assert client.finish() == 0
