"""Compare runs of ONNX models over bursts with `InferenceSession.run`.

``python benchmarks/onnx_speed.py [--quick] [--markdown FILE]`` builds MLPs of Gemm and Relu, takes resnet50 from the
`onnx` package, and measures each model like ``nnburst bench --model``. ONNX Runtime has one thread, and the compared
calls take turns. Exits with 1 if a ratio exceeds its limit.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console

from nnburst.cli.bench.model import BASE, Contest
from nnburst.cli.bench.report import Report

LIMITS = {
    "mlp 16 x 1": {"burst-bound": 0.80, "burst-run": 0.95},
    "mlp 64 x 4": {"burst-bound": 0.85, "burst-run": 0.95},
    "mlp 256 x 4": {"burst-bound": 1.00, "burst-run": 1.05},
    "resnet50": {"burst-bound": 1.01, "burst-run": 1.01},
}
"""Limits of the median time divided by the time of `InferenceSession.run`, by network (or ``mlp WIDTH x LAYERS``)."""


def mlp(width: int, layers: int, path: Path) -> None:
    """Write a model of Gemm and Relu, from `x` to `y`."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(width)
    nodes, weights, last = [], [], "x"
    for i in range(layers):
        out = "y" if i == layers - 1 else f"h{i}"
        nodes += [
            helper.make_node("Gemm", [last, f"w{i}", f"b{i}"], [f"g{i}"]),
            helper.make_node("Relu", [f"g{i}"], [out]),
        ]
        weights += [
            numpy_helper.from_array((rng.normal(size=(width, width)) / np.sqrt(width)).astype(np.float32), f"w{i}"),
            numpy_helper.from_array(rng.normal(size=width).astype(np.float32), f"b{i}"),
        ]
        last = out
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, width)) for name in "xy")
    graph = helper.make_graph(nodes, path.stem, [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def model_file(name: str, directory: Path) -> Path:
    """Return the path of a model, which is written if necessary."""
    if not name.startswith("mlp"):
        import onnx

        return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"
    _, width, _, layers = name.split()
    path = directory / f"mlp{width}x{layers}.onnx"
    mlp(int(width), int(layers), path)
    return path


def markdown(reports: dict[str, Report]) -> str:
    """Return the table of `docs/benchmarks.md`, with "nan" for a ratio that is not settled."""
    first = next(iter(reports.values()))
    lines = ["| p50 in µs (ratio) | " + " | ".join(case.title for case in first.cases) + " |"]
    lines.append("|---|" + "--:|" * len(first.cases))
    for name, report in reports.items():
        rows = [report.row(case) for case in report.cases]
        cells = [f"{row['p50_us']:,.2f} ({row['ratio'] or math.nan:.2f})" if row["count"] else "-" for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- {line}" for line in first.conditions)]) + "\n"


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds per model")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    much = (5, 0.1) if options.quick else (20, 0.3)
    console, reports, missed = Console(), {}, 0
    with tempfile.TemporaryDirectory(prefix="nnburst-speed-") as directory:
        for name, limits in LIMITS.items():
            report = reports[name] = Contest(str(model_file(name, Path(directory)))).measure(*much)
            report.show(console)
            for key, limit in limits.items():
                ratio = report.results[key].ratio(report.results[BASE])
                if math.isnan(ratio):
                    missed += 1
                    console.print(f"  not settled  {key}, at most {limit:.2f}: the machine is busy")
                    continue
                missed += ratio > limit
                console.print(f"  {'pass' if ratio <= limit else 'MISS'}  {key} {ratio:.3f}, at most {limit:.2f}")
    if options.markdown:
        options.markdown.write_text(markdown(reports), encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
