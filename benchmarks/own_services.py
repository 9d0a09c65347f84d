"""What 2, 4, 8, 16 programs get that each have a service of their own.

``python benchmarks/own_services.py [--seconds S] [--most N]`` says, for each number of programs, the runs of all of
them a second and how many more the one with most had than the one with least, in turns with polling and without.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import nnburst
from nnburst.cli.bench.clients import HEAD, Share, _receive, _run_until, show
from nnburst.cli.bench.models import step_model

WARM_UP = 0.2
WINDOWS = ("50", "0")
"""Microseconds that the ends of a burst poll."""


def program(window: str, end: Connection) -> None:
    """Run as fast as it can when it is told to, and send how often."""
    os.environ["NNBURST_POLLING_WINDOW_US"] = window
    with nnburst.launch(devices=["nnburst-noop"]) as service, service.session(step_model(1024)) as session:
        run = session.bind().run
        run()
        end.send(None)
        start, stop = end.recv()
        _run_until(start, run)
        end.send(_run_until(stop, run))
        end.recv()  # all have their counts: ending a service takes processor time


def measure(count: int, seconds: float, window: str) -> Share:
    """Measure so many programs at a time."""
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        ends: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=program, args=(window, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            ends.append(stack.enter_context(ours))
        for end in ends:
            _receive(end)
        start = time.monotonic() + WARM_UP
        for end in ends:
            end.send((start, start + seconds))
        runs = tuple(_receive(end, seconds) for end in ends)
        for end in ends:
            end.send(None)
        return Share(count, 1, seconds, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description="What programs get that each have a service of their own.")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--most", type=int, default=16, help="programs")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print(f"window  {HEAD}")
    count = 2
    while count <= options.most:
        for _ in range(options.turns):
            for window in WINDOWS:
                print(f"{window:>3} µs  {show(measure(count, options.seconds, window))}", flush=True)
        count *= 2


if __name__ == "__main__":
    main()
