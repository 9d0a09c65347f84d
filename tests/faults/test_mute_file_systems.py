"""Files whose server stops to answer: the service neither reads nor measures them, and goes on."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnburst import Memory
from nnburst.cache.reasons import CacheReason, CacheRejected
from nnburst.devices import Device
from nnburst.devices.interfaces import CacheFiles, CompileJob
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, InvalidArgument
from nnburst.memory.kinds import PROT_READ
from nnburst.model import Request, RunOptions
from nnburst.model.types import DataLocation, RequestArgument
from nnburst.service.client.proxies import RemotePreparedModel
from nnburst.service.host.host import ServiceHost
from nnburst.service.process.launch import start_child
from nnburst.service.wire.marshal import request_to_wire
from nnburst.service.wire.protocol import ExecuteFenced
from support.models import request_on, tiny_model
from support.waiting import PATIENCE, Background

pytestmark = pytest.mark.check

TOKEN = bytes(32)


@pytest.fixture(params=["read,getattr,poll", "flush"])
def fds(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[int]]:
    """Descriptors of a file on FUSE and of one on an overlay over it, both mounted in another namespace.

    A process that starts while they are open closes its copies, and waits: start services first.
    """
    ours, theirs = socket.socketpair()
    server = subprocess.Popen(
        ["unshare", "-Urm", sys.executable, str(Path(__file__).with_name("mute_file_system.py")), str(theirs.fileno()),
         str(tmp_path), "512", request.param],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    theirs.close()
    ours.settimeout(PATIENCE)
    found: list[int] = []
    try:
        said, found, _, _ = socket.recv_fds(ours, 1, 4)
        if not said:
            pytest.skip(f"FUSE cannot be mounted here: {server.communicate()[1].decode()[-200:]}")
        assert ours.recv(1) == b"!"
        yield found
    finally:
        ours.close()
        server.communicate(timeout=PATIENCE)
        for fd in found:  # nothing waits any more; the kernel says that the server is gone
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with start_child(devices=("nnburst-reference",)) as connection:
        yield connection.devices[0]


@pytest.mark.parametrize("where", [0, 1], ids=["fuse", "overlay"])
def test_pool_on_a_mute_file_system_fails_and_blocks_no_worker(device: Device, fds: list[int], where: int) -> None:
    prepared = device.prepare_model(tiny_model(256))
    with Memory.mmap_fd(fds[where], 256, prot=PROT_READ) as slow, Memory.ashmem(512) as pool:
        inputs = (RequestArgument(location=DataLocation(0, 0, 256)),)
        outputs = (RequestArgument(location=DataLocation(1, 256, 256)),)
        for _ in range(8):  # more than there are workers
            run = Background(lambda: prepared.execute_synchronously(Request(inputs, outputs, (slow, pool)))[0])
            assert run.result() is ErrorStatus.GENERAL_FAILURE
        assert prepared.execute_synchronously(request_on(pool))[0] is ErrorStatus.NONE
    prepared.close()


@pytest.mark.parametrize("where", [0, 1], ids=["fuse", "overlay"])
def test_cache_files_on_a_mute_file_system_are_neither_written_nor_read(
    device: Device, fds: list[int], where: int
) -> None:
    files = CacheFiles((fds[where],), (fds[where],), TOKEN)
    save = Background(lambda: device.prepare_model(tiny_model(256), CompileJob(cache=files)))
    prepared = save.result()
    assert prepared.cache_result.reason is CacheReason.REMOTE_FILES
    prepared.close()
    load = Background(lambda: device.prepare_model_from_cache(files)).result()
    assert isinstance(load, CacheRejected)
    assert load.reason is CacheReason.REMOTE_FILES


@pytest.mark.parametrize("is_spilled", [False, True], ids=["too many", "body"])
def test_connection_that_sends_nonsense_on_a_mute_file_system_ends(fds: list[int], is_spilled: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host = ServiceHost([create_device("nnburst-noop")])
    try:
        connection = host.serve(theirs)
        # kind, flags, descriptors, call id; a body in a descriptor has its length behind
        nonsense = struct.pack("<BBHIQ", 0, 1, 0, 1, 512) if is_spilled else struct.pack("<BBHI", 0, 0, 0, 1)
        socket.send_fds(ours, [nonsense], [fds[0]])
        assert connection.connection.wait_ended(PATIENCE)
        host.close()
    finally:
        ours.close()


@pytest.mark.representative
@pytest.mark.parametrize("where", [0, 1], ids=["fuse", "overlay"])
def test_fence_on_a_mute_file_system_is_refused_without_a_look_at_it(
    device: Device, fds: list[int], where: int
) -> None:
    prepared = device.prepare_model(tiny_model(256))
    assert isinstance(prepared, RemotePreparedModel)
    with Memory.ashmem(512) as pool:
        wire, pool_fds = request_to_wire(request_on(pool))
        for _ in range(8):  # more than there are workers
            message = ExecuteFenced(prepared.number, wire, RunOptions(), 1)
            with pytest.raises(InvalidArgument, match="is not a fence"):
                prepared.connection.call(message, [*pool_fds, fds[where]], timeout=PATIENCE)
        assert prepared.execute_synchronously(request_on(pool))[0] is ErrorStatus.NONE
    prepared.close()
