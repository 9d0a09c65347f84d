"""The rows of the record, in the order of the table and of a round."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from typing import Any

import click

from benchmarks.programs import shared_service
from nnburst import connect, launch
from nnburst._core._nnburst import lib
from nnburst.cli.bench.rounds import POLLING_WINDOW, Case, Subject
from nnburst.cli.bench.rows import BURSTS, LINE, PAYLOADS, POOLS, bytes_in_bytes_out
from nnburst.cli.bench.sampling import from_c, time_calls
from nnburst.cli.targets import size

from .cache import CACHE_CASES
from .flights import FLIGHT_CASES
from .lock import LOCK_CASES
from .memory import INPUT_CASES, SLOT_CASES, STATE_CASES
from .peers import MESSAGE, installed_peers
from .queues import QUEUE_CASES
from .server import server_process


@contextmanager
def _open_c() -> Iterator[Subject]:
    model = bytes_in_bytes_out(32)
    with launch(devices=["nnburst-noop"]) as service, service.session(model, polling_window=POLLING_WINDOW) as session:
        pointer = session.bind().pointer
        sample = lambda count: from_c(count, "runs", lambda out: lib.nnb_bench_runs(pointer, count, out))  # noqa: E731
        yield Subject(sample, service.pid)


@contextmanager
def _open_shared() -> Iterator[Subject]:
    with (
        shared_service("--device", "nnburst-noop", "--isolate", "none") as address,
        connect(address) as service,
        service.session(bytes_in_bytes_out(32), polling_window=POLLING_WINDOW) as session,
    ):
        yield Subject(partial(time_calls, session.bind().run), service.pid)


def _sink_server(connection: Any) -> Generator[None, None, None]:
    """Receive a payload and answer with 32 bytes, as in the rows of bursts."""
    receive, send = connection.recv_bytes, connection.send_bytes
    yield
    while True:
        receive()
        send(MESSAGE)


@contextmanager
def _open_pipe(nbytes: int) -> Iterator[Subject]:
    ours, theirs = multiprocessing.Pipe()
    payload = bytes(nbytes)

    def call() -> None:
        ours.send_bytes(payload)
        ours.recv_bytes()

    with ours, server_process(_sink_server, theirs) as process:
        theirs.close()
        yield process.subject(call)


def _pipe(nbytes: int) -> Case:
    key, title = f"pipe-{size(nbytes).replace(' ', '')}", f"Pipe.send_bytes, {size(nbytes)}"
    return Case(key, "f", title, "block", nbytes, partial(_open_pipe, nbytes))


_BURSTS: tuple[tuple[str, str, Callable[[], Any]], ...] = (
    ("burst-c", "the same, a loop in C", _open_c),
    ("burst-shared", "the same, shared service", _open_shared),
)


def all_cases() -> tuple[Case, ...]:
    """Return every row. Rows that are compared with each other are near each other."""
    bursts = BURSTS[0], *(Case(key, "d", title, "poll", 32, opener) for key, title, opener in _BURSTS), *BURSTS[1:]
    payloads = *POOLS, *map(_pipe, PAYLOADS)
    ours = *INPUT_CASES, *STATE_CASES, *SLOT_CASES, *CACHE_CASES, *LOCK_CASES
    return LINE, *QUEUE_CASES, *bursts, *FLIGHT_CASES, *installed_peers(), *payloads, *ours


def select(cases: tuple[Case, ...], patterns: tuple[str, ...]) -> tuple[Case, ...]:
    """Return the rows whose key or group matches any of the patterns (``*`` allowed). No patterns mean all rows.

    Raises:
        click.BadParameter: There is no such row.
    """
    chosen = tuple(c for c in cases if not patterns or any(fnmatch(c.key, p) or c.group == p for p in patterns))
    if not chosen:
        names = ", ".join(case.key for case in cases)
        raise click.BadParameter(f"no row matches {', '.join(patterns)}; the rows are {names}", param_hint="--only")
    return chosen
