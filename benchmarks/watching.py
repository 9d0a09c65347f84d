"""Measure how much a no-op execution is slowed down by timing, by an attached `nnburst top`, and by a trace.

Client and service have one CPU each. The cases take turns in short blocks, and ratios compare neighbouring blocks.

    python benchmarks/watching.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic, perf_counter_ns
from typing import Any

import nnburst
from nnburst._core import ffi, lib
from nnburst.cli.bench.rounds import allowed_cpus

BLOCK = 10_000
ATTACHED = 1.3
"""Seconds of a block with `top`, which reads once a second."""


def model() -> nnburst.Model:
    builder = nnburst.ModelBuilder()
    x = builder.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 8))
    builder.output("y", builder.relu(x))
    return builder.build()


def median_ns(run: Callable[[], Any]) -> float:
    """Return the median nanoseconds of an execution in a block. The time includes a reading of the clock."""
    took = []
    for _ in range(BLOCK):
        started = perf_counter_ns()
        run()
        took.append(perf_counter_ns() - started)
    return statistics.median(took)


def compare(name: str, cases: dict[str, Callable[[], float]], rounds: int) -> None:
    """Measure two cases in turns. Print their medians, the ratio and the difference."""
    found: dict[str, list[float]] = {case: [] for case in cases}
    for i in range(rounds):
        for case in sorted(cases, reverse=bool(i % 2)):
            found[case].append(cases[case]())
    (a, with_it), (b, without) = found.items()
    ratio = statistics.median(x / y for x, y in zip(with_it, without, strict=True))
    more = statistics.median(x - y for x, y in zip(with_it, without, strict=True))
    medians = f"{a} {statistics.median(with_it):.0f} ns, {b} {statistics.median(without):.0f} ns"
    print(f"{name:8} {medians}: ratio {ratio:.3f}, {more:+.0f} ns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    cpus = allowed_cpus()
    os.sched_setaffinity(0, {cpus.client})
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        service = stack.enter_context(nnburst.launch(devices=["nnburst-noop"], affinity={cpus.server}))

        def opened() -> nnburst.Session:
            return stack.enter_context(service.session(model()))

        timed, off = opened().bind(), opened()
        lib.nnb_client_trace(off.burst.controller.endpoint, ffi.NULL, 2**31 - 1)  # times one run in 2**31 - 1: none
        untimed = off.bind()
        os.environ["NNBURST_TRACE"] = f"{directory}/trace.json"
        traced = opened().bind()
        del os.environ["NNBURST_TRACE"]
        for execution in (timed, untimed, traced):
            median_ns(execution.run)
        compare("timing", {"on": lambda: median_ns(timed.run), "off": lambda: median_ns(untimed.run)}, rounds)
        compare("trace", {"on": lambda: median_ns(traced.run), "off": lambda: median_ns(timed.run)}, rounds)

        command = [sys.executable, "-m", "nnburst", "top", "--json"]
        top = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(top.kill)

        def beside_top(how: signal.Signals) -> float:
            os.kill(top.pid, how)
            end, medians = monotonic() + ATTACHED, []
            while monotonic() < end:
                medians.append(median_ns(timed.run))
            return statistics.median(medians)

        compare("top", {"on": lambda: beside_top(signal.SIGCONT), "off": lambda: beside_top(signal.SIGSTOP)}, rounds)


if __name__ == "__main__":
    main()
