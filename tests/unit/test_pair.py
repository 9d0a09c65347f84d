"""A session and its standby: which of them requests get, when services die at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from nnburst import Session
from nnburst.errors import BadState, DeadObject, DeviceUnavailable, MissedDeadline
from nnburst.scale.pair import Pair
from support.models import relu
from support.waiting import PATIENCE, until


class Peer:
    """What a pair needs of a session: a service that lives or not."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = True
        self.closed = threading.Event()

    @property
    def service(self) -> Peer:
        return self

    def close(self) -> None:
        self.closed.set()


class Opener:
    """Opens peers 1, 2, 3, ...; from the third on when the test says so: `open` or `fail`."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.asked = 0
        self._outcomes: queue.Queue[Exception | None] = queue.Queue()
        self.open(2)

    def open(self, count: int = 1) -> None:
        for _ in range(count):
            self._outcomes.put(None)

    def fail(self) -> None:
        self._outcomes.put(DeviceUnavailable("no memory"))

    def __call__(self) -> Session:
        self.asked += 1
        error = self._outcomes.get(timeout=PATIENCE)
        if error is not None:
            raise error
        self.peers.append(Peer(len(self.peers) + 1))
        return cast(Session, self.peers[-1])


@pytest.fixture
def opener() -> Iterator[Opener]:
    opener = Opener()
    before = set(threading.enumerate())
    yield opener
    opener.open(10)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)


def number(session: Session) -> int:
    """Run: a peer whose service is gone fails."""
    peer = cast(Peer, session)
    if not peer.alive:
        raise DeadObject("gone")
    return peer.number


def dies_unnoticed(*numbers: int) -> Callable[[Session], int]:
    """Run: the service is gone, which only the request knows as yet."""

    def call(session: Session) -> int:
        peer = cast(Peer, session)
        if peer.number in numbers:
            raise DeadObject("gone")
        return peer.number

    return call


Ask = Callable[[Pair, Callable[[Session], int]], int]


def ask_plainly(pair: Pair, call: Callable[[Session], int]) -> int:
    return pair.run(call)


def ask_awaited(pair: Pair, call: Callable[[Session], int]) -> int:
    async def awaited(session: Session) -> int:
        await asyncio.sleep(0)
        return call(session)

    return asyncio.run(pair.arun(awaited))


asks = pytest.mark.parametrize("ask", [ask_plainly, ask_awaited], ids=["run", "arun"])


@asks
def test_request_that_finds_the_death_first_goes_to_the_standby_and_waits_for_no_start(
    opener: Opener, ask: Ask
) -> None:
    with contextlib.closing(Pair(opener, retry=True)) as pair:
        assert ask(pair, dies_unnoticed(1)) == 2  # no third one is open
        assert ask(pair, number) == 2
        opener.open()
        until(lambda: len(opener.peers) == 3)
        assert ask(pair, dies_unnoticed(2)) == 3


@asks
def test_request_without_retry_gets_the_death_and_the_next_one_the_standby(opener: Opener, ask: Ask) -> None:
    with contextlib.closing(Pair(opener)) as pair:
        with pytest.raises(DeadObject, match="gone"):
            ask(pair, dies_unnoticed(1))
        assert ask(pair, dies_unnoticed(1)) == 2


@asks
def test_request_after_a_death_that_is_known_goes_to_the_standby_without_retry(opener: Opener, ask: Ask) -> None:
    with contextlib.closing(Pair(opener)) as pair:
        opener.peers[0].alive = False
        assert ask(pair, number) == 2


def test_requests_that_meet_one_death_have_one_standby_opened(opener: Opener) -> None:
    together = threading.Barrier(4)

    def dies_for_all(session: Session) -> int:
        if cast(Peer, session).number == 1:
            together.wait(PATIENCE)
            raise DeadObject("gone")
        return cast(Peer, session).number

    with contextlib.closing(Pair(opener, retry=True)) as pair, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: pair.run(dies_for_all), range(4))) == [2] * 4
        opener.open()
        until(lambda: len(opener.peers) == 3)
        pair.check()
    assert opener.asked == 3


@asks
def test_both_dead_without_retry_is_a_dead_object_at_once(opener: Opener, ask: Ask) -> None:
    with contextlib.closing(Pair(opener)) as pair:
        for peer in opener.peers:
            peer.alive = False
        with pytest.raises(DeadObject, match="still being started"):
            ask(pair, number)
        opener.open()
        until(lambda: len(opener.peers) == 3)
        until(lambda: pair.in_use().done())
        assert ask(pair, number) == 3


@asks
def test_both_dead_with_retry_waits_for_the_one_that_is_being_started(opener: Opener, ask: Ask) -> None:
    with contextlib.closing(Pair(opener, retry=True)) as pair, ThreadPoolExecutor(1) as threads:
        for peer in opener.peers:
            peer.alive = False
        answer = threads.submit(ask, pair, number)
        until(lambda: opener.asked == 3)
        assert not answer.done()
        opener.open()
        assert answer.result(PATIENCE) == 3


@asks
def test_request_that_meets_the_deaths_of_both_waits_for_the_next_one(opener: Opener, ask: Ask) -> None:
    with contextlib.closing(Pair(opener, retry=True)) as pair, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, pair, dies_unnoticed(1, 2))
        until(lambda: opener.asked == 3)
        assert not answer.done()
        opener.open()
        assert answer.result(PATIENCE) == 3


@asks
def test_request_that_meets_three_deaths_gets_the_last(opener: Opener, ask: Ask) -> None:
    opener.open(3)
    with contextlib.closing(Pair(opener, retry=True)) as pair:
        with pytest.raises(DeadObject, match="gone"):
            ask(pair, dies_unnoticed(1, 2, 3))
        assert ask(pair, number) == 4


@asks
def test_both_dead_with_retry_waits_no_longer_than_a_request_may_take(opener: Opener, ask: Ask) -> None:
    with contextlib.closing(Pair(opener, retry=True, timeout=0.01)) as pair:
        for peer in opener.peers:
            peer.alive = False
        with pytest.raises(MissedDeadline, match="not started in time"):
            ask(pair, number)


@asks
def test_start_that_fails_is_said_and_tried_again_by_the_next_request(opener: Opener, ask: Ask) -> None:
    with contextlib.closing(Pair(opener, retry=True)) as pair:
        for peer in opener.peers:
            peer.alive = False
        opener.fail()
        with pytest.raises(DeadObject, match="no other can be started: no memory"):
            ask(pair, number)
        opener.open()
        assert ask(pair, number) == 3


def test_task_that_is_cancelled_while_it_waits_does_not_end_the_start(opener: Opener) -> None:
    async def main(pair: Pair) -> None:
        async def call(session: Session) -> int:
            return number(session)

        task = asyncio.ensure_future(pair.arun(call))
        while opener.asked < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with contextlib.closing(Pair(opener, retry=True)) as pair:
        for peer in opener.peers:
            peer.alive = False
        asyncio.run(main(pair))
        opener.open()
        assert pair.run(number) == 3


def test_check_replaces_a_standby_that_has_died(opener: Opener) -> None:
    with contextlib.closing(Pair(opener)) as pair:
        opener.peers[1].alive = False
        opener.open()
        pair.check()
        assert [pair.run(number), pair.run(dies_unnoticed())] == [1, 1]
        opener.peers[0].alive = False
        assert pair.run(number) == 3


def test_check_says_that_nothing_can_be_started(opener: Opener) -> None:
    with contextlib.closing(Pair(opener)) as pair:
        opener.peers[1].alive = False
        opener.fail()
        with pytest.raises(DeviceUnavailable, match="no memory"):
            pair.check()
        opener.open()
        pair.check()
        assert len(opener.peers) == 3


def test_close_while_a_standby_is_being_opened_closes_that_one_too(opener: Opener) -> None:
    pair = Pair(opener)
    opener.peers[0].alive = False
    assert pair.run(number) == 2
    until(lambda: opener.asked == 3)
    pair.close()
    assert opener.peers[1].closed.is_set()
    opener.open()
    until(lambda: len(opener.peers) == 3)
    assert opener.peers[2].closed.wait(PATIENCE)
    with pytest.raises(BadState, match="closed"):
        pair.run(number)


def test_standby_that_cannot_be_opened_closes_the_first() -> None:
    first = Peer(1)
    asked: list[None] = []

    def open_session() -> Session:
        asked.append(None)
        if len(asked) > 1:
            raise DeviceUnavailable("no memory")
        return cast(Session, first)

    with pytest.raises(DeviceUnavailable, match="no memory"):
        Pair(open_session)
    assert first.closed.is_set()


@pytest.mark.check
def test_killed_service_costs_a_request_neither_an_answer_nor_a_start() -> None:
    """The service dies below the request, whose session must not start it again by itself."""
    opened: list[weakref.ref[Session]] = []
    gate = threading.Semaphore(2)

    def open_session() -> Session:
        assert gate.acquire(timeout=PATIENCE)
        session = Session(relu(), device="nnburst-reference")
        opened.append(weakref.ref(session))
        return session

    def killed(session: Session) -> list[Any]:
        if session is opened[0]():
            os.kill(session.service.pid, signal.SIGKILL)
        return session.run(None, {"x": np.float32([-1, 0, 1, 2])})

    async def awaited(session: Session) -> list[Any]:
        if session is opened[1]():
            os.kill(session.service.pid, signal.SIGKILL)
        return await session.arun(None, {"x": np.float32([-1, 0, 1, 2])})

    with contextlib.closing(Pair(open_session, retry=True)) as pair:
        assert pair.run(killed)[0].tolist() == [0, 0, 1, 2]
        assert pair.session is opened[1]()
        until(lambda: gc.collect() is not None and opened[0]() is None)  # let go of
        gate.release()
        pair.check()
        assert asyncio.run(pair.arun(awaited))[0].tolist() == [0, 0, 1, 2]
        assert pair.session is opened[2]()
        gate.release()
        pair.check()
