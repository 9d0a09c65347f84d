"""Run a loop that needs an answer every two milliseconds. If an answer is late, the loop uses the previous answer.

    python examples/recipes/real_time.py [--steps 500]

The service and the loop each get their own CPU and a real-time policy. Without the right to use the policy, the
program prints how to get the right, and only separates the CPUs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time

import numpy as np
from detector import MODEL, images, right

import nnburst

PERIOD = 0.002


def launch() -> nnburst.Service:
    """Start a service on the last CPU, and keep the other CPUs for this program."""
    *ours, last = sorted(os.sched_getaffinity(0))
    theirs = {last} if ours else None  # a single CPU is shared
    if ours:
        os.sched_setaffinity(0, ours)
    try:
        return nnburst.launch(scheduler=("fifo", 20), affinity=theirs)
    except nnburst.DeviceUnavailable as refused:
        print(f"not in real time: {refused}", file=sys.stderr)
        return nnburst.launch(affinity=theirs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    pictures = images(steps)
    late, wrong = 0, 0
    with launch() as service, service.session(MODEL, timeout=10) as session:
        with session.bind() as step:
            for _ in range(20):  # the first runs allocate buffers, and may take longer
                step.run()
            step.timeout = PERIOD
            try:
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
            except PermissionError:
                pass  # `launch` has printed it already
            gc.disable()  # garbage collection would delay a step
            scores = step.outputs["scores"].copy()
            due = time.monotonic()
            for picture in pictures:
                step.inputs["image"][0] = picture
                try:
                    step.run()
                    np.copyto(scores, step.outputs["scores"])
                    wrong += not right(picture, scores[0])
                except nnburst.MissedDeadline:
                    late += 1  # `scores` are from the previous step
                except nnburst.BadState:
                    late += 1  # the abandoned run still uses these arrays
                due += PERIOD
                time.sleep(max(0.0, due - time.monotonic()))
            gc.enable()
        print(f"{steps} steps, {late} late; {session.latency()}")
    print("every answer is right" if not wrong else f"{wrong} answers are WRONG")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
