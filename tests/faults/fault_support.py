"""Helpers of the fault tests: processes, calls in threads, a model."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from patience import PATIENCE

from nnburst.memory import Memory
from nnburst.model import DataLocation, Model, ModelBuilder, OperandType, Request, RequestArgument

WATCHDOG = PATIENCE
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def tiny_model() -> Model:
    """y = x + constant, four floats; the constant is a pool of its own size."""
    builder = ModelBuilder()
    x = builder.input("x", OperandType.TENSOR_FLOAT32, (64,))
    c = builder.constant(np.arange(64, dtype=np.float32))
    builder.output("y", builder.add(x, c))
    return builder.build()


def request_on(pool: Memory, nbytes: int = 256) -> Request:
    inputs = (RequestArgument(location=DataLocation(0, 0, nbytes)),)
    outputs = (RequestArgument(location=DataLocation(0, 256, nbytes)),)
    return Request(inputs, outputs, (pool,))


class Background:
    """A call in a thread; `result` waits for what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome.append(call())
        except Exception as error:
            self._outcome.append(error)

    def result(self) -> Any:
        self._thread.join(WATCHDOG)
        assert self._outcome, "the call did not come back"
        return self._outcome[0]


def wait_gone(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended; closes it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    gone = poll.poll(WATCHDOG * 1000)
    if not gone:
        import signal

        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert gone, "the process is still there"


class Client:
    """A client program in a process of its own. It prints one line of process ids when it is where it should be."""

    def __init__(self, program: str) -> None:
        path = os.pathsep.join((str(HERE), str(ROOT / "tests" / "unit"), str(ROOT), os.environ.get("PYTHONPATH", "")))
        env = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.kill()
            self.finish()
            raise AssertionError("the client failed")
        self.pids = [int(word) for word in line.split()]
        self.pidfds = [os.pidfd_open(pid) for pid in self.pids]

    def finish(self) -> int:
        """Reap the client; returns its status."""
        status = self.process.wait(WATCHDOG)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return status
