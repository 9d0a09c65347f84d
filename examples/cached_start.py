"""Show how a compilation cache speeds up repeated starts of a program.

Each start has its own service process. The cache is in a temporary directory that is removed at the end.

Usage: python examples/cached_start.py [--width 800] [--starts 3]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np

import nnburst


def build(width: int) -> nnburst.Model:
    """Return a model of four fully connected layers."""
    rng, b = np.random.default_rng(0), nnburst.ModelBuilder()
    y = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, width))
    for _ in range(4):
        weights = (rng.normal(size=(width, width)) / np.sqrt(width)).astype(np.float32)
        y = b.fully_connected(y, weights, activation="relu")
    b.output("y", y)
    return b.build()


def start(model: nnburst.Model, directory: str, width: int) -> np.ndarray:
    """Do one start of the program: open a session, run a few times, and print the outcome. Return the last output."""
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        began = time.perf_counter()
        with service.session(model, cache_dir=directory) as session:
            opened = time.perf_counter() - began
            x = {"x": np.ones((1, width), np.float32)}
            for _ in range(5):
                answer = session.run(None, x)[0]
            report = session.cache_report
    print(f"{report.outcome:9} {report.reason.value:12} opened in {1e3 * opened:6.1f} ms")
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=800)
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    if options.width < 1 or options.starts < 1:
        parser.error("--width and --starts are at least 1")
    model, answers = build(options.width), []
    with tempfile.TemporaryDirectory(prefix="nnburst-example-") as place:
        os.environ["NNBURST_STATE_DIR"] = f"{place}/state"  # a real program would keep the default
        for _ in range(options.starts):
            answers.append(start(model, f"{place}/cache", options.width))
    same = all((answer == answers[0]).all() for answer in answers)
    print("all answers are the same" if same else "the answers DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
