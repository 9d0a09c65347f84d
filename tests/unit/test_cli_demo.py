"""The main job: what it measures, what it says, and that a wrong answer cannot pass."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

import nnburst
from nnburst.cli import main
from nnburst.cli.demo import command, network
from support import ROOT

LAST_LINE = re.compile(r"demo: accuracy=(0\.\d{4}|1\.0000) p50_us=\d+\.\d p99_us=\d+\.\d pipe_p50_us=\d+\.\d")

FloatArray = npt.NDArray[np.float32]


def test_race_lets_contenders_take_turns_and_times_every_call() -> None:
    images = np.random.default_rng(3).random((450, *network.IMAGE_SHAPE), dtype=np.float32)
    calls: list[str] = []

    def contender(name: str) -> Callable[[FloatArray], FloatArray]:
        return lambda image: calls.append(name) or image.reshape(-1)[:10].reshape(1, 10).copy()  # type: ignore[func-returns-value]

    took, answers = command.race({name: contender(name) for name in "ab"}, images, 3)
    assert "".join(calls[2 * command.WARM_UP :]) == ("a" * 450 + "b" * 450) * 3
    assert {len(each) for each in took.values()} == {3 * 450}
    assert np.array_equal(answers["a"][:, :, 0], [images.reshape(450, -1)[:, :10]] * 3)


def test_percentiles_are_in_microseconds_and_were_observed() -> None:
    assert command.percentiles_us(np.arange(1, 1001, dtype=np.int64) * 1000) == [501.0, 901.0, 991.0, 1000.0]


@pytest.fixture(scope="module")
def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_train", ROOT / "examples" / "digits" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_model_computes_what_the_training_script_trained(training: ModuleType) -> None:
    digits = network.load_digits()
    with np.load(network.DATA / "weights.npz") as weights:
        expected, _ = training.forward(dict(weights), digits.images[:50, 0])
    with (
        nnburst.in_process(devices=["nnburst-reference"]) as service,
        service.session(network.build_model()) as session,
    ):
        got = np.concatenate(list(map(command.asking(session), digits.images[:50])))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_files_of_the_demo_are_those_that_the_script_makes(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
    script = ROOT / "examples" / "digits" / "models.py"
    subprocess.run([sys.executable, str(script), "--output", str(tmp_path)], check=True, timeout=60)
    for name in network.EXAMPLES:
        assert onnx.load(tmp_path / name) == onnx.load(network.DATA / name), name


@pytest.mark.check
def test_demo_ends_with_the_machine_readable_line_and_succeeds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nnburst", "demo", "--passes", "1"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    match = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert match, done.stdout
    assert float(match.group(1)) >= 0.97
    assert done.stderr == ""  # no bar where there is no terminal


@pytest.mark.check
def test_demo_fails_when_a_burst_answer_was_tampered_with(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, victim = command.asking, network.load_digits().images[1234]

    def tampered(session: nnburst.Session) -> command.Ask:
        ask = asking(session)
        tampers = session.service.pid != os.getpid()

        def answer(image: FloatArray) -> FloatArray:
            given = ask(image)
            if tampers and np.array_equal(image, victim):
                given.view(np.uint32)[0, 3] ^= 1
            return given

        return answer

    monkeypatch.setattr(command, "asking", tampered)
    result = CliRunner().invoke(main, ["demo", "--passes", "1"])
    assert result.exit_code == 1, result.output
    assert "1 answers of burst to the service differ from in-process execution" in result.stderr
    assert not result.stdout.splitlines()[-1].startswith("demo:")


@pytest.mark.parametrize("name", ["digits", "digits.npy"])
def test_model_is_saved_where_run_finds_it(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["demo", "--save", str(tmp_path / name)])
    assert (done.exit_code, "ends with .onnx" in done.output, [*tmp_path.iterdir()]) == (1, True, [])


def test_demo_names_a_device_that_does_not_exist() -> None:
    result = CliRunner().invoke(main, ["demo", "--device", "nobody-knows"])
    assert result.exit_code == 1
    assert "nobody-knows" in result.stderr
    assert "Traceback" not in result.output
