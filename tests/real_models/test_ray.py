"""Sessions in Ray: an actor, a deployment, and what a kill of a model's service costs their callers."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
ray = pytest.importorskip("ray", reason="needs the extra nnburst[ray]")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's, as it is imported
    from ray import serve

    from nnburst.errors import DeadObject, GeneralFailure, InvalidArgument, MissedDeadline
    from nnburst.scale.ray import Replica, actor, deployment

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.leaks("Ray's own processes and threads"),
    pytest.mark.filterwarnings("ignore"),
]
X = {"x": np.linspace(-1, 1, 8, dtype=np.float32)[None]}
Y = np.maximum(X["x"], 0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, logging_level="warning")
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> str:
    value = [onnx.helper.make_tensor_value_info(name, 1, [1, 8]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "relu", value[:1], value[1:])
    path = tmp_path_factory.mktemp("models") / "relu.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


def test_actor_runs_a_model_and_gets_over_the_death_of_its_service(cluster: None, relu: str) -> None:
    class Visible(Replica):  # in here, so that Ray sends it as it is
        def pid(self) -> int:
            return self.session.service.pid

    one = ray.remote(Visible).options(num_cpus=0).remote(relu, retry=True)
    assert ray.get(one.run.remote(X))[0].tobytes() == Y.tobytes()
    first = ray.get(one.pid.remote())
    os.kill(first, signal.SIGKILL)
    assert ray.get(one.run.remote(X))[0].tobytes() == Y.tobytes()
    assert ray.get(one.pid.remote()) != first
    many = ray.get(one.run_many.remote([X] * 3))
    assert [outputs[0].tobytes() for outputs in many] == [Y.tobytes()] * 3
    ray.kill(one)


def test_actor_by_one_call(cluster: None, relu: str) -> None:
    one = actor(relu, actor_options={"num_cpus": 0})
    assert ray.get(one.run.remote(X))[0].tobytes() == Y.tobytes()
    ray.kill(one)


def services(below: str) -> list[int]:
    """Return the services whose parents are replicas of Serve."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            title = Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            continue
        if any(part.endswith(b"process/bootstrap.py") for part in command) and below.encode() in title:
            found.append(int(entry))
    return found


def killed_under_load(handle: Any, seconds: float) -> tuple[list[BaseException], float, int]:
    """Kill the services while requests go on: (failures, longest time without an answer, answers)."""
    failures: list[BaseException] = []
    times = [time.monotonic()]
    end = times[0] + seconds
    kill_at = times[0] + seconds / 2

    def load() -> None:
        while time.monotonic() < end:
            try:
                assert handle.remote(X).result(timeout_s=60)[0].tobytes() == Y.tobytes()
                times.append(time.monotonic())
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, kill_at - time.monotonic()))
    os.kill(services("ServeReplica")[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    times.sort()
    return failures, max(b - a for a, b in itertools.pairwise(times)), len(times) - 1


def test_killed_service_costs_no_request_with_retry(cluster: None, relu: str) -> None:
    options = {"num_replicas": 1}
    handle = serve.run(deployment(relu, retry=True, serve_options=options), name="retry")
    handle.remote(X).result(timeout_s=60)
    failures, longest, answers = killed_under_load(handle, 6.0)
    print(f"with retry: {answers} answers, {len(failures)} failures, longest pause {longest:.3f} s")
    serve.delete("retry")
    assert failures == []


def test_killed_service_is_a_typed_error_without_retry(cluster: None, relu: str) -> None:
    handle = serve.run(deployment(relu, serve_options={"num_replicas": 1}), name="raise")
    handle.remote(X).result(timeout_s=60)
    failures, longest, answers = killed_under_load(handle, 6.0)
    print(f"without retry: {answers} answers, {len(failures)} failures, longest pause {longest:.3f} s")
    serve.delete("raise")
    assert all(isinstance(error, DeadObject) for error in failures), failures


def test_update_of_two_nodes_in_token_mode_loses_no_request() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "ray_nodes.py"
    # In a process of its own, as Ray reads the mode when it is imported. Ray's processes end with it.
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pass ") == 3, done.stdout


def test_service_of_a_user_is_used_only_if_that_user_is_trusted() -> None:
    with pytest.raises(InvalidArgument, match="trust_uid='me'"):
        Replica("m", service="nowhere", trust_uid="me")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    value = [onnx.helper.make_tensor_value_info(name, 1, ["n", 8]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "rows", value[:1], value[1:])
    path = tmp_path_factory.mktemp("models") / "rows.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


def test_requests_are_put_together_and_each_gets_its_own_answer(cluster: None, rows: str) -> None:
    handle = serve.run(deployment(rows, batch=4, batch_wait=0.2), name="batch")
    inputs = [np.full((1, 8), i, np.float32) for i in range(-5, 6)]
    inputs[3] = inputs[3][:, :7]
    answers = [handle.remote({"x": x}) for x in inputs]
    for i, (x, answer) in enumerate(zip(inputs, answers, strict=True)):
        if i == 3:
            with pytest.raises(InvalidArgument):
                answer.result(timeout_s=60)
        else:
            assert answer.result(timeout_s=60)[0].tobytes() == np.maximum(x, 0).tobytes()
    serve.delete("batch")


def test_batch_with_one_wrong_input_answers_the_others(rows: str) -> None:
    with contextlib.closing(Replica(rows)) as replica:
        good, wrong = {"x": np.ones((1, 8), np.float32)}, {"x": np.ones((1, 7), np.float32)}
        first, second, third = replica.run_together([good, wrong, good], 4)
        assert isinstance(second, InvalidArgument)
        for answer in (first, third):
            assert isinstance(answer, list)
            assert answer[0].tobytes() == good["x"].tobytes()


@pytest.mark.parametrize(
    ("error", "retry", "is_alone"),
    [
        (GeneralFailure("broken"), False, True),
        (DeadObject("gone"), True, True),
        (DeadObject("gone"), False, False),
        (MissedDeadline("late"), True, False),
    ],
    ids=["failure", "death, retry", "death", "late"],
)
def test_batch_that_fails_is_run_one_by_one_if_it_may_run_again(
    rows: str, error: Exception, retry: bool, is_alone: bool
) -> None:
    good, guilty = {"x": np.ones((1, 8), np.float32)}, {"x": np.full((1, 8), 13, np.float32)}

    def run_many(inputs: Any, batch: int = 1) -> Any:
        if any(one is guilty for one in inputs):
            raise error
        return [[one["x"]] for one in inputs]

    with contextlib.closing(Replica(rows, retry=retry)) as replica:
        replica.run_many = run_many  # type: ignore[method-assign]
        first, second, third = replica.run_together([good, guilty, good], 4)
    assert second is error
    assert [isinstance(answer, list) for answer in (first, third)] == [is_alone] * 2


def test_cost_beside_an_echo(cluster: None, relu: str) -> None:
    @serve.deployment
    class Echo:
        async def __call__(self, inputs: Any) -> Any:
            return [inputs["x"]]

    echo, ours = serve.run(Echo.bind(), name="echo", route_prefix="/e"), serve.run(deployment(relu), name="ours")
    medians = {}
    for _ in range(3):
        for name, handle in (("echo", echo), ("ours", ours)):
            laps = []
            for _ in range(300):
                begin = time.perf_counter()
                handle.remote(X).result(timeout_s=60)
                laps.append(time.perf_counter() - begin)
            medians.setdefault(name, []).append(float(np.median(laps)))
    print({name: f"{np.median(values) * 1e6:.0f} us" for name, values in medians.items()})
    serve.delete("echo")
    serve.delete("ours")
