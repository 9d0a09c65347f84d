"""Nothing that ONNX Runtime did not write is handed out, whatever dimension is 0."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_zero_sized import compare, computed, made

import nnburst
from nnburst import GeneralFailure
from nnburst.devices.onnxruntime.guards import add_guards
from support.onnx_models import FLOAT, TensorProto, graph, helper, node

NOT_WRITTEN = (
    "plain,in_if,in_loop,in_function,added,new_axis,matmulinteger,qlinearmatmul,concat_2d,convinteger,lstm_,gru_,"
    "scan,attention_local_window_with_past"
)
"""Cases of operators that ONNX Runtime does not write all results of."""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_results_of_sizes_of_zero_do_not_depend_on_what_memory_held(tmp_path: Path) -> None:
    ran, different, ended = compare(tmp_path, NOT_WRITTEN, 0)
    assert not different
    assert not ended
    assert ran >= 100


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_results_of_no_operator_with_sizes_of_zero_depend_on_what_memory_held(tmp_path: Path) -> None:
    ran, different, ended = compare(tmp_path, "", 200)
    print(f"{ran} cases ran")
    assert not different
    assert not ended
    assert ran >= 8000


def test_integer_product_over_nothing_fails_and_the_service_lives() -> None:
    arrays = {"a": np.ones((2, 0), np.uint8), "b": np.ones((0, 3), np.uint8)}
    model = made([node("MatMulInteger", ["a", "b"], ["y"])], arrays, ["y"])
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.INT32, None))
    with nnburst.Session(model.SerializeToString()) as session:
        with pytest.raises(GeneralFailure, match="MatMulInteger of no elements"):
            session.run(None, arrays)
        (something,) = session.run(None, {"a": np.full((2, 2), 3, np.uint8), "b": np.full((2, 3), 2, np.uint8)})
    np.testing.assert_array_equal(something, np.full((2, 3), 12, np.int32))


def test_joining_what_does_not_fit_fails_and_says_which_node() -> None:
    join = helper.make_node("Concat", ["a", "b"], ["y"], name="tokens", axis=1)
    model = graph([join], [("a", FLOAT, None), ("b", FLOAT, None)], [("y", FLOAT, None)])
    fits = np.ones((2, 3), np.float32)
    with nnburst.Session(model.SerializeToString()) as session:
        with pytest.raises(GeneralFailure, match="Concat 'tokens' of parts that do not fit together"):
            session.run(None, {"a": fits, "b": np.ones((0, 5), np.float32)})
        (joined,) = session.run(None, {"a": fits, "b": np.ones((2, 0), np.float32)})
    np.testing.assert_array_equal(joined, fits)


def test_scan_of_no_steps_fails_and_the_service_lives() -> None:
    body = helper.make_graph(
        [node("Add", ["s", "x"], ["t"]), node("Identity", ["t"], ["u"])],
        "body",
        [helper.make_tensor_value_info(name, FLOAT, (2,)) for name in "sx"],
        [helper.make_tensor_value_info(name, FLOAT, (2,)) for name in "tu"],
    )
    scan = helper.make_node("Scan", ["", "start", "rows"], ["last", "all"], body=body, num_scan_inputs=1)
    values = [("start", FLOAT, (1, 2)), ("rows", FLOAT, (1, "n", 2))]
    model = graph([scan], values, [("last", FLOAT, (1, 2)), ("all", FLOAT, (1, "n", 2))])
    model.opset_import[0].version = 8
    start = np.array([[3, 4]], np.float32)
    with nnburst.Session(model.SerializeToString()) as session:
        with pytest.raises(GeneralFailure, match="Scan of no elements"):
            session.run(None, {"start": start, "rows": np.ones((1, 0, 2), np.float32)})
        last, rows = session.run(None, {"start": start, "rows": np.ones((1, 3, 2), np.float32)})
    np.testing.assert_array_equal(last, start + 3)
    assert rows.shape == (1, 3, 2)


def test_lstm_of_no_steps_fails_and_the_service_lives() -> None:
    weights = {"w": np.ones((1, 12, 2), np.float32), "r": np.ones((1, 12, 3), np.float32)}
    lstm = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=3)
    model = graph([lstm], [("x", FLOAT, ("n", 1, 2))], [("y", FLOAT, ("n", 1, 1, 3))], weights)
    with nnburst.Session(model.SerializeToString()) as session:
        with pytest.raises(GeneralFailure, match="LSTM of no elements"):
            session.run(None, {"x": np.ones((0, 1, 2), np.float32)})
        assert session.run(None, {"x": np.ones((1, 1, 2), np.float32)})[0].shape == (1, 1, 1, 3)


def test_normalisation_of_computed_nothing_fails_and_the_service_lives() -> None:
    weights = {"one": np.ones(2, np.float32), "starts": np.zeros(3, np.int64)}
    nodes = [
        node("Slice", ["x", "starts", "ends"], ["cut"]),
        node("InstanceNormalization", ["cut", "one", "one"], ["y"]),
    ]
    inputs = [("x", FLOAT, ("n", 2, "w")), ("ends", TensorProto.INT64, (3,))]
    with nnburst.Session(graph(nodes, inputs, [("y", FLOAT, None)], weights).SerializeToString()) as session:
        x = np.ones((1, 2, 3), np.float32)
        with pytest.raises(GeneralFailure, match="InstanceNormalization of no elements"):
            session.run(None, {"x": x, "ends": np.int64([1, 2, 0])})
        for ends in [(1, 2, 3), (0, 2, 3), (0, 2, 0)]:
            assert session.run(None, {"x": x, "ends": np.int64(ends)})[0].shape == ends


SCALES = {"s": np.array(0.5, np.float32), "z": np.array(3, np.uint8)}
BYTES = {"x": np.ones((2, 4), np.uint8)} | SCALES
VOLUME, KERNEL = np.ones((1, 2, 3, 4, 4), np.float32), np.ones((2, 2, 3, 3, 3), np.float32)
SIGNAL = {"x": np.ones((1, 8, 1), np.float32), "n": np.array(1, np.int64), "w": np.ones(4, np.float32)}
NEEDED: list[tuple[str, dict[str, np.ndarray], str, int, dict[str, int]]] = [
    ("ConvTranspose", {"x": VOLUME, "k": KERNEL}, "x", 2, {}),
    ("Dropout", {"x": SIGNAL["x"], "r": SCALES["s"], "t": np.zeros(1, np.bool_)}, "t", 0, {}),
    ("QLinearSoftmax", BYTES | {"t": np.ones(1, np.float32), "u": SCALES["z"]}, "t", 0, {"opset": 13}),
    ("QLinearWhere", {"c": BYTES["x"] > 0} | BYTES | {"x2": BYTES["x"], "s2": SCALES["s"], "z2": SCALES["z"],
     "t": np.ones(1, np.float32), "u": SCALES["z"]}, "t", 0, {}),
    ("STFT", SIGNAL, "w", 0, {}),
    ("Unique", {"x": np.ones((3, 2), np.float32)}, "x", 1, {"axis": 0}),
]  # fmt: skip
"""An operator and its inputs; the one that may not be empty, along which axis; and attributes."""


@pytest.mark.parametrize(("operator", "filled", "needed", "axis", "attributes"), NEEDED, ids=[row[0] for row in NEEDED])
def test_run_with_a_computed_input_of_no_elements_fails_and_the_service_lives(
    operator: str, filled: dict[str, np.ndarray], needed: str, axis: int, attributes: dict[str, int]
) -> None:
    domain = "com.microsoft" if operator[0] == "Q" else ""
    one = helper.make_node(operator, list(filled), ["y"], domain=domain, **attributes)
    model = made([one], filled, ["y"])
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.UINT8 if domain else FLOAT, None))
    empty = filled | {needed: np.take(filled[needed], [], axis)}
    _, model, (good, bad) = computed(("", model, [filled, empty]))
    with nnburst.Session(model.SerializeToString()) as session:
        with pytest.raises(GeneralFailure, match=f"{operator} of no elements"):
            session.run(None, bad)
        assert session.run(None, good)[0].size


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("operator", ["Conv", "ConvInteger", "QLinearConv", "FusedConv"])
def test_convolution_with_a_kernel_of_size_0_fails_and_the_service_lives(operator: str, groups: int) -> None:
    dtype = np.uint8 if operator in ("ConvInteger", "QLinearConv") else np.float32
    arrays = {"x": np.ones((2, 4, 0), dtype), "w": np.ones((4, 4 // groups, 0), dtype)}
    inputs = ["x", "w"]
    if operator == "QLinearConv":
        arrays |= {"s": np.array(0.5, np.float32), "z": np.array(3, np.uint8)}
        inputs = ["x", "s", "z", "w", "s", "z", "s", "z"]
    domain = "com.microsoft" if operator == "FusedConv" else ""
    one = helper.make_node(operator, inputs, ["y"], domain=domain, group=groups)
    model = made([one], arrays, ["y"])
    if domain:
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", FLOAT, None))
    with nnburst.Session(model.SerializeToString()) as session:
        with pytest.raises(GeneralFailure, match=f"{operator} of no elements"):
            session.run(None, arrays)
        filled = {"x": np.ones((2, 4, 3), dtype), "w": np.ones((4, 4 // groups, 2), dtype)}
        assert session.run(None, arrays | filled)[0].shape == (2, 4, 2)


def test_inverse_of_what_is_not_square_fails_and_the_service_lives() -> None:
    inverse = helper.make_node("Inverse", ["x"], ["y"], domain="com.microsoft")
    model = made([inverse], {"x": np.eye(2)}, ["y"])
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.DOUBLE, None))
    with nnburst.Session(model.SerializeToString()) as session:
        for shape in [(1, 4), (8, 4), (8, 0), (0, 8), (2, 3, 2)]:
            with pytest.raises(GeneralFailure, match="Inverse of what is not square"):
                session.run(None, {"x": np.ones(shape)})
        np.testing.assert_array_equal(session.run(None, {"x": np.eye(2)})[0], np.eye(2))


def test_nodes_whose_sizes_are_known_and_not_zero_stay_as_they_are() -> None:
    weights = {"w": np.ones((4, 3), np.uint8), "k": np.ones((3, 4, 2), np.float32)}
    weights |= {"s1": np.array(1, np.float32), "z1": np.array(0, np.uint8)}  # numbers, which have no dimensions
    nodes = [
        node("Conv", ["image", "k"], ["c"]),
        node("MatMulInteger", ["x", "w"], ["y"]),  # over 4, whatever the batch is
        node("Concat", ["y", "y"], ["z"], axis=0),  # of 3 columns each
        node("Shape", ["x"], ["s"]),
        node("Concat", ["s", "s"], ["t"], axis=0),  # of one dimension
        node("Dropout", ["z"], ["d"]),
        node("ConvTranspose", ["image", "k"], ["e"]),  # of no volume
        node("Unique", ["x"], ["u"]),
        helper.make_node("QLinearSoftmax", ["x", "s1", "z1", "s1", "z1"], ["v"], domain="com.microsoft", opset=13),
    ]
    inputs = [("x", TensorProto.UINT8, ("batch", 4)), ("image", FLOAT, None)]
    outputs = [("c", FLOAT, None), ("z", TensorProto.INT32, None), ("t", TensorProto.INT64, None)]
    model = graph(nodes, inputs, outputs, weights)
    model.opset_import.add(domain="com.microsoft", version=1)
    before = model.SerializeToString()
    add_guards(model)
    assert model.SerializeToString() == before


def test_what_a_file_says_of_shapes_inside_it_is_not_believed() -> None:
    nodes = [node("Identity", ["a"], ["b"]), node("Concat", ["b", "b"], ["y"], axis=1)]
    model = graph(nodes, [("a", FLOAT, None)], [("y", FLOAT, (2, 6))])
    model.graph.value_info.append(helper.make_tensor_value_info("b", FLOAT, (2, 3)))
    add_guards(model)
    assert [one.op_type for one in model.graph.node][-1] == "Reshape"
