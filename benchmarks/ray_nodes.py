"""Measure how a rolling update on two Ray nodes with token authentication affects requests.

``python benchmarks/ray_nodes.py [--clients N]`` needs ``nnburst[ray,onnx]``, Ray 2.52 or later. Two nodes on this
machine have one replica each of a model, which another model replaces under load. Exits with 1 if a request is lost,
an answer is wrong, or a cluster program without the token is accepted.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

TOKEN = secrets.token_hex(32)
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}

import numpy as np  # noqa: E402 - Ray reads its environment as it is imported
import onnx  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing Ray causes warnings
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from nnburst.scale.ray import deployment

X = {"x": np.linspace(-1, 1, 64, dtype=np.float32)[None]}
Y = {"Relu": np.maximum(X["x"], 0), "Neg": -X["x"]}
QUIET = 3.0
"""Seconds of load before the update, and also after it."""


def model_of(operation: str) -> bytes:
    """Return a model of one operation."""
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [1, 64]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node(operation, ["x"], ["y"])], operation, [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def run(model: bytes) -> Any:
    """Deploy a model with one replica per node. Return when all replicas have it."""
    options = {"num_replicas": 2, "max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 1}}
    return serve.run(deployment(model, retry=True, serve_options=options), name="updated")


class Load:
    """Threads that send requests during a ``with`` block, and record each request's start, duration and model."""

    def __init__(self, handle: Any, clients: int) -> None:
        self.handle = handle
        self.answers: list[tuple[float, float, str]] = []
        self.lost: list[str] = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def _ask(self) -> None:
        while not self._ends.is_set():
            began = time.monotonic()
            try:
                (y,) = self.handle.remote(X).result(timeout_s=60)
                (name,) = (name for name, right in Y.items() if y.tobytes() == right.tobytes())
                self.answers.append((began, time.monotonic() - began, name))
            except Exception as error:
                self.lost.append(repr(error))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def line(self, begin: float, end: float) -> str:
        """Return a line about the requests that began between two times."""
        times = [took for began, took, _ in self.answers if begin <= began < end]
        p50, p99 = np.percentile(times, [50, 99]) * 1e3
        return f"{len(times)} answers, p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(times) * 1e3:.0f} ms"


def strangers_answer(address: str) -> str:
    """Return the cluster's answer to a program with another token."""
    code = f"import ray; ray.init({address!r}, log_to_driver=False); print('let in', len(ray.nodes()))"
    other = os.environ | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=other, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout if done.returncode == 0 else "refused: " + done.stderr.strip().splitlines()[-1]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    clients = parser.parse_args().clients
    missed = False

    def judge(good: bool, text: str) -> None:
        nonlocal missed
        missed |= not good
        print("pass" if good else "MISS", text, flush=True)

    cluster = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(cluster.address, logging_level="error", log_to_driver=False)
        answer = strangers_answer(cluster.address)
        judge(answer.startswith("refused"), f"another token: {answer}")
        handle = run(model_of("Relu"))
        with Load(handle, clients) as load:
            time.sleep(QUIET)
            begin = time.monotonic()
            run(model_of("Neg"))
            end = time.monotonic()
            time.sleep(QUIET)
        late = {name for began, _, name in load.answers if began >= end}
        judge(not load.lost, f"requests lost: {len(load.lost)} of {len(load.answers)} {load.lost[:1] or ''}")
        judge(late == {"Neg"}, f"answers after the update are of {late}")
        print(f"     before: {load.line(0, begin)}")
        print(f"     during the update of {end - begin:.1f} s: {load.line(begin, end)}")
        print(f"     after: {load.line(end, time.monotonic())}")
        print(f"     status: {handle.status.remote().result(timeout_s=60)}")
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cluster.shutdown()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
