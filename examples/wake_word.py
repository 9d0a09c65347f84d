"""Listen for a wake word, with three .tflite models in one audio pipeline, each in its own sandbox.

The first model turns samples into mel bands. The second turns 76 rows of bands into an embedding. The third turns 16
embeddings into a probability. The models come with the package pyopen-wakeword. Without a recording, the program
listens to noise. It compares the results with LiteRT in this process.

    pip install 'nnburst[litert]' pyopen-wakeword
    python examples/wake_word.py [RECORDING.wav]        16 kHz, 16 bits, one channel
"""

from __future__ import annotations

import sys
import wave
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import nnburst

try:
    import pyopen_wakeword
    from ai_edge_litert.interpreter import Interpreter
except ModuleNotFoundError:
    sys.exit("this example needs two packages: pip install 'nnburst[litert]' pyopen-wakeword")

Step = Callable[[Any], Any]
MODELS = Path(str(pyopen_wakeword.__file__)).parent / "models"
NAMES = ("melspectrogram", "embedding_model", "okay_nabu")
CHUNK, BEFORE = 1280, 480
"""Number of samples in 80 ms, and number of earlier samples that the first mel band of these 80 ms needs."""
ROWS, EVERY, EMBEDDINGS = 76, 8, 16


def probabilities(samples: Any, mel: Step, embed: Step, word: Step) -> list[float]:
    """Return the probability of the word after each 80 ms, once there are enough samples."""
    heard, bands, features = np.zeros(BEFORE, np.float32), np.zeros((0, 32), np.float32), np.zeros((0, 96), np.float32)
    found = []
    for start in range(0, len(samples) - CHUNK + 1, CHUNK):
        heard = np.concatenate([heard[-BEFORE:], samples[start : start + CHUNK]])
        bands = np.concatenate([bands, mel(heard[None])[0, 0] / 10 + 2])
        while len(bands) >= ROWS:
            features = np.concatenate([features[1 - EMBEDDINGS :], embed(bands[None, :ROWS, :, None])[0, 0]])
            bands = bands[EVERY:]
            if len(features) == EMBEDDINGS:
                found.append(float(word(features[None])[0, 0]))
    return found


def in_service(session: nnburst.Session) -> Step:
    """Return a function that runs a model in its service."""
    name = session.get_inputs()[0].name
    return lambda array: session.run(None, {name: array})[0]


def in_process(name: str) -> Step:
    """Return a function that runs the same model in this process."""
    runner = Interpreter(model_path=str(MODELS / f"{name}.tflite")).get_signature_runner()
    (taken,) = runner.get_input_details()
    (given,) = runner.get_output_details()
    return lambda array: runner(**{taken: array})[given]


def read(path: str) -> Any:
    """Return the samples of a recording."""
    with wave.open(path) as file:
        if (file.getframerate(), file.getsampwidth(), file.getnchannels()) != (16000, 2, 1):
            sys.exit(f"{path}: give a recording of 16 kHz, 16 bits, one channel")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32)


def main() -> None:
    """Listen, print the probabilities, and compare."""
    noise = np.random.default_rng(1).normal(0, 500, 16000 * 4).astype(np.float32)
    samples = read(sys.argv[1]) if len(sys.argv) > 1 else noise
    with ExitStack() as stack:
        sessions = [stack.enter_context(nnburst.Session(MODELS / f"{name}.tflite")) for name in NAMES]
        found = probabilities(samples, *map(in_service, sessions))
    if found != probabilities(samples, *map(in_process, NAMES)):
        sys.exit("the services and this process do not agree")
    print(f"{len(found)} probabilities, the highest {max(found, default=0):.4f}; the services and this process agree")


if __name__ == "__main__":
    main()
