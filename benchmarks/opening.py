"""Measure the start of a program that opens a session on its own service and runs it once.

``python benchmarks/opening.py [--rounds N] [--markdown FILE]`` runs two programs in turns: one uses ONNX Runtime in
its own process, the other opens two sessions. Both have the environment of a service, and may write bytecode files.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

from nnburst.service.process.command import service_environment

_IN_PROCESS = """
import sys, time
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
session.run(None, {"x": np.ones((1, 784), np.float32)})
print(time.monotonic())
"""
_SESSIONS = """
import sys, time
import numpy as np
import nnburst
for i in range(2):
    session = nnburst.Session(sys.argv[1])
    session.run(None, {"x": np.ones((1, 784), np.float32)})
    print(time.monotonic())
    session.close()
    print(time.monotonic())
"""
_WIDTHS = (784, 128, 64, 10)


def write_mlp(path: Path) -> None:
    """Write a perceptron of three layers."""
    rng, nodes, weights, name = np.random.default_rng(0), [], [], "x"
    for i, (n, m) in enumerate(itertools.pairwise(_WIDTHS)):
        weights.append(numpy_helper.from_array(rng.standard_normal((n, m)).astype(np.float32), f"w{i}"))
        nodes += [
            helper.make_node("MatMul", [name, f"w{i}"], [f"y{i}"]),
            helper.make_node("Relu", [f"y{i}"], [f"z{i}"]),
        ]
        name = f"z{i}"
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, w]) for n, w in (("x", 784), (name, 10)))
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def program(code: str, model: Path) -> list[float]:
    """Run a program. Return the milliseconds from its start to each time that it prints."""
    env = service_environment(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, model], env=env, check=True, capture_output=True, text=True)
    return [(float(moment) - begun) * 1e3 for moment in done.stdout.split()]


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="nnburst-opening-") as directory:
        model = Path(directory, "mlp.onnx")
        write_mlp(model)
        for _ in range(options.rounds + 1):
            (in_process,) = program(_IN_PROCESS, model)
            first, closed, second, _ = program(_SESSIONS, model)
            rounds.append((in_process, first, second - closed))
    lines = ["| | ms | of ONNX Runtime in process |", "|---|--:|--:|"]
    titles = (
        "a program that opens a session of ONNX Runtime and runs it, from its start",
        "one that opens a session of nnburst and runs it, likewise",
        "its second session, with its first run",
    )
    for i, title in enumerate(titles):
        middle = statistics.median(each[i] for each in rounds[1:])  # the first round is left out: it writes bytecode
        ratio = statistics.median(each[i] / each[0] for each in rounds[1:])
        lines.append(f"| {title} | {middle:.0f} | {ratio:.2f} |")
    print(*lines, sep="\n")
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
