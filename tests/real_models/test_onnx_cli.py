"""`nnburst run` and `nnburst bench --model`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from nnburst import launch
from nnburst.cli import main
from nnburst.cli.demo.network import build_model, load_digits
from support.onnx_models import FLOAT, RNG, TensorProto, classifier, graph, helper, in_process, mlp, node, save

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
        ("--random", "--shape", "x=-2,16"): "cannot be made up",
        ("--random", "--shape", "x=99999999999,16"): "cannot be made up",
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


@pytest.mark.check
def test_bench_measures_five_contenders_side_by_side(model: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = nnburst("bench", "--model", model, "--quick", "--rounds", "2", "--shape", "x=2,16", "--json", str(report))
    assert done.exit_code == 0, done.output
    rows = {row["key"]: row for row in json.loads(report.read_text())["rows"]}
    assert list(rows) == ["inprocess-run", "inprocess-binding", "burst-bound", "burst-run", "pipe"]
    for row in rows.values():
        assert not row["note"], row
        assert row["count"] >= 10
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["max_us"]
        assert row["ratio"] is None or row["ratio"] > 0  # None: the machine was too busy in each round
    assert rows["inprocess-run"]["ratio"] in (1, None)


@pytest.mark.check
def test_bench_compares_the_outputs(tmp_path: Path) -> None:
    noise = graph([node("RandomNormal", [], ["y"], shape=[4])], [("x", FLOAT, (1,))], [("y", FLOAT, (4,))])
    done = nnburst("bench", "--model", save(noise, tmp_path / "m.onnx"), "--quick", "--rounds", "1")
    for way in ("burst-bound", "burst-run", "pipe"):
        assert f"{way}: failed: the outputs differ from those of InferenceSession.run" in done.output


@pytest.mark.check
def test_bench_of_a_model_that_cannot_run_says_why(tmp_path: Path) -> None:
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


def test_run_many_names_a_file_that_cannot_be_read_also_for_a_model_without_inputs(tmp_path: Path) -> None:
    noise = graph([node("RandomNormal", [], ["y"], shape=[4])], [], [("y", FLOAT, (4,))])
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.npz").write_text("no arrays")
    np.savez(tmp_path / "in" / "b.npz")
    done = nnburst("run", save(noise, tmp_path / "m.onnx"), "--many", str(tmp_path / "in"), "--json")
    report = json.loads(done.stdout)
    assert [Path(row["file"]).name for row in report["failed"]] == ["a.npz"]
    assert [Path(row["file"]).name for row in report["results"]] == ["b.npz"]


@pytest.mark.parametrize("options", [["--random"], ["--show"], ["--input", "x=x.npy"]])
def test_run_many_takes_no_other_inputs(model: str, options: list[str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 16), np.float32))
    done = nnburst("run", model, "--many", str(tmp_path), *[o.replace("=x", f"={tmp_path}/x") for o in options])
    assert done.exit_code == 1
    assert "--many takes its inputs from files" in done.output
    done = nnburst("run", model, "--into", str(tmp_path / "out"))
    assert "belong to --many" in done.output


def test_saved_network_of_the_demo_answers_as_the_demo_does(tmp_path: Path) -> None:
    file, images = str(tmp_path / "m.onnx"), load_digits().images
    assert f"now: nnburst run {file} --input image=" in nnburst("demo", "--save", file).output
    (answers,) = in_process(file, {"image": images[:, 0]})
    with launch(devices=["nnburst-reference"]) as service, service.session(build_model()) as session:
        expected = np.concatenate([session.run(None, {"image": image})[0] for image in images[:100]])
    np.testing.assert_allclose(answers[:100], expected, atol=1e-5)
    assert load_digits().accuracy(answers, held_out_only=True) > 0.95
    assert nnburst("run", file, "--input", f"image={tmp_path / 'm.npy'}").exit_code == 0


# ---- strings, sequences and maps -----------------------------------------------------------------------------------


@pytest.fixture
def kinds(tmp_path: Path) -> str:
    return save(classifier(), tmp_path / "kinds.onnx")


@pytest.fixture
def twice(tmp_path: Path) -> str:
    x, y = (("x", TensorProto.STRING, ("n",)), ("y", TensorProto.STRING, ("n",)))
    return save(graph([node("StringConcat", ["x", "x"], ["y"])], [x], [y], opset=20), tmp_path / "twice.onnx")


def test_values_that_are_no_arrays_are_printed_in_part(kinds: str, tmp_path: Path) -> None:
    lines = nnburst("run", kinds, "--random", "--shape", "x=25,2").output.splitlines()
    assert lines[0] == "label: tensor(string) [25]"
    assert lines[-2] == "scores: seq(map(string,tensor(float))) [25]"
    assert lines[-1].startswith("[{'cat': 0.")
    assert lines[-1].endswith("...]")


def test_classifier_is_shown_and_told_as_json(kinds: str) -> None:
    holds = "seq(map(string,tensor(float)))"
    shown = nnburst("run", kinds, "--show").output
    assert shown == f"input  x: float32 [n, 2]\noutput label: tensor(string) [n]\noutput scores: {holds}\n"
    label, scores = json.loads(nnburst("run", kinds, "--show", "--json").output)["outputs"]
    assert label == {"name": "label", "dtype": "tensor(string)", "shape": ["n"]}
    assert scores == {"name": "scores", "dtype": holds, "shape": None}
    label, scores = json.loads(nnburst("run", kinds, "--random", "--shape", "x=2,2", "--json").output)["outputs"]
    assert label == {"name": "label", "dtype": "tensor(string)", "shape": [2], "values": ["cat", "cat"]}
    assert (scores["dtype"], scores["shape"]) == (holds, [2])
    assert [list(row) for row in scores["values"]] == [["cat", "dog", "é"]] * 2


def test_strings_and_maps_are_saved_without_pickle(kinds: str, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.npy" for name in ("label", "scores")}
    options = [option for name, file in files.items() for option in ("--output", f"{name}={file}")]
    done = nnburst("run", kinds, "--random", *options)
    assert done.exit_code == 0, done.output
    assert np.load(files["label"]).tolist() == ["cat"]
    (row,) = json.loads(np.load(files["scores"]).item())
    assert list(row) == ["cat", "dog", "é"]


def test_strings_go_in_from_files_and_made_up(twice: str, tmp_path: Path) -> None:
    assert nnburst("run", twice, "--random", "--shape", "x=2").output == "y: tensor(string) [2]\n['00' '00']\n"
    np.save(tmp_path / "x.npy", np.array(["a", "é"]))
    target = tmp_path / "y.npy"
    assert nnburst("run", twice, "--input", f"x={tmp_path / 'x.npy'}", "--output", f"y={target}").exit_code == 0
    assert np.load(target).tolist() == ["aa", "éé"]
    np.save(tmp_path / "x.npy", np.zeros(2, np.float32))
    done = nnburst("run", twice, "--input", f"x={tmp_path / 'x.npy'}")
    assert done.exit_code == 1
    assert "'x' holds strings: give an array of str" in done.output


def test_what_is_no_array_is_made_up_empty(tmp_path: Path) -> None:
    proto = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
    values = [helper.make_value_info(name, proto) for name in "xy"]
    made = helper.make_graph([node("Identity", ["x"], ["y"])], "same", values[:1], values[1:])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    done = nnburst("run", save(model, tmp_path / "m.onnx"), "--random", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["outputs"][0]["values"] == []


def test_run_many_takes_and_saves_strings_and_maps(kinds: str, twice: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(3):
        np.save(tmp_path / "in" / f"{i}.npy", np.full((i, 2), i, np.float32))
    many = ("--many", str(tmp_path / "in"), "--into", str(tmp_path / "out"), "--json")
    report = json.loads(nnburst("run", kinds, *many).stdout)
    assert report["failed"] == []
    assert [row["outputs"][0]["shape"] for row in report["results"]] == [[0], [1], [2]]
    assert report["results"][2]["outputs"][1]["dtype"] == "seq(map(string,tensor(float)))"
    with np.load(report["results"][2]["saved"]) as saved:
        assert saved["label"].tolist() == ["cat", "cat"]
        assert len(json.loads(saved["scores"].item())) == 2
    for i in range(3):
        np.save(tmp_path / "in" / f"{i}.npy", np.array([f"é{i}"] * i))
    report = json.loads(nnburst("run", twice, *many).stdout)
    assert report["failed"] == []
    with np.load(report["results"][2]["saved"]) as saved:
        assert saved["y"].tolist() == ["é2é2"] * 2
    done = nnburst("run", twice, *many, "--batch", "2")
    assert "batch=2 needs a symbolic first dimension" in done.output
