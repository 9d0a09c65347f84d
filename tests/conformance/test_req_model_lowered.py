"""REQ-MODEL-052 … 072 on the device that lowers operations to ONNX: the samples, in every way to execute; the cache,
memory of the device; models at random, in parts beside the reference device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from random_models import Author, changed

import nnburst
from nnburst.devices import Device
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.partitioned import PartitionedDevice
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, GeneralFailure, MissedDeadline, NNBurstError
from nnburst.nnapi import Burst, Compilation, Execution
from nnburst.service.process.launch import start_child
from support.models import described
from support.samples import ALL_WAYS, SAMPLES, WAYS, check_outputs, run, with_unspecified_outputs

pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")

LOWERED = [name for name in SAMPLES if name != "unknown_batch"]
DRAWS = 120


@pytest.fixture(scope="module", params=["in_process", pytest.param("service", marks=pytest.mark.check)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "in_process":
        yield create_device("nnburst-onnxruntime")
        return
    with contextlib.closing(start_child(devices=("nnburst-onnxruntime",))) as connection:
        yield connection.devices[0]


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("name", LOWERED)
def test_REQ_MODEL_052_059_lowered_samples(device: Device, name: str, way: str) -> None:
    sample = SAMPLES[name]()
    assert all(device.get_supported_operations(sample.model))
    with contextlib.closing(device.prepare_model(sample.model)) as prepared:
        dims = [array.shape for array in sample.outputs]
        for _ in range(2):
            check_outputs(sample, run(prepared, sample.model, sample.inputs, dims, way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOWERED)
def test_REQ_MODEL_055_lowered_outputs_with_open_dimensions(device: Device, name: str, way: str) -> None:
    sample = SAMPLES[name]()
    model = with_unspecified_outputs(sample.model)
    with contextlib.closing(device.prepare_model(model)) as prepared:
        outcome = run(prepared, model, sample.inputs, [array.shape for array in sample.outputs], way)
        check_outputs(sample, outcome)
        assert [shape.dimensions for shape in outcome.shapes] == [array.shape for array in sample.outputs]


def test_a_dimension_that_only_requests_know_is_left_to_other_devices(device: Device) -> None:
    model = SAMPLES["unknown_batch"]().model
    assert device.get_supported_operations(model) == (False,)
    with pytest.raises(GeneralFailure, match=r"\(FULLY_CONNECTED\): dimensions \[0, 4\] of input 0 are not"):
        device.prepare_model(model)


def test_REQ_MODEL_071_lowering_has_a_deadline(device: Device) -> None:
    with pytest.raises(MissedDeadline):
        device.prepare_model(SAMPLES["conv_float"]().model, CompileJob(deadline_ns=1))


def test_a_lowered_model_is_restored_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    outcomes = []
    for name in ("conv_float", "per_channel", "conv_float", "per_channel", "quant_chain_signed"):
        sample = SAMPLES[name]()
        with Compilation(sample.model, [create_device("nnburst-onnxruntime")]) as compilation:
            compilation.set_caching_auto(tmp_path / "cache")
            compilation.finish()
            outcomes.append(compilation.cache_report.outcome)
            found = run(compilation.prepared_model, sample.model, sample.inputs, [a.shape for a in sample.outputs])
            check_outputs(sample, found)
    assert outcomes == ["SAVED", "SAVED", "HIT", "HIT", "SAVED"]


@pytest.mark.parametrize("where", ["in_process", pytest.param("launch", marks=pytest.mark.check)])
def test_a_lowered_model_keeps_its_state_in_memory_of_the_device(where: str) -> None:
    sample = SAMPLES["recurrent"]()
    with (
        getattr(nnburst, where)(devices=["nnburst-onnxruntime"]) as service,
        Compilation(sample.model, service.devices) as compilation,
    ):
        compilation.finish()
        desc = described((compilation, "input", 1), (compilation, "output", 0))
        x, first, y = sample.inputs[0], sample.outputs[1], np.zeros_like(sample.outputs[1])
        with desc.create_memory() as state, Burst(compilation) as burst:
            for step in range(2):
                with Execution(compilation) as execution:
                    execution.set_input(0, x)
                    if step:
                        execution.set_input_from_memory(1, state)
                        execution.set_output(0, np.zeros_like(y))
                    else:
                        execution.set_input(1, sample.inputs[1])
                        execution.set_output_from_memory(0, state)
                    execution.set_output(1, y)
                    execution.burst_compute(burst)
                wanted = run(compilation.prepared_model, sample.model, (x, first), [y.shape] * 2).outputs[1]
                np.testing.assert_allclose(y, wanted if step else first, atol=1e-5)


@pytest.mark.check
def test_models_at_random_in_parts_give_what_the_reference_device_gives() -> None:
    alone = ReferenceDevice()
    together = PartitionedDevice([create_device("nnburst-onnxruntime:threads=1"), alone])
    parts = Counter[bool]()
    for seed in range(DRAWS):
        model, inputs, dims = Author(seed).model()
        try:
            prepared = together.prepare_model(model)
        except GeneralFailure:  # dimensions are open where it would be cut
            continue
        with contextlib.closing(prepared), contextlib.closing(alone.prepare_model(model)) as whole:
            parts[len(prepared.parts) > 1] += 1
            found, wanted = run(prepared, model, inputs, dims), run(whole, model, inputs, dims)
        assert found.status is wanted.status is ErrorStatus.NONE, f"draw {seed}"
        half = model.relax_computation_float32_to_float16
        for mine, theirs in zip(found.outputs, wanted.outputs, strict=True):
            tolerance = {"atol": 5 / 1024, "rtol": 5 / 1024} if half else {"atol": 1e-5, "rtol": 6e-7}
            np.testing.assert_allclose(mine, theirs, err_msg=f"draw {seed}", **tolerance)
    assert min(parts.values()) > DRAWS / 4


def test_REQ_MODEL_045_a_changed_model_is_lowered_to_what_runs_or_refused() -> None:
    device, alone, seen = create_device("nnburst-onnxruntime:threads=1"), ReferenceDevice(), Counter[str]()
    for seed in range(2 * DRAWS):
        author = Author(10**6 + seed)
        model, inputs, dims = author.model()
        broken = changed(model, author)
        try:
            if not all(device.get_supported_operations(broken)):
                continue
            with contextlib.closing(device.prepare_model(broken)) as prepared:
                found = run(prepared, broken, inputs, dims)
            with contextlib.closing(alone.prepare_model(broken)) as whole:
                assert found.status is run(whole, broken, inputs, dims).status, f"draw {seed}"
            seen[found.status.name] += 1
        except NNBurstError as error:
            seen[type(error).__name__] += 1
        except (ValueError, KeyError, TypeError):  # the test cannot make a request
            continue
    assert seen["NONE"] > 5
    assert seen["InvalidArgument"] > DRAWS
