"""The broker of a shared service, in process: whom it keeps, and whom it sends away."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest

from nnburst.errors import InvalidArgument
from nnburst.service.client.connection import send_order
from nnburst.service.host.quotas import PER_USER, Ledger
from nnburst.service.process import broker as _broker
from nnburst.service.process import workers
from nnburst.service.process.broker import AccessPolicy, Broker
from nnburst.service.process.discovery import Peer
from nnburst.service.process.workers import AcceptedClient
from nnburst.service.wire.protocol import EndClients, LoadModel
from support.waiting import PATIENCE

Dial = Callable[[], socket.socket]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Broker, Dial]]]:
    """Make a broker whose worker does nothing, and dial it."""
    monkeypatch.setattr(workers, "own_groups", lambda: None)
    with contextlib.ExitStack() as stack:
        address = str(tmp_path / "socket")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(address)
        listener.listen()

        def dial() -> socket.socket:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.connect(address)
            sock.setblocking(False)
            return sock

        def make(user_quotas: Mapping[str, int] = MappingProxyType({}), **options: Any) -> tuple[Broker, Dial]:
            def pool(broker: Broker) -> workers.WorkerPool:
                return workers.WorkerPool(
                    broker, lambda *_, **__: Mock(pid=os.getpid()), "name", [], user_quotas=user_quotas
                )

            made = Broker([listener], pool, **options)
            stack.callback(made.close)
            return made, dial

        yield make


@contextlib.contextmanager
def running(broker: Broker, dial: Dial, **options: Any) -> Iterator[str]:
    """Have a broker run, in a thread that handles no signals. Yields its address."""
    (listener,) = broker._listeners.values()
    thread = threading.Thread(target=broker._loop)
    broker._change = options.get("change")  # type: ignore[assignment]
    thread.start()
    try:
        yield f"unix:{listener.getsockname()}"
    finally:
        broker.stop("enough")
        thread.join()
        broker._changes.shutdown()


def is_disconnected(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


def test_of_many_peers_that_are_refused_sixteen_at_a_time_are_told_why(serve: Any) -> None:
    broker, dial = serve(user_quotas={"connections": 0})
    peers = []
    for _ in range(20):
        peers.append(dial())
        broker._accept(*broker._listeners.values())
    assert [is_disconnected(peer) for peer in peers] == [False] * 16 + [True] * 4


def test_broker_is_in_use_while_a_peer_has_time_to_say_hello(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_broker, "_HELLO_PATIENCE", 0.1)
    broker, dial = serve(idle_exit=0.001)
    peer = dial()
    assert broker.run().startswith("no client for")
    assert "it has not said hello" in caplog.text
    assert is_disconnected(peer)


def test_process_that_ends_the_clients_of_a_user_keeps_its_own_connection_and_those_of_others(serve: Any) -> None:
    broker, _ = serve()
    user = Ledger(PER_USER, "user 7")
    with contextlib.ExitStack() as stack:
        for pid, uid in ((1, 7), (2, 7), (3, 7), (4, 8)):
            ours, theirs = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            stack.enter_context(theirs)
            broker.workers.add_client(AcceptedClient(pid, ours, Peer(pid, uid, frozenset()), user.charge()))
        assert broker.kick(2, "enough", 7) == 2
        (shared,) = broker.workers
        assert list(shared.clients) == [2, 4]
        assert broker.kick(2, "enough", None) == 1
        assert list(shared.clients) == [4]


def test_user_who_does_not_run_the_service_orders_nothing(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, dial = serve(policy=AccessPolicy(uids=frozenset({65534})))
    monkeypatch.setattr(_broker, "peer_of", lambda sock: Peer(4711, 65534, frozenset()))
    with running(broker, dial) as address:
        for message in (EndClients(4711), LoadModel("relu", unload=True)):
            with pytest.raises(InvalidArgument, match="user 65534 may not order that of this service"):
                send_order(address, message, timeout=PATIENCE)


def test_load_that_takes_long_leaves_the_broker_to_other_orders(serve: Any) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def load(name: str | None, unload: bool) -> None:
        begun.release()
        assert go_on.wait(PATIENCE)
        if unload:
            raise InvalidArgument(f"{name} has no files")

    with running(*serve(), change=load) as address, ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(send_order, address, LoadModel("relu", unload)) for unload in (False, True)]
        assert begun.acquire(timeout=PATIENCE)
        assert send_order(address, EndClients(4711), timeout=PATIENCE).connections == 0
        assert not begun.acquire(blocking=False), "two at once"
        go_on.set()
        answers = {load.exception(PATIENCE) and str(load.exception()) for load in loads}
        assert answers == {None, "relu has no files"}
