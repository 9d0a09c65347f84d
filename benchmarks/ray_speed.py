"""Measure a model of this package in Ray Serve against an echo in Ray Serve, and the effect of a service's death.

``python benchmarks/ray_speed.py [--seconds S]`` needs ``nnburst[ray,onnx]``. Exits with 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx_speed import mlp
from turns import in_turns

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing Ray causes warnings
    import ray
    from ray import serve

    from nnburst.errors import DeadObject
    from nnburst.scale.ray import deployment

MOST_OF_ECHO = 1.05
MOST_PAUSE_S = 3.0
WIDTH = 64
X = {"x": np.linspace(-1, 1, WIDTH, dtype=np.float32)[None]}


@serve.deployment
class Echo:
    """Deployment that returns its arguments."""

    async def __call__(self, inputs: Any) -> Any:
        return [inputs["x"]]


def rows_model(path: Path) -> None:
    """Write a model for any number of rows."""
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["n", WIDTH]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "rows", [x], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)


def services() -> list[int]:
    """Return the process ids of the replicas' services."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
            if b"process/bootstrap.py" in command and b"ServeReplica" in Path(f"/proc/{parent}/cmdline").read_bytes():
                found.append(int(entry))
    return found


def killed(handle: Any, seconds: float) -> tuple[float, int, list[BaseException]]:
    """Kill the service under load. Return the longest time without an answer, the answers, and the failures."""
    failures: list[BaseException] = []
    times = [time.monotonic()]
    end = times[0] + seconds

    def load() -> None:
        while time.monotonic() < end:
            try:
                handle.remote(X).result(timeout_s=60)
                times.append(time.monotonic())
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 2)
    os.kill(services()[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    times.sort()
    return max(b - a for a, b in itertools.pairwise(times)), len(times) - 1, failures


def together(handle: Any, seconds: float) -> float:
    """Return the answers per second with 32 requests at a time."""
    count, end = 0, time.monotonic() + seconds
    begin = time.monotonic()
    while time.monotonic() < end:
        for answer in [handle.remote(X) for _ in range(32)]:
            answer.result(timeout_s=60)
        count += 32
    return count / (time.monotonic() - begin)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each row")
    options = parser.parse_args()
    missed = False

    def judge(good: bool, text: str) -> None:
        nonlocal missed
        missed |= not good
        print("pass" if good else "MISS", text, flush=True)

    with tempfile.TemporaryDirectory(prefix="nnburst-ray-") as folder:
        path, rows = Path(folder) / "mlp.onnx", Path(folder) / "rows.onnx"
        mlp(WIDTH, 4, path)
        rows_model(rows)
        ray.init(num_cpus=8, include_dashboard=False, logging_level="error", log_to_driver=False)
        echo = serve.run(Echo.bind(), name="echo", route_prefix="/echo")
        ours = serve.run(deployment(str(path), retry=True), name="ours", route_prefix="/ours")
        calls = {"echo": lambda: echo.remote(X).result(), "ours": lambda: ours.remote(X).result()}
        laps = in_turns(calls, options.seconds, warm_up=50)
        ratio = laps["ours"] / laps["echo"]
        figures = f"echo {laps['echo'] * 1e6:,.0f} us, an MLP {laps['ours'] * 1e6:,.0f} us"
        judge(ratio <= MOST_OF_ECHO, f"{figures}: {ratio:.3f}, at most {MOST_OF_ECHO}")
        serve.delete("echo")
        pause, answers, failures = killed(ours, options.seconds)
        judge(
            not failures and pause <= MOST_PAUSE_S,
            f"killed, retry: {answers} answers, {len(failures)} failures, {pause:.2f} s without one",
        )
        serve.delete("ours")
        bare = serve.run(deployment(str(path)), name="bare", route_prefix="/bare")
        bare.remote(X).result()
        pause, answers, failures = killed(bare, options.seconds)
        typed = all(isinstance(error, DeadObject) for error in failures)
        judge(
            typed and pause <= MOST_PAUSE_S,
            f"killed: {answers} answers, {len(failures)} failures, typed: {typed}, {pause:.2f} s without an answer",
        )
        serve.delete("bare")
        for batch in (1, 32):
            many = serve.run(
                deployment(str(rows), batch=batch, serve_options={"max_ongoing_requests": 64}),
                name="many",
                route_prefix="/many",
            )
            many.remote(X).result()
            print(f"     batch={batch}: {together(many, options.seconds / 2):,.0f} answers a second, 32 at once")
            serve.delete("many")
        serve.shutdown()
        ray.shutdown()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
