"""What 1, 2, 4 … programs get of one service that they share."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...errors import DeviceUnavailable

_DEVICE = "nnburst-noop"
_PATIENCE = 120.0
"""Seconds for a client to come up, many of which do so at once."""


@dataclass(frozen=True, slots=True)
class Share:
    """What so many clients got.

    Attributes:
        clients: Programs, each with a burst of its own on the same model.
        seconds: How long they ran.
        runs: Of each of them.
    """

    clients: int
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


def measure_shares(most: int, seconds: float) -> Iterator[Share]:
    """Measure with 1, 2, 4 … up to `most` clients, each as fast as it can.

    Raises:
        DeviceUnavailable: The service could not be started.
    """
    from ... import runtime  # once for all clients, which are forks of this process  # noqa: F401

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="nnburst-bench-") as directory, _service(Path(directory)) as address:
        count = 1
        while count < most:
            yield _measure(context, address, count, seconds)
            count *= 2
        yield _measure(context, address, most, seconds)


def _measure(context: Any, address: str, count: int, seconds: float) -> Share:
    with contextlib.ExitStack() as stack:
        ends: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            client = context.Process(target=_client, args=(address, theirs), daemon=True)
            client.start()
            theirs.close()
            stack.callback(client.join)
            stack.callback(client.terminate)
            ends.append(stack.enter_context(ours))
        for end in ends:
            _receive(end)
        start = time.monotonic() + 0.1
        for end in ends:
            end.send((start, start + seconds))
        return Share(count, seconds, tuple(_receive(end) for end in ends))


def _receive(end: Connection) -> Any:
    if not end.poll(_PATIENCE):
        raise DeviceUnavailable(f"a client of the benchmark has said nothing for {_PATIENCE:g} s")
    try:
        return end.recv()
    except EOFError:
        raise DeviceUnavailable("a client of the benchmark has ended; its error is above") from None


def _client(address: str, end: Connection) -> None:
    from ...runtime import connect
    from ._memory import step_model

    with connect(address, timeout=_PATIENCE) as service, service.session(step_model(1024)) as session:
        run, now = session.bind().run, time.monotonic
        run()
        end.send(None)
        start, stop = end.recv()
        time.sleep(max(0.0, start - now()))
        runs = 0
        while now() < stop:
            run()
            runs += 1
        end.send(runs)


@contextlib.contextmanager
def _service(directory: Path) -> Iterator[str]:
    """Start ``nnburst serve`` and return its address."""
    path = directory / "shared.sock"
    command = [sys.executable, "-m", "nnburst.cli", "serve", "--socket", str(path), "--device", _DEVICE, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise DeviceUnavailable(f"nnburst serve ended with status {process.wait()} before it was ready")
            json.loads(line)
            yield f"unix:{path}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)


def show(share: Share) -> str:
    """One line of the table."""
    return f"{share.clients:7} {share.rate:12,.0f} {share.ratio:18.2f}"


HEAD = "clients       runs/s   most/least runs"


def as_json(shares: list[Share]) -> str:
    """The numbers for a file."""
    return json.dumps({"clients": [asdict(share) for share in shares]}, indent=1)
