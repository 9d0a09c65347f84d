"""Helpers of benchmarks with several programs: a shared service, its programs, and a model."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nnburst import Model, ModelBuilder, OperandType

PATIENCE = 60.0
"""Seconds that opening a session may take."""
_PR_SET_PDEATHSIG = 1
_TURN = 180.0
"""Seconds without a message after which a program counts as failed."""


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


@contextlib.contextmanager
def shared_service(*options: str, **process: Any) -> Iterator[str]:
    """Start ``nnburst serve`` with options. Yield its address."""
    with tempfile.TemporaryDirectory(prefix="nnburst-shared-") as directory:
        os.chmod(directory, 0o755)  # other users can connect, if the service accepts them
        path = Path(directory, "shared.sock")
        command = [sys.executable, "-m", "nnburst", "serve", "--socket", str(path), "--json", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=end_with_parent, **process) as serving:
            assert serving.stdout is not None
            try:
                if not serving.stdout.readline():
                    raise RuntimeError(f"nnburst serve ended with status {serving.wait()}")
                yield f"unix:{path}"
            finally:
                serving.send_signal(signal.SIGTERM)


class Program:
    """A process that does one thing each time that `begin` is called. It ends with the stack.

    Args:
        stack: The exit stack that ends the process.
        does: Function that the process calls with the arguments and one end of a pipe. It sends None when ready.
        arguments: The arguments of `does`.
    """

    def __init__(self, stack: contextlib.ExitStack, does: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._end, theirs = context.Pipe()
        process = context.Process(target=does, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        stack.callback(process.join)
        stack.callback(process.kill)
        stack.callback(self._end.close)
        self.receive()

    def begin(self, *how: Any) -> None:
        """Have the process do its work once."""
        self._end.send(how)

    def receive(self) -> Any:
        """Return the result of the work."""
        if not self._end.poll(_TURN):
            raise TimeoutError("a program has said nothing")
        return self._end.recv()


def together(count: int, seconds: float, does: Callable[..., None], *arguments: Any) -> list[Any]:
    """Run several programs at the same time, from a common start to a common end. Return the result of each."""
    with contextlib.ExitStack() as stack:
        programs = [Program(stack, does, *arguments) for _ in range(count)]
        start = time.monotonic() + 0.3
        for program in programs:
            program.begin(start, start + seconds)
        return [program.receive() for program in programs]


def step_model(nbytes: int) -> Model:
    """Return the cheapest model with a state: one pass over the state, and a small input and output."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (1, 4))
    h = b.input("h_in", OperandType.TENSOR_FLOAT32, (1, nbytes // 4))
    b.output("h_out", b.relu(h))
    b.output("y", b.relu(x))
    return b.build()
