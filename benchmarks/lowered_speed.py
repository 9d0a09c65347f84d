"""Measure how much faster models of NNAPI operations run on ONNX Runtime than on the reference device.

``python benchmarks/lowered_speed.py [--rounds 20] [--markdown FILE]`` builds a MobileNet v1 of 128 x 128 pixels, in
float32 and in 8 bits, an LSTM that runs one step, an LSTM that runs a sequence, and small MLPs. The devices take turns
in this process, each with several runs in a row. For the reference device and ONNX Runtime with one thread, the figure
is the median processor time, which other programs hardly change. For ONNX Runtime with its default of all processors,
the figure is the shortest elapsed time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy reads this when it is imported

import numpy as np

from nnburst import Memory, Model, ModelBuilder, Operand, OperandType, OperationType
from nnburst.devices import LocalModel
from nnburst.devices.registry import create_device
from nnburst.model import Request, RunOptions
from nnburst.model.operand_types import operand_info, operand_nbytes
from nnburst.model.types import DataLocation, RequestArgument

Array = np.ndarray[Any, np.dtype[Any]]
F32, Q8 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM
RNG = np.random.default_rng(1)
BLOCK_NS = 5_000_000
"""Minimum nanoseconds of a series of runs."""
LAYERS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
"""Channels and stride of each pair of convolutions in a MobileNet."""


def reals(*shape: int) -> Array:
    return (RNG.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)


def mobilenet(quantised: bool, size: int = 128) -> tuple[Model, list[Array]]:
    """Return a MobileNet v1 (width 1, fused ReLU6), and input arrays for it."""
    b, shape = ModelBuilder(), (1, size, size, 3)
    x = b.input("x", Q8, shape, scale=0.03, zero_point=128) if quantised else b.input("x", F32, shape)

    def conv(h: Operand, out: int, width: int, stride: int, *, depthwise: bool = False) -> Operand:
        depth = h.shape[-1]
        of_filter = (1, width, width, depth) if depthwise else (out, width, width, depth)
        method, inputs = b.depthwise_conv_2d if depthwise else b.conv_2d, width * width * (1 if depthwise else depth)
        options: dict[str, Any] = {"stride": stride, "padding": "same", "activation": "relu6"}
        if not quantised:
            return method(h, (RNG.normal(size=of_filter) * 1.4 / np.sqrt(inputs)).astype(np.float32), **options)
        codes = RNG.integers(1, 256, of_filter).astype(np.uint8)
        filter_ = b.constant(codes, scale=float(1.4 / 73 / np.sqrt(inputs)), zero_point=128)
        return method(h, filter_, scale=6 / 255, zero_point=0, **options)  # this is the range of ReLU6

    h = conv(x, 32, 3, 2)
    for out, stride in LAYERS:
        h = conv(conv(h, 0, 3, stride, depthwise=True), out, 1, 1)
    h = b.average_pool_2d(h, h.shape[1])
    if quantised:
        weights = b.constant(RNG.integers(98, 158, (1000, 1024)).astype(np.uint8), scale=0.002, zero_point=128)
        h = b.fully_connected(h, weights, scale=0.05, zero_point=128)
    else:
        h = b.fully_connected(h, reals(1000, 1024))
    b.output("y", b.softmax(h))
    b.output("logits", h)  # only the last output is compared
    image = RNG.integers(0, 256, shape).astype(np.uint8) if quantised else RNG.normal(size=shape).astype(np.float32)
    return b.build(), [image]


def lstm(units: int, steps: int = 0, batch: int = 1) -> tuple[Model, list[Array]]:
    """Return an LSTM of `units` inputs and outputs, and input arrays for it. It runs one step if `steps` is 0."""
    b = ModelBuilder()
    shape = (steps, batch, units) if steps else (batch, units)
    arrays = [reals(*shape)]
    x, nothing = b.input("x", F32, shape), b.omitted(F32)
    matrices = [b.constant(reals(units, units)) for _ in range(8)]
    biases = [b.constant(reals(units)) for _ in range(4)]
    states = [b.input(name, F32, (batch, units)) for name in ("out_state", "cell_state")]
    arrays += [reals(batch, units)] * 2
    inputs = [x, *matrices, *[nothing] * 3, *biases, *[nothing] * 2, *states, *map(b.scalar, (4, 0.0, 0.0))]
    if steps:
        outs = b.operation(OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM, *inputs, b.scalar(True), *[nothing] * 4)
    else:
        outs = b.operation(OperationType.LSTM, *inputs)
    for which, out in enumerate(outs):
        b.output(f"y{which}", out)
    return b.build(), arrays


def mlp(units: int, layers: int) -> tuple[Model, list[Array]]:
    b = ModelBuilder()
    h = b.input("x", F32, (1, units))
    for _ in range(layers):
        h = b.fully_connected(h, reals(units, units), activation="relu")
    b.output("y", h)
    return b.build(), [reals(1, units)]


MODELS: dict[str, Callable[[], tuple[Model, list[Array]]]] = {
    "MobileNet v1, 128 x 128, float32": lambda: mobilenet(False),
    "MobileNet v1, 128 x 128, 8 bits": lambda: mobilenet(True),
    "LSTM of 128, one step": lambda: lstm(128),
    "LSTM of 512, one step": lambda: lstm(512),
    "LSTM of 128, 100 steps": lambda: lstm(128, 100),
    "LSTM of 128, 100 steps, batch of 8": lambda: lstm(128, 100, 8),
    "MLP 64 x 4": lambda: mlp(64, 4),
    "MLP 256 x 4": lambda: mlp(256, 4),
    "MLP 1024 x 4": lambda: mlp(1024, 4),
}


class Bound:
    """A model on a device, bound to one request."""

    def __init__(self, device: str, model: Model, arrays: list[Array]) -> None:
        self._prepared = create_device(device).prepare_model(model)
        assert isinstance(self._prepared, LocalModel)
        main, places, end = model.main, list[DataLocation](), 0
        outputs = [main.operands[index] for index in main.output_indexes]
        sizes = [*(array.nbytes for array in arrays), *(operand_nbytes(o.type, o.dimensions) for o in outputs)]
        for size in sizes:
            places.append(DataLocation(0, end, size))
            end += -(-size // 64) * 64
        self._memory = Memory.ashmem(end)
        for array, place in zip(arrays, places, strict=False):
            self._memory.array(array.dtype, array.shape, place.offset)[...] = array
        arguments = [RequestArgument(location=place) for place in places]
        given, results = tuple(arguments[: len(arrays)]), tuple(arguments[len(arrays) :])
        self.run = self._prepared.bind(Request(given, results, (self._memory,)), RunOptions())
        self._last, self._where = outputs[-1], places[-1]

    def result(self) -> Array:
        dtype = operand_info(self._last.type).dtype
        assert dtype is not None
        return self._memory.array(dtype, self._last.dimensions, self._where.offset).astype(np.float64)


def measured(bounds: list[Bound], rounds: int) -> list[tuple[float, float]]:
    """Measure in turns. Return the median processor time and the shortest time of each, in microseconds."""
    times = [list[tuple[float, float]]() for _ in bounds]
    for _ in range(rounds):
        for bound, mine in zip(bounds, times, strict=True):
            count, start, used = 0, time.perf_counter_ns(), time.thread_time_ns()
            while (now := time.perf_counter_ns()) < start + BLOCK_NS:
                bound.run()
                count += 1
            mine.append(((time.thread_time_ns() - used) / count / 1000, (now - start) / count / 1000))
    return [(median(used for used, _ in mine), min(whole for _, whole in mine)) for mine in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each device (default 20)")
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    options = parser.parse_args()
    rows = ["| model | reference | ONNX Runtime | ratio | all processors | largest difference |"]
    rows += ["|---|--:|--:|--:|--:|--:|"]
    devices = ("nnburst-reference", "nnburst-onnxruntime:threads=1", "nnburst-onnxruntime")
    for name, make in MODELS.items():
        model, arrays = make()
        bounds = [Bound(device, model, arrays) for device in devices]
        (ours, _), (theirs, _), (_, wide) = measured(bounds, options.rounds)
        far = np.abs(bounds[0].result() - bounds[1].result()).max()
        rows.append(f"| {name} | {ours:,.1f} | {theirs:,.1f} | {ours / theirs:.1f} | {wide:,.1f} | {far:.0e} |")
        print(rows[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
