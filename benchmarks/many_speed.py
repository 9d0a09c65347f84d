"""Measure the benefit of several runs in flight and of batches: an ONNX MLP through `run_many`.

``python benchmarks/many_speed.py [--quick]`` exits with 1 if a ratio does not keep its limit:

* ``one by one``: runs per second of ``run_many``, divided by runs per second of ``Session.run``.
* ``run_many``: time of ``run_many(batch=…)`` for 10,000 inputs, divided by the time of `InferenceSession.run` in this
  process with batches made by the program. Each side uses its best batch size.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from onnx_speed import mlp

import nnburst

WIDTH, LAYERS, INPUTS = 64, 4, 10_000
BATCHES = (16, 64, 256)
LEAST_RUNS, MOST_TIME = 1.3, 1.15


def open_batches(path: Path, out: Path) -> None:
    """Write the same model with a symbolic first dimension."""
    import onnx

    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(model, out)


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def one_by_one_ratio(path: Path, rounds: int, runs: int) -> float:
    """Return the runs per second of `run_many`, divided by the runs per second of `run`."""
    xs = [np.random.default_rng(i).normal(size=(1, WIDTH)).astype(np.float32) for i in range(64)]

    def inputs() -> Iterator[dict[str, np.ndarray]]:
        for i in range(runs):
            yield {"x": xs[i % 64]}

    with nnburst.Session(path) as session, apart(session.service.pid):

        def one_by_one() -> None:
            for arrays in inputs():
                session.run(None, arrays)

        def in_flight() -> None:
            for _ in session.run_many(inputs()):
                pass

        ratios = []
        for _ in range(rounds + 1):
            ratios.append(seconds(one_by_one) / seconds(in_flight))
    return statistics.median(ratios[1:])


def many_ratio(path: Path, rounds: int) -> tuple[float, int, int]:
    """Return the time of `run_many` divided by the time of batches in this process, and both best batch sizes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    here = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    xs = np.random.default_rng(1).normal(size=(INPUTS, 1, WIDTH)).astype(np.float32)
    inputs = [{"x": x} for x in xs]

    def by_hand(batch: int) -> list[np.ndarray]:
        out: list[np.ndarray] = []
        for start in range(0, INPUTS, batch):
            (y,) = here.run(None, {"x": np.concatenate([each["x"] for each in inputs[start : start + batch]])})
            out.extend(y[i : i + 1] for i in range(len(y)))
        return out

    one_thread = "nnburst-onnxruntime:threads=1"  # this process uses one thread, too
    with nnburst.Session(path, device=one_thread) as session, apart(session.service.pid):

        def many(batch: int) -> list[np.ndarray]:
            return [y for (y,) in session.run_many(inputs, batch=batch)]

        assert np.allclose(np.concatenate(by_hand(64)), np.concatenate(many(64)), atol=1e-5)
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for batch in BATCHES:
                times.setdefault(("many", batch), []).append(seconds(lambda batch=batch: many(batch)))  # type: ignore[misc]
                times.setdefault(("hand", batch), []).append(seconds(lambda batch=batch: by_hand(batch)))  # type: ignore[misc]
    best = {way: min(BATCHES, key=lambda batch: statistics.median(times[way, batch])) for way in ("many", "hand")}
    pairs = zip(times["many", best["many"]], times["hand", best["hand"]], strict=True)
    return statistics.median(a / b for a, b in pairs), best["many"], best["hand"]


@contextlib.contextmanager
def apart(pid: int) -> Iterator[None]:
    """Pin all threads of this process to one processor, and all threads of a service to another processor."""
    every = os.sched_getaffinity(0)
    pin(pid, {max(every)})
    pin(os.getpid(), {min(every)})
    try:
        yield
    finally:
        pin(os.getpid(), every)  # the next service inherits the CPUs


def pin(pid: int, processors: set[int]) -> None:
    """Pin all threads of a process to some processors."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), processors)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some seconds")
    options = parser.parse_args()
    rounds = 5 if options.quick else 20
    with tempfile.TemporaryDirectory() as name:
        fixed, open_ended = Path(name, "mlp.onnx"), Path(name, "many.onnx")
        mlp(WIDTH, LAYERS, fixed)
        open_batches(fixed, open_ended)
        runs = one_by_one_ratio(fixed, rounds, 2000)
        many, mine, theirs = many_ratio(open_ended, rounds)
    print(f"run_many of an MLP {WIDTH} x {LAYERS}: {runs:.2f} times the runs of run() (at least {LEAST_RUNS})")
    print(
        f"run_many, {INPUTS} inputs: {many:.2f} times the time of batches in this process (at most {MOST_TIME}); "
        f"best batches {mine} and {theirs}"
    )
    return int(runs < LEAST_RUNS or many > MOST_TIME)


if __name__ == "__main__":
    sys.exit(main())
