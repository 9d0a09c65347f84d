"""REQ-MODEL-001 … 013 and 070 … 075: devices and quality of service."""

from __future__ import annotations

import contextlib
import re
import time

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst import Model, ModelBuilder, OperandType
from nnburst.devices import Device, device_names
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.registry import create_device
from nnburst.errors import DeviceUnavailable, ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline
from nnburst.model import Operation, Priority
from nnburst.model.types import DeviceStatus, DeviceType, Lifetime, OperandDesc, Subgraph
from support import usable_devices
from support.samples import SAMPLES, O, T, check_outputs, ran, run

_END_OF_TIME = 2**64 - 1


def _soon() -> int:
    """Return a deadline that a fast machine holds and a busy one misses."""
    return time.monotonic_ns() + 5_000_000


def test_REQ_MODEL_001_device_opens_by_name() -> None:
    for name in usable_devices():
        device = create_device(name)
        assert device.name == name
        device.close()


def test_REQ_MODEL_001_unknown_device() -> None:
    with pytest.raises(DeviceUnavailable, match="nnburst-reference"):
        create_device("nnburst-nothing")


def test_REQ_MODEL_002_006_007_010_status_version_type_and_cache_files(device: Device) -> None:
    assert device.status is DeviceStatus.AVAILABLE
    assert device.version_string
    assert device.type in (DeviceType.OTHER, DeviceType.CPU, DeviceType.GPU, DeviceType.ACCELERATOR)
    assert all(0 <= count <= 32 for count in device.get_number_of_cache_files_needed())


def test_REQ_MODEL_003_004_005_capabilities(device: Device) -> None:
    capabilities = device.capabilities
    everything = [info for _, info in capabilities.operand_performance]
    everything += [capabilities.relaxed_scalar, capabilities.relaxed_tensor]
    everything += [capabilities.if_performance, capabilities.while_performance]
    assert all(info.exec_time > 0 and info.power_usage > 0 for info in everything)
    types = [code for code, _ in capabilities.operand_performance]
    assert types == sorted(set(types))
    assert types
    assert OperandType.SUBGRAPH not in types


def test_REQ_MODEL_008_name_has_one_dash_inside(device: Device) -> None:
    for name in (*device_names(), device.name):
        assert re.fullmatch(r"[^-]+-[^-]+", name)


def test_REQ_MODEL_009_names_of_extensions() -> None:
    names = set()
    for name in usable_devices():
        device = create_device(name)
        names |= {extension.name for extension in device.get_supported_extensions()}
        device.close()
    assert names
    assert all(re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", name) for name in names)


@pytest.mark.representative
@pytest.mark.parametrize("name", SAMPLES)
def test_REQ_MODEL_012_013_supported_means_prepared(device: Device, name: str) -> None:
    model = SAMPLES[name]().model
    supported = device.get_supported_operations(model)
    assert len(supported) == len(model.main.operations) >= 1
    assert all(supported)
    device.prepare_model(model).close()


@pytest.mark.parametrize("priority", list(Priority))
def test_REQ_MODEL_070_priorities(device: Device, priority: Priority) -> None:
    sample = SAMPLES["three_adds"]()
    with contextlib.closing(device.prepare_model(sample.model, CompileJob(priority=priority))) as prepared:
        check_outputs(sample, run(prepared, sample.model, sample.inputs, [a.shape for a in sample.outputs]))


def test_REQ_MODEL_071_a_deadline_that_is_soon_is_missed_or_not(device: Device) -> None:
    sample = SAMPLES["conv_float"]()
    try:
        prepared = device.prepare_model(sample.model, CompileJob(deadline_ns=_soon()))
    except MissedDeadline as error:
        assert error.status in (ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT)
    else:
        check_outputs(sample, run(prepared, sample.model, sample.inputs, [a.shape for a in sample.outputs]))
        prepared.close()


def test_REQ_MODEL_071_a_deadline_that_passed_is_missed(device: Device) -> None:
    with pytest.raises(MissedDeadline):
        device.prepare_model(SAMPLES["conv_float"]().model, CompileJob(deadline_ns=1))


def test_REQ_MODEL_071_a_bad_model_is_said_before_a_missed_deadline(device: Device) -> None:
    with pytest.raises(InvalidArgument):
        device.prepare_model(SAMPLES["conv_float"]().model, CompileJob(priority=7, deadline_ns=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SAMPLES)
def test_REQ_MODEL_072_074_unlimited_deadlines(device: Device, name: str) -> None:
    sample = SAMPLES[name]()
    prepared = device.prepare_model(sample.model, CompileJob(deadline_ns=_END_OF_TIME))
    dims = [a.shape for a in sample.outputs]
    check_outputs(sample, run(prepared, sample.model, sample.inputs, dims, deadline_ns=_END_OF_TIME))
    prepared.close()


def test_REQ_MODEL_073_075_a_deadline_that_is_soon_is_missed_or_not_and_the_model_runs_again(device: Device) -> None:
    sample = SAMPLES["conv_float"]()
    prepared = device.prepare_model(sample.model)
    dims = [a.shape for a in sample.outputs]
    outcome = run(prepared, sample.model, sample.inputs, dims, measure=True, deadline_ns=_soon())
    if outcome.status is ErrorStatus.NONE:
        check_outputs(sample, outcome)
    else:
        assert outcome.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
        assert outcome.shapes == ()
        assert outcome.timing.time_on_device is outcome.timing.time_in_driver is None
    check_outputs(sample, run(prepared, sample.model, sample.inputs, dims))
    prepared.close()


@pytest.mark.representative
def test_REQ_MODEL_073_a_deadline_that_passed_is_missed(device: Device) -> None:
    sample = SAMPLES["three_adds"]()
    outcome = ran(device, sample.model, sample.inputs, [(2, 3)], deadline_ns=1)
    assert outcome.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT


def test_REQ_MODEL_013_what_is_not_supported_is_not_prepared(device: Device) -> None:
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (2,))
    b.output("y", *b.operation(O.OEM_OPERATION, x, outputs=[{"type": T.TENSOR_INT32, "dimensions": (2,)}]))
    model = b.build()
    assert device.get_supported_operations(model) == (False,)
    with pytest.raises(GeneralFailure, match="OEM_OPERATION"):
        device.prepare_model(model)


def test_noop_device_does_nothing() -> None:
    sample = SAMPLES["three_adds"]()
    device = create_device("nnburst-noop")
    prepared = device.prepare_model(sample.model)
    for way in ("sync", "burst"):
        outcome = run(prepared, sample.model, sample.inputs, [(2, 3)], way)
        assert outcome.status is ErrorStatus.NONE
        np.testing.assert_array_equal(outcome.outputs[0], np.zeros((2, 3)))


def test_REQ_MODEL_012_an_operation_of_an_extension_is_valid_but_not_supported(device: Device) -> None:
    operation, kind = 1 << 16, 1 << 16 | 1
    L = Lifetime
    operands = (
        OperandDesc(kind, (2,), 1, lifetime=L.SUBGRAPH_INPUT, extra_params=bytes(16)),
        OperandDesc(kind, (2,), 0, lifetime=L.SUBGRAPH_OUTPUT),
        OperandDesc(T.TENSOR_FLOAT32, (2,), 1, lifetime=L.SUBGRAPH_INPUT),
        OperandDesc(T.TENSOR_FLOAT32, (2,), 0, lifetime=L.SUBGRAPH_OUTPUT),
    )
    main = Subgraph(operands, (Operation(operation, (0,), (1,)), Operation(O.RELU, (2,), (3,))), (0, 2), (1, 3))
    model = Model(main, extension_name_to_prefix={"com.example.fibonacci": 1})
    assert device.get_supported_operations(model) == (False, True)
    with pytest.raises(GeneralFailure, match=r"operation 0 .* com\.example\.fibonacci"):
        device.prepare_model(model)
    taken_for_a_float = replace(model, main=Subgraph(operands[:2], (Operation(O.RELU, (0,), (1,)),), (0,), (1,)))
    with pytest.raises(InvalidArgument, match=r"V8: operation 0 \(RELU\).* input 0 \(x\) is extension type 0x10001"):
        device.get_supported_operations(taken_for_a_float)
    with pytest.raises(InvalidArgument, match="prefix 1"):
        device.get_supported_operations(replace(model, extension_name_to_prefix={}))
