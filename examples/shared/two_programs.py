"""Use one service from two programs, with the model in memory once.

    python examples/shared/two_programs.py

The program starts `nnburst serve` with one model, then runs itself twice as a client, and checks the clients' answers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import nnburst

WIDTH = 64


def client(role: str, name: str) -> None:
    """Run a client, which knows only the names of the service and of the model."""
    with nnburst.connect(name) as service, service.session("mixer") as session:
        (argument,) = session.get_inputs()
        block = np.full((1, WIDTH), 1 if role == "left" else 2, np.float32)
        (mixed,) = session.run(None, {argument.name: block})
        print(f"{role}: served by process {service.pid}, sum {mixed.sum():.0f}")


def save_model(path: Path) -> None:
    """Write a model of y = x W, where every element of W is 1."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        sys.exit("this example makes an ONNX model: pip install 'nnburst[onnx]'")

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "mixer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, WIDTH])],
        [numpy_helper.from_array(np.ones((WIDTH, WIDTH), np.float32), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Two programs, one service.")
    parser.add_argument("--role", choices=["left", "right"], help=argparse.SUPPRESS)
    parser.add_argument("--name", default=f"example-{os.getpid()}", help="name of the service")
    options = parser.parse_args()
    if options.role:
        client(options.role, options.name)
        return 0

    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory, "mixer.onnx"))
        command = [sys.executable, "-P", "-m", "nnburst", "serve", "--json", "--name", options.name]
        service = subprocess.Popen(
            [*command, "--model", f"mixer={directory}/mixer.onnx"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert service.stdout is not None
            ready = json.loads(service.stdout.readline())
            print(f"service: process {ready['pid']} serves {ready['models']}")
            programs = [
                subprocess.Popen(
                    [sys.executable, __file__, "--role", role, "--name", options.name],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for role in ("left", "right")
            ]
            lines = [program.communicate()[0] for program in programs]
        finally:
            service.terminate()
            service.communicate()
    print("".join(lines), end="")
    expected = [f"sum {WIDTH * WIDTH * factor}\n" for factor in (1, 2)]
    right = all(line.endswith(end) for line, end in zip(lines, expected, strict=True))
    right &= len({line.split()[4] for line in lines}) == 1  # one process has served both programs
    print("both programs used the one service" if right else "the answers are WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
