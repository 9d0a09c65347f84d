"""Measure the cost of the sandbox against ``sandbox="off"``, and the time to open a model on a shared service.

``python benchmarks/walls.py [--rounds N] [--json FILE]`` prints medians over the rounds. For runs it also prints the
median of the rounds' ratios, and for opening the median of the rounds' differences. Runs are pinned: the client to the
first processor, services to the last. The first session of the program is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from opening import write_mlp
from programs import shared_service, step_model

import nnburst

_RUNS = 2000
_QUIET = 0.5
"""Seconds to leave a shared service idle."""
MODES = ("on", "off")


def timed(function: Callable[[], object], times: int, pause: float = 0.0) -> float:
    """Return the median time of a number of calls in microseconds, with a pause before each."""
    clock = time.perf_counter_ns
    took = []
    for _ in range(times):
        if pause:
            time.sleep(pause)
        begun = clock()
        function()
        took.append(clock() - begun)
    return statistics.median(took) / 1e3


def runs(mode: str, model: str, pin: list[int]) -> dict[str, float]:
    """Measure runs in two services that have the sandbox mode `mode`."""
    x = {"x": np.ones((1, 784), np.float32)}
    with nnburst.launch(devices=["nnburst-noop"], sandbox=mode, affinity=pin) as service:
        rows = {}
        for name, nbytes in (("no-op, 32 B", 32), ("no-op, 1 MiB", 1 << 20)):
            with service.session(step_model(nbytes)) as session:
                bound = session.bind()
                timed(bound.run, _RUNS)
                rows[name] = timed(bound.run, _RUNS)
        with service.session(step_model(32)) as session:
            bound = session.bind()
            bound.run()
            rows["no-op, asleep"] = timed(bound.run, 200, 0.002)
    with (
        nnburst.launch(devices=["nnburst-onnxruntime"], sandbox=mode, affinity=pin) as service,
        service.session(model) as session,
    ):
        bound = session.bind()
        timed(bound.run, _RUNS)
        rows["ONNX, bind().run()"] = timed(bound.run, _RUNS)
        rows["ONNX, Session.run"] = timed(lambda: session.run(None, x), _RUNS)
    return rows


def opening(mode: str, model: str) -> float:
    """Return the milliseconds to open a session and run it once."""
    x = {"x": np.ones((1, 784), np.float32)}
    begun = time.perf_counter()
    with nnburst.Session(model, sandbox=mode) as session:
        session.run(None, x)
        return (time.perf_counter() - begun) * 1e3


def shared(model: str, rounds: int) -> dict[str, float]:
    """Return the milliseconds to open a named model, a client's own model, and the own model again, on a service."""
    x = {"x": np.ones((1, 784), np.float32)}
    took: dict[str, list[float]] = {"named": [], "own, first of its user": [], "own, another one": []}
    with shared_service("--model", f"mlp={model}", "--isolate", "connection") as address:
        for _ in range(rounds + 1):
            time.sleep(_QUIET)
            with nnburst.connect(address) as service:
                for name, source in zip(took, ("mlp", model, model), strict=True):
                    begun = time.perf_counter()
                    with service.session(source) as session:
                        session.run(None, x)
                        took[name].append((time.perf_counter() - begun) * 1e3)
    return {name: statistics.median(each[1:]) for name, each in took.items()}


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="nnburst-walls-") as directory:
        model = str(Path(directory, "mlp.onnx"))
        write_mlp(Path(model))
        opening("on", model)
        turns = [{mode: opening(mode, model) for mode in MODES[:: 1 - 2 * (i % 2)]} for i in range(options.rounds)]
        figures["opening, ms"] = {
            **{mode: statistics.median(turn[mode] for turn in turns) for mode in MODES},
            "on - off": statistics.median(turn["on"] - turn["off"] for turn in turns),
        }
        figures["shared service, ms"] = shared(model, options.rounds)
        os.sched_setaffinity(0, cpus[:1])
        pin = cpus[-1:]
        rounds = [{mode: runs(mode, model, pin) for mode in MODES[:: 1 - 2 * (i % 2)]} for i in range(options.rounds)]
        for row in rounds[0]["on"]:
            figures[f"{row}, µs"] = {
                **{mode: statistics.median(each[mode][row] for each in rounds) for mode in MODES},
                "on / off": statistics.median(each["on"][row] / each["off"][row] for each in rounds),
            }
    for name, values in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in values.items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
