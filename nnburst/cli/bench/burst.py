"""Rows (d) and (f): a burst on the no-op device, and what the payload does to it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..._core._nnburst import lib
from .case import Bench, Case, Subject
from .clients import shared_service
from .models import bytes_in_bytes_out, size_name
from .peers import MESSAGE
from .placement import APART, ONE_CORE
from .sampling import Samples, from_c, time_calls
from .server import server_process

PAYLOADS = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


@contextmanager
def _open_burst(nbytes: int, polls: bool, bench: Bench, in_c: bool = False) -> Iterator[Subject]:
    with _run_on(bench.service(), nbytes, bench.polling_window if polls else 0.0, in_c) as subject:
        yield subject


@contextmanager
def _open_shared_burst(nbytes: int, bench: Bench) -> Iterator[Subject]:
    from ...runtime import connect

    with (
        shared_service() as (address, _),
        connect(address) as service,
        _run_on(service, nbytes, bench.polling_window) as subject,
    ):
        yield subject


@contextmanager
def _run_on(service: Any, nbytes: int, window: float, in_c: bool = False) -> Iterator[Subject]:
    with service.session(bytes_in_bytes_out(nbytes), polling_window=window) as session:
        bound = session.bind()
        bound.inputs["x"][...] = 1  # the pages exist before anything is timed
        bound.run()
        # The service needs no parking: its listener sleeps in the futex once the window has passed.
        sample = partial(_c_samples, bound) if in_c else partial(time_calls, bound.run)
        yield Subject(sample, service.pid)


def _c_samples(bound: Any, count: int) -> Samples:
    return from_c(count, "runs", lambda out: lib.nnb_bench_runs(bound._pointer, count, out))


def _sink_server(connection: Any) -> Generator[None, None, None]:
    """Take a payload, answer with 32 bytes: what the burst rows do."""
    receive, send = connection.recv_bytes, connection.send_bytes
    yield
    while True:
        receive()
        send(MESSAGE)


@contextmanager
def _open_pipe(nbytes: int, bench: Bench) -> Iterator[Subject]:
    ours, theirs = multiprocessing.Pipe()
    payload = bytes(nbytes)
    send, receive = ours.send_bytes, ours.recv_bytes

    def call() -> None:
        send(payload)
        receive()

    with ours, server_process(_sink_server, theirs) as process:
        theirs.close()
        call()
        process.park()
        yield Subject(partial(time_calls, call), process.pid, process.park, process.unpark)


def _payload_case(kind: str, title: str, wait: str, nbytes: int, opener: Callable[..., Any]) -> Case:
    size = size_name(nbytes)
    return Case(f"{kind}-{size.replace(' ', '')}", "f", f"{title}, {size}", wait, nbytes, opener)


BURST_CASES: tuple[Case, ...] = (
    Case("burst-poll", "d", "burst Execution.run()", "poll", 32, partial(_open_burst, 32, True), APART),
    Case("burst-c", "d", "the same, a loop in C", "poll", 32, partial(_open_burst, 32, True, in_c=True), APART),
    Case("burst-shared", "d", "the same, shared service", "poll", 32, partial(_open_shared_burst, 32), APART),
    Case("burst-block", "d", "burst Execution.run()", "block", 32, partial(_open_burst, 32, False), APART),
    Case("burst-block-1core", "d", "burst Execution.run()", "block", 32, partial(_open_burst, 32, False), ONE_CORE),
)

PAYLOAD_CASES: tuple[Case, ...] = (
    *(_payload_case("pool", "burst, pool", "poll", n, partial(_open_burst, n, True)) for n in PAYLOADS),
    *(_payload_case("pipe", "Pipe.send_bytes", "block", n, partial(_open_pipe, n)) for n in PAYLOADS),
)
