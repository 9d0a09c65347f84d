"""Each test leaves nothing behind. Fixtures of several files: a gateway and its clients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.gateways import Gateway


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("leaks"):
        request.getfixturevalue("nnburst_leaves_nothing")


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    from support.gateways import Gateway  # needs extras

    gateway = Gateway(tmp_path_factory.mktemp("gateway"), "--oip-shared-memory")
    yield gateway
    gateway.close()


@pytest.fixture(params=["grpc", "rest"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(gateway: Gateway, protocol: str) -> Iterator[Any]:
    client = gateway.client(protocol)
    yield client
    client.close()


@pytest.fixture
def memory() -> Iterator[Any]:
    from tritonclient.utils import shared_memory as region

    memory = region.create_shared_memory_region("tensors", f"/nnburst-test-{os.getpid()}", 4096)
    yield memory
    region.destroy_shared_memory_region(memory)
