"""Which rows of a model run together: those of few shapes at a time, on as many threads as they need."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst.devices import create_device
from nnburst.devices.onnxruntime.batch import Batches
from nnburst.devices.onnxruntime.graph import SessionSettings, compile_graph
from nnburst.memory import Memory
from support.onnx_models import FLOAT, TensorProto, graph, node

INT64 = TensorProto.INT64


def batches(model: Any, most: int = 8) -> Batches:
    return Batches(compile_graph(model.SerializeToString(), {}, SessionSettings()), most, lambda: None)


def of_rows(*nodes: Any, **weights: np.ndarray) -> Any:
    return graph(nodes, [("x", FLOAT, ("N", 6))], [("y", FLOAT, ("N", 6))], weights)


def of_any_length() -> Any:
    """y = -x."""
    return graph([node("Neg", ["x"], ["y"])], [("x", FLOAT, ("N", "L"))], [("y", FLOAT, ("N", "L"))])


def joins(them: Batches, *shape: int) -> object:
    """Bind a request of such an input `x` and output `y`; returns what has to be kept, None if it runs alone."""
    them_graph = them.graph
    place = np.zeros(4 * int(np.prod(shape)), np.uint8)
    bound = them_graph.bound(them_graph.session.io_binding(), (), ())
    inputs, outputs = [(them_graph.inputs[0], shape, place)], [(them_graph.outputs[0], shape, place)]
    return them.join(bound.kernel, inputs, outputs)


def test_model_with_other_rows_in_its_output_runs_alone() -> None:
    twice = batches(
        graph([node("Concat", ["x", "x"], ["y"], axis=0)], [("x", FLOAT, ("N", 6))], [("y", FLOAT, ("M", 6))])
    )
    place = np.zeros(48, np.uint8)
    bound = twice.graph.bound(twice.graph.session.io_binding(), (), ())
    inputs, outputs = [(twice.graph.inputs[0], (1, 6), place[:24])], [(twice.graph.outputs[0], (2, 6), place)]
    assert twice.join(bound.kernel, inputs, outputs) is None


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


def test_request_without_rows_runs_alone() -> None:
    plain = batches(of_any_length())
    assert joins(plain, 0, 4) is joins(plain, 4, 0) is None


@pytest.mark.parametrize(
    ("model", "all_us", "one_us", "chosen"),
    [
        (of_rows(node("Neg", ["x"], ["y"])), 50, 60, "one"),
        (of_rows(node("Neg", ["x"], ["y"])), 50, 90, "all"),
        (of_rows(node("Neg", ["x"], ["y"])), 20_000, None, "all"),
    ],
)
def test_batches_run_on_one_thread_unless_more_make_them_much_faster(
    monkeypatch: pytest.MonkeyPatch, model: Any, all_us: int, one_us: int | None, chosen: str
) -> None:
    graphs = {each: compile_graph(model.SerializeToString(), {}, SessionSettings()) for each in ("all", "one")}
    times = {graphs["all"]: all_us * 1000, graphs["one"]: (one_us or 0) * 1000}
    monkeypatch.setattr(Batches, "_fastest", lambda _, graph: times[graph])

    def on_one_thread() -> Any:
        assert one_us is not None, "it was compiled for nothing"
        return graphs["one"]

    assert Batches(graphs["all"], 8, on_one_thread).graph is graphs[chosen]


def test_model_of_open_sizes_stays_on_the_threads_that_it_has() -> None:
    made = compile_graph(of_any_length().SerializeToString(), {}, SessionSettings())
    assert Batches(made, 8, lambda: pytest.fail("it was compiled for nothing")).graph is made


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
