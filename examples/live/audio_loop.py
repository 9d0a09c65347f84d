"""Recognise telephone keys in sound, in blocks of ten milliseconds.

The network is recurrent: its state is the recent loudness of each tone. The state stays in the device, in two buffers
that alternate; only the samples of a block and the scores are transferred.

    python audio_loop.py --number 0123456789
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from live_view import LiveView

import nnburst

RATE = 8000
BLOCK = 80
LOW, HIGH = (697, 770, 852, 941), (1209, 1336, 1477, 1633)
KEYS = "123A456B789C*0#D"
MEMORY = np.float32(0.75)
"""Factor by which each block reduces the earlier loudness."""

Samples = np.ndarray[Any, np.dtype[np.float32]]


def tone_network() -> bytes:
    """Return an ONNX file's bytes: (block, previous loudness) → (loudness, scores of the 16 keys and of silence)."""
    try:
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        sys.exit("this example makes an ONNX model: pip install 'nnburst[onnx]'")

    phase = 2 * np.pi * np.outer(np.arange(BLOCK), (*LOW, *HIGH)) / RATE
    window = np.hanning(BLOCK)[:, None]
    pairs = np.zeros((8, 17), np.float32)
    for key in range(16):
        pairs[key // 4, key] = pairs[4 + key % 4, key] = 1  # a key has one low and one high tone
    weights = {
        "cosine": np.cos(phase) * window,
        "sine": np.sin(phase) * window,
        "memory": MEMORY,
        "news": 1 - MEMORY,
        "pairs": pairs,
        "silence": np.float32([0] * 16 + [200]),
    }
    node = helper.make_node
    nodes = [
        node("MatMul", ["block", "cosine"], ["re"]),
        node("MatMul", ["block", "sine"], ["im"]),
        node("Mul", ["re", "re"], ["re2"]),
        node("Mul", ["im", "im"], ["im2"]),
        node("Add", ["re2", "im2"], ["heard"]),
        node("Mul", ["heard", "news"], ["new"]),
        node("Mul", ["loudness_in", "memory"], ["old"]),
        node("Add", ["old", "new"], ["loudness_out"]),
        node("Gemm", ["loudness_out", "pairs", "silence"], ["scores"]),
    ]
    f32 = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "tones",
        [
            helper.make_tensor_value_info("block", f32, (1, BLOCK)),
            helper.make_tensor_value_info("loudness_in", f32, (1, 8)),
        ],
        [
            helper.make_tensor_value_info("loudness_out", f32, (1, 8)),
            helper.make_tensor_value_info("scores", f32, (1, 17)),
        ],
        [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()],
    )
    data: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return data


def dial(number: str) -> Iterator[Samples]:
    """Yield blocks of the sound of a dialled number, with noise: 100 ms of each key and 100 ms of silence."""
    rng = np.random.default_rng(1)
    seconds = np.arange(RATE // 10) / RATE
    for key in number:
        index = KEYS.index(key)
        tone = sum(np.sin(2 * np.pi * f * seconds) for f in (LOW[index // 4], HIGH[index % 4]))
        for sound in (tone, np.zeros(RATE // 10)):
            noisy = (sound + rng.normal(scale=0.1, size=sound.size)).astype(np.float32)
            yield from noisy.reshape(-1, BLOCK)


def main() -> None:
    """Run the loop and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", default="0123456789*#ABCD" * 10, help="what is dialled")
    parser.add_argument("--plot", help="image file for the latencies")
    options = parser.parse_args()
    if set(options.number) - set(KEYS):
        parser.error(f"a telephone has the keys {KEYS}")

    heard, pressed = "", 16
    view = LiveView("audio")
    with nnburst.Session(tone_network()) as session:
        with session.bind(state={"loudness_out": "loudness_in"}) as step:
            for block in dial(options.number):
                step.inputs["block"][0] = block
                started = time.perf_counter()
                step.run()
                seconds = time.perf_counter() - started
                key = int(step.outputs["scores"].argmax())
                if key != pressed and key < 16:
                    heard += KEYS[key]
                pressed = key
                view.step(seconds, heard[-16:])
        shown = heard if len(heard) <= 32 else f"{heard[:14]}…{heard[-14:]}"
        same = "as dialled" if heard == options.number else "NOT what was dialled"
        print(f"audio: {len(view.microseconds)} blocks, heard {shown} ({same}), {view.summary()}")
    if options.plot:
        view.plot(options.plot)
    if heard != options.number:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
