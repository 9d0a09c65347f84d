"""`nnburst run` and `nnburst bench --model`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from onnx_support import FLOAT, RNG, TensorProto, graph, in_process, mlp, node, save

from nnburst.cli import main


def nnburst(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save(mlp(16, 2, "n"), tmp_path / "m.onnx")


def test_run_prints_and_saves_outputs(model: str, tmp_path: Path) -> None:
    x = RNG.normal(size=(3, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    (expected,) = in_process(model, {"x": x})
    done = nnburst("run", model, "--input", f"x={tmp_path / 'x.npy'}", "--output", f"y={tmp_path / 'y.npy'}")
    assert done.exit_code == 0, done.output
    assert "y: float32 [3, 16] saved" in done.output
    assert np.array_equal(np.load(tmp_path / "y.npy"), expected)
    done = nnburst("run", model, "--input", f"x={tmp_path / 'x.npy'}")
    assert done.output.startswith("y: float32 [3, 16]\n[[")


def test_run_shows_what_a_model_takes(model: str) -> None:
    assert nnburst("run", model, "--show").output == "input  x: float32 [n, 16]\noutput y: float32 [n, 16]\n"


def test_run_makes_inputs_up(model: str) -> None:
    assert "y: float32 [1, 16]" in nnburst("run", model, "--random").output
    assert "y: float32 [5, 16]" in nnburst("run", model, "--random", "--shape", "x=5,16").output


def test_run_says_what_is_wrong(model: str, tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_bytes(b"no array")
    np.save(tmp_path / "int.npy", np.zeros((1, 16), np.int64))
    cases = {
        (): "x: float32 [n, 16]",
        ("--input", "x"): "NAME=VALUE",
        ("--input", f"x={tmp_path / 'bad.npy'}"): "no .npy file",
        ("--input", f"x={tmp_path / 'none.npy'}"): "no .npy file",
        ("--input", f"x={tmp_path / 'int.npy'}"): ".astype('float32')",
        ("--random", "--shape", "z=1"): "--shape for ['z']",
        ("--random", "--shape", "x=1,2"): "does not admit",
        ("--random", "--output", "z=z.npy"): "--output for ['z']",
    }
    for arguments, message in cases.items():
        done = nnburst("run", model, *arguments)
        assert done.exit_code == 1, arguments
        assert message in done.output
    assert "no-such.onnx" in nnburst("run", str(tmp_path / "no-such.onnx")).output
    assert "no file that a device reads" in nnburst("run", str(tmp_path / "bad.npy")).output


def test_bench_measures_five_contenders_side_by_side(model: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = nnburst(
        "bench",
        "--model",
        model,
        "--quick",
        "--count",
        "60",
        "--rounds",
        "2",
        "--shape",
        "x=2,16",
        "--json",
        str(report),
    )
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(report.read_text())["rows"]}
    assert list(rows) == ["inprocess-run", "inprocess-binding", "burst-bound", "burst-run", "pipe"]
    for row in rows.values():
        assert not row["note"], row
        assert row["count"] >= 10
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["max_us"]
        assert row["ratio"] > 0
    assert rows["inprocess-run"]["ratio"] == 1


def test_bench_compares_the_outputs(tmp_path: Path) -> None:
    noise = graph([node("RandomNormal", [], ["y"], shape=[4])], [("x", FLOAT, (1,))], [("y", FLOAT, (4,))])
    done = nnburst("bench", "--model", save(noise, tmp_path / "m.onnx"), "--count", "20", "--rounds", "1")
    assert done.output.count("the outputs differ from those of InferenceSession.run") >= 3


def test_bench_of_a_model_that_cannot_run_says_why(tmp_path: Path) -> None:
    strings = graph(
        [node("Identity", ["x"], ["y"])], [("x", TensorProto.STRING, (1,))], [("y", TensorProto.STRING, (1,))]
    )
    done = nnburst("bench", "--model", save(strings, tmp_path / "m.onnx"))
    assert done.exit_code == 1
    assert "holds strings" in done.output
    assert nnburst("bench", "--model", "x.onnx", "--only", "d").exit_code == 2
