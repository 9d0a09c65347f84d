"""What ``nnburst serve --batch`` is worth: an ONNX MLP of 256 x 4 that programs share, a row at a time.

``python benchmarks/batching.py [--quick]`` measures in turns with and without batches, as ``nnburst bench --clients 16
--model`` does, and exits with 1 if a limit is missed:

* ``rows``: rows a second of 16 programs to those without batches, the median of the turns.
* ``p99``: of these 16 the 99th percentile of a run, to what a row waits and two runs of 16 rows in this process.
* ``alone``: time of one program's run, the median, to that without batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from many_speed import open_batches
from onnx_speed import mlp

from nnburst.cli.bench.batched import Pair, measure_rows, show
from nnburst.cli.bench.model import in_process_session
from nnburst.cli.bench.sampling import time_calls

CLIENTS, WIDTH, LAYERS, WAIT = 16, 256, 4, 0.001
LEAST_ROWS, MOST_P99, MOST_ALONE = 3.0, 1.0, 1.02


def batch_seconds(path: Path) -> float:
    """Return what ONNX Runtime takes for the rows of all programs, in this process."""
    session, x = in_process_session(str(path), 0), np.zeros((CLIENTS, WIDTH), np.float32)
    return float(np.median(time_calls(lambda: session.run(None, {"x": x}), 1000))) / 1e9


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description="Measures batches across clients.")
    parser.add_argument("--quick", action="store_true", help="one turn of half a second")
    quick: bool = parser.parse_args().quick
    turns, seconds = (1, 0.5) if quick else (7, 1.0)
    with tempfile.TemporaryDirectory(prefix="nnburst-bench-") as directory:
        fixed, model = Path(directory, "fixed.onnx"), Path(directory, "open.onnx")
        mlp(WIDTH, LAYERS, fixed)
        open_batches(fixed, model)
        lasts = batch_seconds(model)
        found: dict[str, list[float]] = {"rows": [], "p99": [], "alone": []}

        def note(single: Pair, many: Pair) -> None:
            found["rows"].append(many[1].rate / many[0].rate)
            found["p99"].append(many[1].p99 / (WAIT + 2 * lasts))
            found["alone"].append(single[1].p50 / single[0].p50)

        for pairs in measure_rows(str(model), {}, (1, CLIENTS), 32, f"{WAIT * 1e3:g}ms", seconds, turns):
            note(*pairs)
            for pair in pairs:
                print(show(pair), flush=True)
    failed = False
    print(f"a run of {CLIENTS} rows in this process: {lasts * 1e6:.0f} µs")
    for name, limit, is_least in (("rows", LEAST_ROWS, True), ("p99", MOST_P99, False), ("alone", MOST_ALONE, False)):
        ratio = statistics.median(found[name])
        is_met = ratio >= limit if is_least else ratio <= limit
        failed |= not is_met
        words = f"{min(found[name]):.2f} to {max(found[name]):.2f}; limit {limit:.2f}"
        print(f"{name:8} {ratio:6.2f} ({words}) {'met' if is_met else 'MISSED'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
