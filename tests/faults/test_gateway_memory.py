"""Shared memory that requests of the Open Inference Protocol name."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as region

from nnburst.errors import BadState, InvalidArgument, ResourceExhausted
from nnburst.gateway.inference import Inference, InputTensor, RegionPlace, infer
from nnburst.gateway.models import ModelCounts
from nnburst.gateway.regions import Regions
from support.gateways import MARKS, PROTOCOLS, Gateway, X, Y, conversions, placed, shared_memory, tensor
from support.waiting import meanwhile

pytestmark = MARKS


def test_tensors_in_shared_memory(client: Any, protocol: str, memory: Any) -> None:
    kind = PROTOCOLS[protocol]
    client.register_system_shared_memory("tensors", f"/nnburst-test-{os.getpid()}", 4096)
    try:
        region.set_shared_memory_region(memory, [X])
        wanted = kind.InferRequestedOutput("y")
        wanted.set_shared_memory("tensors", Y.nbytes, 1024)
        client.infer("relu", [placed(kind)], outputs=[wanted])
        assert region.get_contents_as_numpy(memory, np.float32, [2, 8], 1024).tobytes() == Y.tobytes()
        status = client.get_system_shared_memory_status(**({"as_json": True} if protocol == "grpc" else {}))
        assert "tensors" in str(status)
    finally:
        client.unregister_system_shared_memory("tensors")
    with pytest.raises(InferenceServerException, match="no region 'tensors'"):
        client.infer("relu", [placed(kind)])


NO_REGION: dict[str, tuple[tuple[str, str, int, int], str]] = {
    "a path out of the folder": (("r", "/../../etc/passwd", 0, 16), "is no name of a POSIX shared memory"),
    "a folder": (("r", "/..", 0, 16), "is no name of a POSIX shared memory"),
    "no name": (("", "{key}", 0, 16), "the name of a region has 1 to 255 characters, got 0"),
    "a long name": (("r" * 5000, "{key}", 0, 16), "the name of a region has 1 to 255 characters, got 5000"),
    "not there": (("r", "/nnburst-not-there", 0, 16), "cannot open the shared memory '/nnburst-not-there'"),
    "too large": (("r", "{key}", 0, 4097), r"has 4096 bytes, not 0 \+ 4097"),
    "beyond the end": (("r", "{key}", 1, 4096), r"has 4096 bytes, not 1 \+ 4096"),
    "huge": (("r", "{key}", 2**62, 2**63 - 1), rf"has 4096 bytes, not {2**62} \+ {2**63 - 1}"),
    "empty": (("r", "{key}", 0, 0), "offset 0 and size 0 are no part of a memory"),
}


@pytest.mark.parametrize("what", NO_REGION)
def test_region_that_is_none_is_refused(what: str, memory: Any) -> None:
    (name, key, offset, size), said = NO_REGION[what]
    regions = Regions(True)
    with pytest.raises(InvalidArgument, match=said):
        regions.register(name, key.format(key=f"/nnburst-test-{os.getpid()}"), offset, size)
    assert regions.status("") == []


def test_region_is_registered_once_and_there_are_not_too_many(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnburst.gateway.regions._MOST_REGIONS", 1)
    regions, key = Regions(True), f"/nnburst-test-{os.getpid()}"
    regions.register("r", key, 0, 16)
    with pytest.raises(BadState, match="'r' is registered already"):
        regions.register("r", key, 0, 32)
    with pytest.raises(ResourceExhausted, match="1 regions are registered"):
        regions.register("another", key, 0, 16)
    assert [row["byte_size"] for row in regions.status("")] == [16]


@pytest.mark.parametrize(("offset", "size"), [(4096, 64), (4090, 64), (0, 63), (0, 4097), (2**62, 64)])
def test_part_that_is_none_of_a_region_is_refused(
    client: Any, protocol: str, memory: Any, offset: int, size: int
) -> None:
    client.register_system_shared_memory("tensors", f"/nnburst-test-{os.getpid()}", 4096)
    try:
        with pytest.raises(InferenceServerException):
            client.infer("relu", [placed(PROTOCOLS[protocol], offset, size)])
    finally:
        client.unregister_system_shared_memory("")


def test_memory_that_its_owner_cuts_fails_the_request_only(gateway: Gateway, client: Any, protocol: str) -> None:
    key = f"/nnburst-cut-{os.getpid()}"
    with shared_memory(key, 4096) as fd:
        client.register_system_shared_memory("cut", key, 4096)
        os.ftruncate(fd, 16)
        wanted = PROTOCOLS[protocol].InferRequestedOutput("y")
        wanted.set_shared_memory("cut", Y.nbytes, 1024)
        with pytest.raises(InferenceServerException, match="its owner cut it"):
            client.infer("relu", [placed(PROTOCOLS[protocol], name="cut")])
        with pytest.raises(InferenceServerException, match="its owner cut it"):
            client.infer("relu", [tensor(PROTOCOLS[protocol], "x", X)], outputs=[wanted])
        client.unregister_system_shared_memory("cut")
    assert client.infer("relu", [tensor(PROTOCOLS[protocol], "x", X)]).as_numpy("y").tobytes() == Y.tobytes()


def test_region_that_is_forgotten_while_requests_use_it(
    gateway: Gateway, client: Any, protocol: str, memory: Any
) -> None:
    kind, url, key = PROTOCOLS[protocol], gateway.url(protocol), f"/nnburst-test-{os.getpid()}"
    region.set_shared_memory_region(memory, [X])
    wanted = kind.InferRequestedOutput("y")
    wanted.set_shared_memory("tensors", Y.nbytes, 1024)

    def come_and_go() -> None:
        other.register_system_shared_memory("tensors", key, 4096)
        other.unregister_system_shared_memory("tensors")

    answers = refusals = 0
    with contextlib.closing(kind.InferenceServerClient(url)) as other, meanwhile(come_and_go):
        while answers < 5 or refusals < 5:
            region.set_shared_memory_region(memory, [np.zeros_like(Y)], 1024)
            try:
                client.infer("relu", [placed(kind)], outputs=[wanted])
            except InferenceServerException as error:
                assert "no region 'tensors' is registered" in str(error)
                refusals += 1
            else:
                assert region.get_contents_as_numpy(memory, np.float32, [2, 8], 1024).tobytes() == Y.tobytes()
                answers += 1


def test_memory_that_is_cut_during_the_run_fails_the_request() -> None:
    tensor, regions, key = conversions("FP32"), Regions(True), f"/nnburst-cut-{os.getpid()}"

    async def run(inputs: dict[str, Any], timeout: float | None) -> list[Any]:
        os.truncate(f"/dev/shm{key}", 4096)
        return [inputs["x"] + 1]

    model = SimpleNamespace(
        version="1", inputs={"x": tensor}, outputs={"y": tensor}, counts=ModelCounts(), is_repeatable=False, run=run
    )

    async def opened(*asked: Any) -> Any:
        return model

    models: Any = SimpleNamespace(open=opened)
    given = InputTensor("x", "FP32", (1024,), RegionPlace("cut", 4096, 4096))
    with shared_memory(key, 8192):
        regions.register("cut", key, 0, 8192)
        with pytest.raises(InvalidArgument, match="its owner cut it"):
            asyncio.run(infer(models, regions, Inference("m", "", [given])))


def test_memory_that_is_cut_while_it_is_used_voids_the_request() -> None:
    regions, key = Regions(True), f"/nnburst-cut-{os.getpid()}"
    with shared_memory(key, 1 << 20) as fd:
        regions.register("cut", key, 4096, (1 << 20) - 4096)
        part, of_it = regions.part("cut", 4096, 8192)
        assert not part.any()
        of_it.check()
        os.ftruncate(fd, 4096)
        regions.unregister("cut")
        assert not part.any()
        with pytest.raises(InvalidArgument, match="its owner cut it"):
            of_it.check()


@pytest.mark.check
def test_memory_is_refused_unless_it_was_allowed(tmp_path: Path, memory: Any) -> None:
    gateway = Gateway(tmp_path)
    client = gateway.client("grpc")
    with pytest.raises(InferenceServerException, match="--oip-shared-memory"):
        client.register_system_shared_memory("tensors", f"/nnburst-test-{os.getpid()}", 4096)
    client.close()
    gateway.close()
