"""Models that take and give what is no array of numbers: strings, sequences, maps, optionals, 4-bit numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import GeneralFailure, InvalidArgument, OutputInsufficientSize
from nnburst.devices import encoded
from support.onnx_models import FLOAT, TensorProto, helper, in_process, node, onnx, ort

STRING, INT64 = TensorProto.STRING, TensorProto.INT64
WORDS = np.array([["a\0b", "é"], ["", "xy\0"]], object)


def tensor(name: str, element: int, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, element, shape)


def sequence(name: str, element: int) -> Any:
    return helper.make_tensor_sequence_value_info(name, element, None)


def optional(name: str, inner: Any) -> Any:
    return helper.make_value_info(name, helper.make_optional_type_proto(inner))


def maps(key: int, value: int) -> Any:
    return helper.make_map_type_proto(key, helper.make_tensor_type_proto(value, None))


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], opset: int = 17) -> bytes:
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    made = helper.make_graph(nodes, "values", inputs, outputs)
    return bytes(helper.make_model(made, opset_imports=opsets, ir_version=10).SerializeToString())


def identity(x: Any, y: Any) -> bytes:
    return model([node("Identity", ["x"], ["y"])], [x], [y])


ECHO = identity(tensor("x", STRING, ["rows", "columns"]), tensor("y", STRING, ["rows", "columns"]))


def zip_map(labels: list[Any], shape: Any = ("rows", 2), key: int = 0, *, times: int = 1) -> bytes:
    kind, element = ("strings", STRING) if isinstance(labels[0], str | bytes) else ("int64s", INT64)
    made = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", **{f"classlabels_{kind}": labels})
    outputs = [helper.make_value_info("y", helper.make_sequence_type_proto(maps(key or element, FLOAT)))]
    return model([made], [tensor("x", FLOAT, shape)], times * outputs)


ZIPMAP = zip_map(["a", "é"])
SEQUENCES = identity(sequence("x", FLOAT), sequence("y", FLOAT))
OPTIONALS = identity(
    optional("x", helper.make_tensor_type_proto(FLOAT, None)), optional("y", helper.make_tensor_type_proto(FLOAT, None))
)


def alike(a: Any, b: Any) -> bool:
    """Whether two values are equal to the bit; NumPy's strings equal objects."""
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(alike, a, b))
    if not isinstance(a, np.ndarray):
        return repr(a) == repr(b)  # of dicts, also their order and types
    if a.dtype.kind in ("O", "T"):
        return a.shape == b.shape and a.tolist() == b.tolist()
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


CASES: dict[str, tuple[bytes, Any]] = {
    "strings": (ECHO, WORDS),
    "no strings": (ECHO, np.zeros((0, 3), object)),
    "maps": (ZIPMAP, np.float32([[0.25, 0.75], [1, 0]])),
    "no maps": (ZIPMAP, np.zeros((0, 2), np.float32)),
    "maps of labels in any order": (
        zip_map(["b", "a\0", "é", "a", "b"], None),
        np.float32([[0.1, -0.0, np.nan, 3, 4]]),
    ),
    "maps of numbers": (zip_map([3, -(2**63), 10, 3], None), np.float32([[0, 1, 2, 3], [4, 5, 6, 7]])),
    "one row of maps": (zip_map([3, 1], None), np.float32([0.5, 0.25])),
    "sequence": (SEQUENCES, [np.float32([1, 2]), np.zeros((0, 3), np.float32)]),
    "no sequence": (SEQUENCES, []),
    "optional": (OPTIONALS, np.float32([3])),
    "no optional": (OPTIONALS, None),
    "sequence of strings": (identity(sequence("x", STRING), sequence("y", STRING)), [WORDS, WORDS[:0]]),
    "map": (
        model(
            [node("DictVectorizer", ["x"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b", "c"])],
            [helper.make_value_info("x", maps(STRING, FLOAT))],
            [tensor("y", FLOAT, None)],
        ),
        {"c": 0.5, "a": 2.0},
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[bytes, Any, Any]:
    data, x = CASES[request.param]
    return data, x, in_process(data, {"x": x})[0]


def ways(session: nnburst.Session) -> Iterator[Callable[[Any], Any]]:
    """Each way to run a session once."""
    yield lambda x: session.run(None, {"x": x})[0]
    yield lambda x: session.run(["y"], {"x": x})[0]
    yield lambda x: asyncio.run(session.arun(None, {"x": x}))[0]
    yield lambda x: list(session.run_many([{"x": x}] * 20))[19][0]

    def bound(x: Any) -> Any:
        with session.bind(shapes={"x": np.shape(x)} if not session.get_inputs()[0].holds else None) as execution:
            if session.get_inputs()[0].holds:
                execution.inputs["x"] = x
            else:
                execution.inputs["x"][...] = x
            execution.run()
            return execution.outputs["y"] if session.get_outputs()[0].holds else execution._copied()[0]

    yield bound


def test_values_are_those_of_onnxruntime_whatever_way_they_run(
    service: nnburst.Service, case: tuple[bytes, Any, Any]
) -> None:
    data, x, expected = case
    with service.session(data) as session:
        for way in ways(session):
            for _ in range(2):
                assert alike(way(x), expected)


def test_values_change_from_run_to_run(service: nnburst.Service) -> None:
    with service.session(OPTIONALS) as session:
        for x in (np.float32([1]), None, np.float32([2, 3]), None, None, np.zeros((0,), np.float32)):
            assert alike(session.run(None, {"x": x})[0], x)
    with service.session(ECHO) as session:
        for length in (1, 100_000, 3, 1_000_000, 0):  # each larger one needs more room
            x = np.array([["é" * length, "b"]], object)
            assert alike(session.run(None, {"x": x})[0], x)


def test_session_shows_types_as_onnxruntime_writes_them(service: nnburst.Service) -> None:
    for data, _ in CASES.values():
        with service.session(data) as session:
            theirs = in_process_session(data)
            for ours, other in zip(
                (*session.get_inputs(), *session.get_outputs()),
                (*theirs.get_inputs(), *theirs.get_outputs()),
                strict=True,
            ):
                assert not ours.holds or ours.holds == other.type
    with service.session(ECHO) as session:
        (x,) = session.get_inputs()
        assert x.shape == ("rows", "columns")
        assert x.dtype.kind in ("O", "T")
        assert "x (rows, columns) tensor(string)" in repr(session)


def in_process_session(data: bytes) -> Any:
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"])


def test_elements_of_four_bits_are_numbers_of_one_byte(service: nnburst.Service) -> None:
    data = model(
        [
            node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=TensorProto.INT4),
            node("DequantizeLinear", ["w", "s"], ["z"]),
        ],
        [tensor("x", FLOAT, ["n"]), tensor("s", FLOAT, []), tensor("w", TensorProto.UINT4, ["m"])],
        [tensor("q", TensorProto.INT4, ["n"]), tensor("z", FLOAT, ["m"])],
        opset=23,
    )
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with service.session(data) as session:
        for w in (np.uint8([1, 15, 3]), np.array([1, 15, 3], ml_dtypes.uint4), np.zeros(0, np.uint8)):
            q, z = session.run(None, {"x": np.float32([-9, 3, 2]), "s": np.float32(1), "w": w})
            assert q.dtype == np.int8
            assert q.tolist() == [-8, 3, 2]
            assert z.tolist() == w.astype(np.float32).tolist()


def test_a_value_of_another_type_is_refused_and_names_the_input(service: nnburst.Service) -> None:
    with service.session(ECHO) as session, session.bind() as bound:
        for wrong, said in (
            (np.array([["a", 1]], object), "str"),
            (["a"], r"shape \('rows', 'columns'\)"),
            (None, "None"),
        ):
            for run in (session.run, lambda names, inputs: next(session.run_many([inputs]))):
                with pytest.raises(InvalidArgument, match=f"'x'.*{said}"):
                    run(None, {"x": wrong})
            with pytest.raises(InvalidArgument, match=f"'x'.*{said}"):
                bound.inputs["x"] = wrong
        with pytest.raises(InvalidArgument, match="missing"):
            session.run(None, {})
        outcomes = list(session.run_many([{"x": WORDS}, {"x": [[1, 2]]}, {"x": WORDS}], on_error="return"))
        assert isinstance(outcomes[1], InvalidArgument)
        assert alike(outcomes[2][0], WORDS)
        assert alike(session.run(None, {"x": WORDS})[0], WORDS)


def test_bound_values_have_room_that_can_be_said(service: nnburst.Service) -> None:
    long = np.array([["x" * 100_000]], object)
    with service.session(ECHO) as session:
        with session.bind() as bound:
            with pytest.raises(InvalidArgument, match="no value yet"):
                bound.run()
            with pytest.raises(GeneralFailure, match="no value yet"):
                bound.outputs["y"]
            with pytest.raises(InvalidArgument, match=r"bind\(shapes=\{'x': \(20"):
                bound.inputs["x"] = long
            assert list(bound.inputs) == ["x"]
            assert len(bound.outputs) == 1
            with pytest.raises(KeyError):
                bound.inputs["z"]
        with session.bind(shapes={"x": (200_000,)}) as bound:
            bound.inputs["x"] = long
            with pytest.raises(OutputInsufficientSize):
                bound.run()
        with session.bind(shapes={"x": (200_000,), "y": (200_000,)}) as bound:
            for value in (long, WORDS):
                bound.inputs["x"] = value
                bound.run()
                assert alike(bound.outputs["y"], value)


def test_values_are_copied_and_take_no_state_memory_steps_or_batch(service: nnburst.Service) -> None:
    with service.session(ECHO) as session:
        with pytest.raises(InvalidArgument, match="copied; give it no memory"):
            session.bind(memory={"x": np.zeros(100, np.uint8)})
        with pytest.raises(InvalidArgument, match=r"'x' is tensor.string., which no state can be"):
            session.bind(state={"y": "x"})
        with pytest.raises(InvalidArgument, match="steps="):
            session.bind(steps=2)
        with pytest.raises(InvalidArgument, match="batch=2"):
            list(session.run_many([{"x": WORDS}], batch=2))


def test_maps_of_a_batch_are_dealt_out(service: nnburst.Service) -> None:
    xs = [np.float32([[i, 1 - i]]) for i in range(7)]
    with service.session(ZIPMAP) as session:
        for outputs, x in zip(session.run_many([{"x": x} for x in xs], batch=3), xs, strict=True):
            assert alike(outputs[0], in_process(ZIPMAP, {"x": x})[0])


def test_outputs_that_need_more_room_come_from_run_many_too(service: nnburst.Service) -> None:
    nonzero = model([node("NonZero", ["x"], ["y"])], [tensor("x", FLOAT, ["n"])], [tensor("y", INT64, [1, None])])
    with service.session(nonzero) as session:
        sizes = [r[0].size for r in session.run_many({"x": np.ones(n, np.float32)} for n in (3, 2000, 2000, 2000, 5))]
        assert sizes == [3, 2000, 2000, 2000, 5]


def test_bytes_that_a_client_made_up_are_refused_and_the_service_lives(service: nnburst.Service) -> None:
    rng = np.random.default_rng(3)
    refused = 0
    with service.session(ECHO) as strings, service.session(SEQUENCES) as sequences:
        for session, x in ((strings, WORDS), (sequences, [np.float32([1, 2])])):
            bound = session.bind()
            bound.inputs["x"] = x
            raw = bound._wired["x"]
            good = raw.copy()
            size = int(good[:8].view("<i8")[0])
            for _ in range(300):
                raw[:] = good
                for _ in range(rng.integers(1, 4)):
                    raw[rng.integers(size)] = rng.integers(256)
                try:
                    bound.run()
                except (InvalidArgument, GeneralFailure, OutputInsufficientSize):
                    refused += 1
            raw[:] = good
            bound.run()
            assert alike(bound.outputs["y"], in_process(strings and (ECHO if x is WORDS else SEQUENCES), {"x": x})[0])
            bound.close()
    assert refused > 100


def test_sequences_of_another_type_than_the_graph_has_are_refused(service: nnburst.Service) -> None:
    """A client that is not this one may send any value for an input."""
    with service.session(SEQUENCES) as session, service.session(ECHO) as other:
        bound, strings = session.bind(), other.bind()
        strings.inputs["x"] = WORDS
        bound._wired["x"][:] = strings._wired["x"]
        with pytest.raises(GeneralFailure, match="x"):
            bound.run()
        bound.close()
        strings.close()


@pytest.mark.parametrize("case", ["strings", "maps"])
def test_a_compiled_model_of_values_comes_from_the_cache(tmp_path: Path, case: str) -> None:
    data, x = CASES[case]
    for _ in range(2):
        with nnburst.Session(data, cache_dir=tmp_path) as session:
            outcome = session.cache_report.outcome
            assert alike(session.run(None, {"x": x})[0], in_process(data, {"x": x})[0])
    assert outcome == "HIT"


def test_scores_that_fit_no_labels_fail_as_in_onnxruntime(service: nnburst.Service) -> None:
    for labels, x in ((["a", "b"], np.ones((3, 3))), (["a", "b"], np.ones((0, 3))), (["a"], np.ones(())),
                      (["a"], np.ones((2, 1, 1))), ([1, 2], np.ones(1)), ([1, 2], np.ones(0))):  # fmt: skip
        data, inputs = zip_map(labels, None), {"x": np.asarray(x, np.float32)}
        with pytest.raises(Exception, match="ZipMap"):
            in_process(data, inputs)
        with service.session(data) as session:
            with pytest.raises(GeneralFailure, match=f"'y' has scores of shape .* for {len(labels)} labels"):
                session.run(None, inputs)
            fitting = np.ones((1, len(labels)), np.float32)
            assert alike(session.run(None, {"x": fitting})[0], in_process(data, {"x": fitting})[0])


def test_maps_may_be_named_as_an_output_twice(service: nnburst.Service) -> None:
    data, inputs = zip_map(["a", "b"], times=2), {"x": np.ones((1, 2), np.float32)}
    with service.session(data) as session:
        assert alike(session.run(None, inputs), in_process(data, inputs))


def test_maps_that_onnxruntime_refuses_are_refused(service: nnburst.Service) -> None:
    for data in (zip_map(["a", "b"], key=INT64), zip_map([1, 2], key=STRING)):
        with pytest.raises(GeneralFailure, match="refuses the model"):
            service.session(data)
    with service.session(zip_map([b"\xff", "b"])) as session, pytest.raises(GeneralFailure, match="no UTF-8"):
        session.run(None, {"x": np.ones((1, 2), np.float32)})


def test_maps_need_no_operators_of_onnx(service: nnburst.Service) -> None:
    """A file may import ONNX-ML's alone."""
    proto = onnx.load_from_string(ZIPMAP)
    del proto.opset_import[0]
    with service.session(proto.SerializeToString()) as session:
        assert alike(session.run(None, {"x": np.float32([[1, 2]])})[0], [{"a": 1.0, "é": 2.0}])


def test_scores_and_maps_of_them_come_together(service: nnburst.Service) -> None:
    nodes = [
        node("Softmax", ["x"], ["scores"]),
        node("ZipMap", ["scores"], ["first"], domain="ai.onnx.ml", classlabels_strings=["b", "a"]),
        node("ZipMap", ["scores"], ["second"], domain="ai.onnx.ml", classlabels_int64s=[1, 0]),
    ]
    outputs = [
        helper.make_value_info(name, helper.make_sequence_type_proto(maps(key, FLOAT)))
        for name, key in (("first", STRING), ("second", INT64))
    ]
    data = model(nodes, [tensor("x", FLOAT, ["n", 2])], [*outputs, tensor("scores", FLOAT)])
    x = np.float32([[1, 2], [3, 5]])
    with service.session(data) as session:
        assert alike(session.run(None, {"x": x}), in_process(data, {"x": x}))
        assert alike(session.run(["second"], {"x": x}), in_process(data, {"x": x})[1:2])


def test_rows_of_maps_are_no_map_of_a_model(service: nnburst.Service) -> None:
    """A client that is not this one may send them."""
    data, x = CASES["map"]
    with service.session(data) as session, session.bind() as bound:
        keys = encoded.from_python(["a", "b"], "tensor(string)", "")
        values = encoded.from_python(np.float32([[1, 2], [3, 4]]), "tensor(float)", "")
        assert isinstance(keys, encoded.EncodedTensor)
        assert isinstance(values, encoded.EncodedTensor)
        rows = encoded.write(encoded.EncodedMap(keys, values))
        bound._wired["x"][: rows.size] = rows
        with pytest.raises((GeneralFailure, InvalidArgument), match="x"):
            bound.run()
        bound.inputs["x"] = x
        bound.run()


def test_an_input_that_is_an_output_is_passed_on(service: nnburst.Service) -> None:
    data = model(
        [node("Identity", ["x"], ["z"])], [tensor("x", STRING, ["n"])], [tensor("x", STRING), tensor("z", STRING)]
    )
    with service.session(data) as session:
        for out in session.run(None, {"x": ["a", "é"]}):
            assert out.tolist() == ["a", "é"]


def test_mixed_inputs_of_a_table_run_together(service: nnburst.Service) -> None:
    data = model(
        [
            node(
                "LabelEncoder",
                ["city"],
                ["c"],
                domain="ai.onnx.ml",
                keys_strings=["rome", "oslo"],
                values_int64s=[5, 7],
            ),
            node("Cast", ["c"], ["f"], to=FLOAT),
            node("Add", ["age", "f"], ["y"]),
        ],
        [tensor("age", FLOAT, ["n", 1]), tensor("city", STRING, ["n", 1])],
        [tensor("y", FLOAT, ["n", 1])],
    )
    with service.session(data) as session:
        for n in (0, 1, 5):
            inputs = {"age": np.ones((n, 1), np.float32), "city": np.full((n, 1), "oslo", object)}
            assert alike(session.run(None, inputs)[0], in_process(data, inputs)[0])
        with session.bind(shapes={"n": 2}) as bound:
            bound.inputs["age"][:] = 1
            bound.inputs["city"] = [["rome"], ["oslo"]]
            bound.run()
            assert bound.outputs["y"].tolist() == [[6], [8]]


def test_strings_of_an_unknown_shape_are_split_and_matched(service: nnburst.Service) -> None:
    """ONNX's inference of shapes crashes where the type of a split is not known."""
    split, match = (
        node("StringSplit", ["x"], ["s", "n"], delimiter=" "),
        node("RegexFullMatch", ["s"], ["y"], pattern="a"),
    )
    data = model([split, match], [tensor("x", STRING)], [tensor("y", TensorProto.BOOL)], 20)
    with service.session(data) as session:
        assert session.run(None, {"x": ["a b", "b a"]})[0].tolist() == [[True, False], [False, True]]
