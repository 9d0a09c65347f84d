"""Rows (k): runs awaited in an event loop, against an echo in asyncio, and several runs in flight."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from nnburst import launch
from nnburst.cli.bench.rounds import POLLING_WINDOW, Case, Subject
from nnburst.cli.bench.rows import bytes_in_bytes_out
from nnburst.cli.bench.sampling import Samples

from .peers import MESSAGE, socket_server
from .server import server_process

_NBYTES = len(MESSAGE)


def _time_awaits(loop: asyncio.AbstractEventLoop, call: Callable[[], Awaitable[object]], count: int) -> Samples:
    """Return the samples of a call that a task of the loop awaits. They are taken as in `time_calls`."""

    async def timed() -> Samples:
        now, stamps = time.perf_counter_ns, [0] * (count + 1)
        stamps[0] = now()
        for i in range(1, count + 1):
            await call()
            stamps[i] = now()
        return np.diff(stamps)

    gc.collect()
    gc.disable()
    try:
        return loop.run_until_complete(timed())
    finally:
        gc.enable()


@contextmanager
def _open_awaited(polls: bool, copies: bool) -> Iterator[Subject]:
    window = POLLING_WINDOW if polls else 0.0
    with (
        launch(devices=["nnburst-noop"]) as service,
        service.session(bytes_in_bytes_out(_NBYTES), polling_window=window) as session,
        closing(asyncio.new_event_loop()) as loop,
    ):
        inputs = {"x": np.ones((1, _NBYTES), np.uint8)}
        call = partial(session.arun, None, inputs) if copies else session.bind().arun
        loop.run_until_complete(call())
        yield Subject(partial(_time_awaits, loop, call), service.pid)


class _Echo(asyncio.Protocol):
    """Client of the fastest echo in asyncio: a protocol without streams, and one future for each answer."""

    answer: asyncio.Future[bytes]

    def connection_made(self, transport: Any) -> None:
        self._write = transport.write

    def data_received(self, data: bytes) -> None:
        self.answer.set_result(data)

    def ask(self) -> asyncio.Future[bytes]:
        self.answer = asyncio.get_running_loop().create_future()
        self._write(MESSAGE)
        return self.answer


@contextmanager
def _open_echo() -> Iterator[Subject]:
    ours, theirs = socket.socketpair()
    with closing(asyncio.new_event_loop()) as loop, server_process(socket_server, theirs) as process:
        theirs.close()
        ours.setblocking(False)
        transport, echo = loop.run_until_complete(loop.create_connection(_Echo, sock=ours))

        async def call() -> None:
            await echo.ask()

        try:
            yield process.subject(call, partial(_time_awaits, loop))
        finally:
            transport.close()
            with suppress(RuntimeError):
                loop.run_until_complete(asyncio.sleep(0))


def _case(key: str, title: str, wait: str, opener: Callable[[], Any]) -> Case:
    return Case(key, "k", title, wait, _NBYTES, opener)


FLIGHT_CASES: tuple[Case, ...] = (
    _case("arun-poll", "await Execution.arun()", "poll", partial(_open_awaited, True, False)),
    _case("arun-copied", "await Session.arun()", "poll", partial(_open_awaited, True, True)),
    _case("arun-block", "await Execution.arun()", "block", partial(_open_awaited, False, False)),
    _case("asyncio-echo", "asyncio, Unix socket pair", "block", _open_echo),
)
