"""Clients that change the memory of a request while ONNX Runtime works on it, and files that are two models."""

from __future__ import annotations

import contextlib
import random
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import BadState, DeadObject, GeneralFailure, InvalidArgument, Memory, MissedDeadline, ResourceExhausted
from nnburst._core import ffi
from nnburst.burst.cancellation import CancelFlag, use_cancel_flag
from nnburst.devices.onnxruntime import kernel
from nnburst.devices.onnxruntime.device import OnnxRuntimeDevice
from nnburst.devices.onnxruntime.graph import SessionSettings, compile_graph
from nnburst.devices.onnxruntime.importer import import_graph
from nnburst.devices.onnxruntime.kernel import BoundGraph
from nnburst.devices.onnxruntime.library import onnxruntime
from nnburst.devices.onnxruntime.packed import load_graph, pack, read_contents
from nnburst.devices.onnxruntime.snapshots import exposed_arguments
from nnburst.memory.staging import open_request
from nnburst.model import Request
from nnburst.model.types import DataLocation, RequestArgument
from nnburst.testing import inject
from support import raw_burst as raw
from support.onnx_models import (
    FLOAT,
    RNG,
    TensorProto,
    graph,
    helper,
    in_process,
    mlp,
    node,
    onnx,
    ort,
    save,
    save_external,
)

INT64, BOOL, UINT8, INT8 = TensorProto.INT64, TensorProto.BOOL, TensorProto.UINT8, TensorProto.INT8
N = 200_000
TEN = np.arange(10, dtype=np.float32)


@contextlib.contextmanager
def changing(array: np.ndarray, values: tuple[Any, ...]) -> Iterator[None]:
    """Write one value after the other into an array, from another thread, for as long as the block lasts."""
    end = threading.Event()

    def write() -> None:
        while not end.is_set():
            for value in values:
                array[...] = value

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def gather() -> tuple[Any, str]:
    """Indices are looked at before the first is used."""
    model = graph([node("Gather", ["k", "i"], ["y"])], [("i", INT64, (N,))], [("y", FLOAT, (N,))], {"k": TEN})
    return model, "i"


def gather_of_an_output() -> tuple[Any, str]:
    """Indices that the graph computes, and gives away before it uses them."""
    nodes = [node("Cast", ["x"], ["i"], to=INT64), node("Gather", ["k", "i"], ["y"])]
    outputs = [("i", INT64, (N,)), ("y", FLOAT, (N,))]
    return graph(nodes, [("x", FLOAT, (N,))], outputs, {"k": TEN}), "i"


def largest() -> tuple[Any, str]:
    """A heap is no heap any more when its elements change."""
    nodes = [node("TopK", ["x", "k"], ["y", "i"])]
    outputs = [("y", FLOAT, (N // 2,)), ("i", INT64, (N // 2,))]
    return graph(nodes, [("x", FLOAT, (N,))], outputs, {"k": np.int64([N // 2])}), "x"


def largest_of_an_output() -> tuple[Any, str]:
    nodes = [node("Relu", ["x"], ["h"]), node("TopK", ["h", "k"], ["y", "i"])]
    outputs = [("h", FLOAT, (N,)), ("y", FLOAT, (N // 2,)), ("i", INT64, (N // 2,))]
    return graph(nodes, [("x", FLOAT, (N,))], outputs, {"k": np.int64([N // 2])}), "h"


@pytest.mark.parametrize("make", [gather, gather_of_an_output, largest, largest_of_an_output])
def test_values_that_change_during_runs_harm_nobody(
    service: nnburst.Service, make: Callable[[], tuple[Any, str]]
) -> None:
    model, victim = make()
    plain = graph([node("Neg", ["x"], ["y"])], [("x", FLOAT, (10,))], [("y", FLOAT, (10,))])
    with (
        service.session(plain.SerializeToString()) as other,
        service.session(model.SerializeToString()) as session,
        session.bind() as bound,
    ):
        places = {**bound.inputs, **bound.outputs}
        for array in bound.inputs.values():
            array[...] = RNG.random(N) * 9
        bound.run()
        is_index = places[victim].dtype == np.int64
        values = (0, 1 << 34, 0, -4000) if is_index else tuple(RNG.random((3, N)).astype(np.float32))
        where = places[victim][-1000:] if is_index else places[victim]
        with changing(where, values):
            for _ in range(25):
                with contextlib.suppress(GeneralFailure):  # an index that is copied may well be out of range
                    bound.run()
                    if "k" in [tensor.name for tensor in model.graph.initializer] and is_index:
                        assert np.isin(bound.outputs["y"], TEN).all()  # and nothing of what lies beside
        assert other.run(None, {"x": TEN})[0].tolist() == (-TEN).tolist()


# -- what is copied ----------------------------------------------------------------------------------------------------


def bound_in_place(proto: Any) -> set[str]:
    """Names of the arguments of which ONNX Runtime gets the addresses in the client's pool."""
    device = OnnxRuntimeDevice(threads="1")
    data = proto.SerializeToString()
    with Memory.ashmem(len(data)) as file, Memory.ashmem(1 << 16) as pool:
        file.buffer[:] = data
        imported = device.import_model("onnx", [file]).model
        prepared = device.prepare_model(
            nnburst.Model(
                imported.main,
                pools=(file,),
                extension_name_to_prefix=imported.extension_name_to_prefix,
                input_names=imported.input_names,
                output_names=imported.output_names,
            )
        )
        names = (*imported.input_names, *imported.output_names)
        arguments = []
        for i, value in enumerate((*proto.graph.input, *proto.graph.output)):
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            size = int(np.prod([d.dim_value for d in value.type.tensor_type.shape.dim])) * dtype.itemsize
            arguments.append(RequestArgument(False, DataLocation(0, 1024 * i, size)))
        n = len(imported.input_names)
        opened = open_request(Request(tuple(arguments[:n]), tuple(arguments[n:]), (pool,)))
        plan = BoundGraph(prepared.graph, prepared.model, opened.request, lambda outputs: None)
        mapped = pool._map_for(writable=True).bytes()
        places = [int(ffi.cast("uintptr_t", row.place)) - mapped.ctypes.data for row in plan._rows]
        found = {name for name, place in zip(names, places, strict=True) if 0 <= place < mapped.nbytes}
        del plan, mapped
        prepared.close()
        return found


@pytest.mark.parametrize(
    ("element", "in_place"),
    [
        (FLOAT, True),
        (TensorProto.FLOAT16, True),
        (TensorProto.DOUBLE, True),
        (UINT8, True),
        (INT8, True),
        (TensorProto.INT32, False),
        (INT64, False),
        (TensorProto.UINT32, False),
        (TensorProto.UINT64, False),
        (BOOL, False),
    ],
)
def test_types_of_indices_and_conditions_are_copied_and_data_is_not(element: int, in_place: bool) -> None:
    proto = graph([node("Identity", ["x"], ["y"])], [("x", element, (4,))], [("y", element, (4,))])
    assert bound_in_place(proto) == ({"x", "y"} if in_place else set())


F4: Any = (FLOAT, (1, 4))


def flow(nodes: list[Any], element: int = FLOAT, outputs: tuple[str, ...] = ("y",)) -> set[str]:
    """Which of x, z and the outputs need a copy."""
    values = [("x", element, (1, 4)), ("z", element, (1, 4))]
    weights = {"k": np.int64([2]), "w": np.ones((4, 4), np.float32)}
    return set(exposed_arguments(graph(nodes, values, [(name, FLOAT, None) for name in outputs], weights)))


def topk(name: str, *outputs: str) -> Any:
    return node("TopK", [name, "k"], [*outputs, "", ""][:2])


def own(operator: str, inputs: list[str], outputs: list[str]) -> Any:
    return helper.make_node(operator, inputs, outputs, domain="own")


def branch(operator: str, name: str) -> Any:
    inner = helper.make_graph(
        [node(operator, [name], ["b"])], "b", [], [helper.make_tensor_value_info("b", FLOAT, None)]
    )
    return node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Add", ["x", "z"], ["y"])],
        [node("Div", ["x", "z"], ["y"])],
        [node("Resize", ["x", "", "w"], ["y"])],
        [node("Constant", [], ["c"], value_floats=[1.0, 1.0]), node("Resize", ["x", "", "c"], ["y"])],
    ],
)
def test_nothing_is_copied_where_all_operators_take_values_as_data(nodes: list[Any]) -> None:
    assert flow(nodes) == set()


@pytest.mark.parametrize(
    "nodes",
    [
        [topk("x", "y")],
        [node("Conv", ["x", "w"], ["h"]), topk("h", "y")],
        [node("Resize", ["x", "", "z"], ["y"])],
        [node("RoiAlign", ["x", "z", "k"], ["y"])],
        [node("NonMaxSuppression", ["x", "w"], ["y"])],
        [own("MatMul", ["x"], ["y"])],
        [branch("Relu", "z")],
    ],
)
def test_all_is_copied_where_one_operator_may_trust_values(nodes: list[Any]) -> None:
    assert flow(nodes) == {"x", "y", "z"}


def test_small_integers_are_data_but_no_divisors() -> None:
    assert flow([node("Add", ["x", "z"], ["y"])], UINT8) == set()
    assert flow([node("Div", ["x", "z"], ["y"])], UINT8) == {"x", "z"}  # y is of floats


def test_function_of_the_model_is_not_taken_for_the_operator_whose_name_it_has() -> None:
    proto = graph([node("Relu", ["x"], ["y"])], [("x", *F4)], [("y", *F4)])
    assert exposed_arguments(proto) == set()
    opset = [helper.make_opsetid("", 17)]
    proto.functions.append(helper.make_function("", "Relu", ["a"], ["b"], [topk("a", "b")], opset))
    assert exposed_arguments(proto) == {"x", "y"}


# -- one file, two models ----------------------------------------------------------------------------------------------


def doubled_by(operator: str) -> Any:
    return graph([node(operator, ["x", "x"], ["y"])], [("x", FLOAT, (2,))], [("y", FLOAT, (2,))])


def in_ort_format(model: Any, directory: Path) -> bytes:
    path = directory / "model.ort"
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return path.read_bytes()


def varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def polyglot(read: Any, flatbuffer: bytes) -> bytes:
    """A file that protobuf reads as one model, and that begins as a flatbuffer whose root is that of another.

    The first four bytes are the field `ir_version` and the number of the field `producer_name`, written in two bytes;
    its length, 79, is the letter O of "ORTM". The other model lies in a field that protobuf does not know.
    """
    head = b"\x08\x08\x92\x00" + b"ORTM" + bytes(0x4F - 3) + read.SerializeToString() + varint(100 << 3 | 2)
    place = struct.unpack("<I", head[:4])[0] - struct.unpack("<I", flatbuffer[:4])[0]
    assert place % 16 == 0  # or its verifier finds it not aligned
    length = place + len(flatbuffer) - len(head) - 4
    assert len(varint(length)) == 4
    return (head + varint(length)).ljust(place, b"\0") + flatbuffer


def test_file_that_is_two_models_runs_as_the_one_that_was_analysed(service: nnburst.Service, tmp_path: Path) -> None:
    """ONNX Runtime guesses the format from the first bytes, protobuf reads any."""
    analysed, hidden = doubled_by("Add"), in_ort_format(doubled_by("Mul"), tmp_path)
    path = tmp_path / "polyglot.onnx"
    path.write_bytes(polyglot(analysed, hidden))
    x = np.float32([3, 5])
    assert onnx.load_model_from_string(path.read_bytes()).graph.node[0].op_type == "Add"
    assert in_process(str(path.with_name("model.ort")), {"x": x})[0].tolist() == [9, 25]
    assert in_process(path.read_bytes(), {"x": x})[0].tolist() == [9, 25]  # by itself, ONNX Runtime takes the other
    with service.session(str(path)) as session:
        assert session.run(None, {"x": x})[0].tolist() == [6, 10]


def test_file_in_another_format_than_onnx_is_refused(service: nnburst.Service, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(in_ort_format(doubled_by("Mul"), tmp_path))
    with pytest.raises(nnburst.InvalidArgument, match="no ONNX model"):
        service.session(str(path))


@pytest.mark.parametrize("saved", [False, True], ids=["sent", "kept"])
def test_runtime_is_given_only_what_was_parsed(saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a field that protobuf does not know nor the bytes that the client sent reach ONNX Runtime."""
    given: list[bytes] = []
    entries: dict[str, str] = {}
    runtime = onnxruntime()
    make, add = runtime.InferenceSession, runtime.SessionOptions.add_session_config_entry

    def noted_entry(options: Any, key: str, value: str) -> None:
        entries[key] = value
        add(options, key, value)

    def noted(data: bytes, options: Any, **others: Any) -> Any:
        given.append(data)
        assert entries.pop("session.load_model_format") == "ONNX"
        return make(data, options, **others)

    monkeypatch.setattr(runtime, "InferenceSession", noted)
    monkeypatch.setattr(runtime.SessionOptions, "add_session_config_entry", noted_entry)
    sent = doubled_by("Add").SerializeToString() + varint(100 << 3 | 2) + varint(6) + b"secret"
    settings = SessionSettings()
    if saved:
        packed, weights = pack(import_graph(sent).model, sent, {}, settings)
        load_graph(read_contents(memoryview(packed)), weights.data, settings)
    else:
        compile_graph(sent, {}, settings)
    assert given
    assert not any(b"secret" in data for data in given)


def test_copies_of_arguments_count_as_working_memory_and_results_of_open_shape_are_not_kept() -> None:
    """INT64 is always copied. What ONNX Runtime allocates for an output of unknown size goes with the run."""
    n, runs = 1 << 17, 3
    proto = graph(
        [node("Add", ["x", "x"], ["y"]), node("NonZero", ["x"], ["where"])],
        [("x", INT64, (n,))],
        [("y", INT64, (n,)), ("where", INT64, (1, None))],
    )
    taken: list[int] = []

    def account(nbytes: int) -> Callable[[], None]:
        taken.append(nbytes)
        return lambda: taken.append(-nbytes)

    data = proto.SerializeToString()
    with contextlib.closing(OnnxRuntimeDevice(threads="1")) as device, Memory.ashmem(len(data)) as file:
        file.buffer[:] = data
        prepared = device.prepare_model(replace(device.import_model("onnx", [file]).model, pools=(file,)))
        with Memory.ashmem(3 * 8 * n) as pool:
            pool.array(np.int64, (n,))[...] = 1
            places = [RequestArgument(False, DataLocation(0, 8 * n * i, 8 * n)) for i in range(3)]
            opened = open_request(Request((places[0],), tuple(places[1:]), (pool,)))
            with use_cancel_flag(CancelFlag(account=account)):
                plan = BoundGraph(prepared.graph, prepared.model, opened.request, lambda outputs: None)
            assert 2 * 8 * n <= sum(taken) < 2 * 8 * n + (1 << 17)
            for _ in range(runs):
                assert plan() is not None
                assert [value.has_value() for value in plan._binding.get_outputs()] == [True, False]
            assert pool.array(np.int64, (n,), 2 * 8 * n).tolist() == list(range(n))
            del plan, opened
            assert sum(taken) == 0
        prepared.close()


def of_functions(levels: int) -> Any:
    """A file of so many functions, of which each calls the next one twice."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]

    def function(number: int) -> Any:
        called = f"f{number + 1}"
        nodes = [helper.make_node(called, ["x"], ["t"], domain="f"), helper.make_node(called, ["t"], ["y"], domain="f")]
        last = [helper.make_node("Neg", ["x"], ["y"])]
        return helper.make_function("f", f"f{number}", ["x"], ["y"], nodes if number + 1 < levels else last, opsets)

    x, y = (helper.make_tensor_value_info(name, FLOAT, [4]) for name in "xy")
    outer = helper.make_graph([helper.make_node("f0", ["x"], ["y"], domain="f")], "g", [x], [y])
    functions = [function(number) for number in range(levels)]
    return helper.make_model(outer, functions=functions, opset_imports=opsets, ir_version=8)


def test_functions_that_call_each_other_twice_are_refused_before_anything_reads_them() -> None:
    with nnburst.in_process(devices=["nnburst-onnxruntime"]) as service:
        with service.session(of_functions(4).SerializeToString()) as session:
            np.testing.assert_array_equal(session.run(None, {"x": TEN[:4]})[0], TEN[:4])  # 8 Neg
        with pytest.raises(InvalidArgument, match=r"549755813888 nodes once its functions are replaced"):
            service.session(of_functions(40).SerializeToString())


def test_function_that_calls_itself_is_refused() -> None:
    model = of_functions(2)
    model.functions[1].node[0].op_type, model.functions[1].node[0].domain = "f0", "f"
    with pytest.raises(InvalidArgument, match=r"function 'f\d' calls itself"):
        import_graph(model.SerializeToString())


@pytest.mark.parametrize("kind", ["input", "output"])
def test_name_with_a_nul_is_refused_when_the_model_is_read(kind: str) -> None:
    """ONNX Runtime's C interface would see another name."""
    x, y = ("a\0b", "y") if kind == "input" else ("x", "a\0b")
    model = graph([node("Relu", [x], [y])], [(x, FLOAT, (4,))], [(y, FLOAT, (4,))])
    with pytest.raises(InvalidArgument, match=f"{kind} .* has a NUL in its name"):
        import_graph(model.SerializeToString())


TRUTH = np.tile(np.uint8([0, 1, 2, 255]), 100)
"""Bools as a client may write them. There are many, for ONNX Runtime reads few of a model one by one."""


def of_bools(*before: Any, name: str = "c") -> list[Any]:
    values = helper.make_tensor("v", FLOAT, TRUTH.shape, np.arange(TRUTH.size))
    cast, compress = node("Cast", [name], ["y"], to=TensorProto.INT32), node("Compress", ["v", name], ["k"])
    return [*before, node("Constant", [], ["v"], value=values), cast, compress]


@pytest.mark.parametrize("way", ["input", "constant", "initializer", "external", "sequence"])
def test_bytes_of_bools_are_0_or_1_for_onnxruntime(service: nnburst.Service, way: str, tmp_path: Path) -> None:
    """Compress would give as many elements as they add up to, most of which it would not have written."""
    tensor = helper.make_tensor("c", BOOL, TRUTH.shape, TRUTH.tobytes(), raw=True)
    before = {
        "constant": node("Constant", [], ["c"], value=tensor),
        "sequence": node("SequenceAt", ["x", "zero"], ["c"]),
    }
    nodes = of_bools(*(made for name, made in before.items() if name == way), name="x" if way == "input" else "c")
    made = graph(
        nodes,
        [("x", BOOL, TRUTH.shape)],
        [("y", TensorProto.INT32, TRUTH.shape), ("k", FLOAT, ("k",))],
        {"zero": np.int64(0)} if way == "sequence" else {},
    )
    if way == "sequence":
        made.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", BOOL, None))
    if way in ("initializer", "external"):
        made.graph.initializer.append(tensor)
    path = tmp_path / "m.onnx"
    save_external(made, path) if way == "external" else save(made, path)
    with service.session(path) as session, session.bind() as bound:
        if way == "sequence":
            bound.inputs["x"] = [np.ones(TRUTH.shape, np.bool_)]
            raw = bound._wired["x"]
            raw[raw.tobytes().index(b"\1" * TRUTH.size) :][: TRUTH.size] = TRUTH
        else:
            bound.inputs["x"].view(np.uint8)[...] = TRUTH
        bound.run()
        assert bound.outputs["y"].tolist() == (TRUTH != 0).tolist()
        assert bound.output_shapes[1].dimensions == (300,)


def of_a_sequence() -> bytes:
    made = graph([node("SequenceLength", ["x"], ["y"])], [], [("y", INT64, ())])
    made.graph.input.append(helper.make_tensor_sequence_value_info("x", FLOAT, None))
    return bytes(made.SerializeToString())


@pytest.mark.check
def test_tensors_of_a_value_count_as_working_memory_before_they_are_made() -> None:
    few, many = ([np.zeros(0, np.float32)] * n for n in (1000, 30_000))
    quotas = {"working_bytes": 8 << 20}
    with nnburst.launch(devices=["nnburst-onnxruntime:threads=1"], quotas=quotas) as service:
        with service.session(of_a_sequence()) as session, session.bind(shapes={"x": (1 << 20,)}) as bound:
            for _ in range(20):  # what a run took, the next one may take
                bound.inputs["x"] = few
                bound.run()
                assert bound.outputs["y"] == 1000
                bound.inputs["x"] = many
                with pytest.raises(ResourceExhausted, match="working_bytes"):
                    bound.run()


def test_a_value_of_many_tensors_is_read_until_the_deadline_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def require_time(deadline_ns: int) -> None:
        asked.append(deadline_ns)
        if len(asked) == 7:
            raise MissedDeadline("now")

    monkeypatch.setattr(kernel, "require_time", require_time)
    with nnburst.in_process(devices=["nnburst-onnxruntime:threads=1"]) as service:
        with service.session(of_a_sequence()) as session, pytest.raises(MissedDeadline, match="now"):
            session.run(None, {"x": [np.zeros(0, np.float32)] * 100}, timeout=100)
    assert len(asked) == 7
    assert min(asked) > 0


# -- requests that follow others ---------------------------------------------------------------------------------------

PART = 4096
"""Bytes of the pool for each argument."""
NUMBERS = (0, 1, 2, 4, 16, 256, PART - 4, PART, PART + 4, 8 * PART, 2**30, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1)


def of_many_arguments(*more: Any) -> bytes:
    """Inputs in the client's memory, copied and optional; outputs of known and of unknown dimensions. More nodes."""
    nodes = [
        node("Add", ["x", "o"], ["y"]),
        node("Greater", ["x", "o"], ["large"]),
        node("Reshape", ["large", "flat"], ["c"]),
        node("Compress", ["x", "c"], ["z"]),
        node("Gather", ["k", "i"], ["g"]),
        *more,
    ]
    inputs = [("x", FLOAT, ("n", 4)), ("i", INT64, ("m",)), ("o", FLOAT, (1,))]
    outputs = [("y", FLOAT, ("n", 4)), ("z", FLOAT, (None,)), ("g", FLOAT, ("m",))]
    weights = {"k": TEN, "o": np.float32([0.5]), "flat": np.int64([-1])}
    return graph(nodes, inputs, outputs, weights).SerializeToString()


def packet_of_any_numbers(dice: random.Random, slots: list[int]) -> list[bytes]:
    """A request for `of_many_arguments`; two in three have a number or two that are none of theirs."""
    n, m = dice.randint(1, 256), dice.randint(1, 512)
    rows: list[list[Any]] = [  # no value, pool, offset, length, dimensions
        [False, 0, 0, 16 * n, [n, 4]],
        [False, 0, PART, 8 * m, [m]],
        [True, 0, 0, 0, []],
        [False, 0, 2 * PART, 16 * n, [n, 4]],
        [False, 0, 3 * PART, PART, []],
        [False, 0, 4 * PART, 4 * m, [m]],
    ]
    for row in dice.sample(rows, dice.randrange(3)):
        number = dice.choice(NUMBERS) if dice.random() < 0.5 else dice.getrandbits(dice.choice([4, 12, 32]))
        field, dims = dice.randrange(7), row[4]
        if field < 2:
            row[field] = dice.choice([0, 1, 1, number]) if field else not row[0]
        elif field < 4:
            row[field] = number if dice.random() < 0.5 else (row[field] + dice.choice([-4, 1, 4])) % 2**32
        elif field == 4 and dims:
            dims[dice.randrange(len(dims))] = number
        else:
            row[4] = dims[1:] if field == 5 else [*dims, *[number] * dice.choice([1, 2, 70])]
    datums = [raw.packet_information(0, 3, 3, len(slots))]
    for i, (no_value, pool, offset, length, dims) in enumerate(rows):
        row = {"no_value": no_value, "pool": pool, "offset": offset, "length": length, "rank": len(dims)}
        datums += [raw.operand(i < 3, **row), *(raw.dimension(i < 3, size) for size in dims)]
    return raw.sealed_size([*datums, *map(raw.pool_identifier, slots), raw.measure_timing(0)])


@pytest.mark.parametrize("packets", [60, pytest.param(2000, marks=pytest.mark.check)])
@pytest.mark.parametrize("more", [(), (node("NonZero", ["x"], ["w"]),)], ids=["in place", "copied"])
def test_request_after_others_is_answered_as_if_there_had_been_none(more: tuple[Any, ...], packets: int) -> None:
    """What is bound to the one before adapts, or does not; a second burst binds each anew. Two pools are one file."""
    data, dice = of_many_arguments(*more), random.Random(packets)
    device, statuses = OnnxRuntimeDevice(threads="1"), set()
    with contextlib.ExitStack() as stack:
        file, pool = stack.enter_context(Memory.ashmem(len(data))), stack.enter_context(Memory.ashmem(5 * PART))
        file.buffer[:] = data
        again = stack.enter_context(Memory.mmap_fd(pool.fds[0], 4 * PART))
        model = replace(device.import_model("onnx", [file]).model, pools=(file,))
        sides = [stack.enter_context(raw.RawBurst(device.prepare_model(model))) for _ in range(2)]
        slots = [side.slots.slots_for([pool, again]) for side in sides]
        contents = pool.array(np.uint8, (pool.size,))
        for _ in range(packets):
            before = np.frombuffer(dice.randbytes(pool.size), np.uint8).copy()
            before[PART : 2 * PART].view(np.int64)[:] = RNG.integers(0, 10, PART // 8)
            before[:PART].view(np.float32)[:] = RNG.integers(0, 2, PART // 4)
            state, answers = dice.getstate(), []
            for side, known in zip(sides, slots, strict=True):
                dice.setstate(state)
                contents[:] = before
                answer = side.ask(packet_of_any_numbers(dice, list(known)))
                answers.append((answer.status, answer.shapes, contents.tobytes()))
            sides[1].context.forget_plans()
            assert answers[0] == answers[1]
            statuses.add(answers[0][0])
    assert {0, 4} <= statuses


# ---- a crash of the runtime ----------------------------------------------------------------------------------------


OTHERS = [signal.SIGABRT, signal.SIGFPE, signal.SIGKILL, signal.SIGUSR1]


@pytest.mark.parametrize("number", [signal.SIGSEGV, *(pytest.param(n, marks=pytest.mark.check) for n in OTHERS)])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "run"])
def test_crash_of_the_runtime_is_a_dead_object_and_the_next_session_works(
    tmp_path: Path, number: signal.Signals, bound: bool
) -> None:
    path = save(mlp(16, 2), tmp_path / "m.onnx")
    ones = np.ones((1, 16), np.float32)
    with nnburst.launch(devices=["nnburst-onnxruntime"], restart=True, faults=True) as service:
        with service.session(path) as session:
            (expected,) = session.run(None, {"x": ones})
            inject(service, crash_on=1, crash_with=number)
            with pytest.raises(DeadObject, match=number.name):
                if bound:
                    session.bind().run()
                else:
                    session.run(None, {"x": ones})
            with pytest.raises((DeadObject, BadState)):
                session.run(None, {"x": ones})
        with service.session(path) as session:
            assert np.array_equal(session.run(None, {"x": ones})[0], expected)
