"""ONNX Runtime through its C library, and through its Python module where that is not there: the same in every bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import Memory
from nnburst.burst.cancellation import CancelFlag, use_cancel_flag
from nnburst.devices.onnxruntime import capi
from nnburst.devices.onnxruntime.device import OnnxRuntimeDevice
from nnburst.devices.onnxruntime.graph import SessionSettings, compile_graph
from nnburst.devices.onnxruntime.kernel import BoundGraph
from nnburst.devices.onnxruntime.library import onnxruntime
from nnburst.errors import GeneralFailure, MissedDeadline, OutputInsufficientSize
from nnburst.memory.staging import open_request
from nnburst.model import Request
from nnburst.model.types import DataLocation, RequestArgument
from support.onnx_models import FLOAT, RNG, TensorProto, graph, in_process, mlp, node, ort, run_graph

INT64 = TensorProto.INT64
LIBRARIES = list((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so.*"))
needs_library = pytest.mark.skipif(not LIBRARIES, reason="this package of ONNX Runtime has no C library")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    onnxruntime()
    yield
    onnxruntime.cache_clear()


@pytest.fixture(
    params=[pytest.param(True, id="C library", marks=needs_library), pytest.param(False, id="Python module")]
)
def in_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(capi, "load", lambda: request.param)
    onnxruntime.cache_clear()
    assert (onnxruntime() is capi) == request.param
    return bool(request.param)


@needs_library
def test_sessions_are_of_the_c_library_where_there_is_one() -> None:
    assert onnxruntime() is capi


@needs_library
@pytest.mark.parametrize("broken", ["version", "interface"])
def test_library_that_fails_its_check_is_not_used(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "version":
        monkeypatch.setattr(capi, "package_version", lambda: "1.9.9")
    else:
        monkeypatch.setattr(capi, "_VERSION", 10_000)
    onnxruntime.cache_clear()
    assert onnxruntime() is ort


def test_results_are_the_same_in_every_bit(in_c: bool) -> None:
    data, x = mlp(64, 3, "n").SerializeToString(), RNG.normal(size=(5, 64)).astype(np.float32)
    (y,) = run_graph(compile_graph(data, {}, SessionSettings(1)), {"x": x})
    assert np.array_equal(y, in_process(data, {"x": x})[0])
    with nnburst.in_process() as service, service.session(data) as session:
        assert np.array_equal(session.run(None, {"x": x})[0], y)


def test_failure_is_told_as_the_python_module_does(in_c: bool) -> None:
    model = graph([node("Gather", ["x", "i"], ["y"])], [("x", FLOAT, (4,)), ("i", INT64, (1,))], [("y", FLOAT, (1,))])
    inputs = {"x": np.zeros(4, np.float32), "i": np.array([99])}
    with pytest.raises(Exception, match="ONNXRuntimeError") as theirs:
        in_process(model.SerializeToString(), inputs)
    with nnburst.in_process() as service, service.session(model.SerializeToString()) as session:
        with pytest.raises(GeneralFailure) as ours:
            session.run(None, inputs)
        reason = str(theirs.value).rpartition(" : ")[2]
        assert str(ours.value).endswith(f"ONNX Runtime: Error in execution: {reason}")
        assert session.run(None, inputs | {"i": np.array([3])})[0].tolist() == [0]


def test_version_is_known_where_the_source_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capi, "_package", lambda: tmp_path)  # as in a program that PyInstaller has frozen
    assert capi.package_version.__wrapped__() == ort.__version__


def test_operator_that_only_a_library_has_is_named_with_its_domain(in_c: bool) -> None:
    frob = node("Frob", ["x"], ["y"], domain="com.example")
    model = graph([frob], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))])
    model.opset_import.add(domain="com.example", version=1)
    with pytest.raises(GeneralFailure, match=r"no operator Frob of the domain 'com\.example'.* serve a function"):
        compile_graph(model.SerializeToString(), {}, SessionSettings(1))


def test_refusal_of_a_model_is_told_as_the_python_module_does(in_c: bool) -> None:
    data = graph([node("Nope", ["x"], ["y"])], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))]).SerializeToString()
    with pytest.raises(Exception, match="ONNXRuntimeError") as theirs:
        in_process(data, {})
    with pytest.raises(GeneralFailure) as ours:
        compile_graph(data, {}, SessionSettings(1))
    assert str(ours.value).startswith("ONNX Runtime refuses the model: ")
    assert str(ours.value).endswith(str(theirs.value).rpartition(" : ")[2])


def test_output_of_another_shape_than_the_file_says_is_told(in_c: bool) -> None:
    model = graph([node("NonZero", ["x"], ["y"])], [("x", FLOAT, (4,))], [("y", INT64, (1, 3))])
    with nnburst.in_process() as service, service.session(model.SerializeToString()) as session:
        with session.bind() as bound:
            bound.inputs["x"][:] = 1, 0, 1, 1
            bound.run()
            assert bound.outputs["y"].tolist() == [[0, 2, 3]]
            bound.inputs["x"][:] = 1
            with pytest.raises(OutputInsufficientSize) as caught:
                bound.run()
            assert [shape.dimensions for shape in caught.value.output_shapes] == [(1, 4)]
        assert session.run(None, {"x": np.ones(4, np.float32)})[0].tolist() == [[0, 1, 2, 3]]


def test_cancelled_plan_never_runs_again(in_c: bool) -> None:
    model = graph([node("Relu", ["x"], ["y"])], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))])
    data = model.SerializeToString()
    with contextlib.closing(OnnxRuntimeDevice(threads="1")) as device, Memory.ashmem(len(data)) as file:
        file.buffer[:] = data
        imported = device.import_model("onnx", [file]).model
        with contextlib.closing(device.prepare_model(replace(imported, pools=(file,)))) as prepared:
            with Memory.ashmem(32) as pool:
                places = [RequestArgument(False, DataLocation(0, 16 * i, 16)) for i in range(2)]
                flag = CancelFlag()
                opened = open_request(Request((places[0],), (places[1],), (pool,)))
                with use_cancel_flag(flag):
                    plan = BoundGraph(prepared.graph, prepared.model, opened.request, lambda outputs: None)
                flag.add(plan)
                pool.array(np.float32, (4,))[...] = 1
                plan()
                assert pool.array(np.float32, (4,), 16).tolist() == [1] * 4
                flag.cancel()
                for run in (plan, partial(plan.run_until, 1 << 62)):
                    with pytest.raises(MissedDeadline, match="its client has gone"):
                        run()
                del plan, opened, run
