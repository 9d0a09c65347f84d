"""Measure how users of a shared service affect each other: equal shares, and four kinds of hostile clients.

``python benchmarks/users.py [--seconds S] [--rounds N] [--json FILE]`` needs root, to run programs as two users. It
starts ``nnburst serve``; each client is a process of one user and brings its own model, so that each user has a
worker. It exits with 1 if a limit is missed:

* ``share``, ``share bursts``: each of two users gets 45 to 55 % of the runs, also with four bursts against twelve.
* ``greedy`` (eight bursts that never rest), ``endless`` (loops that never end), ``crashing`` (a worker that dies as
  often as it starts), ``flooding`` (connections, messages and log lines without pause): an honest client runs every
  5 ms beside the hostile client. The 99th percentile of the honest client's runs is at most twice the percentile
  without the hostile client, plus a tick of the kernel. No run fails, and the honest client's worker lives.

Compared cases are measured in turns; the percentiles are over all turns together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from programs import PATIENCE, Program, shared_service
from turns import Verdicts

import nnburst
from nnburst import Model, ModelBuilder, OperandType
from nnburst.service.wire import protocol

ONE, OTHER = 65534, 65532
"""Ids of two users without other processes."""
PAUSE = 0.005
_TICK_US = 4000
"""Microseconds that a computing thread may keep a processor: a tick of a kernel at 250 Hz."""
_WORK = 600
"""Rows and columns of a matrix product that takes about a millisecond."""


def working_model() -> Model:
    """Return a model that multiplies matrices."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (_WORK // 8, _WORK))
    b.output("y", b.fully_connected(x, np.eye(_WORK, dtype=np.float32)))
    return b.build()


def endless_model() -> Model:
    """Return a model of a loop whose condition is its input."""
    condition = ModelBuilder()
    going = condition.input("going", OperandType.TENSOR_BOOL8, (1,))
    condition.output("again", condition.logical_or(going, going))
    body = ModelBuilder()
    state = body.input("going", OperandType.TENSOR_BOOL8, (1,))
    body.output("still", body.logical_and(state, state))
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_BOOL8, (1,))
    b.output("y", b.loop(condition.build(), body.build(), [x])[0])
    return b.build()


def client(stack: contextlib.ExitStack, uid: int, does: Callable[..., None], *arguments: Any) -> Program:
    """Start a process of user `uid`. On request, the process calls `does` for a given number of seconds."""
    return Program(stack, _program, uid, does, *arguments)


def _program(uid: int, does: Callable[..., None], address: str, *arguments: Any) -> None:
    with nnburst.connect(address, open_timeout=PATIENCE) as service, service.session(working_model()) as session:
        session.run(None, {"x": np.zeros((_WORK // 8, _WORK), np.float32)})  # this imports all modules as root
        session.bind().run()
    os.setsid()  # it gets its own session, as the kernel shares the processors among sessions
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, 0)  # the saved id is a way back to root, for the client that kills its worker
    does(address, *arguments)


def worker_of(session: nnburst.Session) -> int:
    """Return the id of the process that runs a session's model."""
    device: Any = session.compilation.device
    hello, _ = device.place().connection.call(protocol.Hello(version=protocol.VERSION, pid=0))
    return int(hello.pid)


def works(address: str, bursts: int, pause: float, end: Connection) -> None:
    """Run the model in several bursts, with a pause after each run. Send durations, errors and the worker's pid."""
    with (
        nnburst.connect(address, open_timeout=PATIENCE, trust_uid=0) as service,
        service.session(working_model()) as session,
    ):
        executions = [session.bind() for _ in range(bursts)]
        for execution in executions:
            execution.run()
        end.send(None)
        while True:
            stop = end.recv()[0] + time.monotonic()
            took: list[float] = []
            failures: list[str] = []

            def loop(run: Callable[[], None], stop: float = stop, took: Any = took, failures: Any = failures) -> None:
                while (begun := time.monotonic()) < stop:
                    try:
                        run()
                    except nnburst.NNBurstError as error:
                        failures.append(str(error))
                    took.append(time.monotonic() - begun)
                    if pause:
                        time.sleep(pause)

            threads = [threading.Thread(target=loop, args=(execution.run,)) for execution in executions]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            end.send((took, failures))


def greedy(address: str, end: Connection) -> None:
    """Run in eight bursts without pause."""
    works(address, 8, 0.0, end)


def loops(address: str, end: Connection) -> None:
    """Start runs that never end, and drop them. Open a new session whenever the service has ended the old one."""
    end.send(None)
    while True:
        stop = end.recv()[0] + time.monotonic()
        while time.monotonic() < stop:
            with contextlib.suppress(nnburst.NNBurstError), contextlib.ExitStack() as stack:
                service = stack.enter_context(nnburst.connect(address, open_timeout=PATIENCE, trust_uid=0))
                session = stack.enter_context(service.session(endless_model(), timeout=2.0))
                for _ in range(4):
                    execution = session.bind()
                    execution.inputs["x"][:] = True
                    execution.submit()
                time.sleep(min(1.0, max(0.0, stop - time.monotonic())))
        end.send(None)


def crashes(address: str, end: Connection) -> None:
    """Open a session, run, kill the worker and run again, repeatedly, like a model that crashes its runtime."""
    end.send(None)
    x = {"x": np.zeros((_WORK // 8, _WORK), np.float32)}
    while True:
        stop = end.recv()[0] + time.monotonic()
        while time.monotonic() < stop:
            with (
                contextlib.suppress(nnburst.NNBurstError),
                nnburst.connect(address, open_timeout=PATIENCE, trust_uid=0) as service,
                service.session(working_model()) as session,
            ):
                session.run(None, x)
                os.seteuid(0)
                os.kill(worker_of(session), signal.SIGKILL)
                os.seteuid(OTHER)
                session.run(None, x)
        end.send(None)


def floods(address: str, end: Connection) -> None:
    """Connect, send garbage and disconnect, in four threads without pause."""
    path = address.removeprefix("unix:")

    def flood(stop: float) -> None:
        while time.monotonic() < stop:
            socks = []
            for n in range(32):
                with contextlib.suppress(OSError):
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                    socks.append(sock)
                    sock.connect(path)
                    for _ in range(20):
                        sock.send(bytes([0, 0, 0, 0, n, 0, 0, 0]) + b"\x81\xa4call\xa5hello")
            for sock in socks:
                sock.close()

    end.send(None)
    while True:
        stop = end.recv()[0] + time.monotonic()
        threads = [threading.Thread(target=flood, args=(stop,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        end.send(None)


def share(address: str, seconds: float, rounds: int, bursts: tuple[int, int]) -> float:
    """Return the percentage of runs that the second of two users gets. `bursts`: number of bursts of each user."""
    with contextlib.ExitStack() as stack:
        pair = [client(stack, uid, works, address, n, 0.0) for uid, n in zip((ONE, OTHER), bursts, strict=True)]
        counts = [0, 0]
        for _ in range(rounds):
            for each in pair:
                each.begin(seconds)
            for i, each in enumerate(pair):
                counts[i] += len(each.receive()[0])
    return 100 * counts[1] / sum(counts)


def beside(address: str, does: Callable[..., None], seconds: float, rounds: int) -> dict[str, Any]:
    """Measure an honest client of one user alone, and beside a hostile client of another user, in turns."""
    with contextlib.ExitStack() as stack:
        honest = client(stack, ONE, works, address, 1, PAUSE)
        hostile = client(stack, OTHER, does, address)
        took: dict[bool, list[float]] = {False: [], True: []}
        failures: list[str] = []
        for turn in range(2 * rounds):
            is_beside = bool(turn % 2)
            if is_beside:
                hostile.begin(seconds / rounds)
            honest.begin(seconds / rounds)
            runs, failed = honest.receive()
            took[is_beside] += runs
            failures += failed
            if is_beside:
                hostile.receive()
    alone, together = (np.percentile(took[key], (50, 99)) * 1e6 for key in (False, True))
    limit = 2 * alone[1] + _TICK_US
    return {
        "alone_p50_us": alone[0],
        "alone_p99_us": alone[1],
        "p50_us": together[0],
        "p99_us": together[1],
        "limit_us": limit,
        "runs": len(took[True]),
        "failures": sorted(set(failures)),
        "kept": bool(together[1] <= limit and not failures),
    }


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="beside each hostile client")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    seconds, rounds = options.seconds, options.rounds
    verdicts = Verdicts()
    users = [f"--allow-uid={uid}" for uid in (ONE, OTHER)]
    with (
        tempfile.TemporaryFile() as log,
        shared_service("--device", "nnburst-reference", *users, stderr=log, start_new_session=True) as address,
    ):
        for row, bursts in (("share", (4, 4)), ("share bursts", (4, 12))):
            percent = share(address, seconds / 20, rounds, bursts)
            verdicts.show(row, {"percent": percent, "kept": 45 <= percent <= 55})
        for row, does in (("greedy", greedy), ("endless", loops), ("crashing", crashes), ("flooding", floods)):
            verdicts.show(row, beside(address, does, seconds, rounds))
    return verdicts.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
