"""The main job: what it measures, what it says, and that a wrong answer cannot pass."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from nnburst.cli import main
from nnburst.cli.demo import contenders as _contenders
from nnburst.cli.demo import network, race
from support import ROOT

LAST_LINE = re.compile(
    r"demo: accuracy=(0\.\d{4}|1\.0000) p50_us=\d+\.\d p99_us=\d+\.\d transport_p50_us=\d+\.\d pipe_p50_us=\d+\.\d"
)

FloatArray = npt.NDArray[np.float32]


class Scripted(_contenders.Contender):
    """Answers each image with its first ten pixels, changed by `distort`."""

    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    def classify(self, image: FloatArray) -> FloatArray:
        self.calls.append(self.name)
        return self.distort(image.reshape(-1)[:10].reshape(1, 10).copy())

    def distort(self, answer: FloatArray) -> FloatArray:
        return answer

    def close(self) -> None:
        pass


class NegativeZeros(Scripted):
    """Equal in value, different in bits."""

    def distort(self, answer: FloatArray) -> FloatArray:
        return -answer


@pytest.fixture
def images() -> FloatArray:
    drawn = np.random.default_rng(3).random((450, *network.IMAGE_SHAPE), dtype=np.float32)
    drawn[17] = 0
    return drawn


def first_pixels(images: FloatArray) -> FloatArray:
    return images.reshape(len(images), -1)[:, :10].reshape(-1, 1, 10).copy()


def test_race_lets_contenders_take_turns_and_times_every_call(images: FloatArray) -> None:
    calls: list[str] = []
    advanced: list[tuple[str, int]] = []
    contenders = {name: Scripted(calls, name) for name in "ab"}
    laps = race.race(contenders, images, {}, 3, lambda name, count: advanced.append((name, count)))
    timed = calls[2 * race.WARM_UP :]
    assert "".join(timed) == ("a" * 450 + "b" * 450) * 3
    assert {lap.nanoseconds.size for lap in laps.values()} == {3 * 450}
    assert sum(count for _, count in advanced) == 2 * 3 * 450
    assert np.array_equal(laps["a"].answers, first_pixels(images))
    assert laps["a"].differences == ()


def test_race_reports_an_answer_that_differs_in_one_bit(images: FloatArray) -> None:
    expected = first_pixels(images)
    expected.view(np.uint32)[33, 0, 4] ^= 1
    lap = race.race({"a": Scripted([], "a")}, images, {"a": expected}, 2, lambda name, count: None)["a"]
    assert [difference.partition(":")[0] for difference in lap.differences] == ["a, image 33"] * 2


def test_race_tells_negative_zero_from_zero(images: FloatArray) -> None:
    images[:] = 0
    lap = race.race({"a": NegativeZeros([], "a")}, images, {"a": first_pixels(images)}, 1, lambda name, count: None)[
        "a"
    ]
    assert len(lap.differences) == len(images)


def test_percentiles_are_in_microseconds_and_were_observed() -> None:
    lap = race.Lap(np.arange(1, 1001, dtype=np.int64) * 1000, np.zeros((1, 1, 10), np.float32), ())
    assert lap.percentiles_us() == (501.0, 901.0, 991.0, 1000.0)


def test_digits_are_the_whole_set_with_a_hold_out() -> None:
    digits = network.load_digits()
    assert digits.images.shape == (1797, 1, 8, 8, 1)
    assert digits.images.dtype == np.float32
    assert (digits.images.min(), digits.images.max()) == (0, 1)
    assert digits.held_out.sum() == 450
    assert set(digits.labels[digits.held_out]) == set(range(10))


def test_weights_are_small_enough_to_be_committed() -> None:
    assert 0 < (network.DATA / "weights.npz").stat().st_size < 200_000


@pytest.fixture(scope="module")
def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_train", ROOT / "examples" / "digits" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gradients_of_the_training_script_are_those_of_its_loss(training: ModuleType) -> None:
    rng = np.random.default_rng(5)
    w = {name: value.astype(np.float64) for name, value in training.initial_weights(rng).items()}
    x, labels = rng.random((6, 8, 8, 1)), np.arange(6, dtype=np.uint8)

    def loss() -> float:
        return float(-np.log(training.forward(w, x)[0][np.arange(6), labels]).mean())

    for name, gradient in training.gradients(w, x, labels).items():
        for index in rng.integers(0, w[name].size, 4):
            kept = w[name].flat[index]
            w[name].flat[index] = kept + 1e-6
            above = loss()
            w[name].flat[index] = kept - 1e-6
            below = loss()
            w[name].flat[index] = kept
            assert (above - below) / 2e-6 == pytest.approx(gradient.flat[index], rel=1e-4, abs=1e-7), (name, index)


@pytest.fixture(scope="module")
def local() -> Iterator[_contenders.InProcessContender]:
    contender = _contenders.InProcessContender("nnburst-reference", network.build_model())
    yield contender
    contender.close()


def test_model_computes_what_the_training_script_trained(
    training: ModuleType, local: _contenders.InProcessContender
) -> None:
    digits = network.load_digits()
    with np.load(network.DATA / "weights.npz") as weights:
        expected, _ = training.forward(dict(weights), digits.images[:50, 0])
    got = np.concatenate([local.classify(image) for image in digits.images[:50]])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_bound_plan_and_unbound_execution_give_the_same_bits(local: _contenders.InProcessContender) -> None:
    for image in network.load_digits().images[:20]:
        assert local.classify(image).tobytes() == local.classify_unbound(image).tobytes()


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
    classify = _contenders.BurstContender.classify
    victim = network.load_digits().images[1234]

    def tampered(self: _contenders.BurstContender, image: FloatArray) -> FloatArray:
        answer = classify(self, image)
        if np.array_equal(image, victim):
            answer.view(np.uint32)[0, 3] ^= 1
        return answer

    monkeypatch.setattr(_contenders.BurstContender, "classify", tampered)
    result = CliRunner().invoke(main, ["demo", "--passes", "1"])
    assert result.exit_code == 1, result.output
    assert "differ from in-process execution" in result.stderr
    assert "image 1234" in result.stderr
    assert not result.stdout.splitlines()[-1].startswith("demo:")


def test_demo_names_a_device_that_does_not_exist() -> None:
    result = CliRunner().invoke(main, ["demo", "--device", "nobody-knows"])
    assert result.exit_code == 1
    assert "nobody-knows" in result.stderr
    assert "Traceback" not in result.output
