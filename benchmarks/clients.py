"""Measure the throughput of 1, 2, 4 … programs with one shared service, or with a service each.

``python benchmarks/clients.py [--most N] [--bursts K] [--own [--window US]] [--quick]`` prints, for each number of
programs, the total runs per second, and the fastest program's runs divided by the slowest program's runs. Both are
medians of five turns. The model does nothing. With ``--bursts``, each program has K bursts, with a thread for each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from programs import PATIENCE, shared_service, step_model, together

import nnburst


def program(address: str | None, bursts: int, end: Connection) -> None:
    """Run the model for a given time, and send the number of runs. Without `address`, start a service first."""
    service = nnburst.connect(address, open_timeout=PATIENCE) if address else nnburst.launch(devices=["nnburst-noop"])
    with service, contextlib.ExitStack() as stack:
        runs = [stack.enter_context(service.session(step_model(1024))).bind().run for _ in range(bursts)]
        for run in runs:
            run()
        end.send(None)
        start, stop = end.recv()
        counts = [0] * bursts

        def note(at: int) -> None:
            run_until(start, runs[at])
            counts[at] = run_until(stop, runs[at])

        threads = [threading.Thread(target=note, args=(at,)) for at in range(1, bursts)]
        for thread in threads:
            thread.start()
        note(0)
        for thread in threads:
            thread.join()
        end.send(sum(counts))
        end.recv()


def run_until(stop: float, run: Callable[[], Any]) -> int:
    runs, now = 0, time.monotonic
    while now() < stop:
        run()
        runs += 1
    return runs


def numbers_up_to(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 … below `most`, and `most`."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=16, help="programs")
    parser.add_argument("--bursts", type=int, default=1, help="of each program")
    parser.add_argument("--own", action="store_true", help="each program has a service of its own")
    parser.add_argument("--window", help="microseconds that the ends of a burst poll (with --own)")
    parser.add_argument("--quick", action="store_true", help="one turn of half a second")
    options = parser.parse_args()
    turns, seconds = (1, 0.5) if options.quick else (5, 1.0)
    if options.window:
        os.environ["NNBURST_POLLING_WINDOW_US"] = options.window
    found: dict[int, list[list[int]]] = {count: [] for count in numbers_up_to(options.most)}
    for _ in range(turns):
        with contextlib.ExitStack() as stack:
            shared = ("--device", "nnburst-noop", "--isolate", "none")
            address = None if options.own else stack.enter_context(shared_service(*shared))
            for count, runs in found.items():
                runs.append(together(count, seconds, program, address, options.bursts))
    print("clients       runs/s   most/least runs")
    for count, several in found.items():
        runs = sorted(several, key=sum)[turns // 2]
        print(f"{count:7} {sum(runs) / seconds:12,.0f} {max(runs) / max(1, min(runs)):18.2f}")


if __name__ == "__main__":
    main()
