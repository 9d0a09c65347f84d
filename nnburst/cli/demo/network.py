"""Images of digits, a network (trained by `examples/digits/train.py`), and ONNX files to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...model.builder import ModelBuilder
from ...model.operand_types import OperandType
from ...model.types import Model

DATA = Path(__file__).with_name("data")
INPUT, IMAGE_SHAPE = "image", (1, 8, 8, 1)
OUTPUT, PROBABILITIES_SHAPE = "probabilities", (1, 10)


@dataclass(frozen=True, slots=True)
class Digits:
    """The data set of handwritten digits.

    Attributes:
        images: float32 [n, 1, 8, 8, 1] from 0 (paper) to 1 (ink); ``images[i]`` is an input.
        labels: uint8 [n], the digit in each image.
        held_out: bool [n], True for images that were not used in training.
    """

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.bool_]

    def accuracy(self, probabilities: npt.NDArray[np.float32], *, held_out_only: bool) -> float:
        """Return the fraction of correct answers in `probabilities` [n, 1, 10], between 0 and 1."""
        right = probabilities.reshape(len(self.labels), -1).argmax(axis=1) == self.labels
        return float(right[self.held_out].mean() if held_out_only else right.mean())


def load_digits() -> Digits:
    """Return 1,797 handwritten digits. For source and licence, see the README beside the data."""
    with np.load(DATA / "digits.npz") as data:
        images = (data["images"] / np.float32(16)).astype(np.float32)
        return Digits(images.reshape(-1, *IMAGE_SHAPE), data["labels"], data["held_out"])


def build_model() -> Model:
    """Return the convolutional network: one image in, ten probabilities out."""
    with np.load(DATA / "weights.npz") as weights:
        w = dict(weights)
    b = ModelBuilder()
    x = b.input(INPUT, OperandType.TENSOR_FLOAT32, IMAGE_SHAPE)
    x = b.conv_2d(x, b.constant(w["conv1_filter"]), b.constant(w["conv1_bias"]), padding="same", activation="relu")
    x = b.max_pool_2d(x, (2, 2))
    x = b.conv_2d(x, b.constant(w["conv2_filter"]), b.constant(w["conv2_bias"]), padding="same", activation="relu")
    x = b.fully_connected(x, b.constant(w["dense_weights"]), b.constant(w["dense_bias"]))
    b.output(OUTPUT, b.softmax(x))
    return b.build()


def _digit() -> npt.NDArray[Any]:
    """Return an image [1, 8, 8, 1] that was not used in training."""
    digits = load_digits()
    image: npt.NDArray[Any] = digits.images[digits.held_out][0]
    return image


def _frame() -> npt.NDArray[Any]:
    """Return an image [120, 160, 3] of three bright squares and two dark ones on noise."""
    image = np.random.default_rng(0).normal(128, 8, (120, 160, 3))
    for left, top, value in ((20, 12, 230), (120, 24, 250), (64, 80, 240), (92, 48, 20), (8, 88, 10)):
        image[top + 2 : top + 14, left + 2 : left + 14] = value
    return image.astype(np.uint8)


EXAMPLES: dict[str, Callable[[], npt.NDArray[Any]]] = {"digits.onnx": _digit, "detector.onnx": _frame}
"""Files in `DATA` (made by `examples/digits/models.py`), and functions that make their inputs."""
