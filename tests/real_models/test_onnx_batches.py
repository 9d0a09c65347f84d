"""Requests of several clients for one named model, run as one: `nnburst serve --batch`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import nnburst
from nnburst.devices.onnxruntime.batch import Batches
from nnburst.devices.onnxruntime.graph import SessionSettings, compile_graph
from nnburst.errors import GeneralFailure, MissedDeadline
from nnburst.watch import find_services, look
from support.onnx_models import graph, in_process, mlp, node, onnx, ort, save
from support.processes import line_of
from support.services import COMMAND, Shared, run_command, shared_service
from support.users import GUEST, OTHER_GUEST, as_root, as_user
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.check

ROWS = 4
CLIENTS = 16
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A service whose models wait for rows of others for a second, but for `quick` and `many`."""
    directory = tmp_path_factory.mktemp("batches")
    table = {"table": np.arange(10, dtype=np.float32)}
    models = {
        "m": mlp(8, 1, "N"),
        "quick": mlp(8, 1, "N"),
        "wide": mlp(64, 2, "N"),
        "many": mlp(256, 4, "N"),
        "chosen": graph(
            [node("Gather", ["table", "i"], ["y"])], [("i", INT64, ("N", 1))], [("y", FLOAT, ("N", 1))], table
        ),
        "bools": graph([node("Cast", ["x"], ["y"], to=FLOAT)], [("x", BOOL, ("N", 1))], [("y", FLOAT, ("N", 1))]),
        "open": graph([node("Neg", ["x"], ["y"])], [("x", FLOAT, ("N", "L"))], [("y", FLOAT, ("N", "L"))]),
        "lasting": lasting(),
    }
    files = [f"--model={name}={save(model, directory / f'{name}.onnx')}" for name, model in models.items()]
    options = ["--batch=8", "--batch=many=32", *(f"--batch-wait={time}" for time in ("1s", "quick=20ms", "many=1ms"))]
    with shared_service(directory, *files, *options) as shared:
        yield shared


def file_of(shared: Shared, name: str) -> str:
    return str(shared.path.parent / f"{name}.onnx")


def right(shared: Shared, name: str, inputs: list[dict[str, np.ndarray]], answers: list[Any]) -> bool:
    """Check that each answer is what the model makes of its row alone."""
    for one, row in zip(answers, inputs, strict=True):
        np.testing.assert_allclose(one, in_process(file_of(shared, name), row)[0], rtol=1e-5, atol=1e-5)
    return True


def comes_within(seconds: float, session: nnburst.Session, row: dict[str, np.ndarray]) -> bool:
    """Whether a row has its answer in time. On a busy machine it may not, though it waits for nothing."""
    with suppress(MissedDeadline):
        session.run(None, row, timeout=seconds)
        return True
    return False


@pytest.mark.representative
def test_waiting_rows_run_as_one_and_each_client_gets_its_own(served: Shared) -> None:
    inputs = [{"x": np.random.default_rng(i).normal(size=(1, 64)).astype(np.float32)} for i in range(ROWS)]
    with Rows(served, "wide", inputs) as rows:
        before, runs = counted(served, "batched"), counted(served, "batches")
        until(lambda: right(served, "wide", inputs, rows.run()) and counted(served, "batches") >= runs + 3)
        assert (counted(served, "batches") - runs) * 2 <= counted(served, "batched") - before


def test_batch_that_fails_is_split_and_the_bad_row_fails_alone(served: Shared) -> None:
    inputs = [{"i": np.array([[i]], np.int64)} for i in (1, 77)]  # two wait for each other
    batches = counted(served, "batches")
    with Rows(served, "chosen", inputs) as rows:
        good, bad = rows.run()
        assert good.item() == 1
        assert isinstance(bad, GeneralFailure)
        assert counted(served, "batches") == batches


def test_bytes_of_bools_in_a_batch_are_0_or_1_for_onnxruntime(served: Shared) -> None:
    inputs = [{"x": np.uint8([[i]]).view(np.bool_)} for i in (0, 2, 255)]
    with Rows(served, "bools", inputs) as rows:
        batches = counted(served, "batches")
        while counted(served, "batches") == batches:
            assert [one.tolist() for one in rows.run()] == [[[0]], [[1]], [[1]]]


def test_requests_of_other_shapes_run_beside_a_batch(served: Shared) -> None:
    shapes = [(1, 3), (1, 5), (2, 3), (1, 3), (1, 5), (2, 3), (3, 0)]
    inputs = [{"x": np.full(shape, i, np.float32)} for i, shape in enumerate(shapes)]
    with Rows(served, "open", inputs) as rows:

        def all_pairs_run_as_one() -> bool:  # if all are there by the time that the first ones run
            before, runs = counted(served, "batched"), counted(served, "batches")
            for one, row in zip(rows.run(), inputs, strict=True):
                np.testing.assert_array_equal(one, -row["x"])
            return (counted(served, "batched") - before, counted(served, "batches") - runs) == (6, 3)

        until(all_pairs_run_as_one)


def test_deadlines_hold_while_a_request_waits_for_others(served: Shared) -> None:
    row = {"x": np.ones((1, 8), np.float32)}
    with Rows(served, "m", [row] * 2) as rows, nnburst.connect(served.address) as service:
        with service.session("m", preference=PATIENT) as alone:  # two other bursts have the model open
            alone.run(None, row)  # has to be bound, and does not wait
            until(lambda: right(served, "m", [row] * 2, rows.run()) and not comes_within(0.2, alone, row))
        with service.session("m") as hasty:  # as by default: it does not wait
            hasty.run(None, row)
            until(lambda: right(served, "m", [row] * 2, rows.run()) and comes_within(0.5, hasty, row))
        assert all(isinstance(one, np.ndarray) for one in rows.run())


def test_bursts_that_have_sent_nothing_for_a_while_are_not_waited_for(served: Shared) -> None:
    row = {"x": np.ones((1, 8), np.float32)}
    with Rows(served, "m", [row] * 2), nnburst.connect(served.address) as service:
        with service.session("m", preference=PATIENT) as alone:
            alone.run(None, row)
            until(lambda: comes_within(0.2, alone, row))


def test_request_of_a_high_priority_takes_those_along_that_wait(served: Shared) -> None:
    row = {"x": np.ones((1, 8), np.float32)}
    with nnburst.connect(served.address) as service, service.session("m", preference=PATIENT) as waits:
        with service.session("m", priority="high") as hasty:
            for session in (waits, hasty):
                session.run(None, row)
            batched = counted(served, "batched")
            with ThreadPoolExecutor(1) as thread:
                while counted(served, "batched") == batched:  # it may be taken alone, before the other is there
                    waiting = thread.submit(waits.run, None, row, timeout=PATIENCE)
                    while not waiting.done():
                        hasty.run(None, row)
                    assert right(served, "m", [row], waiting.result())


def test_wrong_option_is_refused_by_name(tmp_path: Path) -> None:
    for options, why in (
        (["--batch", "other=4"], "no --model has the name 'other'"),
        (["--batch", "0"], "give a number of rows from 1 to 128"),
        (["--batch-wait", "soon"], "give a time of up to a second, such as 1ms"),
    ):
        done = run_command("serve", "--socket", str(tmp_path / "s.sock"), "--model", "m=m.onnx", *options)
        assert done.exit_code == 1
        assert why in done.output


def test_models_that_cannot_be_batched_are_refused_by_name(tmp_path: Path) -> None:
    text = [(name, TensorProto.STRING, ("N", 1)) for name in "xy"]
    fixed, texts = mlp(8, 1), graph([node("Identity", ["x"], ["y"])], text[:1], text[1:])
    for name, model, why in (
        ("m", fixed, "'x' of shape (1, 8) has no open first dimension"),
        ("t", texts, "'x' holds other values than NumPy's numbers, which do not run together"),
    ):
        path = save(model, tmp_path / f"{name}.onnx")
        with pytest.raises(AssertionError) as refused, shared_service(tmp_path, f"--model={name}={path}", "--batch=4"):
            pass
        assert f"model {name} of {path}: " in str(refused.value)
        assert why in str(refused.value)


@pytest.mark.parametrize("number", [1_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_rows_of_many_clients_are_what_they_are_alone(served: Shared, number: int) -> None:
    x = np.random.default_rng(5).normal(size=(number, 1, 256)).astype(np.float32)
    batched = counted(served, "batched")
    with ExitStack() as stack:
        services = [stack.enter_context(nnburst.connect(served.address)) for _ in range(CLIENTS)]
        sessions = [stack.enter_context(one.session("many", preference=PATIENT)) for one in services]
        own = ort.InferenceSession(file_of(served, "many"), providers=["CPUExecutionProvider"])
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
    assert counted(served, "batched") > batched


def test_one_client_alone_waits_for_nobody(served: Shared) -> None:
    row = {"x": np.ones((1, 8), np.float32)}
    batched = counted(served, "batched")
    with nnburst.connect(served.address) as service, service.session("m", preference=PATIENT) as session:
        session.run(None, row)
        for _ in range(20):
            until(lambda: comes_within(0.9, session, row))  # it would wait for a second
        assert counted(served, "batched") == batched


def test_row_whose_time_is_over_misses_its_deadline_and_the_others_have_their_answers(served: Shared) -> None:
    inputs = [{"x": np.full((1, 8), i, np.float32)} for i in range(ROWS)]
    with Rows(served, "lasting", inputs) as rows:
        rows.executions[2].timeout = 0.01
        answers = rows.run()
        assert isinstance(answers.pop(2), MissedDeadline)
        assert [one[0, 0] for one in answers] == [0, 1, 3]
        rows.executions[2].timeout = PATIENCE
        assert [one[0, 0] for one in rows.run()] == [0, 1, 2, 3]


def test_task_that_is_cancelled_while_it_waits_leaves_the_others_their_answers(served: Shared) -> None:
    inputs = [{"x": np.full((1, 8), i, np.float32)} for i in range(2)]
    with Rows(served, "m", inputs) as rows, nnburst.connect(served.address) as service:
        with service.session("m", preference=PATIENT) as session:

            async def is_given_up() -> bool:
                """Whether it waited for the other two, which ask for nothing, until it was cancelled."""
                task = asyncio.ensure_future(session.arun(None, inputs[0]))
                await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.wait([task])
                return task.cancelled()

            session.run(None, inputs[0])
            for _ in range(3):
                until(lambda: right(served, "m", inputs, rows.run()) and asyncio.run(is_given_up()))
                assert right(served, "m", inputs, rows.run())
            assert right(served, "m", inputs[1:], session.run(None, inputs[1]))


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


def test_trace_says_with_how_many_others_a_row_ran(served: Shared, tmp_path: Path) -> None:
    trace, batched = tmp_path / "trace.json", counted(served, "batched")
    command = [*COMMAND, "trace", "-o", str(trace), sys.executable, "-c", TRACED, served.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "execute"]
    together = [event["args"].get("together") for event in slices]
    assert together.count(2) == counted(served, "batched") - batched > 0
    assert set(together) <= {2, None}


DOOMED = """
import sys
import numpy as np
import nnburst
with nnburst.connect(sys.argv[1]) as service, service.session("quick", preference="sustained_speed") as session:
    for i in range(10**9):
        session.run(None, {"x": np.ones((1, 8), np.float32)})
        if i == 10:
            print("runs", flush=True)
"""


def test_client_that_dies_in_a_batch_takes_nobody_along(served: Shared) -> None:
    inputs = [{"x": np.full((1, 8), i, np.float32)} for i in range(3)]
    with Rows(served, "quick", inputs) as rows:
        for _ in range(3):
            command = [sys.executable, "-c", DOOMED, served.address]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as doomed:
                try:
                    with ThreadPoolExecutor(1) as thread:
                        runs = thread.submit(line_of, doomed)
                        while not runs.done():
                            rows.run()
                    assert runs.result() == "runs\n"
                    before, rounds = counted(served, "batched"), 0
                    while rounds < 20 or counted(served, "batched") == before:
                        rounds += 1
                        if rounds == 5:
                            doomed.kill()
                        assert right(served, "quick", inputs, rows.run())
                finally:
                    doomed.kill()


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
    file = f"--model=m={save(model, open_to_guests / 'm.onnx')}"
    with shared_service(open_to_guests, file, "--isolate", isolation, *options) as shared:
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


# ---- which rows run together ---------------------------------------------------------------------------------------


def batches(model: Any, most: int = 8) -> Batches:
    return Batches(compile_graph(model.SerializeToString(), {}, SessionSettings()), most)


def of_any_length() -> Any:
    """y = -x."""
    return graph([node("Neg", ["x"], ["y"])], [("x", FLOAT, ("N", "L"))], [("y", FLOAT, ("N", "L"))])


def joins(them: Batches, *shape: int) -> object:
    """Bind a request of such an input `x` and output `y`; returns what has to be kept, None if it runs alone."""
    them_graph = them.graph
    place = np.zeros(4 * int(np.prod(shape)), np.uint8)
    bound = them_graph.bind(them_graph.session.io_binding(), (), ())
    inputs, outputs = [(them_graph.inputs[0], shape, place)], [(them_graph.outputs[0], shape, place)]
    return them.join(bound.kernel, inputs, outputs)


@pytest.mark.representative
def test_model_with_other_rows_in_its_output_runs_alone() -> None:
    twice = batches(
        graph([node("Concat", ["x", "x"], ["y"], axis=0)], [("x", FLOAT, ("N", 6))], [("y", FLOAT, ("M", 6))])
    )
    place = np.zeros(48, np.uint8)
    bound = twice.graph.bind(twice.graph.session.io_binding(), (), ())
    inputs, outputs = [(twice.graph.inputs[0], (1, 6), place[:24])], [(twice.graph.outputs[0], (2, 6), place)]
    assert twice.join(bound.kernel, inputs, outputs) is None


@pytest.mark.representative
def test_few_shapes_and_little_memory_are_kept_for_a_model() -> None:
    plain = batches(of_any_length(), 128)
    kept = [joins(plain, 1, size) for size in range(1, 20)]
    assert [one is not None for one in kept] == [True] * 8 + [False] * 11
    assert joins(plain, 1, 3) is not None  # with those that there are
    del kept[2]
    assert joins(plain, 1, 20) is not None
    kept.clear()
    assert joins(plain, 1, 5 << 20) is None  # two, with their outputs, are 80 MiB
    large = joins(plain, 1, 1 << 18)  # of 2 MiB with its output, of which 32 are kept
    assert large is not None
    assert sum(batch.nbytes for batch in plain._batches.values()) <= 64 << 20
    assert joins(plain, 1, 3) is None


@pytest.mark.representative
def test_request_without_rows_runs_alone() -> None:
    plain = batches(of_any_length())
    assert joins(plain, 0, 4) is joins(plain, 4, 0) is None
