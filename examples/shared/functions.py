"""Python functions as models of a service that programs share.

    nnburst serve --name filters examples/shared/functions.py:edges examples/shared/functions.py:brightness
    python examples/shared/functions.py

The first command serves the two functions below, until Ctrl-C. The second is a test: it starts such a service under
another name, runs the functions there and in this process, and compares the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

import nnburst
from nnburst import Tensor, declare

Array = np.ndarray[Any, np.dtype[np.float32]]
IMAGE = Tensor("image", "float32", ("h", "w"))


@declare(inputs=[IMAGE], outputs=[Tensor("edges", "float32", (None, "w"))])
def edges(image: Array) -> Array:
    """Return the edges of an image. The array is shared memory of the client, read-only, and valid during the call."""
    return np.abs(np.diff(image, axis=0))


@declare(inputs=[IMAGE], outputs=[Tensor("mean", "float32", (1,)), Tensor("rows", "float32", ("h",))])
def brightness(image: Array) -> tuple[Array, Array]:
    """Return two outputs as a tuple: the mean of the image, and the mean of each row."""
    return image.mean(keepdims=True).reshape(1), image.mean(axis=1)


def main() -> int:
    name = f"example-{os.getpid()}"
    functions = [f"{__file__}:{function}" for function in ("edges", "brightness")]
    command = [sys.executable, "-P", "-m", "nnburst", "serve", "--json", "--name", name, *functions]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            ready = json.loads(server.stdout.readline())
            print(f"service: process {ready['pid']} serves {ready['models']}")
            image = np.linspace(0, 1, 48, dtype=np.float32).reshape(6, 8)
            with nnburst.connect(name) as service:
                with service.session("edges") as session:
                    right = np.array_equal(session.run(None, {"image": image})[0], edges(image))
                with service.session("brightness") as session:
                    there = session.run(None, {"image": image})
                    right &= all(map(np.array_equal, there, brightness(image)))
        finally:
            server.terminate()
    print("the service and this program agree" if right else "the answers are WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
