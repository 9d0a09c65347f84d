"""`nnburst serve --metrics` while programs of the machine do what they like with its port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

import nnburst
from nnburst import InvalidArgument
from nnburst._core.tokens import EVERYONE, Tokens
from nnburst.cli.serve.children import start_metrics
from nnburst.watch import RowKind, find_services, look
from support.models import relu
from support.processes import beside
from support.services import Shared, shared_service
from support.waiting import PATIENCE, until

pytest.importorskip("aiohttp", reason="needs the extra nnburst[metrics]")
pytest.importorskip("prometheus_client", reason="needs the extra nnburst[metrics]")

import aiohttp
from prometheus_client import CollectorRegistry

from nnburst.gateway.metrics import serve_metrics

CONNECTIONS = 500
X = {"x": np.zeros((1, 4), np.float32)}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Shared]:
    with shared_service(tmp_path, "--device", "nnburst-noop", "--metrics", "0") as shared:
        yield shared


def scraped(shared: Shared) -> str:
    """What a scrape gives; one that is turned away is repeated."""

    def scrape() -> str:
        with contextlib.suppress(OSError), urllib.request.urlopen(shared.ready["metrics"], timeout=PATIENCE) as answer:
            return str(answer.read().decode())
        return ""

    return str(until(scrape, "no scrape succeeds"))


def address(shared: Shared) -> tuple[str, int]:
    host, _, port = shared.ready["metrics"].split("/")[2].partition(":")
    return host, int(port)


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.check
def test_idle_connections_to_the_metrics_port_take_nothing_of_the_service(served: Shared) -> None:
    scraped(served)
    assert served.worker
    before = threads(served.pid), served.descriptors()
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(socket.create_connection(address(served), PATIENCE))
        assert "nnburst_open_models 0.0" in scraped(served)
        # One more is the thread that serves the calls of a worker; what a scrape opens is closed after its answer.
        until(lambda: threads(served.pid) <= before[0] + 1, "threads are taken")
        until(lambda: served.descriptors() <= before[1], "descriptors are taken")
        (exporter,) = beside(served.pid)
        assert threads(exporter) == 1
        assert len(os.listdir(f"/proc/{exporter}/fd")) < 200
        with nnburst.connect(served.address) as service, service.session(relu((1, 4))) as session:
            session.run(None, X)
            counted = f'nnburst_results_total{{model="nnburst-noop: x → y",user="{os.geteuid()}"}} 1.0'
            until(lambda: counted in scraped(served), "the run is not counted")  # an answer is, once it is sent


def test_process_that_serves_metrics_is_started_again_at_its_port(served: Shared) -> None:
    (first,) = beside(served.pid)
    os.kill(first, signal.SIGKILL)
    assert "nnburst_open_models" in scraped(served)
    (second,) = beside(served.pid)
    assert second != first
    assert "another one is started" in served.log.read_text()


@pytest.mark.check
def test_only_the_service_is_found_by_those_who_watch(served: Shared) -> None:
    (exporter,) = beside(served.pid)
    with nnburst.connect(served.address) as service:
        assert [page.pid for page in find_services(service.pid)] == [service.pid]
    assert list(find_services(exporter)) == []
    (page,) = find_services(served.pid)
    assert {row.client_pid for row in look(page).of(RowKind.PROCESS)} == {served.worker}


@contextlib.asynccontextmanager
async def answering(tokens: Tokens = EVERYONE, most: int = 8) -> AsyncIterator[tuple[str, int]]:
    """Where an empty registry is served."""
    runner, port = await serve_metrics(CollectorRegistry(), "127.0.0.1:0", tokens, most)
    try:
        yield "127.0.0.1", int(port)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("field", "status"), [(b"Accept: ", b"200"), (b"Authorization: Bearer ", b"401")])
def test_field_of_bytes_that_are_no_ascii_is_answered(field: bytes, status: bytes, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text("monitor:0123456789abcdef\n")

    async def main() -> bytes:
        async with answering(Tokens(str(file) if status == b"401" else None)) as place:
            reader, writer = await asyncio.open_connection(*place)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: here\r\n" + field + b"\xff\xc3\xa9\r\n\r\n")
            said = await reader.readline()
            writer.close()
        return said

    assert asyncio.run(main()).startswith(b"HTTP/1.1 " + status)


def test_each_path_asks_for_a_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text("monitor:0123456789abcdef\n")

    async def main() -> int:
        async with answering(Tokens(str(file))) as (host, port), aiohttp.ClientSession() as http:
            async with http.get(f"http://{host}:{port}/v2/health/live") as answer:
                return answer.status

    assert asyncio.run(main()) == 401


def test_socket_without_a_path_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="give HOST:PORT"):
        start_metrics("unix:", {"token_file": None})


def test_latest_connection_is_served_where_there_are_as_many_as_may_be() -> None:
    async def main() -> str:
        async with answering(most=2) as place:
            idle = [await asyncio.open_connection(*place) for _ in range(3)]
            with contextlib.suppress(ConnectionError):
                assert await idle[0][0].read() == b""  # the oldest had to go
            async with aiohttp.ClientSession() as http, http.get(f"http://{place[0]}:{place[1]}") as answer:
                kind = answer.content_type
            for _, other in idle:
                other.close()
        return kind

    assert asyncio.run(main()) == "text/plain"
