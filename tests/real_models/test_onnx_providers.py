"""Other providers of ONNX Runtime than the processor: those that are installed, and doubles of what hardware does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_onnx_values import ECHO

import nnburst
from nnburst import DeviceUnavailable, GeneralFailure, MissedDeadline, ModelBuilder, OperandType
from nnburst.cli.doctor import check_extra
from nnburst.devices.onnxruntime.device import OnnxRuntimeDevice
from nnburst.devices.onnxruntime.library import check_providers
from nnburst.model.types import DeviceType
from support.onnx_models import FLOAT, RNG, TensorProto, graph, in_process, mlp, node, ort

OFFERED = ort.get_available_providers()
OTHERS = [name for name in OFFERED if name != "CPUExecutionProvider"]
needs_other = pytest.mark.skipif(not OTHERS, reason="this package of ONNX Runtime has the processor alone")
MODEL = mlp(16, 2, "n").SerializeToString()


def device_of(providers: str) -> str:
    return f"nnburst-onnxruntime:threads=1,providers={providers}"


@pytest.fixture(scope="module", params=["{other}", "{other}+CPUExecutionProvider", "{short}+cpu"])
def service(request: pytest.FixtureRequest) -> Iterator[nnburst.Service]:
    if not OTHERS:
        pytest.skip("this package of ONNX Runtime has the processor alone")
    short = OTHERS[0].removesuffix("ExecutionProvider").lower()
    with nnburst.launch(devices=[device_of(request.param.format(other=OTHERS[0], short=short))]) as service:
        yield service


def rows(n: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=(n, 16)).astype(np.float32)


def test_provider_that_is_not_there_is_refused_and_those_that_are_there_are_named() -> None:
    for asked, missing in (("Nothing", "Nothing"), ("cpu+Nothing", "Nothing"), ("cpu+", "")):
        with pytest.raises(DeviceUnavailable, match=f"no '{missing}'; it has {', '.join(OFFERED)}"):
            check_providers(asked)
    with pytest.raises(DeviceUnavailable, match=f"'Nothing'; it has {', '.join(OFFERED)}"):
        nnburst.launch(devices=[device_of("Nothing")])
    assert check_providers("cpu") == check_providers("CPUExecutionProvider+cpu") == ()


def test_models_run_in_every_way_as_on_the_processor(service: nnburst.Service) -> None:
    device = service.devices[0]
    assert device.type == DeviceType.OTHER
    assert OTHERS[0] in device.version_string
    with service.session(MODEL) as session:
        for n in (3, 0, 5):
            x = rows(n)
            (y,) = in_process(MODEL, {"x": x})
            assert session.run(None, {"x": x})[0].tobytes() == y.tobytes()
            assert asyncio.run(session.arun(None, {"x": x}))[0].tobytes() == y.tobytes()
            assert all(out.tobytes() == y.tobytes() for (out,) in session.run_many([{"x": x}] * 3))
        with session.bind(shapes={"n": 2}) as bound:
            for _ in range(3):
                x = bound.inputs["x"][:] = rows(2)
                bound.run()
                assert bound.outputs["y"].tobytes() == in_process(MODEL, {"x": x})[0].tobytes()


def test_run_ends_at_its_deadline(service: nnburst.Service) -> None:
    body = graph(
        [node("Identity", ["go"], ["on"]), node("Sin", ["a"], ["b"])],
        [("i", TensorProto.INT64, ()), ("go", TensorProto.BOOL, ()), ("a", FLOAT, ("n",))],
        [("on", TensorProto.BOOL, ()), ("b", FLOAT, ("n",))],
    ).graph
    made = graph(
        [node("Loop", ["trips", "", "x"], ["y"], body=body)],
        [("trips", TensorProto.INT64, ()), ("x", FLOAT, ("n",))],
        [("y", FLOAT, ("n",))],
    )
    with service.session(made.SerializeToString()) as session:
        x = np.ones(1000, np.float32)
        with pytest.raises(MissedDeadline):
            session.run(None, {"trips": np.array(1 << 40), "x": x}, timeout=0.2)
        assert np.allclose(session.run(None, {"trips": np.array(1), "x": x})[0], np.sin(x))


def test_bytes_of_bools_are_0_or_1_for_a_provider(service: nnburst.Service) -> None:
    made = graph([node("Cast", ["x"], ["y"], to=FLOAT)], [("x", TensorProto.BOOL, (3,))], [("y", FLOAT, (3,))])
    with service.session(made.SerializeToString()) as session:
        assert session.run(None, {"x": np.uint8([0, 2, 255]).view(np.bool_)})[0].tolist() == [0, 1, 1]


@needs_other
def test_compiled_models_of_one_provider_are_not_those_of_another(tmp_path: Path) -> None:
    x, outcomes = rows(2), []
    for providers in (OTHERS[0], OTHERS[0], "cpu"):
        with nnburst.Session(MODEL, device=device_of(providers), cache_dir=tmp_path) as session:
            outcomes.append(session.cache_report.outcome)
            assert session.run(None, {"x": x})[0].tobytes() == in_process(MODEL, {"x": x})[0].tobytes()
    assert outcomes == ["SAVED", "HIT", "SAVED"]
    assert OnnxRuntimeDevice(providers=OTHERS[0]).cache_epoch != OnnxRuntimeDevice(providers="cpu").cache_epoch


@needs_other
def test_operations_of_nnapi_and_values_are_left_to_the_processor() -> None:
    builder = ModelBuilder()
    builder.output("y", builder.relu(builder.input("x", OperandType.TENSOR_FLOAT32, (1, 4))))
    model = builder.build()
    assert OnnxRuntimeDevice(providers="cpu").get_supported_operations(model) == (True,)
    assert OnnxRuntimeDevice(providers=OTHERS[0]).get_supported_operations(model) == (False,)
    with nnburst.launch(devices=[device_of(OTHERS[0])]) as service:
        with pytest.raises(GeneralFailure, match="CPUExecutionProvider alone"):
            service.session(ECHO)


class _CopiesOfItsOwn(ort.IOBinding):  # type: ignore[misc]
    """What the binding of a provider with memory of its own does: an input is copied to it when it is bound."""

    def bind_input(self, name: str, device: str, number: int, element: int, shape: list[int], address: int) -> None:
        there = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32)
        source = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * there.numpy().size).from_address(address))
        there.update_inplace(source.reshape(shape))
        self.bind_ortvalue_input(name, there)


@needs_other
@pytest.mark.filterwarnings("ignore:builtin type")
def test_inputs_are_copied_to_a_provider_with_memory_of_its_own_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort.InferenceSession, "io_binding", lambda session: _CopiesOfItsOwn(session))
    with nnburst.in_process(devices=[device_of(OTHERS[0])]) as service, service.session(MODEL) as session:
        with session.bind(shapes={"n": 2}) as bound:
            for _ in range(3):
                x = bound.inputs["x"][:] = rows(2)
                bound.run()
                assert bound.outputs["y"].tobytes() == in_process(MODEL, {"x": x})[0].tobytes()


@needs_other
def test_provider_that_does_not_start_is_a_failure_and_not_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort.InferenceSession, "get_providers", lambda session: ["CPUExecutionProvider"])
    with nnburst.in_process(devices=[device_of(OTHERS[0])]) as service:
        with pytest.raises(GeneralFailure, match=f"cannot start {OTHERS[0]} here; .* needs sandbox='off'"):
            service.session(MODEL)


def test_doctor_lists_the_providers() -> None:
    assert f"onnxruntime {ort.__version__} {' '.join(OFFERED)}" in check_extra("onnx").found
