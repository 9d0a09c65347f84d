"""`nnburst run` and `nnburst bench --model`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from nnburst.cli import main
from support.onnx_models import FLOAT, RNG, TensorProto, graph, in_process, mlp, node, save

BITS = TensorProto.BFLOAT16
"""A type that InferenceSession.run takes no arrays of."""


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


def test_run_writes_the_file_that_it_names(model: str, tmp_path: Path) -> None:
    target = tmp_path / "result"
    done = nnburst("run", model, "--random", "--output", f"y={target}")
    assert done.output == f"y: float32 [1, 16] saved to {target}\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("result")] == ["result"]
    assert np.load(target).shape == (1, 16)


def test_files_that_cannot_be_written_are_found_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    places = {
        tmp_path / "none" / "y": f"there is no directory {tmp_path / 'none'}",
        tmp_path: "it is a directory",
        tmp_path / "file" / "y": f"{tmp_path / 'file'} is not a directory",
        tmp_path / ("n" * 300): "too long",
    }
    if os.geteuid():
        places[Path("/proc/version")] = "it is read-only"
    for place, message in places.items():
        for arguments in (
            ("run", "no-such.onnx", "--random", "--output", f"y={place}"),
            ("bench", "--model", "no-such.onnx", "--json", str(place)),
            ("bench", "--json", str(place)),
        ):
            done = nnburst(*arguments)
            assert isinstance(done.exception, SystemExit), arguments
            assert message in done.output.replace("\n", ""), done.output
    done = nnburst("run", "no-such.onnx", "--output", "y=o", "--output", "z=o")
    assert "into one file" in done.output


def test_file_that_cannot_be_written_after_all_is_named(model: str) -> None:
    done = nnburst("run", model, "--random", "--output", "y=/dev/full")
    assert done.exit_code == 1
    assert done.output == "Error: /dev/full cannot be written: No space left on device\n"


def test_run_says_what_is_wrong(model: str, tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_bytes(b"no array")
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04no archive")
    np.savez(tmp_path / "two.npz", np.zeros(1), np.ones(1))
    np.save(tmp_path / "int.npy", np.zeros((1, 16), np.int64))
    cases = {
        (): "x: float32 [n, 16]",
        ("--input", "x"): "NAME=VALUE",
        ("--input", f"x={tmp_path / 'bad.npy'}"): "no .npy or .npz file",
        ("--input", f"x={tmp_path / 'none.npy'}"): "no .npy or .npz file",
        ("--input", f"x={tmp_path / 'int.npy'}"): ".astype('float32')",
        ("--input", f"x={tmp_path / 'zip.npy'}"): "no .npy or .npz file",
        ("--input", f"x={tmp_path / 'two.npz'}"): "holds several arrays",
        ("--input", f"z={tmp_path / 'int.npy'}"): "--input for ['z']; the inputs are ['x']",
        ("--random", "--input", f"z={tmp_path / 'int.npy'}"): "--input for ['z']; the inputs are ['x']",
        ("--random", "--shape", "x=-2,16"): "does not admit",
        ("--random", "--shape", "x=99999999999,16"): "larger than 4294967295 bytes",
        ("--random", "--shape", "z=1"): "--shape for ['z']",
        ("--random", "--shape", "x=1,2"): "does not admit",
        ("--random", "--output", "z=z.npy"): "--output for ['z']",
    }
    for arguments, message in cases.items():
        done = nnburst("run", model, *arguments)
        assert done.exit_code == 1, arguments
        assert isinstance(done.exception, SystemExit), arguments
        assert message in done.output
    assert "no-such.onnx" in nnburst("run", str(tmp_path / "no-such.onnx")).output
    assert "no device reads" in nnburst("run", str(tmp_path / "bad.npy")).output


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
        assert row["ratio"] is None or row["ratio"] > 0  # None: the machine was too busy in each round
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
    bits = graph([node("Identity", ["x"], ["y"])], [("x", BITS, (1,))], [("y", BITS, (1,))])
    done = nnburst("bench", "--model", save(bits, tmp_path / "m.onnx"))
    assert done.exit_code == 1
    assert "does not run in this process" in done.output


def test_run_gives_json(model: str, tmp_path: Path) -> None:
    shown = json.loads(nnburst("run", model, "--show", "--json").output)
    assert shown == {
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["n", 16]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["n", 16]}],
    }
    x = np.ones((1, 16), np.float32)
    np.save(tmp_path / "x.npy", x)
    (output,) = json.loads(nnburst("run", model, "--input", f"x={tmp_path / 'x.npy'}", "--json").output)["outputs"]
    assert np.allclose(output.pop("values"), in_process(model, {"x": x})[0])
    assert output == {"name": "y", "dtype": "float32", "shape": [1, 16]}
    target = tmp_path / "y.npy"
    done = nnburst("run", model, "--random", "--json", "--output", f"y={target}")
    assert json.loads(done.output)["outputs"][0]["file"] == str(target)


def test_run_many_takes_a_directory_and_saves_in_another(model: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    arrays = {f"{i:02}": RNG.normal(size=(1 + i % 3, 16)).astype(np.float32) for i in range(20)}
    for name, array in arrays.items():
        np.save(tmp_path / "in" / f"{name}.npy", array)
    many = ("run", model, "--many", str(tmp_path / "in"), "--batch", "8", "--into", str(tmp_path / "out"))
    done = nnburst(*many, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["files"], report["failed"], len(report["results"])) == (20, [], 20)
    for row, (name, array) in zip(report["results"], arrays.items(), strict=True):
        assert row["outputs"] == [{"name": "y", "dtype": "float32", "shape": list(array.shape)}]
        with np.load(row["saved"]) as saved:
            assert np.allclose(saved["y"], in_process(model, {"x": array})[0], atol=1e-5)
        assert Path(row["saved"]) == tmp_path / "out" / f"{name}.npz"
    np.save(tmp_path / "in" / "20.npy", np.zeros((1, 15), np.float32))
    done = nnburst(*many)
    assert done.exit_code == 1
    assert done.stdout.startswith("20 of 21 files in ")
    assert f"{tmp_path / 'in' / '20.npy'}: InvalidArgument: " in done.stderr


@pytest.mark.parametrize("options", [["--random"], ["--show"], ["--input", "x=x.npy"]])
def test_run_many_takes_no_other_inputs(model: str, options: list[str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 16), np.float32))
    done = nnburst("run", model, "--many", str(tmp_path), *[o.replace("=x", f"={tmp_path}/x") for o in options])
    assert done.exit_code == 1
    assert "--many takes its inputs from files" in done.output
    done = nnburst("run", model, "--into", str(tmp_path / "out"))
    assert "belong to --many" in done.output
