"""What 1, 2, 4 … programs get of one service that they share."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from ...errors import DeviceUnavailable
from .placement import scratch_directory

T = TypeVar("T")

_DEVICE = "nnburst-noop"
PATIENCE = 120.0
"""Seconds for a client to come up, many of which do so at once."""
WARM_UP = 0.2
"""Seconds that all run before they are counted."""


@dataclass(frozen=True, slots=True)
class Share:
    """What so many clients got.

    Attributes:
        clients: Programs.
        bursts: Of each of them, each burst with a model and a thread of its own.
        seconds: How long they ran.
        runs: Of each client, on all its bursts.
    """

    clients: int
    bursts: int
    seconds: float
    runs: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Runs a second, all together."""
        return sum(self.runs) / self.seconds

    @property
    def ratio(self) -> float:
        """The client with most runs to the one with least."""
        return max(self.runs) / max(1, min(self.runs))


def measure_shares(most: int, seconds: float, bursts: int = 1) -> Iterator[Share]:
    """Measure with 1, 2, 4 … up to `most` clients, each as fast as it can: one turn, with a service of its own.

    Raises:
        DeviceUnavailable: The service could not be started.
    """
    with shared_service() as (address, _):
        for count in numbers_up_to(most):
            yield measure_share(address, count, seconds, bursts)


def numbers_up_to(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 … and the last one."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def medians(turns: list[list[T]], figure: Callable[[T], float]) -> list[T]:
    """Of each number of clients the turn with the median of a figure."""
    return [sorted(found, key=figure)[len(found) // 2] for found in zip(*turns, strict=True)]


def measure_share(address: str, count: int, seconds: float, bursts: int = 1) -> Share:
    """Measure what so many clients of the service at `address` get.

    Raises:
        DeviceUnavailable: A client has ended, or says nothing.
    """
    return Share(count, bursts, seconds, tuple(together(count, seconds, partial(_client, address, bursts))))


def together(count: int, seconds: float, client: Callable[[Connection], None]) -> list[Any]:
    """Have so many programs run at the same time, and return what they say afterwards.

    Args:
        count: Programs, which are forks of this one.
        seconds: How long they are to run.
        client: Says None once it is ready, is told when to begin and to end, and says what it has done.

    Raises:
        DeviceUnavailable: A client has ended, or says nothing.
    """
    from ... import runtime  # once for all clients, which are forks of this process  # noqa: F401

    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        ends: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=client, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            ends.append(stack.enter_context(ours))
        for end in ends:
            _receive(end)
        start = time.monotonic() + 0.1 + WARM_UP
        for end in ends:
            end.send((start, start + seconds))
        return [_receive(end, seconds) for end in ends]


def _receive(end: Connection, seconds: float = 0.0) -> Any:
    if not end.poll(PATIENCE + seconds):
        raise DeviceUnavailable(f"a client of the benchmark has said nothing for {PATIENCE + seconds:g} s")
    try:
        return end.recv()
    except EOFError:
        raise DeviceUnavailable("a client of the benchmark has ended; its error is above") from None


def _client(address: str, bursts: int, end: Connection) -> None:
    from ...runtime import connect
    from .models import step_model

    with connect(address, open_timeout=PATIENCE) as service, contextlib.ExitStack() as stack:
        runs = [stack.enter_context(service.session(step_model(1024))).bind().run for _ in range(bursts)]
        for run in runs:
            run()
        end.send(None)
        start, stop = end.recv()
        time.sleep(max(0.0, start - WARM_UP - time.monotonic()))
        if bursts == 1:
            _run_until(start, runs[0])
            end.send(_run_until(stop, runs[0]))
            return
        counts = [0] * bursts

        def note(at: int) -> None:
            _run_until(start, runs[at])
            counts[at] = _run_until(stop, runs[at])

        threads = [threading.Thread(target=note, args=(at,)) for at in range(bursts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not all(counts):
            raise DeviceUnavailable("a burst of the benchmark has run nothing")
        end.send(sum(counts))


def _run_until(stop: float, run: Callable[[], Any]) -> int:
    runs, now = 0, time.monotonic
    while now() < stop:
        run()
        runs += 1
    return runs


@contextlib.contextmanager
def shared_service(*options: str) -> Iterator[tuple[str, int]]:
    """Start ``nnburst serve``, and return its address and the id of the process that runs the models.

    Args:
        options: Without any, it has models that do nothing.

    Raises:
        DeviceUnavailable: It could not be started.
    """
    from ...runtime import connect

    with scratch_directory() as directory:
        path = Path(directory, "shared.sock")
        chosen = options or ("--device", _DEVICE, "--isolate", "none")
        command = [sys.executable, "-P", "-m", "nnburst", "serve", "--socket", str(path), "--json", *chosen]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    raise DeviceUnavailable(f"nnburst serve ended with status {process.wait()} before it was ready")
                json.loads(line)
                with connect(f"unix:{path}") as service:
                    worker = service.pid
                yield f"unix:{path}", worker
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)


def show(share: Share) -> str:
    return f"{share.clients:7} {share.rate:12,.0f} {share.ratio:18.2f}"


HEAD = "clients       runs/s   most/least runs"


def as_json(shares: list[Share]) -> str:
    return json.dumps({"clients": [asdict(share) for share in shares]}, indent=1)
