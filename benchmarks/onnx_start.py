"""Measure how much a compilation cache speeds up the opening of ONNX sessions.

The models are networks of the `onnx` package, whose weights are computed in the graph. Two networks are also measured
with random weights.

``python benchmarks/onnx_start.py [--rounds N] [--markdown FILE] [NETWORK …]`` opens sessions in one service, in turns
with and without a cache, and exits with 1 if a limit is missed. The times with a cache include its verification.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import nnburst

RANDOM = ("bvlc_alexnet", "vgg19")
"""Networks that are also measured with random weights in their files."""
LEAST = {"densenet121": 2.0, "inception_v2": 2.0, "resnet50": 1.3} | {f"{name}, random": 2.0 for name in RANDOM}
"""Minimum speed-up: the time to open without the cache, divided by the time with it; 1 for networks not listed."""
_TRIES = 4
"""Maximum number of sessions to open until the model is cached: the device may decline three times."""


def networks(wanted: Collection[str], room: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and file of each wanted network, or of all. Those with random weights are written to `room`."""
    import onnx

    directory = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(directory.glob("light_*.onnx")):
        name = path.stem.removeprefix("light_")
        if not wanted or name in wanted:
            yield name, path
        if name in RANDOM and (not wanted or f"{name}, random" in wanted):
            with_random_weights(path, room / path.name)
            yield f"{name}, random", room / path.name


def with_random_weights(source: Path, target: Path) -> None:
    """Write a network with random weights in the file, instead of weights computed in the graph."""
    import onnx

    model = onnx.load(source)
    graph, generator = model.graph, np.random.default_rng(1)
    shapes = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            nodes.append(node)
            continue
        shape = tuple(map(int, shapes[node.input[0]]))
        weights = generator.standard_normal(shape, np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))
        graph.initializer.append(onnx.numpy_helper.from_array(weights, node.output[0]))
    del graph.node[:]
    graph.node.extend(nodes)
    model.ir_version = max(model.ir_version, 4)
    onnx.save(model, target)


def opening(service: nnburst.Service, path: Path, cache: Path | None) -> tuple[float, str]:
    """Return the milliseconds to open a session, and the outcome of the cache."""
    started = time.perf_counter()
    session = service.session(path, cache_dir=cache)
    milliseconds = (time.perf_counter() - started) * 1e3
    report = session.cache_report
    session.close()
    return milliseconds, report.reason.value if report.outcome != "HIT" else "HIT"


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("networks", nargs="*")
    options = parser.parse_args()
    rows, missed = [], 0
    with tempfile.TemporaryDirectory(prefix="nnburst-start-") as directory:
        os.environ["NNBURST_STATE_DIR"] = str(Path(directory) / "state")
        cache = Path(directory) / "cache"
        with nnburst.launch(devices=["nnburst-onnxruntime:threads=1"]) as service:
            for name, path in networks(options.networks, Path(directory)):
                for _ in range(_TRIES):
                    opening(service, path, cache)
                    opening(service, path, None)
                turns = [
                    (opening(service, path, None)[0], *opening(service, path, cache)) for _ in range(options.rounds)
                ]
                without, with_cache = (float(np.median([turn[i] for turn in turns])) for i in (0, 1))
                hits = all(turn[2] == "HIT" for turn in turns)
                ratio, least = without / with_cache, LEAST.get(name, 1.0 if hits else None)
                missed += least is not None and not (hits and ratio >= least)
                rows.append(
                    (
                        name,
                        f"{without:.1f}",
                        f"{with_cache:.1f}",
                        f"{ratio:.2f}",
                        f"{least:.2f}" if least else "declined",
                        turns[-1][2],
                    )
                )
                print(*rows[-1], flush=True)
    columns = ("network", "compile, ms", "with cache, ms", "ratio", "at least", "the cache")
    table = Table(title="opening a session, median", title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if options.markdown:
        lines = [
            "| " + " | ".join(columns) + " |",
            "|---|--:|--:|--:|--:|---|",
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
