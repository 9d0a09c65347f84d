"""Requests of several clients for one named model, run as one: `nnburst serve --batch`."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import nnburst
from nnburst.errors import GeneralFailure, MissedDeadline
from nnburst.watch import find_services, look
from support.onnx_models import graph, in_process, mlp, node, onnx, ort, save
from support.processes import line_of
from support.services import COMMAND, Shared, shared_service
from support.users import GUEST, OTHER_GUEST, as_root, as_user
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.check

ROWS = 4
CLIENTS = 16
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
PATIENT = "sustained_speed"


def counted(shared: Shared, name: str) -> int:
    """A counter of the named models, over all bursts that there are and were."""
    return sum(row.counters[name] for page in find_services(shared.worker) for row in look(page).rows)


class Rows:
    """Threads with a session each, that ask for a row at the same time."""

    def __init__(self, shared: Shared, name: str, inputs: list[dict[str, np.ndarray]], **options: Any) -> None:
        self._stack = ExitStack()
        self._barrier = threading.Barrier(len(inputs))
        self._threads = self._stack.enter_context(ThreadPoolExecutor(len(inputs)))
        self.executions: list[nnburst.Execution] = []
        self._calls: list[Callable[..., Any]] = []
        for each in inputs:  # a client of its own for each
            service = self._stack.enter_context(nnburst.connect(shared.address))
            session = self._stack.enter_context(service.session(name, preference=PATIENT, **options))
            execution = session.bind(shapes={key: value.shape for key, value in each.items()})
            for key, value in each.items():
                execution.inputs[key][...] = value
            self.executions.append(execution)
            self._calls.append(lambda execution=execution: (execution.run(), execution.outputs["y"].copy())[1])

    def _one(self, call: Callable[[], Any]) -> Any:
        self._barrier.wait(PATIENCE)
        try:
            return call()
        except nnburst.NNBurstError as error:
            return error

    def run(self) -> list[Any]:
        """Run once in each; returns what came out, be it an error."""
        return list(self._threads.map(self._one, self._calls))

    def __enter__(self) -> Rows:
        self.run()  # each is bound, which is done one by one
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


@contextmanager
def serving(directory: Path, model: Any, *options: str) -> Iterator[tuple[Shared, str]]:
    path = save(model, directory / "m.onnx")
    with shared_service(directory, "--model", f"m={path}", *options) as shared:
        yield shared, path


def lasting() -> Any:
    """y = x, after a while."""
    info = onnx.helper.make_tensor_value_info
    inner = onnx.helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Neg", ["s"], ["t"])],
        "body",
        [info("i", INT64, []), info("go", TensorProto.BOOL, []), info("s", FLOAT, ["N", 8])],
        [info("on", TensorProto.BOOL, []), info("t", FLOAT, ["N", 8])],
    )
    loop = onnx.helper.make_node("Loop", ["n", "", "x"], ["y"], body=inner)
    return graph([loop], [("x", FLOAT, ("N", 8))], [("y", FLOAT, ("N", 8))], {"n": np.array(20_000)})


@pytest.mark.representative
def test_waiting_rows_run_as_one_and_each_client_gets_its_own(tmp_path: Path) -> None:
    inputs = [{"x": np.random.default_rng(i).normal(size=(1, 64)).astype(np.float32)} for i in range(ROWS)]
    with serving(tmp_path, mlp(64, 2, "N"), "--batch", "8", "--batch-wait", "1s") as (shared, path):
        with Rows(shared, "m", inputs) as rows:
            before, runs = counted(shared, "batched"), counted(shared, "batches")
            for _ in range(3):
                for one, row in zip(rows.run(), inputs, strict=True):
                    np.testing.assert_allclose(one, in_process(path, row)[0], rtol=1e-5, atol=1e-5)
            batched, batches = counted(shared, "batched") - before, counted(shared, "batches") - runs
            assert 3 <= batches <= batched // 2 <= 3 * ROWS // 2  # two or more in each round


def test_batch_that_fails_is_split_and_the_bad_row_fails_alone(tmp_path: Path) -> None:
    model = graph(
        [node("Gather", ["table", "i"], ["y"])],
        [("i", INT64, ("N", 1))],
        [("y", FLOAT, ("N", 1))],
        {"table": np.arange(10, dtype=np.float32)},
    )
    inputs = [{"i": np.array([[i]], np.int64)} for i in (1, 77)]  # two wait for each other
    with serving(tmp_path, model, "--batch", "8", "--batch-wait", "1s") as (shared, _):
        with Rows(shared, "m", inputs) as rows:
            good, bad = rows.run()
            assert good.item() == 1
            assert isinstance(bad, GeneralFailure)
            assert counted(shared, "batches") == 0


def test_bytes_of_bools_in_a_batch_are_0_or_1_for_onnxruntime(tmp_path: Path) -> None:
    made = graph([node("Cast", ["x"], ["y"], to=FLOAT)], [("x", TensorProto.BOOL, ("N", 1))], [("y", FLOAT, ("N", 1))])
    inputs = [{"x": np.uint8([[i]]).view(np.bool_)} for i in (0, 2, 255)]
    with (
        serving(tmp_path, made, "--batch", "8", "--batch-wait", "1s") as (shared, _),
        Rows(shared, "m", inputs) as rows,
    ):
        assert [one.tolist() for one in rows.run()] == [[[0]], [[1]], [[1]]]
        assert counted(shared, "batches") >= 1


def test_requests_of_other_shapes_run_beside_a_batch(tmp_path: Path) -> None:
    model = graph([node("Neg", ["x"], ["y"])], [("x", FLOAT, ("N", "L"))], [("y", FLOAT, ("N", "L"))])
    shapes = [(1, 3), (1, 5), (2, 3), (1, 3), (1, 5), (2, 3), (3, 0)]
    inputs = [{"x": np.full(shape, i, np.float32)} for i, shape in enumerate(shapes)]
    with serving(tmp_path, model, "--batch", "8", "--batch-wait", "1s") as (shared, _):
        with Rows(shared, "m", inputs) as rows:

            def all_pairs_run_as_one() -> bool:  # if all are there by the time that the first ones run
                before, runs = counted(shared, "batched"), counted(shared, "batches")
                for one, row in zip(rows.run(), inputs, strict=True):
                    np.testing.assert_array_equal(one, -row["x"])
                return (counted(shared, "batched") - before, counted(shared, "batches") - runs) == (6, 3)

            until(all_pairs_run_as_one)


def test_deadlines_hold_while_a_request_waits_for_others(tmp_path: Path) -> None:
    inputs = [{"x": np.ones((1, 8), np.float32)}] * 2
    with serving(tmp_path, mlp(8, 1, "N"), "--batch", "8", "--batch-wait", "m=1s") as (shared, _):
        with Rows(shared, "m", inputs) as rows, nnburst.connect(shared.address) as service:
            with service.session("m", preference=PATIENT) as alone:  # two other bursts have the model open
                alone.run(None, inputs[0])  # has to be bound, and does not wait
                rows.run()
                with pytest.raises(MissedDeadline):
                    alone.run(None, inputs[0], timeout=0.2)
            with service.session("m") as hasty:  # as by default: it does not wait
                hasty.run(None, inputs[0])
                hasty.run(None, inputs[0], timeout=0.5)
            assert all(isinstance(one, np.ndarray) for one in rows.run())


def test_bursts_that_have_sent_nothing_for_a_while_are_not_waited_for(tmp_path: Path) -> None:
    x = {"x": np.ones((1, 8), np.float32)}
    with serving(tmp_path, mlp(8, 1, "N"), "--batch", "8", "--batch-wait", "1s") as (shared, _):
        with Rows(shared, "m", [x] * 2), nnburst.connect(shared.address) as service:
            with service.session("m", preference=PATIENT) as alone:
                alone.run(None, x)
                end = time.monotonic() + PATIENCE
                while time.monotonic() < end:
                    with suppress(MissedDeadline):
                        alone.run(None, x, timeout=0.2)
                        break
                assert time.monotonic() < end


def test_request_of_a_high_priority_takes_those_along_that_wait(tmp_path: Path) -> None:
    x = {"x": np.ones((1, 8), np.float32)}
    with serving(tmp_path, mlp(8, 1, "N"), "--batch", "8", "--batch-wait", "1s") as (shared, path):
        with nnburst.connect(shared.address) as service, service.session("m", preference=PATIENT) as waits:
            with service.session("m", priority="high") as hasty:
                for session in (waits, hasty):
                    session.run(None, x)
                batched = counted(shared, "batched")
                with ThreadPoolExecutor(1) as thread:
                    while counted(shared, "batched") == batched:  # it may be taken alone, before the other is there
                        waiting = thread.submit(waits.run, None, x, timeout=PATIENCE)
                        while not waiting.done():
                            hasty.run(None, x)
                        np.testing.assert_allclose(waiting.result()[0], in_process(path, x)[0], rtol=1e-5)


def test_models_and_numbers_that_cannot_be_batched_are_refused_by_name(tmp_path: Path) -> None:
    path = save(mlp(8, 1), tmp_path / "m.onnx")
    save(
        graph(
            [node("Identity", ["x"], ["y"])],
            [("x", TensorProto.STRING, ("N", 1))],
            [("y", TensorProto.STRING, ("N", 1))],
        ),
        tmp_path / "text.onnx",
    )
    for options, why in (
        (
            ["--model", f"t={tmp_path}/text.onnx", "--batch", "t=4"],
            "'x' holds other values than NumPy's numbers, which do not run together",
        ),
        (["--batch", "4"], "model m of"),
        (["--batch", "4"], "'x' of shape (1, 8) has no open first dimension"),
        (["--batch", "other=4"], "no --model has the name 'other'"),
        (["--batch", "0"], "give a number of rows from 1 to 128"),
        (["--batch-wait", "soon"], "give a time of up to a second, such as 1ms"),
    ):
        command = [*COMMAND, "serve", "--socket", str(tmp_path / "s.sock"), "--model", f"m={path}", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 1
        assert why in done.stderr


def test_ten_thousand_rows_of_many_clients_are_what_they_are_alone(tmp_path: Path) -> None:
    model = mlp(256, 4, "N")
    x = np.random.default_rng(5).normal(size=(10_000, 1, 256)).astype(np.float32)
    with serving(tmp_path, model, "--batch", "32", "--batch-wait", "1ms") as (shared, path), ExitStack() as stack:
        services = [stack.enter_context(nnburst.connect(shared.address)) for _ in range(CLIENTS)]
        sessions = [stack.enter_context(one.session("m", preference=PATIENT)) for one in services]
        own = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        whole = [own.run(None, {"x": x[:n, 0]})[0] for n in range(1, CLIENTS + 1)]
        alone = np.concatenate([own.run(None, {"x": one})[0] for one in x])
        is_exact = all((rows == alone[: len(rows)]).all() for rows in whole)  # of ONNX Runtime's own batches

        def ask(at: int) -> np.ndarray:
            return np.concatenate([sessions[at].run(None, {"x": one})[0] for one in x[at::CLIENTS]])

        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = list(threads.map(ask, range(CLIENTS)))
        for at, rows in enumerate(answers):
            np.testing.assert_allclose(rows, alone[at::CLIENTS], rtol=1e-5, atol=1e-5)
            assert not is_exact or (rows == alone[at::CLIENTS]).all()
        assert counted(shared, "batched") > len(x) / 2


def test_one_client_alone_waits_for_nobody(tmp_path: Path) -> None:
    x = {"x": np.ones((1, 8), np.float32)}
    with serving(tmp_path, mlp(8, 1, "N"), "--batch", "8", "--batch-wait", "1s") as (shared, _):
        with nnburst.connect(shared.address) as service, service.session("m", preference=PATIENT) as session:
            session.run(None, x)
            for _ in range(20):
                session.run(None, x, timeout=0.9)  # it would wait for a second
            assert counted(shared, "batched") == 0


def test_row_whose_time_is_over_misses_its_deadline_and_the_others_have_their_answers(tmp_path: Path) -> None:
    inputs = [{"x": np.full((1, 8), i, np.float32)} for i in range(ROWS)]
    with serving(tmp_path, lasting(), "--batch", "8", "--batch-wait", "1s") as (shared, _):
        with Rows(shared, "m", inputs) as rows:
            rows.executions[2].timeout = 0.01
            answers = rows.run()
            assert isinstance(answers.pop(2), MissedDeadline)
            assert [one[0, 0] for one in answers] == [0, 1, 3]
            rows.executions[2].timeout = PATIENCE
            assert [one[0, 0] for one in rows.run()] == [0, 1, 2, 3]


def test_task_that_is_cancelled_while_it_waits_leaves_the_others_their_answers(tmp_path: Path) -> None:
    inputs = [{"x": np.full((1, 8), i, np.float32)} for i in range(2)]
    with serving(tmp_path, mlp(8, 1, "N"), "--batch", "8", "--batch-wait", "1s") as (shared, path):
        expected = [in_process(path, row)[0] for row in inputs]
        with Rows(shared, "m", inputs) as rows, nnburst.connect(shared.address) as service:
            with service.session("m", preference=PATIENT) as session:

                async def give_up() -> None:
                    task = asyncio.ensure_future(session.arun(None, inputs[0]))
                    await asyncio.sleep(0.001)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):  # the other two ask for nothing
                        await task

                session.run(None, inputs[0])
                for _ in range(3):
                    asyncio.run(give_up())
                    for one, right in zip(rows.run(), expected, strict=True):
                        np.testing.assert_allclose(one, right, rtol=1e-5)
                np.testing.assert_allclose(session.run(None, inputs[1])[0], expected[1], rtol=1e-5)


TRACED = """
import sys, threading
import numpy as np
import nnburst
barrier = threading.Barrier(2)

def ask():
    with nnburst.connect(sys.argv[1]) as service, service.session("m", preference="sustained_speed") as session:
        for _ in range(5):
            barrier.wait()
            session.run(None, {"x": np.ones((1, 8), np.float32)})
        barrier.wait()

other = threading.Thread(target=ask)
other.start()
ask()
other.join()
"""


def test_trace_says_with_how_many_others_a_row_ran(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with serving(tmp_path, mlp(8, 1, "N"), "--batch", "8", "--batch-wait", "1s") as (shared, _):
        command = [*COMMAND, "trace", "-o", str(trace), sys.executable, "-c", TRACED, shared.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "execute"]
        together = [event["args"].get("together") for event in slices]
        assert together.count(2) == counted(shared, "batched") > 0
        assert set(together) <= {2, None}


DOOMED = """
import sys
import numpy as np
import nnburst
with nnburst.connect(sys.argv[1]) as service, service.session("m", preference="sustained_speed") as session:
    for i in range(10**9):
        session.run(None, {"x": np.ones((1, 8), np.float32)})
        if i == 10:
            print("runs", flush=True)
"""


def test_client_that_dies_in_a_batch_takes_nobody_along(tmp_path: Path) -> None:
    inputs = [{"x": np.full((1, 8), i, np.float32)} for i in range(3)]
    with serving(tmp_path, mlp(8, 1, "N"), "--batch", "8", "--batch-wait", "20ms") as (shared, path):
        expected = [in_process(path, row)[0] for row in inputs]
        with Rows(shared, "m", inputs) as rows:
            for _ in range(3):
                command = [sys.executable, "-c", DOOMED, shared.address]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as doomed:
                    try:
                        with ThreadPoolExecutor(1) as thread:
                            runs = thread.submit(line_of, doomed)
                            while not runs.done():
                                rows.run()
                        assert runs.result() == "runs\n"
                        before = counted(shared, "batched")
                        for i in range(20):
                            if i == 5:
                                doomed.kill()
                            for one, right in zip(rows.run(), expected, strict=True):
                                np.testing.assert_allclose(one, right, rtol=1e-5)
                        assert counted(shared, "batched") > before
                    finally:
                        doomed.kill()


@pytest.fixture
def open_to_guests() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="nnburst-", dir="/tmp"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def ask_for_rows(address: str, own: bytes, value: float) -> str:
    """Run the model that all share, and one of one's own, with the rows of one user."""
    x = {"x": np.full((1, 64), value, np.float32)}
    with nnburst.connect(address) as service, ExitStack() as stack:
        shared, mine = (stack.enter_context(service.session(which, preference=PATIENT)) for which in ("m", own))
        answers = [session.run(None, x)[0] for _ in range(20) for session in (shared, mine)]
    assert all((one == value).all() for one in answers)
    return "right"


@as_root
@pytest.mark.parametrize("isolation", ["user", "connection", "none"])
def test_rows_of_two_users_run_together_in_the_model_that_all_share_and_in_no_other(
    open_to_guests: Path, isolation: str
) -> None:
    model = graph([node("Identity", ["x"], ["y"])], [("x", FLOAT, ("N", 64))], [("y", FLOAT, ("N", 64))])
    options = [*(f"--allow-uid={user}" for user in (GUEST, OTHER_GUEST)), "--batch", "8", "--batch-wait", "1s"]
    with serving(open_to_guests, model, "--isolate", isolation, *options) as (shared, _):
        users, rounds = {GUEST: 1.0, OTHER_GUEST: 2.0}, 0
        with ThreadPoolExecutor(2) as threads:
            while not counted(shared, "batched"):  # one may have ended before the other is there
                rounds += 1
                assert rounds < 10, "they never run together"
                said = [
                    threads.submit(
                        as_user,
                        user,
                        lambda value=value: ask_for_rows(shared.address, model.SerializeToString(), value),
                    )
                    for user, value in users.items()
                ]
                assert [one.result() for one in said] == ["right"] * 2
        assert counted(shared, "batched") <= 40 * rounds  # not those of the models that they brought
