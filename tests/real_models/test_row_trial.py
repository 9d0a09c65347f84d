"""Which models' rows run together: those that have nothing to do with each other, of few shapes at a time."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst.burst import ExecutionBurstController
from nnburst.devices import NamedDevice, create_device
from nnburst.devices.onnxruntime import batch
from nnburst.devices.onnxruntime.batch import Batches
from nnburst.devices.onnxruntime.graph import SessionSettings, compile_graph
from nnburst.errors import ErrorStatus, InvalidArgument
from nnburst.memory import Memory
from nnburst.model import DataLocation, Request, RequestArgument
from support.onnx_models import FLOAT, TensorProto, graph, mlp, node
from support.services import in_process
from support.waiting import PATIENCE

INT64 = TensorProto.INT64
ANOTHER = "has other values beside other rows than alone"


def batches(model: Any, most: int = 8) -> Batches:
    return Batches(compile_graph(model.SerializeToString(), {}, SessionSettings()), most, lambda: None)


def of_rows(*nodes: Any, **weights: np.ndarray) -> Any:
    return graph(nodes, [("x", FLOAT, ("N", 6))], [("y", FLOAT, ("N", 6))], weights)


def of_any_length() -> Any:
    """y = -x."""
    return graph([node("Neg", ["x"], ["y"])], [("x", FLOAT, ("N", "L"))], [("y", FLOAT, ("N", "L"))])


def joins(them: Batches, *shape: int, deadline_ns: int = 0) -> object:
    """Bind a request of such an input `x` and output `y`; returns what has to be kept, None if it runs alone."""
    them_graph = them.graph
    place = np.zeros(4 * int(np.prod(shape)), np.uint8)
    bound = them_graph.bound(them_graph.session.io_binding(), (), ())
    inputs, outputs = [(them_graph.inputs[0], shape, place)], [(them_graph.outputs[0], shape, place)]
    return them.join(bound.kernel, inputs, outputs, deadline_ns)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"])],
        [node("Softmax", ["x"], ["y"], axis=0)],
        [node("LayerNormalization", ["x", "one"], ["y"], axis=0)],
        [node("CumSum", ["x", "zero"], ["y"])],
        [node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])],
    ],
    ids=lambda nodes: nodes[0].op_type,
)
def test_model_whose_rows_change_each_other_is_refused_by_the_name_of_its_output(nodes: list[Any]) -> None:
    weights = {"one": np.ones(1, np.float32), "zero": np.array(0)}
    used = {name for each in nodes for name in each.input}
    with pytest.raises(InvalidArgument, match=f"'y' {ANOTHER}"):
        batches(of_rows(*nodes, **{name: array for name, array in weights.items() if name in used}))


@pytest.mark.parametrize("operator", ["Concat", "Reshape"])
def test_model_with_other_rows_in_its_output_is_refused(operator: str) -> None:
    nodes = {
        "Concat": node("Concat", ["x", "x"], ["y"], axis=0),
        "Reshape": node("Reshape", ["x", "shape"], ["y"]),
    }
    with pytest.raises(InvalidArgument, match=r"'y' has the shape \[2, [36]\] where its inputs have 1 rows"):
        batches(
            graph(
                [nodes[operator]],
                [("x", FLOAT, ("N", 6))],
                [("y", FLOAT, ("M", 3 if operator == "Reshape" else 6))],
                {"shape": np.array([-1, 3])} if operator == "Reshape" else {},
            )
        )


def test_models_whose_rows_have_nothing_to_do_with_each_other_are_not_refused() -> None:
    table = {"table": np.arange(10, dtype=np.float32)}
    rows = [("y", FLOAT, ("N", 1))]
    for model in (
        mlp(32, 3, "N"),
        of_rows(node("Softmax", ["x"], ["y"], axis=1)),
        graph(
            [node("Gather", ["table", "i"], ["y"])], [("i", INT64, ("N", 1))], rows, table
        ),  # 0 and 1 alone are in range
        graph([node("ArgMax", ["x"], ["y"], axis=1)], [("x", FLOAT, ("N", 9))], [("y", INT64, ("N", 1))]),
        graph([node("Less", ["x", "x"], ["y"])], [("x", FLOAT, ("N", 9))], [("y", TensorProto.BOOL, ("N", 9))]),
        graph([node("Cast", ["x"], ["y"], to=10)], [("x", FLOAT, ("N", 9))], [("y", TensorProto.FLOAT16, ("N", 9))]),
    ):
        batches(model)


def test_model_that_runs_with_no_random_row_is_refused() -> None:
    model = graph(
        [node("Reshape", ["x", "s"], ["y"])],
        [("x", FLOAT, ("N", 3))],
        [("y", FLOAT, ("N", 6))],
        {"s": np.array([-1, 6])},
    )
    with pytest.raises(InvalidArgument, match="its rows could not be tried: ONNX Runtime"):
        batches(model)


def test_rows_of_sizes_that_the_model_leaves_open_are_tried_when_they_are_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = batches(of_any_length())
    assert joins(plain, 1, 11) is not None
    only = graph(
        [node("Reshape", ["x", "s"], ["r"]), node("Identity", ["r"], ["y"])],
        [("x", FLOAT, ("N", "L"))],
        [("y", FLOAT, ("N", "L"))],
        {"s": np.array([-1, 5000])},
    )
    other = batches(only)  # with none of the sizes that are tried
    with caplog.at_level(logging.WARNING):
        assert joins(other, 1, 2500) is None
    assert "requests whose rows have the shapes [[2500]] run alone: " in caplog.text
    assert joins(other, 1, 5000) is not None


def test_few_shapes_and_little_memory_are_kept_for_a_model() -> None:
    plain = batches(of_any_length(), 128)
    kept = [joins(plain, 1, size) for size in range(1, 20)]
    assert [one is not None for one in kept] == [True] * 8 + [False] * 11
    assert joins(plain, 1, 3) is not None  # with those that there are
    del kept[2]
    assert joins(plain, 1, 20) is not None
    kept.clear()
    large = joins(plain, 1, 1 << 18)  # of 2 MiB with its output, of which 32 are kept
    assert large is not None
    assert sum(batch.nbytes for batch in plain._batches.values()) <= 64 << 20
    assert joins(plain, 1, 3) is None


def test_request_without_rows_runs_alone() -> None:
    plain = batches(of_any_length())
    assert joins(plain, 0, 4) is joins(plain, 4, 0) is None


def test_trial_ends_with_the_time_of_its_request_and_is_left_to_a_later_one(caplog: pytest.LogCaptureFixture) -> None:
    plain = batches(of_any_length())
    assert joins(plain, 1, 11, deadline_ns=1) is None
    assert not caplog.text
    assert joins(plain, 1, 11, deadline_ns=time.monotonic_ns() + 10**12) is not None


def test_sizes_whose_trial_takes_too_long_run_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = batches(of_any_length())
    with monkeypatch.context() as short:
        short.setattr(batch, "_LONGEST_TRIAL_NS", 0)
        assert joins(plain, 1, 11) is None
    assert "requests whose rows have the shapes [[11]] run alone: the run was ended at its deadline" in caplog.text
    assert joins(plain, 1, 11) is None


def test_trial_holds_up_no_request_of_a_size_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = batches(of_any_length())
    assert joins(plain, 1, 11) is not None
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(batch, "require_rows_apart", lambda *_: begun.set() or go_on.wait(PATIENCE))
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(joins, plain, 1, 12)
        try:
            assert begun.wait(PATIENCE)
            assert threads.submit(joins, plain, 1, 11).result(PATIENCE / 2) is not None
            soon = time.monotonic_ns() + 10_000_000
            assert threads.submit(joins, plain, 1, 13, deadline_ns=soon).result(PATIENCE / 2) is None
            same = threads.submit(joins, plain, 1, 12, deadline_ns=time.monotonic_ns() + 10**12)
        finally:
            go_on.set()
        assert slow.result(PATIENCE) is not None
        assert same.result(PATIENCE) is not None  # it has waited


def test_no_size_is_tried_twice_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = batches(of_any_length())
    trials = []
    monkeypatch.setattr(batch, "_MOST_TRIALS", 4)
    monkeypatch.setattr(batch, "require_rows_apart", lambda _, shapes, __: trials.append(shapes))
    joined = [joins(plain, 1, 10 + i) is not None for i in (*range(6), *range(6))]
    assert joined == [True, True, True, False, False, False] * 2  # one was tried beforehand
    assert trials == [((10,),), ((11,),), ((12,),)]


def test_rows_are_tried_for_bursts_alone_with_their_time_and_working_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []
    join = Batches.join

    def noted(them: Batches, *places: Any) -> object:
        left.append((places[-1] - time.monotonic_ns()) / 1e9)
        assert join(them, *places) is None
        assert len(them._tried) == 1
        return None

    monkeypatch.setattr(Batches, "join", noted)
    monkeypatch.setattr(batch, "ROWS_KEPT", 1 << 40)  # more than any quota has
    data = np.frombuffer(of_any_length().SerializeToString(), np.uint8)
    device = create_device("nnburst-onnxruntime")
    named = NamedDevice([device])
    x, y = (RequestArgument(False, DataLocation(0, at, 44), (1, 11)) for at in (0, 64))
    with Memory.ashmem(data.size) as file, Memory.ashmem(4096) as pool, closing(device), closing(named):
        file.array(np.uint8, data.shape)[...] = data
        found = device.import_model("onnx", [file])
        named.publish("m", device, replace(found, model=replace(found.model, pools=(file,))), batch=8)
        with in_process([named], max_run=1000.0) as (client, _):
            remote, request = client.devices[0], Request((x,), (y,), (pool,))
            with closing(remote.prepare_model(remote.import_model("name:m").model)) as prepared:
                assert prepared.execute_synchronously(request)[0] is ErrorStatus.NONE
                assert not left
                with ExecutionBurstController.create(prepared) as burst:
                    assert burst.compute(request)[0] is ErrorStatus.NONE
    assert len(left) == 1
    assert 0 < left[0] <= 1000


@pytest.mark.parametrize(
    ("model", "all_us", "one_us", "chosen"),
    [
        (of_rows(node("Neg", ["x"], ["y"])), 50, 60, "one"),
        (of_rows(node("Neg", ["x"], ["y"])), 50, 90, "all"),
        (of_rows(node("Neg", ["x"], ["y"])), 20_000, None, "all"),
        (of_any_length(), 50, None, "all"),
    ],
)
def test_batches_run_on_one_thread_unless_more_make_them_much_faster(
    monkeypatch: pytest.MonkeyPatch, model: Any, all_us: int, one_us: int | None, chosen: str
) -> None:
    graphs = {each: compile_graph(model.SerializeToString(), {}, SessionSettings()) for each in ("all", "one")}
    times = {graphs["all"]: all_us * 1000, graphs["one"]: (one_us or 0) * 1000}
    monkeypatch.setattr(Batches, "_fastest", lambda _, graph, rows: times[graph])

    def on_one_thread() -> Any:
        assert one_us is not None, "it was compiled for nothing"
        return graphs["one"]

    assert Batches(graphs["all"], 8, on_one_thread).graph is graphs[chosen]


@pytest.mark.parametrize(("spec", "threads"), [("", 1), (":threads=2", 2)])
def test_named_model_that_is_small_runs_in_batches_on_the_threads_that_it_needs(spec: str, threads: int) -> None:
    data = np.frombuffer(of_rows(node("Neg", ["x"], ["y"])).SerializeToString(), np.uint8)
    with Memory.ashmem(data.size) as file, closing(create_device(f"nnburst-onnxruntime{spec}")) as device:
        file.array(np.uint8, data.shape)[...] = data
        found = device.import_model("onnx", [file])
        with closing(device.prepare_model(replace(found.model, pools=(file,)))) as prepared:
            before = prepared.graph
            prepared.run_together(8)
            assert (prepared.graph is not before) is (threads == 1 and os.cpu_count() != 1)
