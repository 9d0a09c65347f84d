"""`nnburst serve --metrics` while programs of the machine do what they like with its port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import nnburst
from nnburst import InvalidArgument
from nnburst.cli.serve.metrics import metrics
from nnburst.watch import RowKind, find_services, look
from nnburst.watch.metrics import MetricsServer
from support.models import relu
from support.processes import beside
from support.services import Shared, shared_service
from support.waiting import PATIENCE, until

pytest.importorskip("prometheus_client", reason="needs the extra nnburst[metrics]")

CONNECTIONS = 500
X = {"x": np.zeros((1, 4), np.float32)}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Shared]:
    with shared_service(tmp_path, "--device", "nnburst-noop", "--metrics", "0") as shared:
        yield shared


def scraped(shared: Shared) -> str:
    """What a scrape gives; one that is turned away is repeated."""

    def scrape() -> str:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(shared.ready["metrics"], timeout=PATIENCE) as answer,
        ):
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
            assert f'nnburst_results_total{{model="nnburst-noop: x → y",user="{os.geteuid()}"}} 1.0' in scraped(served)


def test_process_that_serves_metrics_is_started_again_and_what_came_meanwhile_is_answered(served: Shared) -> None:
    (first,) = beside(served.pid)
    os.kill(first, signal.SIGKILL)
    with socket.create_connection(address(served), PATIENCE) as sock:  # before there is another one
        sock.settimeout(PATIENCE)
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert sock.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
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


@pytest.mark.parametrize(
    "sent", [b"", b"GET /met", b"GET\r\n\r\n", b"x" * 100_000], ids=["none", "slow", "bad", "long"]
)
def test_request_that_is_none_does_not_stay(sent: bytes) -> None:
    def never(environ: object, start: object) -> list[bytes]:
        raise AssertionError("it was taken for a request")

    async def main() -> bytes:
        ended, ready = asyncio.Event(), asyncio.Event()
        patience = PATIENCE if sent.endswith(b"\n") else 0.05  # one that says more than it should has its answer
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = asyncio.ensure_future(MetricsServer(never, patience=patience).serve(listener, ended, ready.set))
            await ready.wait()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(sent)
            said = b""
            with contextlib.suppress(ConnectionError):  # nothing is said to it
                said = await reader.read()
            writer.close()
            ended.set()
            await server
        return said

    assert asyncio.run(main())[:12] == (b"HTTP/1.1 400" if sent.endswith(b"\n") else b"")


def test_socket_without_a_path_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="give a port of this machine"), metrics("unix:"):
        pass


def test_latest_connection_is_served_where_there_are_as_many_as_may_be() -> None:
    def answer(environ: dict[str, str], start: object) -> list[bytes]:
        start(environ["QUERY_STRING"], [])  # type: ignore[operator]
        return [environ["HTTP_X_WORD"].encode()]

    async def main() -> list[bytes]:
        ended, ready = asyncio.Event(), asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = asyncio.ensure_future(MetricsServer(answer, most=2).serve(listener, ended, ready.set))  # type: ignore[arg-type]
            await ready.wait()
            idle = [await asyncio.open_connection(*listener.getsockname()) for _ in range(3)]
            with contextlib.suppress(ConnectionError):
                await idle[0][0].read()  # the oldest had to go
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET /?200 HTTP/1.1\r\nX-Word: yes\r\n\r\n")
            lines = (await reader.read()).splitlines()
            for _, other in (*idle, (reader, writer)):
                other.close()
            ended.set()
            await server
        return lines

    lines = asyncio.run(main())
    assert (lines[0], lines[-1]) == (b"HTTP/1.1 200", b"yes")
