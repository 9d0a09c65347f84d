"""A service that is killed while it compiles or restores: the call in flight is told, and does not hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from nnburst.devices import Device, PreparedModel
from nnburst.devices.interfaces import CacheFiles, CompileJob
from nnburst.errors import DeadObject, ErrorStatus
from nnburst.service.process.launch import start_child
from nnburst.testing import inject
from support.caches import cache_files
from support.models import tiny_model
from support.waiting import Background

Call = Callable[[Device, CacheFiles], PreparedModel]
CALLS: dict[str, tuple[str, Call]] = {
    "REQ_CACHE_065_prepare_model": ("prepare", lambda device, files: device.prepare_model(tiny_model(256))),
    "REQ_CACHE_072_from_cache": ("restore", lambda device, files: device.prepare_model_from_cache(files)),
    "REQ_CACHE_079_with_files": (
        "prepare",
        lambda device, files: device.prepare_model(tiny_model(256), CompileJob(cache=files)),
    ),
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[CacheFiles]:
    with cache_files(tmp_path) as files:
        yield files


@pytest.mark.parametrize(("step", "call"), CALLS.values(), ids=CALLS.keys())
def test_service_killed_during_the_call_is_a_dead_object(
    files: CacheFiles, step: Literal["prepare", "restore"], call: Call
) -> None:
    with start_child(devices=("nnburst-reference",), faults=True) as connection:
        device = connection.devices[0]
        frozen = inject(connection, at=step, freeze="call")
        running = Background(lambda: call(device, files))
        frozen.wait()  # the service is inside the call
        os.kill(connection.pid, signal.SIGKILL)
        error = running.result()
        assert isinstance(error, DeadObject)
        assert error.status is ErrorStatus.DEAD_OBJECT
        with pytest.raises(DeadObject):
            call(device, files)
