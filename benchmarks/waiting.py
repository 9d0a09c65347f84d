"""Measure occasional calls over a burst, a socket and a Pipe, beside programs that compute.

``python benchmarks/waiting.py [--think MS,...] [--hogs N,...] [--work MS] [--clients N] [--rounds N]
[--json FILE] [--markdown FILE]``
A client sleeps between its calls, like a program with a camera, an audio loop or a game. ``--hogs`` sets the number
of processes that run ``while True: pass``. In each round every kind has a turn of half a second:

* ``burst``: `Execution.run()` on the client's own service; ``asleep``: the same with a polling window of 0;
* ``shared``: the same as ``burst``, through ``nnburst serve``;
* ``socket``, ``pipe``: 32 bytes there and back through a SEQPACKET socketpair, and through `multiprocessing.Pipe`.

``--work`` sets how long the server computes before it answers; by default it does nothing. A row has,
for each kind, the mean and the 99th percentile in microseconds, over all clients and turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from programs import PATIENCE, Program, shared_service

import nnburst
from nnburst import Model, ModelBuilder, OperandType

_TURN = 0.5
_MESSAGE = bytes(32)
_COLUMNS = 1024
_ROWS_A_MILLISECOND = 1024
"""Rows of a matrix product that takes about a millisecond. The real time is printed."""


def _product(work: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rows = max(1, int(work * _ROWS_A_MILLISECOND / 16))
    return np.ones((rows, _COLUMNS), np.float32), np.ones((64, _COLUMNS), np.float32)


def model(work: float) -> Model:
    """Return a model of one operation: a matrix product or, if `work` is 0, a small ReLU for the no-op device."""
    builder = ModelBuilder()
    if work:
        x, weights = _product(work)
        builder.output("y", builder.fully_connected(builder.input("x", OperandType.TENSOR_FLOAT32, x.shape), weights))
    else:
        builder.output("y", builder.relu(builder.input("x", OperandType.TENSOR_FLOAT32, (1, 8))))
    return builder.build()


@contextlib.contextmanager
def _run(service: nnburst.Service, work: float, window: float | None) -> Iterator[Callable[[], object]]:
    with service, service.session(model(work), polling_window=window) as session:
        yield session.bind().run


def _burst(window: float | None, address: str, work: float) -> Any:
    device = "nnburst-reference" if work else "nnburst-noop"
    return _run(nnburst.launch(devices=[device]), work, window)


def _shared(address: str, work: float) -> Any:
    return _run(nnburst.connect(address, open_timeout=PATIENCE), work, None)


@contextlib.contextmanager
def _echo(ours: Any, theirs: Any, send: str, receive: str, work: float) -> Iterator[Callable[[], object]]:
    if not (pid := os.fork()):
        ours.close()
        x, weights = _product(work)
        take, answer = getattr(theirs, receive), getattr(theirs, send)
        with contextlib.suppress(EOFError, ConnectionError):
            while message := take():
                if work:
                    np.matmul(x, weights.T)
                answer(message)
        os._exit(0)
    theirs.close()
    put, take = getattr(ours, send), getattr(ours, receive)

    def call() -> object:
        put(_MESSAGE)
        return take()

    with ours:
        yield call
    os.waitpid(pid, 0)


class _Socket(socket.socket):
    def take(self) -> bytes:
        return self.recv(64)


def _socket(address: str, work: float) -> Any:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return _echo(*(_Socket(fileno=end.detach()) for end in ends), "send", "take", work)


def _pipe(address: str, work: float) -> Any:
    return _echo(*multiprocessing.Pipe(), "send_bytes", "recv_bytes", work)


KINDS: dict[str, Callable[[str, float], Any]] = {
    "burst": lambda *how: _burst(None, *how),
    "asleep": lambda *how: _burst(0.0, *how),
    "shared": _shared,
    "socket": _socket,
    "pipe": _pipe,
}


def _client(kind: str, address: str, work: float, end: Connection) -> None:
    """Call and sleep in turn until a given time. Send the seconds of each call."""
    with KINDS[kind](address, work) as call:
        call()
        end.send(None)
        with contextlib.suppress(EOFError):
            while True:
                think, stop = end.recv()
                took = []
                while (began := time.perf_counter()) < stop or not took:
                    call()
                    took.append(time.perf_counter() - began)
                    if think:
                        time.sleep(think)
                end.send(took)


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Run `count` programs that compute without pause."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.callback(stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"])).kill)
        yield


def measure(
    programs: dict[str, list[Program]], thinks: list[float], busy: list[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of hogs and each pause."""
    for count in busy:
        for think in thinks:
            took: dict[str, list[float]] = {kind: [] for kind in programs}
            with hogs(count):
                for _ in range(rounds):
                    for kind, clients in programs.items():
                        stop = time.perf_counter() + _TURN
                        for client in clients:
                            client.begin(think / 1e3, stop)
                        for client in clients:
                            took[kind] += client.receive()
            figures = {k: (float(np.mean(t)) * 1e6, float(np.percentile(t, 99)) * 1e6) for k, t in took.items()}
            yield {"hogs": count, "think": think, **figures}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [f"| µs: mean (p99) | {' | '.join(KINDS)} |", "|---" + "|--:" * len(KINDS) + "|"]
    for row in rows:
        cells = (f"{row[kind][0]:,.0f} ({row[kind][1]:,.0f})" for kind in KINDS)
        lines.append(f"| {row['hogs']} programs, {row['think']:g} ms | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    numbers = lambda of: lambda text: [of(each) for each in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--think", type=numbers(float), default=[0.1, 1.0, 10.0, 33.0], metavar="MS,...")
    parser.add_argument("--hogs", type=numbers(int), default=[0, 1, 2, 3], metavar="N,...")
    parser.add_argument("--work", type=float, default=0.0, metavar="MS")
    parser.add_argument("--clients", type=int, default=1, metavar="N")
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    device = "nnburst-reference" if arguments.work else "nnburst-noop"
    rows = []
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(shared_service("--device", device, "--isolate", "none"))
        programs = {
            kind: [Program(stack, _client, kind, address, arguments.work) for _ in range(arguments.clients)]
            for kind in KINDS
        }
        print(f"{'hogs':>4} {'sleeps':>7} " + " ".join(f"{kind:>15}" for kind in KINDS), flush=True)
        for row in measure(programs, arguments.think, arguments.hogs, arguments.rounds):
            cells = " ".join(f"{row[kind][0]:7,.0f} {row[kind][1]:7,.0f}" for kind in KINDS)
            print(f"{row['hogs']:>4} {row['think']:>4g} ms {cells}", flush=True)
            rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
