"""Measure runs with strings and maps through a service, against `InferenceSession.run` in this process.

``python benchmarks/values_speed.py [--rounds 200]`` runs two classifiers as scikit-learn exports them, in turns. One
gets numbers, and answers with a string and a map for each row (ZipMap). The other gets a table with a string column.
Before anything is timed, the answers of both sides are compared. Each side has one thread of ONNX Runtime.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

import nnburst

ML = "ai.onnx.ml"
LABELS = ["low", "middle", "high"]
CITIES = ["rome", "oslo", "lomé", "a town with a long name"]
FEATURES = 8
RNG = np.random.default_rng(1)


def model(nodes: list[Any], inputs: list[Any], width: int) -> bytes:
    """Return a model that ends in a linear classifier of `width` features and a map of probabilities."""
    ends = [
        helper.make_node(
            "LinearClassifier",
            ["features"],
            ["label", "scores"],
            domain=ML,
            classlabels_strings=LABELS,
            coefficients=RNG.normal(size=len(LABELS) * width).tolist(),
            intercepts=[0.0] * len(LABELS),
            post_transform="SOFTMAX",
        ),
        helper.make_node("ZipMap", ["scores"], ["probability"], domain=ML, classlabels_strings=LABELS),
    ]
    row = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    outputs = [
        helper.make_tensor_value_info("label", TensorProto.STRING, ["rows"]),
        helper.make_value_info("probability", helper.make_sequence_type_proto(row)),
    ]
    graph = helper.make_graph([*nodes, *ends], "classifier", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 3)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def of_numbers() -> bytes:
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", FEATURES])
    return model([helper.make_node("Identity", ["x"], ["features"])], [given], FEATURES)


def of_a_table() -> bytes:
    nodes = [
        helper.make_node("OneHotEncoder", ["city"], ["hot"], domain=ML, cats_strings=CITIES, zeros=1),
        helper.make_node("Reshape", ["hot", "flat"], ["places"]),
        helper.make_node("Concat", ["x", "places"], ["features"], axis=1),
    ]
    flat = helper.make_tensor("flat", TensorProto.INT64, [2], [-1, len(CITIES)])
    constant = helper.make_node("Constant", [], ["flat"], value=flat)
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", FEATURES]),
        helper.make_tensor_value_info("city", TensorProto.STRING, ["rows", 1]),
    ]
    return model([constant, *nodes], inputs, FEATURES + len(CITIES))


def inputs_of(kind: str, rows: int) -> dict[str, Any]:
    given: dict[str, Any] = {"x": RNG.normal(size=(rows, FEATURES)).astype(np.float32)}
    if kind == "table":
        given["city"] = np.array(CITIES, object)[RNG.integers(0, len(CITIES), (rows, 1))]
    return given


def measured(calls: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Measure calls in turns. Return the microseconds of each call in each round."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, into in zip(calls, times, strict=True):
            start = time.perf_counter_ns()
            call()
            into.append((time.perf_counter_ns() - start) / 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=200, help="runs of each side (default 200)")
    rounds = parser.parse_args().rounds
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    print("| p50 in µs | rows | in process | `Session.run` | ratio |\n|---|--:|--:|--:|--:|")
    with nnburst.launch(devices=["nnburst-onnxruntime:threads=1"]) as service:
        for kind, data in (("numbers", of_numbers()), ("table", of_a_table())):
            theirs = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            with service.session(data) as ours:
                for rows in (1, 10, 100, 1000):
                    given = inputs_of(kind, rows)
                    calls = [partial(side.run, None, given) for side in (theirs, ours)]
                    for _ in range(20):
                        (label, maps), (other, others) = (call() for call in calls)
                        assert (label.tolist(), maps) == (other.tolist(), others)
                    times = measured(calls, rounds)
                    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
                    a, b = map(statistics.median, times)
                    print(f"| {kind} | {rows:,} | {a:,.0f} | {b:,.0f} | {ratio:.2f} |", flush=True)
    print(f"load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
