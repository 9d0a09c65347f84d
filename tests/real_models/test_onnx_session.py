"""Sessions on ONNX files: through a service process, compared with ONNX Runtime in this one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import (
    BadState,
    DeviceUnavailable,
    GeneralFailure,
    InvalidArgument,
    Memory,
    OutputInsufficientSize,
    ResourceExhausted,
)
from nnburst._core import lib
from nnburst.devices.onnxruntime.kernel import BoundGraph
from nnburst.memory.managed import Uses
from nnburst.watch import find_services, look
from support import images
from support.onnx_models import FLOAT, RNG, TensorProto, graph, helper, in_process, mlp, node, ort, save
from support.processes import run_python


@pytest.fixture(scope="module")
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-reference", "nnburst-onnxruntime:threads=1"]) as service:
        yield service


FLOATS = helper.make_tensor_type_proto(FLOAT, None)


def rows(n: int, width: int = 16) -> np.ndarray:
    return RNG.normal(size=(n, width)).astype(np.float32)


def test_session_of_its_own_answers_as_onnxruntime_does(tmp_path: Path) -> None:
    path, x = save(mlp(16, 2), tmp_path / "mlp.onnx"), rows(1)
    with nnburst.Session(Path(path)) as session:
        assert session.device.name == "nnburst-onnxruntime"
        (y,) = session.run(None, {"x": x})
        bound = session.bind()
        bound.inputs["x"][:] = x
        bound.run()
        (expected,) = in_process(path, {"x": x})
        assert np.array_equal(y, expected)
        assert np.array_equal(bound.outputs["y"], expected)
        assert session.stats.fallbacks == 0


def test_service_writes_no_file_into_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, home = save(mlp(16, 2), tmp_path / "mlp.onnx"), tmp_path / "home"
    home.mkdir()
    for name in ("ORT_DISABLE_TELEMETRY", "CI", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    with nnburst.Session(path) as session:
        session.run(None, {"x": rows(1)})
    assert [path for path in home.rglob("*") if not path.is_dir()] == []


def test_arguments_are_those_of_the_file_with_symbolic_dimensions(service: nnburst.Service, tmp_path: Path) -> None:
    model = graph(
        [node("Reshape", ["x", "to"], ["y"]), node("NonZero", ["x"], ["where"])],
        [("x", FLOAT, ("batch", None, 4)), ("to", TensorProto.INT64, (2,))],
        [("y", FLOAT, None), ("where", TensorProto.INT64, (3, "count"))],
    )
    with service.session(save(model, tmp_path / "m.onnx")) as session:
        x, to = session.get_inputs()
        y, where = session.get_outputs()
        assert (x.name, x.shape, x.dtype) == ("x", ("batch", None, 4), np.float32)
        assert (to.name, to.shape, to.dtype) == ("to", (2,), np.int64)
        assert (y.name, y.shape) == ("y", None)
        assert (where.name, where.shape, where.dtype) == ("where", (3, "count"), np.int64)


def test_output_whose_size_depends_on_the_data_grows(service: nnburst.Service, tmp_path: Path) -> None:
    model = graph([node("NonZero", ["x"], ["y"])], [("x", FLOAT, (4000,))], [("y", TensorProto.INT64, (1, "n"))])
    with service.session(save(model, tmp_path / "m.onnx")) as session:
        for n in (3, 4000, 0, 1):
            x = np.zeros(4000, np.float32)
            x[:n] = 1
            (y,) = session.run(None, {"x": x})
            assert y.shape == (1, n)
            assert y[0].tolist() == list(range(n))


def test_bound_output_that_is_too_small_says_what_it_needs(service: nnburst.Service, tmp_path: Path) -> None:
    model = graph([node("NonZero", ["x"], ["y"])], [("x", FLOAT, (4000,))], [("y", TensorProto.INT64, (1, "n"))])
    with service.session(save(model, tmp_path / "m.onnx")) as session, session.bind() as bound:
        bound.inputs["x"][:] = 1
        with pytest.raises(OutputInsufficientSize) as caught:
            bound.run()
        assert [shape.dimensions for shape in caught.value.output_shapes] == [(1, 4000)]
        bound.inputs["x"][5:] = 0
        bound.run()
        assert bound.output_shapes[0].dimensions == (1, 5)
        assert bound.outputs["y"].view(np.int64)[:5].tolist() == [0, 1, 2, 3, 4]


TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "float64": TensorProto.DOUBLE,
    "bool": TensorProto.BOOL,
    **{name: getattr(TensorProto, name.upper()) for name in ("int8", "int16", "int32", "int64")},
    **{name: getattr(TensorProto, name.upper()) for name in ("uint8", "uint16", "uint32", "uint64")},
}


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)], ids=["matrix", "scalar", "empty"])
@pytest.mark.parametrize("name", TYPES)
def test_type_goes_in_and_out(service: nnburst.Service, tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    model = graph([node("Identity", ["x"], ["y"])], [("x", TYPES[name], shape)], [("y", TYPES[name], shape)])
    dtype = np.dtype(name)
    x = np.frombuffer(RNG.bytes(64), np.uint8)[: int(np.prod(shape)) * dtype.itemsize].copy()
    x = (x & 1).astype(np.bool_).reshape(shape) if name == "bool" else x.view(dtype).reshape(shape)
    with service.session(save(model, tmp_path / "m.onnx")) as session:
        assert session.get_inputs()[0].dtype == dtype
        (y,) = session.run(None, {"x": x})
        assert (y.dtype, y.shape) == (dtype, shape)
        assert y.tobytes() == x.tobytes()


@pytest.mark.parametrize("shape", [("n",), None], ids=["rank 1", "no rank"])
@pytest.mark.parametrize("count", [40, 600, 1000, 1100])
def test_many_outputs_fit_the_request_and_their_dimensions_the_answer(
    service: nnburst.Service, count: int, shape: tuple[str, ...] | None
) -> None:
    names = [f"y{i}" for i in range(count)]
    split = node("Split", ["x"], names, axis=0)
    model = graph([split], [("x", FLOAT, (count,))], [(name, FLOAT, shape) for name in names])
    with service.session(model.SerializeToString()) as session:
        for _ in range(2):
            values = session.run(None, {"x": np.arange(count, dtype=np.float32)})
            assert [value.tolist() for value in values] == [[i] for i in range(count)]
        assert session.stats.fallbacks == 0


@pytest.mark.parametrize("name", ["float32", "int64", "uint8"])
def test_input_of_open_rank_takes_arrays_of_any_rank(service: nnburst.Service, name: str) -> None:
    nodes = [node("Identity", ["x"], ["h"]), node("Add", ["h", "h"], ["y"])]
    model = graph(nodes, [("x", TYPES[name], None)], [("y", TYPES[name], None)]).SerializeToString()
    with service.session(model) as session:
        for shape in ((), (1,), (), (2, 3), (1, 1, 1, 1, 1)):
            x = np.arange(3, 3 + np.prod(shape, dtype=int)).astype(name).reshape(shape)
            (y,) = session.run(None, {"x": x})
            assert (y.shape, y.dtype, y.tolist()) == (shape, x.dtype, (x + x).tolist())


@pytest.mark.parametrize("shape", [(2, 3), ("n", 3), None, ()], ids=["fixed", "open", "no rank", "scalar"])
@pytest.mark.parametrize("name", ["float32", "int64", "uint8"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another"])
def test_input_that_is_an_output_too_is_passed_on(
    service: nnburst.Service, name: str, shape: tuple[int | str, ...] | None, alone: bool
) -> None:
    value = ("x", TYPES[name], shape)
    nodes, more = ([], []) if alone else ([node("Add", ["x", "x"], ["y"])], [("y", TYPES[name], shape)])
    model = graph(nodes, [value], [value, *more]).SerializeToString()
    with service.session(model) as session:
        for first in (1, 50):
            x = np.arange(first, first + 6).astype(name).reshape(2, 3) if shape != () else np.array(first, name)
            outputs = session.run(None, {"x": x})
            for output, expected in zip(outputs, [x] if alone else [x, x + x], strict=True):
                assert (output.dtype, output.shape) == (x.dtype, x.shape)
                assert np.array_equal(output, expected)


def test_input_that_is_an_output_too_can_be_bound_and_asked_for_alone(service: nnburst.Service) -> None:
    model = graph([], [("x", FLOAT, ("n",))], [("x", FLOAT, ("n",))]).SerializeToString()
    with service.session(model) as session, session.bind(shapes={"x": (2000,)}) as bound:
        bound.inputs["x"][:] = 3
        bound.run()
        assert bound.outputs["x"].tolist() == [3.0] * 2000
    model = graph([node("Relu", ["x"], ["y"])], [("x", FLOAT, (2,))], [("y", FLOAT, (2,)), ("x", FLOAT, (2,))])
    with service.session(model.SerializeToString()) as session:
        assert session.run(["x"], {"x": np.float32([-1, 2])})[0].tolist() == [-1, 2]


LACKING = {
    "bfloat16": TensorProto.BFLOAT16,
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
    "float8_e4m3fnuz": TensorProto.FLOAT8E4M3FNUZ,
    "float8_e5m2": TensorProto.FLOAT8E5M2,
    "float8_e5m2fnuz": TensorProto.FLOAT8E5M2FNUZ,
}
"""Types that NumPy lacks, by their names in ml_dtypes."""


@pytest.mark.parametrize("name", LACKING)
def test_types_that_numpy_lacks_are_passed_as_bits_or_by_ml_dtypes(service: nnburst.Service, name: str) -> None:
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    nodes = [node("Cast", ["x"], ["y"], to=FLOAT), node("Cast", ["y"], ["z"], to=LACKING[name])]
    for shape in ((3,), (), ("n",)):
        given = graph(nodes, [("x", LACKING[name], shape)], [("y", FLOAT, shape), ("z", LACKING[name], shape)])
        given.opset_import[0].version = 19
        values = np.float32([1.5, -2, 0.25]) if shape else np.float32(1.5)
        named = values.astype(dtype)
        bits = named.view(f"u{dtype.itemsize}")
        with service.session(given.SerializeToString()) as session:
            (x,) = session.get_inputs()
            assert x.dtype == session.get_outputs()[1].dtype == bits.dtype
            assert x.bits_of == name
            assert f"bits of {name}" in repr(session)
            for ours in (named, bits):
                y, z = session.run(None, {"x": ours})
                assert (y.tolist(), z.dtype, z.tolist()) == (values.tolist(), bits.dtype, bits.tolist())
                assert z.view(dtype).tolist() == values.tolist()
            with session.bind(shapes={"n": 3} if "n" in shape else None) as bound:
                bound.inputs["x"].view(dtype)[...] = values
                bound.run()
                assert bound.outputs["z"].tolist() == bits.tolist()


@pytest.mark.parametrize("name", [*LACKING, "uint8", "uint16", "float16"])
def test_types_of_one_size_are_not_taken_for_each_other(service: nnburst.Service, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numbers = {"uint8": TensorProto.UINT8, "uint16": TensorProto.UINT16, "float16": TensorProto.FLOAT16} | LACKING
    given = graph([node("Cast", ["x"], ["y"], to=FLOAT)], [("x", numbers[name], (2,))], [("y", FLOAT, (2,))])
    given.opset_import[0].version = 19
    remedy = f"ml_dtypes.{name}" if name in LACKING else f"'{name}'"
    with service.session(given.SerializeToString()) as session:
        for other in [*LACKING, "float8_e4m3", "float32"]:
            if other != name:
                wrong = {"x": np.ones(2, getattr(ml_dtypes, other, other))}
                for run in (session.run, lambda names, inputs: next(session.run_many([inputs]))):
                    with pytest.raises(InvalidArgument, match=rf"'x' is .*, got {other}; .*astype\({remedy}\)"):
                        run(None, wrong)


def sums(batch: int | str | None = "n") -> bytes:
    nodes = [node("Relu", ["x"], ["y"]), node("ReduceSum", ["x"], ["s"], keepdims=0)]
    made = graph(nodes, [("x", FLOAT, (batch, 4))], [("y", FLOAT, (batch, 4)), ("s", FLOAT, ())])
    whole: bytes = made.SerializeToString()
    return whole


@pytest.mark.parametrize("batch", ["n", None, 0])
def test_array_without_elements_goes_every_way(service: nnburst.Service, batch: int | str | None) -> None:
    empty = {"x": np.zeros((0, 4), np.float32)}
    with nnburst.Session(sums(batch), service=service) as session:
        for outputs in (
            session.run(None, empty),
            asyncio.run(session.arun(None, empty)),
            *session.run_many([empty, empty]),
        ):
            assert [output.shape for output in outputs] == [(0, 4), ()]
            assert outputs[1] == 0
        with session.bind(shapes={} if batch == 0 else {"x": (0, 4)}) as bound:
            bound.submit().result()
            bound.run()
            assert bound.inputs["x"].shape == (0, 4)
            assert bound.output_shapes[0].dimensions == (0, 4)
            if batch is not None:
                assert bound.outputs["y"].shape == (0, 4)
            assert bound.outputs["s"] == 0


def test_shape_that_no_array_has_is_refused_though_it_is_empty(service: nnburst.Service) -> None:
    model = graph([node("Relu", ["x"], ["y"])], [("x", FLOAT, ("a", "b", "c"))], [("y", FLOAT, ("a", "b", "c"))])
    with nnburst.Session(model.SerializeToString(), service=service) as session:
        with pytest.raises(InvalidArgument, match=r"'x': dimensions .* are larger than a tensor can be"):
            session.bind(shapes={"x": (0, 2**32 - 1, 2**32 - 1)})


def test_inputs_of_no_rows_are_part_of_a_batch(service: nnburst.Service) -> None:
    model = graph([node("Relu", ["x"], ["y"])], [("x", FLOAT, ("n", 4))], [("y", FLOAT, ("n", 4))])
    counts = (2, 0, 3, 0, 0)
    with nnburst.Session(model.SerializeToString(), service=service) as session:
        inputs = [{"x": np.ones((count, 4), np.float32)} for count in counts]
        assert [len(y) for (y,) in session.run_many(inputs, batch=4)] == list(counts)


def test_array_without_elements_is_set_and_computed(service: nnburst.Service) -> None:
    with nnburst.Session(sums(), service=service) as session:
        total = np.full((), 7, np.float32)
        with nnburst.nnapi.Execution(session.compilation) as execution:
            execution.set_input(0, np.zeros((0, 4), np.float32))
            execution.set_output(0, np.zeros(16, np.float32))
            execution.set_output(1, total)
            execution.compute()
            assert execution.get_output_dimensions(0) == (0, 4)
        assert total == 0


@pytest.mark.parametrize("declared", [(None,), (3, "b"), (), ("b", 1, 1), (2, 7)])
@pytest.mark.parametrize("shape", [(2, 7), (3, 0), (), (4,)])
def test_output_that_comes_out_otherwise_than_declared_is_given_as_it_is(
    service: nnburst.Service, declared: tuple[int | str | None, ...], shape: tuple[int, ...]
) -> None:
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Abs", ["v"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, ()),
            helper.make_tensor_value_info("go", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("v", FLOAT, None),
        ],
        [helper.make_tensor_value_info("on", TensorProto.BOOL, ()), helper.make_tensor_value_info("w", FLOAT, None)],
    )
    nodes = [helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body)]
    inputs = [("trips", TensorProto.INT64, ()), ("x", FLOAT, None)]
    model = graph(nodes, inputs, [("y", FLOAT, declared)])
    with nnburst.Session(model.SerializeToString(), service=service) as session:
        for trips in (0, 2, 0):
            x = np.ones(shape, np.float32)
            (y,) = session.run(None, {"trips": np.array(trips), "x": x})
            assert np.array_equal(y, x)
            assert y.shape == shape


def test_arrays_that_are_not_like_the_last_ones_are_looked_at_again(service: nnburst.Service, tmp_path: Path) -> None:
    path, x = save(mlp(16, 1), tmp_path / "m.onnx"), rows(1)
    with service.session(path) as session:
        (y,) = session.run(None, {"x": x})
        (again,) = session.run(None, {"x": x})
        assert np.array_equal(y, again)
        assert not np.shares_memory(y, again)
        for wrong in (x[0], x[:, :1], np.float32(1), x.astype(np.float64), x.astype(">f4")):  # NumPy would broadcast
            with pytest.raises(InvalidArgument, match="'x'"):
                session.run(None, {"x": wrong})
        with pytest.raises(InvalidArgument, match="missing"):
            session.run(None, {"z": x})
        with pytest.raises(InvalidArgument, match="no inputs"):
            session.run(None, {"x": x, "z": x})
        assert np.array_equal(session.run(["y"], {"x": list(x)})[0], y)
        session.close()
        with pytest.raises(BadState):
            session.run(None, {"x": x})


@pytest.mark.check
def test_client_needs_neither_onnx_nor_onnxruntime(tmp_path: Path) -> None:
    import subprocess

    path = save(mlp(16, 1), tmp_path / "m.onnx")
    code = (
        "import sys, numpy, nnburst\n"
        f"with nnburst.Session({path!r}) as s: s.run(None, {{'x': numpy.ones((1, 16), 'f4')}})\n"
        "assert not {'onnx', 'onnxruntime'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_plain_model_needs_the_messages_of_onnx_alone_and_the_package_has_the_same(tmp_path: Path) -> None:
    path = save(mlp(16, 1), tmp_path / "m.onnx")
    code = (
        "import sys, numpy, nnburst\n"
        f"with nnburst.in_process().session({path!r}) as s: s.run(None, {{'x': numpy.ones((1, 16), 'f4')}})\n"
        "assert not {'onnx', 'onnxruntime'} & set(sys.modules)\n"
        "messages = sys.modules['onnx.onnx_ml_pb2']\n"
        "import onnx\n"
        "assert onnx.ModelProto is messages.ModelProto\n"
    )
    run_python("-c", code, check=True)


def test_measured_run_has_a_time(service: nnburst.Service, tmp_path: Path) -> None:
    with service.session(save(mlp(16, 1), tmp_path / "m.onnx")) as session, session.bind(measure=True) as bound:
        bound.inputs["x"][:] = 1
        bound.run()
        assert bound.timing.time_on_device <= bound.timing.time_in_driver < 10**9


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_corrupt_file_is_refused_and_the_service_lives(service: nnburst.Service, tmp_path: Path) -> None:
    good = mlp(16, 1).SerializeToString()
    for i, data in enumerate((b"no model", good[: len(good) // 2], b"\0" * 100, bytes(RNG.bytes(5000)))):
        (tmp_path / f"{i}.onnx").write_bytes(data)
        with pytest.raises((InvalidArgument, GeneralFailure), match="ONNX"):
            service.session(str(tmp_path / f"{i}.onnx"))
    with service.session(save(mlp(16, 1), tmp_path / "good.onnx")) as session:
        session.run(None, {"x": rows(1)})


def test_empty_file_and_directory_are_refused(service: nnburst.Service, tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "directory.onnx").mkdir()
    for name in ("empty", "directory"):
        with pytest.raises(InvalidArgument, match=rf"{name}\.onnx' is empty or no regular file"):
            service.session(str(tmp_path / f"{name}.onnx"))


@pytest.mark.parametrize(("taken", "given"), [((2, "b"), (2, "b")), ((2, 1), (None, None)), ((2, 1), None)])
def test_state_of_symbolic_dimensions_is_bound(service: nnburst.Service, taken: Any, given: Any) -> None:
    model = graph([node("Add", ["x", "s"], ["t"])], [("x", FLOAT, taken), ("s", FLOAT, taken)], [("t", FLOAT, given)])
    with service.session(model.SerializeToString()) as session:
        with session.bind(state={"t": "s"}, shapes={"x": (2, 1), "s": (2, 1)}) as step:
            step.inputs["x"][:] = 1
            step.run()
            step.run()
            assert step.get_state()["s"].tolist() == [[2], [2]]


def test_state_of_any_rank_is_refused(service: nnburst.Service) -> None:
    model = graph([node("Add", ["x", "s"], ["t"])], [("x", FLOAT, None), ("s", FLOAT, None)], [("t", FLOAT, None)])
    with service.session(model.SerializeToString()) as session, pytest.raises(InvalidArgument, match="of any rank"):
        session.bind(state={"t": "s"}, shapes={"x": (2, 1), "s": (2, 1)})


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (helper.make_tensor_value_info("x", TensorProto.COMPLEX64, (1,)), "complex"),
        (helper.make_tensor_value_info("x", TensorProto.INT2, (1,)), "2-bit"),
        (helper.make_sparse_tensor_value_info("x", FLOAT, (1,)), "sparse tensor"),
        (
            helper.make_value_info("x", helper.make_sequence_type_proto(helper.make_sequence_type_proto(FLOATS))),
            r"seq\(seq\(tensor\(float\)\)\)",
        ),
        (helper.make_tensor_sequence_value_info("x", TensorProto.COMPLEX64, None), "complex"),
    ],
)
def test_what_docs_onnx_lists_is_refused_by_name(
    service: nnburst.Service, tmp_path: Path, value: object, what: str
) -> None:
    model = graph([node("Identity", ["x"], ["y"])], [], [("y", FLOAT, (1,))])
    model.graph.input.append(value)
    with pytest.raises(GeneralFailure, match=f"input 'x'.*{what}"):
        service.session(save(model, tmp_path / "m.onnx"))


def test_service_without_the_device_names_the_remedy(tmp_path: Path) -> None:
    with nnburst.in_process(devices=["nnburst-reference"]) as service:
        with pytest.raises(DeviceUnavailable, match=r"launch\(devices=\['nnburst-onnxruntime'\]\)"):
            service.session(save(mlp(16, 1), tmp_path / "m.onnx"))


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('onnx', 'onnxruntime'): raise ModuleNotFoundError(name)\n"
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name in ('onnx', 'onnxruntime') else found(name, *a)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'hidden'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(DeviceUnavailable, match=r"pip install 'nnburst\[onnx\]'"):
        nnburst.Session(save(mlp(16, 1), tmp_path / "m.onnx"))


@pytest.mark.parametrize("options", ["threads=x", "threads=-1", "spinning=2", "colour=red", "threads"])
def test_bad_option_of_the_device_is_refused(options: str) -> None:
    with pytest.raises(InvalidArgument, match=options.partition("=")[0]):
        nnburst.in_process(devices=[f"nnburst-onnxruntime:{options}"])


# -- symbolic dimensions -----------------------------------------------------------------------------------------------


def test_session_runs_several_batches_in_one_memory(service: nnburst.Service, tmp_path: Path) -> None:
    path = save(mlp(16, 1, "batch"), tmp_path / "m.onnx")
    with service.session(path) as session:
        for n in (1, 8, 1, 8, 1, 3, 8):
            x = rows(n)
            assert np.array_equal(session.run(None, {"x": x})[0], in_process(path, {"x": x})[0])
        assert len(session.burst.controller._slots) == 1
        assert session.stats.fallbacks == 0


DOUBLED = {
    "number": ((2, 4), (2, 4)),
    "name": (("n", 4), ("n", 4)),
    "rank": ((2, 4), (8,)),
    "smaller": ((2, 4), (9, 4)),
}


@pytest.mark.parametrize("case", DOUBLED)
def test_shape_that_the_file_says_wrongly_is_the_real_one(service: nnburst.Service, tmp_path: Path, case: str) -> None:
    """As in ONNX Runtime, which only warns."""
    says, out = DOUBLED[case]
    nodes = [node("Concat", ["x", "x"], ["y"], axis=0), node("Relu", ["x"], ["z"])]
    path = save(graph(nodes, [("x", FLOAT, says)], [("y", FLOAT, out), ("z", FLOAT, says)]), tmp_path / "m.onnx")
    for _ in range(2):  # the second session meets a graph that is known
        with service.session(path) as session:
            for seed in range(3):
                x = rows(2, 4) + seed
                y, z = session.run(None, {"x": x})
                assert (y.shape, y.dtype) == ((4, 4), np.float32)
                assert np.array_equal(y, np.concatenate([x, x]))
                assert np.array_equal(z, np.maximum(x, 0))
            with session.bind(shapes={"x": (2, 4)}) as bound:
                bound.inputs["x"][:] = x
                bound.run()
                if bound.output_shapes:  # else the graph tells the shape before a run
                    assert bound.output_shapes[0].dimensions == (4, 4)
                y = bound.outputs["y"].view(np.float32).reshape(-1)[:16].reshape(4, 4)
                assert np.array_equal(y, np.concatenate([x, x]))


@pytest.mark.parametrize("pitch", [14, 20], ids=["in place", "copied"])
def test_planes_of_a_decoder_are_inputs_where_they_lie(tmp_path: Path, service: nnburst.Service, pitch: int) -> None:
    """P010 of an odd size: 16-bit numbers, a plane of Y and one of pairs, each frame a slot of its own."""
    u16, shapes = TensorProto.UINT16, {"luma": (1, 5, 7, 1), "chroma": (1, 3, 4, 2)}
    nodes = [node("Cast", [name], [f"{name} of float"], to=FLOAT) for name in shapes]
    outputs = [(f"{name} of float", FLOAT, shape) for name, shape in shapes.items()]
    path = save(graph(nodes, [(name, u16, shape) for name, shape in shapes.items()], outputs), tmp_path / "p010.onnx")
    with nnburst.Memory.hardware_buffer(7, 5, "P010", pitch=pitch) as frame, service.session(path) as session:
        layout = frame.image
        assert layout is not None
        assert layout.is_tensor is (pitch == 14)
        with frame.plane_memory(0) as luma, frame.plane_memory(1) as chroma:
            execution = session.bind(memory={"luma": luma, "chroma": chroma})
            for seed in range(3):
                raw = np.random.default_rng(seed).bytes(frame.span)
                os.pwrite(frame.fds[0], raw, 0)
                execution.run()
                found = np.concatenate([execution.outputs[name].reshape(-1) for name, _, _ in outputs])
                assert found.tolist() == images.decode("P010", layout, raw)


def test_other_shapes_in_the_same_memory_are_bound_without_python(service: nnburst.Service) -> None:
    model = graph([node("Add", ["x", "x"], ["y"])], [("x", FLOAT, ("n", 4))], [("y", FLOAT, ("n", 4))])

    def misses() -> int:
        return sum(row.counters["plan_misses"] for page in find_services(service.pid) for row in look(page).rows)

    memory = Memory.ashmem(1 << 16)
    with service.session(model.SerializeToString()) as session, contextlib.ExitStack() as stay:

        def run(n: int, start: int, end: int) -> None:
            x, y = memory.array(np.float32, (n, 4), start), memory.array(np.float32, (n, 4), end)
            execution = stay.enter_context(session.bind(memory={"x": x, "y": y}))
            x[:] = rows(n, 4)
            execution.run()
            np.testing.assert_array_equal(y, x + x)

        before = misses()
        for n in (3, 1, 200, 3, 200):
            run(n, 0, 1 << 15)
        assert misses() == before + 1
        run(8, 64, 1 << 15)
        assert misses() == before + 2
        with pytest.raises(InvalidArgument, match="overlaps"):
            run(8, 0, 64)
        beyond = stay.enter_context(Memory.mmap_fd(memory.fds[0], 1 << 15, offset=4096))  # of the same file
        execution = stay.enter_context(session.bind(memory={"x": memory, "y": beyond}, shapes={"n": 256}))
        execution.run()
        execution.reshape({"n": 257})
        with pytest.raises(InvalidArgument, match="overlaps"):
            execution.run()


def test_state_that_grows_with_each_run(service: nnburst.Service) -> None:
    model = graph(
        [node("Concat", ["past", "x"], ["now"], axis=0), node("ReduceSum", ["now"], ["y"], keepdims=0)],
        [("x", FLOAT, (1, 2)), ("past", FLOAT, ("n", 2))],
        [("y", FLOAT, ()), ("now", FLOAT, ("n + 1", 2))],
    ).SerializeToString()
    kept, first = {"now": "past"}, np.float32([[5, 5]])
    with (
        service.session(model) as session,
        session.bind(state=kept, initial_state={"past": first}, room={"past": (9, 2)}) as execution,
    ):
        for n in range(1, 9):
            execution.inputs["x"][:] = n
            execution.run()
            assert execution.outputs["y"] == 10 + n * (n + 1)
        state = execution.get_state()["past"]
        assert state.tolist() == [[n, n] for n in (5, *range(1, 9))]
        execution.reset_state({"past": state[:3]})
        assert execution.get_state()["past"].tolist() == state[:3].tolist()
        execution.run()
        assert execution.outputs["y"] == 10 + 2 + 4 + 16
        assert len(execution.get_state()["past"]) == 4
        execution.reset_state()
        assert execution.get_state()["past"].tolist() == [[0, 0]]
        with pytest.raises(InvalidArgument, match="past"):
            execution.reset_state({"past": np.zeros((3, 4), np.float32)})
    with service.session(model) as session, pytest.raises(InvalidArgument, match="is no input of shape"):
        session.bind(state=kept, shapes={"past": (1, 2), "now": (2, 2)})


def sums_of_cache() -> bytes:
    return graph(
        [
            node("Concat", ["past", "x"], ["now"], axis=0),
            node("ReduceSum", ["now"], ["y"], keepdims=0),
            node("NonZero", ["x"], ["some"]),
        ],
        [("x", FLOAT, ("m", 2)), ("past", FLOAT, ("n", 2))],
        [("y", FLOAT, ()), ("now", FLOAT, (None, 2)), ("some", TensorProto.INT64, (2, "z"))],
    ).SerializeToString()


def test_state_grows_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python binds each turn once, and again only where a cache needs more room; each result is a fresh binding's."""
    model, calls, bound, steady = sums_of_cache(), list[int](), list[BoundGraph](), 0
    conclude, make = BoundGraph.conclude, BoundGraph.__init__

    def noted(kernel: BoundGraph, status: int, deadline_ns: int) -> Any:
        calls.append(status)
        return conclude(kernel, status, deadline_ns)

    def made(kernel: BoundGraph, *args: Any) -> None:
        make(kernel, *args)
        bound.append(kernel)

    monkeypatch.setattr(BoundGraph, "conclude", noted)
    monkeypatch.setattr(BoundGraph, "__init__", made)
    reference, past = ort.InferenceSession(model), np.float32([[5, 5]])
    with (
        nnburst.in_process().session(model, device="nnburst-onnxruntime") as session,
        session.bind(state={"now": "past"}, initial_state={"past": past}, room={"past": (99, 2), "x": (4, 2)}) as state,
    ):
        for n in range(300):
            x = rows(1 + n % 3 if n % 60 < 20 else 1, 2) * (n % 2)  # other shapes, some outputs without elements
            state.reshape({"x": x.shape})
            state.inputs["x"][:] = x
            state.run()
            y, past, some = reference.run(None, {"x": x, "past": past})
            assert state.outputs["y"] == y
            assert state.output_shapes[2].dimensions == some.shape
            if n % 50 == 0:
                assert np.array_equal(state.get_state()["past"], past)
            steady += bound[-1]._outputs[1].is_steady
        assert 100 < steady < 250  # then the next run writes to the buffer
        assert len(bound) == 2  # one for each turn
        assert set(calls) == {-errno.ENOSPC}
        assert len(calls) < 20
        state.reset_state({"past": past[:2]})
        state.run()
        assert len(state.get_state()["past"]) == 2 + len(x)


@contextlib.contextmanager
def growing() -> Iterator[nnburst.Execution]:
    """An execution in this process whose state begins with a row, and grows by those of its input."""
    room = {"past": (99, 2), "x": (4, 2)}
    with (
        nnburst.in_process().session(sums_of_cache(), device="nnburst-onnxruntime") as session,
        session.bind(state={"now": "past"}, initial_state={"past": rows(1, 2)}, room=room) as state,
    ):
        yield state


def test_growing_state_that_was_in_use_runs_with_the_shapes_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan in Python was made for other shapes than those to which C has adapted the kernel since."""
    with growing() as state:

        def run(m: int) -> int:
            state.reshape({"x": (m, 2)})
            state.inputs["x"][:] = 1
            state.run()
            return len(state.get_state()["past"])

        assert [run(m) for m in (1, 1, 3, 3)] == [2, 3, 6, 9]
        user, enter = state._arguments.states.all["past"].buffers[0]._open()._writing, Uses.acquire  # type: ignore[attr-defined]
        enter(user)

        def enter_after_it(uses: Uses) -> None:
            monkeypatch.undo()
            user.release(lib.NNB_UNCHANGED)
            enter(uses)

        monkeypatch.setattr(Uses, "acquire", enter_after_it)
        state.inputs["x"][:] = 1
        state.run()
        assert Uses.acquire is enter
        assert len(state.get_state()["past"]) == 12
        assert run(2) == 14


def test_growing_state_beyond_the_quota_is_refused_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with growing() as state:
        state.reshape({"x": (1, 2)})
        state.inputs["x"][:] = 1

        def refuse(nbytes: int) -> None:
            raise ResourceExhausted("no more")

        for buffer in state._arguments.states.all["past"].buffers:
            buffer.account_to(lambda nbytes: None)
        for _ in range(4):
            state.run()
        for buffer in state._arguments.states.all["past"].buffers:
            buffer.account_to(refuse)
        before = state.get_state()["past"]
        while len(before) < 99:
            try:
                state.run()
            except ResourceExhausted:
                break
            before = state.get_state()["past"]
        assert len(before) < 20
        for buffer in state._arguments.states.all["past"].buffers:
            buffer.account_to(lambda nbytes: None)
        state.run()
        assert np.array_equal(state.get_state()["past"], [*before, [1, 1]])


def test_state_that_grows_beside_an_input_with_room(service: nnburst.Service) -> None:
    model = graph(
        [node("Concat", ["past", "x"], ["now"], axis=0), node("ReduceSum", ["now"], ["y"], keepdims=0)],
        [("x", FLOAT, ("m", 2)), ("past", FLOAT, ("n", 2))],
        [("y", FLOAT, ()), ("now", FLOAT, ("n + m", 2))],
    ).SerializeToString()
    kept, first, room = {"now": "past"}, {"past": np.zeros((1, 2), np.float32)}, {"past": (9, 2), "x": (4, 2)}
    with service.session(model) as session, session.bind(state=kept, initial_state=first, room=room) as execution:
        rows = 1
        for m in (4, 1, 2):
            execution.reshape({"x": (m, 2)})
            execution.inputs["x"][:] = m
            execution.run()
            rows += m
            assert len(execution.get_state()["past"]) == rows
        execution.reshape({"x": (3, 2)})
        assert execution.get_state()["past"][-3:].tolist() == [[1, 1], [2, 2], [2, 2]]


@pytest.mark.parametrize("strings", [False, True], ids=["numbers", "numbers and strings"])
def test_shapes_that_never_repeat_give_what_onnxruntime_gives(service: nnburst.Service, strings: bool) -> None:
    nodes = [
        node("Concat", ["a", "b"], ["ab"], axis=1),
        node("Where", ["c", "a", "b"], ["w"]),
        node("NonZero", ["c"], ["nz"]),
        node("Neg", ["any"], ["less"]),
    ]
    values = [(name, FLOAT, ("n", "m")) for name in "ab"] + [("c", TensorProto.BOOL, ("n", "m")), ("any", FLOAT, None)]
    told = [("ab", FLOAT, ("n", "k")), ("w", FLOAT, ("n", "m")), ("nz", TensorProto.INT64, (2, "z"))]
    told.append(("less", FLOAT, None))
    if strings:
        nodes.append(node("Identity", ["s"], ["t"]))
        values.append(("s", TensorProto.STRING, ("k",)))
        told.append(("t", TensorProto.STRING, ("k",)))
    model, numbers = graph(nodes, values, told), np.random.default_rng(38)

    def some() -> dict[str, np.ndarray]:
        n, m, k = numbers.integers(0 if numbers.random() < 0.1 else 1, 30, 3)
        given = {name: numbers.normal(size=(n, m)).astype(np.float32) for name in "ab"}
        given["c"] = numbers.random((n, m)) < 0.5
        given["any"] = numbers.normal(size=numbers.integers(1, 5, numbers.integers(1, 4))).astype(np.float32)
        return given | ({"s": np.array(["é" * i for i in range(k)], object)} if strings else {})

    with service.session(model.SerializeToString()) as session:
        reference = ort.InferenceSession(model.SerializeToString())
        sequence = [some() for _ in range(60)]
        expected = [reference.run(None, given) for given in sequence]
        runs = [session.run(None, given) for given in sequence]
        for outcome in (runs, session.run_many(sequence)):
            for outputs, exact in zip(outcome, expected, strict=True):
                assert [(y.shape, y.tolist()) for y in outputs] == [(y.shape, y.tolist()) for y in exact]
