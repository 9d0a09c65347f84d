"""Initializers that are inputs, too: a run may give them, or leave them out, as with ONNX Runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import InvalidArgument, Memory
from nnburst.devices.onnxruntime.guards import add_guards
from nnburst.devices.onnxruntime.snapshots import exposed_arguments
from support.onnx_models import FLOAT, RNG, TensorProto, graph, in_process, node, onnx, ort, save_external

HUNDREDS = np.float32([100, 200])
INT64 = TensorProto.INT64


def add(*, opset: int = 17, ir_version: int = 8, shape: Any = (2,), rows: Any = 1, default: Any = HUNDREDS) -> Any:
    """y = x + hidden."""
    inputs = [("hidden", FLOAT, shape), ("x", FLOAT, (rows, 2))]
    made = graph([node("Add", ["x", "hidden"], ["y"])], inputs, [("y", FLOAT, (rows, 2))], {"hidden": default}, opset)
    made.ir_version = ir_version
    return made


@pytest.fixture
def session(service: nnburst.Service) -> Iterator[nnburst.Session]:
    with service.session(add().SerializeToString()) as session:
        yield session


@pytest.fixture
def rows(service: nnburst.Service) -> Iterator[nnburst.Session]:
    with service.session(add(rows="n").SerializeToString()) as session:
        yield session


X = np.float32([[1, 2]])
GIVEN = {"x": X, "hidden": np.float32([10, 20])}
LEFT, GAVE = [[101, 202]], [[11, 22]]


def test_they_are_listed_as_onnxruntime_lists_them(session: nnburst.Session) -> None:
    other = ort.InferenceSession(add().SerializeToString())
    for list_of in ("get_inputs", "get_overridable_initializers"):
        ours, theirs = getattr(session, list_of)(), getattr(other, list_of)()
        assert [(each.name, list(each.shape)) for each in ours] == [(each.name, each.shape) for each in theirs]
    assert "hidden" not in repr(session)


def executed(session: nnburst.Session, feed: dict[str, Any]) -> Any:
    execution = nnburst.nnapi.Execution(session.compilation)
    for index, argument in enumerate(session.compilation.inputs):
        if argument.name in feed:
            execution.set_input(index, feed[argument.name])
    execution.set_output(0, out := np.zeros((1, 2), np.float32))
    execution.compute()
    return [out]


def bound(session: nnburst.Session, feed: dict[str, Any]) -> Any:
    with session.bind(shapes={name: array.shape for name, array in feed.items()}) as execution:
        assert execution.inputs.keys() == feed.keys()
        for name, array in feed.items():
            execution.inputs[name][:] = array
        execution.run()
        return [execution.outputs["y"].copy()]


def in_memory(session: nnburst.Session, feed: dict[str, Any]) -> Any:
    with Memory.ashmem(8) as memory:
        view = memory.array(np.float32, (2,))
        view[:] = feed.get("hidden", 0)
        with session.bind(memory={"hidden": view} if "hidden" in feed else {}) as execution:
            execution.inputs["x"][:] = feed["x"]
            execution.run()
            return [execution.outputs["y"].copy()]


def stepped(session: nnburst.Session, feed: dict[str, Any]) -> Any:
    with session.bind(shapes={name: array.shape for name, array in feed.items()}, steps=2) as execution:
        for name, array in feed.items():
            execution.inputs[name][:] = array
        execution.run()
        return [execution.outputs["y"][1].copy()]


WAYS: dict[str, Callable[[nnburst.Session, dict[str, Any]], Any]] = {
    "run": lambda session, feed: session.run(None, feed),
    "arun": lambda session, feed: asyncio.run(session.arun(None, feed)),
    "run_many": lambda session, feed: next(session.run_many([feed])),
    "execution": executed,
    "bind": bound,
    "memory": in_memory,
    "steps": stepped,
}


@pytest.mark.parametrize("way", WAYS)
def test_they_may_be_given_or_left_out_in_every_way_to_run(session: nnburst.Session, way: str) -> None:
    for feed, expected in (({"x": X}, LEFT), (GIVEN, GAVE), ({"x": X}, LEFT)):
        assert WAYS[way](session, feed)[0].tolist() == expected


def test_run_many_takes_inputs_with_and_without_them_in_turn(rows: nnburst.Session) -> None:
    feeds, expected = [{"x": X}, GIVEN, GIVEN, {"x": X}], [LEFT, GAVE, GAVE, LEFT]
    assert [y.tolist() for (y,) in rows.run_many(feeds)] == expected
    assert [y.tolist() for (y,) in rows.run_many([{"x": X}] * 5, batch=2)] == [LEFT] * 5
    with pytest.raises(InvalidArgument, match=r"batch=2 needs .* also of \['hidden'\]"):
        list(rows.run_many(feeds[1:], batch=2))


def test_a_batch_ends_where_they_are_given(service: nnburst.Service) -> None:
    model = add(shape=("n", 2), rows="n", default=HUNDREDS.reshape(1, 2))
    with service.session(model.SerializeToString()) as session:
        given = {"x": X, "hidden": np.float32([[10, 20]])}
        feeds = [given, given, given]
        assert [y.tolist() for (y,) in session.run_many(feeds, batch=2)] == [GAVE] * 3


@pytest.mark.parametrize(
    ("feed", "says"),
    [
        ({**GIVEN, "hidden": np.float32([1, 2, 3])}, "'hidden' has shape"),
        ({**GIVEN, "hidden": np.int64([1, 2])}, "'hidden' is float32"),
        ({"hidden": GIVEN["hidden"]}, r"\['x'\] are missing; this model takes \['x'\] and, if given, 'hidden'"),
        ({**GIVEN, "other": X}, r"no inputs \['other'\]"),
    ],
)
def test_wrong_ones_are_refused(session: nnburst.Session, feed: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        session.run(None, feed)
    assert session.run(None, {"x": X})[0].tolist() == LEFT


def test_a_state_may_have_a_default(service: nnburst.Service) -> None:
    model = add(shape=(1, 2), default=HUNDREDS.reshape(1, 2))
    with service.session(model.SerializeToString()) as session:
        with session.bind(state={"y": "hidden"}) as execution:
            execution.inputs["x"][:] = X
            execution.run()
            execution.run()
            assert execution.get_state()["hidden"].tolist() == [[2, 4]]


def test_a_file_that_lists_all_initializers_as_it_had_to_has_no_optional_input(service: nnburst.Service) -> None:
    with service.session(add(opset=8, ir_version=3).SerializeToString()) as session:
        assert session.get_overridable_initializers() == []
        assert session.run(None, {"x": X})[0].tolist() == LEFT
        with pytest.raises(InvalidArgument, match=r"no inputs \['hidden'\]"):
            session.run(None, GIVEN)


SHAPES = {"fixed": (2,), "symbolic": ("n",), "any": None}
CASES: dict[str, tuple[Any, list[Any]]] = {
    f"shape {name}": (
        graph(
            [node("Reshape", ["x", "to"], ["y"])],
            [("x", FLOAT, (4,)), ("to", INT64, shape)],
            [("y", FLOAT, ("a", "b"))],
            {"to": np.int64([2, 2])},
        ),
        [np.int64([4, 1]), np.int64([1, 4])],
    )
    for name, shape in SHAPES.items()
} | {
    "empty": (add(shape=("m",)), [np.float32([7]), np.float32([7, 8])]),
    "scalar": (
        graph(
            [node("Mul", ["x", "f"], ["y"])],
            [("x", FLOAT, (4,)), ("f", FLOAT, ())],
            [("y", FLOAT, (4,))],
            {"f": np.array(3, np.float32)},
        ),
        [np.array(5, np.float32)],
    ),
    "bool": (
        graph(
            [node("Where", ["c", "x", "z"], ["y"])],
            [("x", FLOAT, (2,)), ("c", TensorProto.BOOL, (2,))],
            [("y", FLOAT, (2,))],
            {"c": np.array([True, False]), "z": np.zeros(2, np.float32)},
        ),
        [np.array([False, True])],
    ),
    "not read": (
        graph(
            [node("Relu", ["x"], ["y"])],
            [("x", FLOAT, (2,)), ("u", FLOAT, (2,))],
            [("y", FLOAT, (2,))],
            {"u": HUNDREDS},
        ),
        [HUNDREDS],
    ),
    "output": (
        graph(
            [node("Add", ["x", "h"], ["y"])],
            [("x", FLOAT, (2,)), ("h", FLOAT, (2,))],
            [("y", FLOAT, (2,)), ("h", FLOAT, (2,))],
            {"h": HUNDREDS},
        ),
        [np.float32([5, 6])],
    ),
    "string": (
        graph(
            [node("Identity", ["x"], ["y"]), node("Identity", ["s"], ["t"])],
            [("x", FLOAT, (2,)), ("s", TensorProto.STRING, (2,))],
            [("y", FLOAT, (2,)), ("t", TensorProto.STRING, (2,))],
            {"s": np.array(["a", "b"], object)},
        ),
        [np.array(["c", "d"], object)],
    ),
    "large": (
        graph(
            [node("MatMul", ["x", "w"], ["y"])],
            [("x", FLOAT, (2, 64)), ("w", FLOAT, (64, 64))],
            [("y", FLOAT, (2, 64))],
            {"w": RNG.normal(size=(64, 64)).astype(np.float32)},
        ),
        [np.eye(64, dtype=np.float32)],
    ),
}


@pytest.mark.parametrize("kept", ["bytes", "file", "cache"])
@pytest.mark.parametrize("case", CASES)
def test_all_is_as_with_onnxruntime(service: nnburst.Service, tmp_path: Path, case: str, kept: str) -> None:
    model, values = CASES[case]
    data = model.SerializeToString()
    x, optional = (value for value in sorted(model.graph.input, key=lambda each: each.name != "x"))
    shape = [dim.dim_value for dim in x.type.tensor_type.shape.dim]
    feed = {"x": np.arange(np.prod(shape), dtype=np.float32).reshape(shape)}
    wanted = [in_process(data, {**feed, **more}) for more in ({}, *({optional.name: value} for value in values))]
    source = data if kept == "bytes" else save_external(onnx.load_from_string(data), tmp_path / "m.onnx")
    options = {"cache_dir": tmp_path / "cache"} if kept == "cache" else {}
    for _ in range(1 + (kept == "cache")):
        with service.session(source, **options) as session:
            for expected, more in zip(wanted, ({}, *({optional.name: value} for value in values)), strict=True):
                for got, right in zip(session.run(None, {**feed, **more}), expected, strict=True):
                    assert np.array_equal(got, right)
            outcome = session.cache_report.outcome
    assert kept != "cache" or outcome == "HIT"


@pytest.mark.parametrize(("ir_version", "is_constant"), [(8, False), (3, True)])
def test_what_makes_a_model_safe_takes_them_for_inputs(ir_version: int, is_constant: bool) -> None:
    int8, default = TensorProto.INT8, np.ones((4, 3), np.int8)
    inputs: list[Any] = [("x", int8, ("m", 4)), ("w", int8, (None, 3))]
    divided = graph([node("Div", ["w", "w"], ["y"])], inputs, [("y", int8, None)], {"w": default})
    product = graph(
        [node("MatMulInteger", ["x", "w"], ["y"])], inputs, [("y", TensorProto.INT32, None)], {"w": default}
    )
    for model in (divided, product):
        model.ir_version = ir_version
    assert ("w" not in exposed_arguments(divided)) == is_constant
    add_guards(product)
    assert (len(product.graph.node) == 1) == is_constant


def test_more_of_them_than_a_channel_has_room_for(service: nnburst.Service) -> None:
    names = [f"w{i}" for i in range(1500)]
    model = graph(
        [node("Sum", ["x", *names], ["y"])],
        [("x", FLOAT, (2,)), *((name, FLOAT, (2,)) for name in names)],
        [("y", FLOAT, (2,))],
        dict.fromkeys(names, np.ones(2, np.float32)),
    )
    with service.session(model.SerializeToString()) as session:
        x = np.zeros(2, np.float32)
        assert session.run(None, {"x": x})[0].tolist() == [1500, 1500]
        assert session.run(None, {"x": x, "w7": x})[0].tolist() == [1499, 1499]
        assert session.stats.fallbacks == 0
