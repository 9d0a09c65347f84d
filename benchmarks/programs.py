"""A shared service, programs that use it, processes of their own, and the model that they run."""

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
"""Seconds after which a program that says nothing has come to harm."""


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


@contextlib.contextmanager
def shared_service(*options: str, **process: Any) -> Iterator[str]:
    """Start ``nnburst serve`` with options, in a process as `subprocess.Popen` makes it; gives the address."""
    with tempfile.TemporaryDirectory(prefix="nnburst-shared-") as directory:
        os.chmod(directory, 0o755)  # other users may connect, if the service lets them
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
    """A process that does something whenever it is told to; it ends with the stack.

    Args:
        stack: What ends it.
        does: Called in the process, with the arguments and the end of a pipe, where it sends None when it is ready.
        arguments: What it is called with.
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
        """Have it do that."""
        self._end.send(how)

    def receive(self) -> Any:
        """Return what came of it."""
        if not self._end.poll(_TURN):
            raise TimeoutError("a program has said nothing")
        return self._end.recv()


def together(count: int, seconds: float, does: Callable[..., None], *arguments: Any) -> list[Any]:
    """Have so many programs run at the same time; return what each sends. They are told when to begin and to end."""
    with contextlib.ExitStack() as stack:
        programs = [Program(stack, does, *arguments) for _ in range(count)]
        start = time.monotonic() + 0.3
        for program in programs:
            program.begin(start, start + seconds)
        return [program.receive() for program in programs]


def step_model(nbytes: int) -> Model:
    """The least that a step can be: one pass over the state, and a small input and output beside it."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (1, 4))
    h = b.input("h_in", OperandType.TENSOR_FLOAT32, (1, nbytes // 4))
    b.output("h_out", b.relu(h))
    b.output("y", b.relu(x))
    return b.build()
