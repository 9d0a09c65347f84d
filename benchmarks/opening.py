"""What it takes to open a session on a service of one's own: the first of a program, the second, and imports alone.

``python benchmarks/opening.py [--rounds N] [--markdown FILE]`` starts programs in turns. They run where bytecode may be
written, in the environment that a service has.
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

from nnburst.service import service_environment

_IMPORTS = "import numpy, onnxruntime"
_SESSIONS = """
import sys, time
import numpy as np
import nnburst
nnburst.Session
x = {"x": np.ones((1, 784), np.float32)}
for i in range(2):
    started = time.perf_counter()
    session = nnburst.Session(sys.argv[1])
    session.run(None, x)
    print((time.perf_counter() - started) * 1e3)
    session.close()
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


def program(code: str, *arguments: str) -> tuple[float, str]:
    """Run a program; return the milliseconds that it took, and what it printed."""
    env = service_environment(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, check=True, capture_output=True, text=True)
    return (time.perf_counter() - started) * 1e3, done.stdout


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="nnburst-opening-") as directory:
        model = Path(directory, "mlp.onnx")
        write_mlp(model)
        for _ in range(options.rounds + 1):
            imports = program(_IMPORTS)[0]
            rounds.append((imports, *map(float, program(_SESSIONS, str(model))[1].split())))
    lines = ["| | ms | of the imports |", "|---|--:|--:|"]
    titles = (f"`python -c '{_IMPORTS}'`", "first session of a program, and its first run", "second session, likewise")
    for i, title in enumerate(titles):
        middle = statistics.median(each[i] for each in rounds[1:])  # the first one writes bytecode
        ratio = statistics.median(each[i] / each[0] for each in rounds[1:])
        lines.append(f"| {title} | {middle:.0f} | {ratio:.2f} |")
    print(*lines, sep="\n")
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
