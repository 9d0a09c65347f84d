"""Each test leaves nothing behind. Fixtures of several files: shared services, a gateway and its clients."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.services import Honest, Shared, shared_service

if TYPE_CHECKING:
    from support.gateways import Gateway


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("leaks"):
        request.getfixturevalue("nnburst_leaves_nothing")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Shared]]:
    """Starts shared services of this test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda *options, **more: stack.enter_context(
            shared_service(tmp_path, "--device", "nnburst-reference", *options, **more)
        )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A shared service for the tests of a module, which leave it as it was."""
    with shared_service(tmp_path_factory.mktemp("shared"), "--device", "nnburst-reference") as shared:
        yield shared


@pytest.fixture(scope="module")
def honest(shared: Shared) -> Iterator[Honest]:
    """A client of that service."""
    with Honest(shared.address) as honest:
        yield honest


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
def stub(gateway: Gateway) -> Iterator[Any]:
    """The calls of gRPC, for messages that Triton's client does not send."""
    import grpc
    from tritonclient.grpc import service_pb2_grpc

    with grpc.insecure_channel(gateway.url("grpc")) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture
def infer_url(gateway: Gateway) -> str:
    return f"http://{gateway.url('rest')}/v2/models/relu/infer"


@pytest.fixture
def memory() -> Iterator[Any]:
    from tritonclient.utils import shared_memory as region

    memory = region.create_shared_memory_region("tensors", f"/nnburst-test-{os.getpid()}", 4096)
    yield memory
    region.destroy_shared_memory_region(memory)
