"""Measure the benefit of ``nnburst serve --batch``: programs run a model's rows with and without batches, in turns.

``python benchmarks/batching.py [--quick]`` uses an ONNX MLP of 256 x 4, and exits with 1 if a limit is missed:

* ``rows``: the rows per second of 16 programs with batches, divided by the rows per second without batches.
* ``p99``: the 99th percentile of the runs of 16 programs with batches, divided by a limit: the longest wait of a row,
  plus two runs of a batch of 16 rows in this process.
* ``alone``: the median time of a single program's run with batches, divided by the median time without batches.

Each figure is the median over the turns.

With ``--model FILE``, the benchmark measures that model, and checks no limits.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from clients import numbers_up_to
from many_speed import open_batches
from onnx_speed import mlp
from programs import PATIENCE, shared_service, together

import nnburst
from nnburst.cli.bench.model import in_process_session
from nnburst.cli.bench.sampling import time_calls
from nnburst.cli.tensors import generate_values

CLIENTS, WIDTH, LAYERS, WAIT = 16, 256, 4, 0.001
LEAST_ROWS, MOST_P99, MOST_ALONE = 3.0, 1.0, 1.02
ALONE = ("--device", "nnburst-onnxruntime")
BATCHES = ("--device", "nnburst-onnxruntime:threads=1", "--batch", "32", "--batch-wait", f"{WAIT * 1e3:g}ms")


@dataclass(frozen=True)
class Rows:
    """Results of several clients together: runs per second, and percentiles of the seconds of a run."""

    rate: float
    p50: float
    p99: float

    def __str__(self) -> str:
        return f"{self.rate:15,.0f} {self.p50 * 1e6:8.0f} {self.p99 * 1e6:8.0f}"


Pair = tuple[Rows, Rows]
"""The results without batches, and with them."""


def measure_rows(model: Path, numbers: Sequence[int], seconds: float, turns: int) -> Iterator[list[Pair]]:
    """Measure each number of clients. The clients run as fast as they can. Yield the results of each turn."""
    named = ["--model", f"model={model.resolve()}"]
    with contextlib.ExitStack() as stack:
        alone, batched = (stack.enter_context(shared_service(*named, *options)) for options in (ALONE, BATCHES))
        for _ in range(turns):
            yield [(_rows(alone, count, seconds), _rows(batched, count, seconds)) for count in numbers]


def _rows(address: str, count: int, seconds: float) -> Rows:
    took = np.concatenate(together(count, seconds, _client, address))
    p50, p99 = np.percentile(took, (50, 99))
    return Rows(len(took) / seconds, float(p50), float(p99))


def _client(address: str, end: Connection) -> None:
    now = time.monotonic
    with (
        nnburst.connect(address, open_timeout=PATIENCE) as service,
        service.session("model", preference="sustained_speed") as session,
    ):
        inputs = generate_values(session.get_inputs(), {})
        execution = session.bind(shapes={name: array.shape for name, array in inputs.items()})
        for name, array in inputs.items():
            execution.inputs[name][...] = array
        execution.run()
        end.send(None)
        start, stop = end.recv()
        while now() < start:
            execution.run()
        took, begun = [], now()
        while begun < stop:
            execution.run()
            ended = now()
            took.append(ended - begun)
            begun = ended
        end.send(np.array(took))


def show(count: int, pair: Pair) -> None:
    alone, batched = pair
    print(f"{count:7} {alone}   {batched} {batched.rate / alone.rate:7.2f}", flush=True)


def batch_seconds(path: Path) -> float:
    """Return the seconds that ONNX Runtime takes in this process for one batch with the rows of all programs."""
    session, x = in_process_session(str(path), 0), np.zeros((CLIENTS, WIDTH), np.float32)
    return float(np.median(time_calls(lambda: session.run(None, {"x": x}), 1000))) / 1e9


def judge(seconds: float, turns: int) -> bool:
    """Measure the MLP. Return True if all limits are met."""
    with tempfile.TemporaryDirectory(prefix="nnburst-bench-") as directory:
        fixed, model = Path(directory, "fixed.onnx"), Path(directory, "open.onnx")
        mlp(WIDTH, LAYERS, fixed)
        open_batches(fixed, model)
        lasts = batch_seconds(model)
        found: dict[str, list[float]] = {"rows": [], "p99": [], "alone": []}
        for single, many in measure_rows(model, (1, CLIENTS), seconds, turns):
            found["rows"].append(many[1].rate / many[0].rate)
            found["p99"].append(many[1].p99 / (WAIT + 2 * lasts))
            found["alone"].append(single[1].p50 / single[0].p50)
            show(1, single)
            show(CLIENTS, many)
    print(f"a run of {CLIENTS} rows in this process: {lasts * 1e6:.0f} µs")
    met = True
    for name, limit, is_least in (("rows", LEAST_ROWS, True), ("p99", MOST_P99, False), ("alone", MOST_ALONE, False)):
        ratio = statistics.median(found[name])
        is_met = ratio >= limit if is_least else ratio <= limit
        met &= is_met
        words = f"{min(found[name]):.2f} to {max(found[name]):.2f}; limit {limit:.2f}"
        print(f"{name:8} {ratio:6.2f} ({words}) {'met' if is_met else 'MISSED'}")
    return met


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn of half a second")
    parser.add_argument("--model", type=Path, help="an ONNX model of rows")
    parser.add_argument("--most", type=int, default=CLIENTS, help="programs (--model)")
    options = parser.parse_args()
    turns, seconds = (1, 0.5) if options.quick else (7, 1.0)
    print("clients   alone: rows/s   p50 µs   p99 µs   batched: rows/s   p50 µs   p99 µs   times")
    if options.model is None:
        return 0 if judge(seconds, turns) else 1
    numbers = list(numbers_up_to(options.most))
    for pairs in measure_rows(options.model, numbers, seconds, turns):
        for count, pair in zip(numbers, pairs, strict=True):
            show(count, pair)
    return 0


if __name__ == "__main__":
    sys.exit(main())
