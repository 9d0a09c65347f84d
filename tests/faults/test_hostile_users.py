"""Two users on one service, one of them hostile, in each way in turn: the other one connects and runs all the time."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import Model, ModelBuilder, OperandType
from nnburst._core._nnburst import lib
from nnburst.service.wire import protocol
from support.intruder import attack_with, hostile_service
from support.models import relu
from support.services import RawConnection, Shared, header, let_pass, shared_service, told_to_pass
from support.users import GUEST, OTHER_GUEST, as_root, as_user, beside, open_directory
from support.waiting import PATIENCE, until

pytestmark = [pytest.mark.check, as_root]

X = {"x": np.ones((1, 4), np.float32)}
FUNCTIONS = """
from nnburst.devices.function import Tensor, declare

def of(*names):
    return dict(inputs=[Tensor(name, 'float32', (1, 4)) for name in names], outputs=[Tensor('y', 'float32', (1, 4))])

@declare(**of('x'))
def same(x): return x

@declare(**of(*(f'an_input_with_a_long_name_{n}' for n in range(3000))))
def wide(*all): return all[0]
"""
REFERENCE = "nnburst-reference"
LONG = protocol.encode(protocol.ImportModel(2, "name:wide"))
"""A short call with an answer of half a megabyte. The hostile device and that of the reference come before."""
MOST_UNREAD, MOST_CONNECTIONS = 8 << 20, 50


# ---- rounds of a hostile user, who is at it once `begun` is set ------------------------------------------------------


def does_not_read(shared: Shared, begun: threading.Event) -> None:
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        for _ in range(10):
            connection = stack.enter_context(RawConnection(shared))
            connection.greet()
            for number in range(30):
                connection.send(header(1 + number), LONG, [])
            poll.register(connection.sock, 0)
        begun.set()
        poll.poll()  # until one has ended


def floods(shared: Shared, begun: threading.Event) -> None:
    with RawConnection(shared) as connection:
        connection.greet()
        begun.set()
        while True:
            connection.send(header(1), protocol.encode(protocol.ListDevices()), [])


def runs_for_ever(shared: Shared, begun: threading.Event) -> None:
    with nnburst.connect(shared.address) as service, service.session(endless(), device=REFERENCE) as session:
        flights = []
        for execution in [session.bind() for _ in range(4)]:
            execution.inputs["x"][:] = True
            flights.append(execution.submit())
        begun.set()
        for flight in flights:
            flight.exception(PATIENCE)


def endless() -> Model:
    """Make a loop whose condition is its input."""
    condition, body, b = ModelBuilder(), ModelBuilder(), ModelBuilder()
    going = condition.input("going", OperandType.TENSOR_BOOL8, (1,))
    condition.output("again", condition.logical_or(going, going))
    state = body.input("going", OperandType.TENSOR_BOOL8, (1,))
    body.output("still", body.logical_and(state, state))
    b.output("y", b.loop(condition.build(), body.build(), [b.input("x", OperandType.TENSOR_BOOL8, (1,))])[0])
    return b.build()


def crashes(shared: Shared, begun: threading.Event) -> None:
    with nnburst.connect(shared.address) as service, contextlib.suppress(nnburst.DeadObject):
        attack_with(service)
    begun.set()


def opens(shared: Shared, begun: threading.Event) -> None:
    with contextlib.ExitStack() as stack, open(os.devnull) as null:
        for number in itertools.count():
            connection = stack.enter_context(RawConnection(shared))
            connection.send(header(1), protocol.encode(protocol.Hello(protocol.VERSION, os.getpid())), [])
            if b"hello.reply" not in connection.answer():
                begun.set()  # there are as many as it may have
                return
            if number % 2:
                connection.send(header(2), protocol.encode(protocol.ListDevices()), [null.fileno()] * 250)


WHO = rf"process \d+ of user {OTHER_GUEST}"
WAYS: dict[str, tuple[Callable[[Shared, threading.Event], None], str]] = {
    "does not read": (does_not_read, f"{WHO} is disconnected: the peer does not read its socket"),
    "floods": (floods, f"{WHO} is disconnected: malformed message: too many calls at once"),
    "runs for ever": (runs_for_ever, ""),  # its runs end, not its connection
    "crashes": (crashes, rf"the worker of user {OTHER_GUEST} .* was killed by SIGABRT"),
    "opens": (opens, f"{WHO} is refused: user {OTHER_GUEST} may have {MOST_CONNECTIONS} connections"),
}
"""What the hostile user does, and what the log says of it."""


@contextlib.contextmanager
def at_it(way: str, shared: Shared) -> Iterator[None]:
    """Have this process, which then ends, be hostile in one way, again and again."""
    begun = threading.Event()

    def rounds() -> None:
        while True:
            with contextlib.suppress(OSError, AssertionError, nnburst.NNBurstError):
                WAYS[way][0](shared, begun)

    threading.Thread(target=rounds, daemon=True).start()
    assert begun.wait(PATIENCE)
    yield


# ---- the other user --------------------------------------------------------------------------------------------------


def is_served(address: str, turns: int, seconds: float) -> str:
    """Connect and run in so many turns, and for so many seconds at least; return how many turns there were."""
    ends, done = time.monotonic() + seconds, 0
    with nnburst.connect(address, open_timeout=PATIENCE) as first, first.session("same", timeout=PATIENCE) as stays:
        while done < turns or time.monotonic() < ends:
            with (
                nnburst.connect(address, open_timeout=PATIENCE) as service,
                service.session("same", timeout=PATIENCE) as named,
                service.session(relu((1, 4)), device=REFERENCE, timeout=PATIENCE) as own,
            ):
                for session in (stays, named, own):
                    assert (session.run(None, X)[0] == 1).all()
            done += 1
    return str(done)


@pytest.fixture(scope="module", params=[0.0, pytest.param(60.0, marks=pytest.mark.soak)], ids=["turns", "a minute"])
def service(request: pytest.FixtureRequest) -> Iterator[tuple[Shared, float]]:
    """A service that is limited as an ordinary user's, and how long the hostile user has. Short: it waits less, too."""

    def crash() -> None:
        os.abort()

    patience = 10.0 if request.param else 2.0
    setup = "from nnburst.service.connection.transport import Connection\n"
    setup += f"Connection.__init__.__kwdefaults__['send_timeout'] = {patience}\n"
    users = [f"--allow-uid={user}" for user in (GUEST, OTHER_GUEST)]
    quotas = f"user.working_bytes={MOST_UNREAD}", f"user.connections={MOST_CONNECTIONS}"
    limits = "--max-run=1", *(f"--quota={quota}" for quota in quotas)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(open_directory())
        (place / "functions.py").write_text(FUNCTIONS)
        options = "--device", REFERENCE, *(f"{place}/functions.py:{name}" for name in ("same", "wide")), *users, *limits
        limited: Any = {"setup": setup, "preexec_fn": lib.nnb_capabilities_drop}
        shared = stack.enter_context(hostile_service(place, crash, *options, **limited))
        is_served(shared.address, 1, 0)  # reads all modules, which the users may not
        endless()
        yield shared, request.param


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_user_beside_a_hostile_one_connects_and_runs(service: tuple[Shared, float], way: str) -> None:
    shared, seconds = service
    with beside(OTHER_GUEST, partial(at_it, way, shared)):
        said = as_user(GUEST, partial(is_served, shared.address, 5, seconds))
        assert said.isdigit(), said
        assert int(said) >= 5
        until(lambda: re.search(WAYS[way][1], shared.log.read_text()), "the log does not say who was disconnected")


def test_client_of_a_dead_worker_counts_until_it_has_read_its_answers_or_gone(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    targets = [f"{tmp_path}/functions.py:{name}" for name in ("same", "wide")]
    options = "--device=nnburst-noop", "--device", REFERENCE, *targets, "--quota=user.connections=1"
    with shared_service(tmp_path, *options, before=told_to_pass(tmp_path)) as shared:
        worker = shared.worker
        with until(lambda: greeted(shared)) as first:
            first.send(header(2), LONG, [])
            until(lambda: select.select([first.sock], [], [], 0)[0])
            os.kill(worker, signal.SIGKILL)
            until(lambda: "was killed by SIGKILL" in shared.log.read_text())
            let_pass(tmp_path, 10)
            for _ in range(3):
                with pytest.raises(nnburst.DeviceUnavailable, match="may have 1 connections"):
                    nnburst.connect(shared.address)
        until(lambda: greeted(shared), "it counts for ever").close()


def greeted(shared: Shared) -> RawConnection | None:
    """Return a connection of its own; None while one that has ended still counts."""
    connection = RawConnection(shared)
    with contextlib.suppress(AssertionError):
        connection.greet()
        return connection
    return connection.close()
