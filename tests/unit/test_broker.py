"""The broker of a shared service, in process: whom it keeps, and whom it sends away."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nnburst.errors import DeviceUnavailable
from nnburst.service.host.quotas import PER_USER, Ledger
from nnburst.service.process import broker as _broker
from nnburst.service.process import workers
from nnburst.service.process.broker import Broker
from nnburst.service.process.discovery import Peer
from nnburst.service.process.worker import AcceptedClient

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

        def make(**options: Any) -> tuple[Broker, Dial]:
            made = Broker(lambda *_, **__: Mock(pid=os.getpid()), "name", [listener], devices=[], **options)
            stack.callback(made.close)
            return made, dial

        yield make


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
            broker.workers.take(AcceptedClient(pid, ours, Peer(pid, uid, frozenset()), user.charge()))
        assert broker.kick(2, "enough", 7) == 2
        (shared,) = broker.workers
        assert list(shared.clients) == [2, 4]
        assert broker.kick(2, "enough", None) == 1
        assert list(shared.clients) == [4]


def test_model_that_is_to_be_loaded_while_the_service_ends_is_refused(serve: Any) -> None:
    broker, _ = serve(idle_exit=0.001)

    def finish() -> None:
        with pytest.raises(DeviceUnavailable, match="the service is ending"):
            broker.change_models("relu", unload=False)

    assert broker.run(finish=finish).startswith("no client for")
