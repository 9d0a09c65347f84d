"""Check the promises of a shared service: priority, equal shares, and no delay when other clients' runs hang.

``python benchmarks/sharing.py [--quick] [--json FILE]`` starts ``nnburst serve`` with the functions below and clients
in separate processes, and exits with 1 if a limit is missed:

* ``priority``: a HIGH client runs every 2 ms, while two LOW clients for each processor run as fast as they can. The
  99th percentile of its runs is at most twice the percentile of the client alone, plus one execution of LOW.
* ``share quick``, ``share slow``: each of two equal clients gets 45 to 55 % of the runs.
* ``hang``: a client runs while as many runs of other clients hang as there are processors. The limit is the 99th
  percentile without the other clients, plus one execution. It holds for the 99th percentile of the client's runs, and
  for the longest of its first three runs after the others began to hang.

Compared cases are measured in turns, and the percentiles are medians over the turns. The time of one execution is the
99th percentile of the time inside the service, because other programs may interrupt an execution.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from programs import PATIENCE, Program, shared_service
from turns import Verdicts

import nnburst
from nnburst.devices.function import Tensor, declare

PAUSE = 0.002
HANG = 2.0
_BYTES = bytes(2_000_000)
_one = Tensor("x", "float32", (1,))
_result = Tensor("y", "float32", (1,))


@declare(inputs=[_one], outputs=[_result])
def quick(x: Any) -> Any:
    """Return at once."""
    return x


@declare(inputs=[_one], outputs=[_result])
def slow(x: Any) -> Any:
    """Compute for some milliseconds, without the interpreter lock. Return the seconds taken."""
    begun = time.monotonic()
    hashlib.sha256(_BYTES).digest()
    return np.full(1, time.monotonic() - begun, np.float32)


@declare(inputs=[_one], outputs=[_result])
def hanging(x: Any) -> Any:
    """Sleep for the number of seconds in the input."""
    time.sleep(float(x[0]))
    return x


Runs = np.ndarray[Any, np.dtype[np.float64]]
BEGUN, TOOK, RETURNED = range(3)


class Client(Program):
    """A program that runs a function on request."""

    def __init__(self, stack: contextlib.ExitStack, address: str, function: str, priority: str = "medium") -> None:
        super().__init__(stack, _program, address, function, priority)

    def run(self, start: float, seconds: float, pause: float = 0.0, value: float = 0.0) -> None:
        """Have the program run for `seconds` from a time of the monotonic clock on, at least once."""
        self.begin(start, start + seconds, pause, value)

    def runs(self) -> Runs:
        """Return the start, duration and result of each run, in seconds."""
        runs: Runs = self.receive()
        return runs


def _program(address: str, function: str, priority: str, end: Connection) -> None:
    now = time.monotonic
    with (
        nnburst.connect(address, open_timeout=PATIENCE) as service,
        service.session(function, priority=priority) as session,
    ):
        execution = session.bind()
        run, x, y = execution.run, execution.inputs["x"], execution.outputs["y"]
        x[0] = 0
        run()
        end.send(None)
        while True:
            start, stop, pause, x[0] = end.recv()
            time.sleep(max(0.0, start - now()))
            runs = []
            while not runs or now() < stop:
                begun = now()
                run()
                runs.append((begun, now() - begun, float(y[0])))
                if pause:
                    time.sleep(pause)
            end.send(np.array(runs))


def together(seconds: float, *clients: Client, pause: float = 0.0) -> list[Runs]:
    """Have clients run at the same time. The first one pauses after each run."""
    start = time.monotonic() + 0.05
    for client in clients:
        client.run(start, seconds, pause if client is clients[0] else 0.0)
    return [client.runs() for client in clients]


def p99(turns: list[Runs], column: int = TOOK) -> float:
    """Return the median of the turns' 99th percentiles."""
    return statistics.median(float(np.percentile(runs[:, column], 99)) for runs in turns)


def p50(turns: list[Runs], column: int = TOOK) -> float:
    """Return the median of the turns' medians."""
    return statistics.median(float(np.median(runs[:, column])) for runs in turns)


def microseconds(kept: bool, **seconds: float) -> dict[str, float]:
    """Return one row of the result, in microseconds."""
    return {**{f"{name}_us": value * 1e6 for name, value in seconds.items()}, "kept": kept}


def priority(address: str, rounds: int) -> dict[str, float]:
    """Measure a HIGH client alone, and against LOW clients."""
    with contextlib.ExitStack() as stack:
        high = Client(stack, address, "quick", "high")
        low = [Client(stack, address, "slow", "low") for _ in range(2 * len(os.sched_getaffinity(0)))]
        alone, beside, executions = [], [], []
        for _ in range(rounds):
            alone += together(1.0, high, pause=PAUSE)
            runs, *others = together(1.0, high, *low, pause=PAUSE)
            beside.append(runs)
            executions.append(np.concatenate(others))
    limit = 2 * p99(alone) + p99(executions, RETURNED)
    return microseconds(
        p99(beside) <= limit,
        alone_p50=p50(alone),
        alone_p99=p99(alone),
        execution_p50=p50(executions, RETURNED),
        execution_p99=p99(executions, RETURNED),
        p50=p50(beside),
        p99=p99(beside),
        limit=limit,
        low_p50=p50(executions),
    )


def share(address: str, function: str, rounds: int) -> dict[str, float]:
    """Measure the shares of two equal clients."""
    with contextlib.ExitStack() as stack:
        pair = [Client(stack, address, function) for _ in range(2)]
        counts = [[len(runs) for runs in together(1.0, *pair)] for _ in range(rounds)]
    first, second = (sum(column) for column in zip(*counts, strict=True))
    percent = 100 * first / (first + second)
    worst = max(100 * max(count) / sum(count) for count in counts)
    return {
        "percent": percent,
        "most_in_a_second_percent": worst,
        "runs": (first + second) / rounds,
        "kept": 45 <= percent <= 55,
    }


def hang(address: str, rounds: int) -> dict[str, float]:
    """Measure a client while runs of others hang."""
    with contextlib.ExitStack() as stack:
        other = Client(stack, address, "slow")
        bad = [Client(stack, address, "hanging") for _ in os.sched_getaffinity(0)]
        alone, beside, next_ones = [], [], []
        for _ in range(rounds):
            alone += together(HANG / 2, other)
            start = time.monotonic() + 0.05
            other.run(start, HANG)
            for client in bad:
                client.run(start + HANG / 4, 0.0, value=HANG)
            runs = other.runs()
            hung = max(float(client.runs()[0, BEGUN]) for client in bad)
            ends = runs[:, BEGUN] + runs[:, TOOK]
            beside.append(runs[ends > hung])
            next_ones.append(float(beside[-1][:3, TOOK].max()))
    limit = p99(alone) + p99(alone, RETURNED)
    return microseconds(
        p99(beside) <= limit and statistics.median(next_ones) <= limit,
        alone_p50=p50(alone),
        alone_p99=p99(alone),
        execution_p99=p99(alone, RETURNED),
        p50=p50(beside),
        p99=p99(beside),
        next=statistics.median(next_ones),
        limit=limit,
    )


@contextlib.contextmanager
def service() -> Iterator[str]:
    """Start ``nnburst serve`` with the functions of this file."""
    here = Path(__file__).resolve()
    functions = "+".join(f"{here.stem}:{name}" for name in ("quick", "slow", "hanging"))
    python_path = os.pathsep.join(filter(None, (str(here.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": python_path}
    with shared_service("--device", f"nnburst-function:call={functions}", env=environment) as address:
        yield address


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    rounds = 1 if options.quick else 5
    verdicts = Verdicts()
    with service() as address:
        verdicts.show("priority", priority(address, rounds))
        verdicts.show("share quick", share(address, "quick", rounds))
        verdicts.show("share slow", share(address, "slow", rounds))
        verdicts.show("hang", hang(address, rounds))
    return verdicts.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
