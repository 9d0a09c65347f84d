"""Classify the frames of a camera that films continuously.

A thread films into a ring of shared-memory pools. A service process classifies the newest frame in place,
when the main thread asks for it. The camera writes a frame once, and no frame is copied or sent.

    python camera_loop.py                                       # an artificial camera and a small network built here
    python camera_loop.py --model squeezenet.onnx --labels labels.txt --camera 0     # a real one, with OpenCV
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from live_view import LiveView

import nnburst

SIZE = 32
SHAPES = ("nothing", "bar across", "bar upright", "cross")
RING = 4


def shape_network() -> bytes:
    """Return an ONNX file's bytes: a network that recognises horizontal bars, vertical bars and crosses."""
    try:
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        sys.exit("this example makes an ONNX model: pip install 'nnburst[onnx]'")

    across = np.zeros((11, 11), np.float32)
    across[5] = 1
    bars = np.stack([across, across.T])[:, None] / 11  # each pixel gets one number: the part of a bar around it
    weights = {
        "bars": bars,
        # scores from (best horizontal bar, best vertical bar): each class has its own corner of that square
        "corners": np.float32([[-2, 2, -2, 2], [-2, -2, 2, 2]]),
        "bias": np.float32([3, 0.5, 0.5, -2]),
    }
    nodes = [
        helper.make_node("Conv", ["image", "bars"], ["found"]),
        helper.make_node("GlobalMaxPool", ["found"], ["most"]),
        helper.make_node("Flatten", ["most"], ["pair"]),
        helper.make_node("Gemm", ["pair", "corners", "bias"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"]),
    ]
    graph = helper.make_graph(
        nodes,
        "shapes",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, 1, SIZE, SIZE))],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, (1, len(SHAPES)))],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    data: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return data


class ArtificialCamera:
    """Camera that draws jumping shapes in front of noise."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(3)

    def film(self, frame: np.ndarray[Any, np.dtype[np.float32]]) -> int:
        """Write one frame into an array. Return the class of its shape."""
        shape = int(self._rng.integers(len(SHAPES)))
        picture = frame[0, 0]
        self._rng.random(out=picture, dtype=np.float32)
        picture *= 0.2
        y, x = self._rng.integers(6, SIZE - 6, 2)
        if shape in (1, 3):
            picture[y, x - 5 : x + 6] = 1
        if shape in (2, 3):
            picture[y - 5 : y + 6, x] = 1
        return shape


class OpenCvCamera:
    """Camera of this machine, with RGB frames from 0 to 1, channels first."""

    def __init__(self, number: int) -> None:
        import cv2

        self._cv2: Any = cv2
        self._capture = cv2.VideoCapture(number)

    def film(self, frame: np.ndarray[Any, np.dtype[np.float32]]) -> int:
        """Write one frame into an array. Return -1, as the class of its shape is unknown."""
        ok, picture = self._capture.read()
        if not ok:
            raise SystemExit("the camera gives no pictures")
        height, width = frame.shape[2:]
        small = self._cv2.resize(picture, (width, height))[:, :, ::-1]
        np.divide(small.transpose(2, 0, 1), 255, out=frame[0], casting="unsafe")
        return -1


def main() -> None:
    """Run the loop and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=5000, help="how many to classify")
    parser.add_argument("--model", help="an ONNX file that takes one image [1, channels, height, width]")
    parser.add_argument("--labels", help="a file with one class per line")
    parser.add_argument("--camera", type=int, help="number of a camera for OpenCV")
    parser.add_argument("--plot", help="image file for the latencies")
    options = parser.parse_args()
    labels = Path(options.labels).read_text().splitlines() if options.labels else list(SHAPES)
    camera = ArtificialCamera() if options.camera is None else OpenCvCamera(options.camera)

    with nnburst.Session(options.model or shape_network()) as session:
        (image,), (answer,) = session.get_inputs(), session.get_outputs()
        ring = [session.bind() for _ in range(RING)]
        free: queue.SimpleQueue[int] = queue.SimpleQueue()
        filmed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        for slot in range(RING):
            free.put(slot)
        stop = threading.Event()

        def film() -> None:
            while not stop.is_set():
                slot = free.get()
                filmed.put((slot, camera.film(ring[slot].inputs[image.name])))

        thread = threading.Thread(target=film, name="camera", daemon=True)
        thread.start()
        view, right, known = LiveView("camera"), 0, 0
        try:
            for _ in range(options.frames):
                slot, shape = filmed.get()
                started = time.perf_counter()
                ring[slot].run()
                seconds = time.perf_counter() - started
                guess = int(ring[slot].outputs[answer.name].argmax())
                free.put(slot)
                right, known = right + (guess == shape), known + (shape >= 0)
                view.step(seconds, labels[guess] if guess < len(labels) else str(guess))
        except KeyboardInterrupt:
            pass
        finally:
            stop.set()
            free.put(0)
            thread.join()
        accuracy = f", {right / known:.1%} right" if known else ""
        print(f"camera: {len(view.microseconds)} frames{accuracy}, {view.summary()}")
    if options.plot:
        view.plot(options.plot)


if __name__ == "__main__":
    main()
