"""Compare each operation of a MobileNet on the reference device with the same operation in ONNX Runtime.

``python benchmarks/operation_speed.py [--size 128] [--rounds 15] [--markdown FILE]`` makes a model of each distinct
layer of MobileNet v1 (width 1), in float32 and in 8 bits per element, and the same layer for ONNX Runtime. Both run it
on one thread, in turns. Quantised filters have one scale. ONNX Runtime gets QLinearConv and similar operators.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # both sides use one thread; NumPy reads this at import

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from nnburst import Memory, ModelBuilder, Operand, OperandType, OperationType
from nnburst.devices.registry import create_device
from nnburst.model import Request, RunOptions
from nnburst.model.operand import Output
from nnburst.model.types import DataLocation, RequestArgument

Array = np.ndarray[Any, np.dtype[Any]]
Q8 = OperandType.TENSOR_QUANT8_ASYMM
RNG = np.random.default_rng(1)
X_SCALE, W_SCALE, Y_SCALE, ZERO = 0.03, 0.01, 0.05, 128


@dataclass(frozen=True)
class Layer:
    """A layer. `kind` is conv, depthwise, pool, dense or softmax; an image is size x size x channels."""

    kind: str
    size: int
    channels: int
    out: int
    filter: int = 1
    stride: int = 1
    count: int = 1

    @property
    def name(self) -> str:
        step = f" / {self.stride}" if self.stride > 1 else ""
        return {
            "conv": f"CONV_2D {self.filter} x {self.filter}{step}",
            "depthwise": f"DEPTHWISE_CONV_2D 3 x 3{step}",
            "pool": "AVERAGE_POOL_2D",
            "dense": "FULLY_CONNECTED",
            "softmax": "SOFTMAX",
        }[self.kind]

    @property
    def shape(self) -> tuple[int, ...]:
        flat = self.kind in ("dense", "softmax")
        return (1, self.channels) if flat else (1, self.size, self.size, self.channels)


def mobilenet(size: int) -> list[Layer]:
    """Return the distinct layers of MobileNet v1, with the number of times that each occurs."""
    layers = [Layer("conv", size, 3, 32, 3, 2)]
    size, channels = size // 2, 32
    for out, stride, count in ((64, 1, 1), (128, 2, 1), (128, 1, 1), (256, 2, 1), (256, 1, 1), (512, 2, 1), (512, 1, 5),
                               (1024, 2, 1), (1024, 1, 1)):  # fmt: skip
        layers.append(Layer("depthwise", size, channels, channels, 3, stride, count))
        size //= stride
        layers.append(Layer("conv", size, channels, out, 1, 1, count))
        channels = out
    return [
        *layers,
        Layer("pool", size, 1024, 1024, size),
        Layer("dense", 1, 1024, 1000),
        Layer("softmax", 1, 1000, 1000),
    ]


def weights(layer: Layer, quantised: bool) -> tuple[Array, Array]:
    """Return random weights of a layer: the filter in NNAPI's order, and the bias."""
    if layer.kind == "dense":
        shape: tuple[int, ...] = (layer.out, layer.channels)
    elif layer.kind == "depthwise":
        shape = (1, 3, 3, layer.out)
    else:
        shape = (layer.out, layer.filter, layer.filter, layer.channels)
    if quantised:
        return RNG.integers(90, 166, shape).astype(np.uint8), RNG.integers(-500, 500, layer.out).astype(np.int32)
    return RNG.normal(size=shape).astype(np.float32) * 0.05, RNG.normal(size=layer.out).astype(np.float32)


def by_reference(
    layer: Layer, x: Array, w: Array, bias: Array, quantised: bool
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return a function that runs the layer on the reference device, and a function that releases the layer."""
    b = ModelBuilder()
    quant = {"scale": X_SCALE, "zero_point": ZERO} if quantised else {}
    given = b.input("x", Q8 if quantised else OperandType.TENSOR_FLOAT32, x.shape, **quant)  # type: ignore[arg-type]
    arguments: list[Operand] = [given]
    if layer.kind in ("conv", "depthwise", "dense"):
        arguments.append(b.constant(w, scale=W_SCALE, zero_point=ZERO) if quantised else b.constant(w))
        arguments.append(b.constant(bias, scale=X_SCALE * W_SCALE) if quantised else b.constant(bias))
    same, step, relu6 = 1, layer.stride, 3
    numbers = {
        "conv": [same, step, step, relu6],
        "depthwise": [same, step, step, 1, relu6],
        "pool": [2, 1, 1, layer.filter, layer.filter, 0],
        "dense": [0],
        "softmax": [],
    }[layer.kind]
    arguments += map(b.scalar, numbers)
    arguments += [b.scalar(1.0)] if layer.kind == "softmax" else []
    kinds = {"conv": "CONV_2D", "depthwise": "DEPTHWISE_CONV_2D", "pool": "AVERAGE_POOL_2D"}
    kinds |= {"dense": "FULLY_CONNECTED", "softmax": "SOFTMAX"}
    fixed = layer.kind in ("pool", "softmax") or not quantised
    outputs: list[Output] | None = None if fixed else [{"scale": Y_SCALE, "zero_point": ZERO}]
    (out,) = b.operation(OperationType[kinds[layer.kind]], *arguments, outputs=outputs)
    b.output("y", out)
    model = b.build()
    prepared = create_device("nnburst-reference").prepare_model(model)
    operand = model.main.operands[out.index]
    nbytes = int(np.prod(operand.dimensions)) * x.itemsize
    start = -(-x.nbytes // 64) * 64
    memory = Memory.ashmem(start + nbytes)
    memory.array(x.dtype, x.shape)[...] = x
    spots = [DataLocation(0, 0, x.nbytes), DataLocation(0, start, nbytes)]
    request = Request((RequestArgument(False, spots[0]),), (RequestArgument(False, spots[1]),), (memory,))
    kernel = prepared.bind(request, RunOptions())  # type: ignore[attr-defined]

    def close() -> None:
        prepared.close()
        memory.close()

    return kernel, close


def by_onnxruntime(layer: Layer, x: Array, w: Array, bias: Array, quantised: bool) -> Callable[[], Any]:
    """Return a function that runs the layer in ONNX Runtime, with images in ONNX's order."""
    image = x if x.ndim == 2 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if layer.kind == "depthwise":
        w = w[0].transpose(2, 0, 1)[:, None]
    elif layer.kind == "conv":
        w = w.transpose(0, 3, 1, 2)
    elif layer.kind == "dense":
        w = w.T
    kept = {"w": np.ascontiguousarray(w), "b": bias, "xs": np.float32(X_SCALE), "ws": np.float32(W_SCALE)}
    kept |= {"ys": np.float32(1 / 256 if layer.kind == "softmax" else X_SCALE if layer.kind == "pool" else Y_SCALE)}
    kept |= {"z": np.uint8(ZERO), "yz": np.uint8(0 if layer.kind == "softmax" else ZERO)}
    kept |= {"low": np.float32(0), "high": np.float32(6)}
    group = layer.channels if layer.kind == "depthwise" else 1
    convolution = {"group": group, "strides": [layer.stride] * 2, "auto_pad": "SAME_UPPER"}
    window = {"kernel_shape": [layer.filter] * 2}
    inner = ["x", "xs", "z"]
    result, microsoft = "y", {"domain": "com.microsoft"}
    make = helper.make_node
    if quantised:
        nodes = {
            "conv": [make("QLinearConv", [*inner, "w", "ws", "z", "ys", "yz", "b"], ["y"], **convolution)],
            "depthwise": [make("QLinearConv", [*inner, "w", "ws", "z", "ys", "yz", "b"], ["y"], **convolution)],
            "pool": [make("QLinearAveragePool", [*inner, "ys", "yz"], ["y"], **window, **microsoft)],
            "dense": [make("QGemm", [*inner, "w", "ws", "z", "b", "ys", "yz"], ["y"], **microsoft)],
            "softmax": [make("QLinearSoftmax", [*inner, "ys", "yz"], ["y"], opset=13, **microsoft)],
        }[layer.kind]
    else:
        fused = [make("Conv", ["x", "w", "b"], ["c"], **convolution), make("Clip", ["c", "low", "high"], ["y"])]
        nodes = {
            "conv": fused,
            "depthwise": fused,
            "pool": [make("AveragePool", ["x"], ["y"], **window)],
            "dense": [make("Gemm", ["x", "w", "b"], ["y"])],
            "softmax": [make("Softmax", ["x"], ["y"])],
        }[layer.kind]
    used = {name for node in nodes for name in node.input}
    element = TensorProto.UINT8 if quantised else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", element, image.shape)],
        [helper.make_tensor_value_info(result, element, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in kept.items() if name in used],
    )
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = helper.make_model(graph, opset_imports=sets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": image})


def measured(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Measure calls in turns. Return the shortest time of each in microseconds, as medians vary on a busy machine."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 2):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter_ns()
            call()
            if number > 1:
                taken.append((time.perf_counter_ns() - start) / 1000)
    return [min(taken) for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", type=int, default=128, help="side of the image (default 128)")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each layer (default 15)")
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    options = parser.parse_args()
    rows = ["| operation | image | channels | times | float32 | ORT | ratio | 8 bits | ORT | ratio |"]
    rows.append("|---|---|---|--:|--:|--:|--:|--:|--:|--:|")
    totals = np.zeros(4)
    for layer in mobilenet(options.size):
        found: list[float] = []
        for quantised in (False, True):
            w, bias = weights(layer, quantised)
            x = RNG.integers(0, 256, layer.shape).astype(np.uint8) if quantised else RNG.normal(size=layer.shape)
            x = x if quantised else x.astype(np.float32)
            ours, close = by_reference(layer, x, w, bias, quantised)
            found += measured([ours, by_onnxruntime(layer, x, w, bias, quantised)], options.rounds)
            del ours
            close()
        totals += np.array(found) * layer.count
        rows.append(_row(layer.name, f"{layer.size}²", f"{layer.channels} → {layer.out}", str(layer.count), found))
    rows.append(_row("**all layers**", "", "", "", list(totals)))
    text = "\n".join(rows)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")


def _row(name: str, image: str, channels: str, count: str, found: list[float]) -> str:
    pairs = [
        f"{ours:,.0f} | {theirs:,.0f} | {ours / theirs:.1f}" for ours, theirs in zip(*[iter(found)] * 2, strict=True)
    ]
    return f"| {name} | {image} | {channels} | {count} | {' | '.join(pairs)} |"


if __name__ == "__main__":
    main()
