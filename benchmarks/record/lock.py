"""Rows (l): a small ONNX model in a service where another thread keeps the interpreter lock without using a CPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from nnburst.cli.bench.rounds import Case, Subject
from nnburst.cli.bench.sampling import Samples

_WIDTH = 16
_THINKING_NS = 100_000
_WINDOW = 0.001
"""Polling window in seconds, longer than the client's pause, so that no sample includes a wake-up."""
HOLDER = """
import ctypes, threading
from nnburst.devices.function import Tensor, declare

sleep_with_the_lock = ctypes.PyDLL(None).usleep
wanted, holding = threading.Event(), threading.Event()

def hold():
    while wanted.wait():
        holding.set()
        sleep_with_the_lock(1000)

threading.Thread(target=hold, daemon=True).start()

@declare(inputs=[Tensor("on", "bool", (1,))], outputs=[Tensor("y", "bool", (1,))])
def lock(on):
    holding.clear()
    (wanted.set if on[0] else wanted.clear)()
    if on[0]:
        holding.wait()
    return on
"""


@contextmanager
def _open_thinking(holds: bool) -> Iterator[Subject]:
    from benchmarks.onnx_speed import mlp
    from nnburst import launch

    with tempfile.TemporaryDirectory(prefix="nnburst-bench-") as name:
        model, holder = Path(name, "model.onnx"), Path(name, "holder.py")
        mlp(_WIDTH, 1, model)
        holder.write_text(HOLDER, encoding="utf-8")
        with (
            launch(devices=["nnburst-onnxruntime", f"nnburst-function:call={holder}:lock"]) as service,
            service.session(model, device="nnburst-onnxruntime", polling_window=_WINDOW) as session,
            service.session("lock") as lock,
            session.bind() as bound,
        ):
            bound.inputs["x"][...] = 1
            for _ in range(3):
                bound.run()

            def turn(on: bool) -> None:
                lock.run(None, {"on": np.array([on])})

            def sample(count: int) -> Samples:
                turn(holds)
                try:
                    return _time_runs(bound.run, count)
                finally:
                    turn(False)

            yield Subject(sample, service.pid)


def _time_runs(run: object, count: int) -> Samples:
    """Run with a pause of 100 µs after each run. Return the nanoseconds of each run, int64[count]."""
    assert callable(run)
    now, samples = time.perf_counter_ns, np.empty(count, np.int64)
    for i in range(count):
        end = now() + _THINKING_NS
        while now() < end:
            pass
        began = now()
        run()
        samples[i] = now() - began
    return samples


def _case(key: str, title: str, holds: bool) -> Case:
    return Case(key, "l", title, "poll", _WIDTH * 4, partial(_open_thinking, holds))


LOCK_CASES: tuple[Case, ...] = (
    _case("lock-free", f"ONNX {_WIDTH} x 1, the client thinks 100 µs", False),
    _case("lock-held", "the same, the lock held 1 ms at a time", True),
)
