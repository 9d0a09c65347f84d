"""REQ-MEM of the NNAPI level: descriptions of memory, memory made from them, copies, and what stands in for it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_req_mem_arguments import every_way, kinds, run

import nnburst
from nnburst import Memory, Model, ModelBuilder, OperandType, OperationType, Service
from nnburst.devices import Device
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.registry import create_device
from nnburst.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    GeneralFailure,
    InvalidArgument,
    NNBurstError,
    ResourceExhausted,
)
from nnburst.model.operand_types import operand_info
from nnburst.model.types import BufferId
from nnburst.nnapi import Burst, Compilation, DeviceMemory, Execution, MemoryDesc, copy_memory
from nnburst.runtime.service import LocalBackend
from support.models import add_with_activation, described, relu
from support.samples import SAMPLES, Sample, with_unspecified_outputs

T, Op = OperandType, OperationType
SHAPE = (2, 3)
NBYTES = 24


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    """Have what a test makes closed at its end, the last first."""
    made: list[Any] = []

    def keep(thing: Any) -> Any:
        made.append(thing)
        return thing

    yield keep
    while made:
        made.pop().close()


def compiled(model: Model, devices: Any) -> Compilation:
    compilation = Compilation(model, devices)
    compilation.finish()
    return compilation


def shared(values: Any, dtype: Any = np.float32) -> Memory:
    array = np.ascontiguousarray(values, dtype)
    memory = Memory.ashmem(array.nbytes)
    memory.array(dtype, array.shape)[...] = array
    return memory


def contents(memory: DeviceMemory, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    with Memory.ashmem(memory.size) as target:
        copy_memory(memory, target)
        return target.array(operand_info(memory.operand.type).dtype, shape).copy()


VALUES = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)


@pytest.fixture
def device_memory(service: Service, opened: Callable[[Any], Any]) -> DeviceMemory:
    """For input and output of a RELU."""
    compilation = opened(compiled(relu(SHAPE), service))
    return opened(described((compilation, "input", 0), (compilation, "output", 0)).create_memory())


# ---- descriptions ---------------------------------------------------------------------------------------------------


@kinds
def test_REQ_MEM_080_role_of_an_invalid_compilation(service: Service, kind: str, opened: Any) -> None:
    class Refusing(ReferenceDevice):
        def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
            raise GeneralFailure("not today")

    failed = Compilation(relu(SHAPE), [Refusing()])
    with pytest.raises(GeneralFailure):
        failed.finish()
    closed = compiled(relu(SHAPE), service)
    closed.close()
    desc = MemoryDesc()
    for compilation in (failed, closed, None, "compilation"):
        with pytest.raises(InvalidArgument):
            getattr(desc, f"add_{kind}_role")(compilation, 0)
    with pytest.raises(InvalidArgument, match="role"):
        desc.finish()  # none of them was added


@pytest.mark.representative
@kinds
def test_REQ_MEM_079_081_082_113_add_role(service: Service, kind: str, opened: Any) -> None:
    compilation = opened(compiled(relu(SHAPE), service))
    desc = MemoryDesc()
    add = getattr(desc, f"add_{kind}_role")
    with pytest.raises(InvalidArgument):
        add(opened(Compilation(relu(SHAPE), service)), 0)  # not finished
    for index, frequency in ((999, 1.0), (-1, 1.0), (0, 10.0), (0, 0.0), (0, -1.0), (0, float("nan"))):
        with pytest.raises(InvalidArgument):
            add(compilation, index, frequency)
    add(compilation, 0, 1.0)
    with pytest.raises(InvalidArgument, match="already"):
        add(compilation, 0, 0.5)
    desc.finish()
    with pytest.raises(BadState):
        add(compilation, 0)
    with pytest.raises(BadState):
        add(opened(compiled(relu(SHAPE), service)), 0)


QUANT = {"scale": 0.5, "zero_point": 128}
OTHERS: dict[str, Callable[[], Model]] = {
    "type": lambda: relu(SHAPE, type=T.TENSOR_FLOAT16),
    "scale": lambda: relu(SHAPE, type=T.TENSOR_QUANT8_ASYMM, scale=0.25, zero_point=128),
    "zero point": lambda: relu(SHAPE, type=T.TENSOR_QUANT8_ASYMM, scale=0.5, zero_point=0),
    "rank": lambda: relu((2, 3, 1)),
    "dimensions": lambda: relu((3, 2)),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(("input", "output"), repeat=2)))
@pytest.mark.parametrize("what", OTHERS)
def test_REQ_MEM_083_roles_that_differ(service: Service, what: str, first: str, second: str, opened: Any) -> None:
    quantised = what in ("scale", "zero point")
    model = relu(SHAPE, type=T.TENSOR_QUANT8_ASYMM, **QUANT) if quantised else relu(SHAPE)
    here, there = opened(compiled(model, service)), opened(compiled(OTHERS[what](), service))
    desc = MemoryDesc()
    getattr(desc, f"add_{first}_role")(here, 0)
    with pytest.raises(InvalidArgument):
        getattr(desc, f"add_{second}_role")(there, 0)
    getattr(desc, f"add_{second}_role")(opened(compiled(model, service)), 0)  # a failed call changes nothing
    desc.finish()
    opened(desc.create_memory())


def test_REQ_MEM_084_channel_scales_that_differ(service: Service, opened: Any) -> None:
    def conv(scales: tuple[float, float]) -> Model:
        b = ModelBuilder()
        x = b.input("x", T.TENSOR_QUANT8_ASYMM, (1, 2, 2, 1), scale=0.5, zero_point=128)
        w = b.operand(
            b.add_operand(
                T.TENSOR_QUANT8_SYMM_PER_CHANNEL,
                (2, 1, 1, 1),
                extra_params=nnburst.model.types.SymmPerChannelQuantParams(scales, 0),
            )
        )
        bias = b.operand(b.add_operand(T.TENSOR_INT32, (2,)))
        y = b.operand(b.add_operand(T.TENSOR_QUANT8_ASYMM, (1, 2, 2, 2), scale=64.0, zero_point=128))
        b.set_operand_value(bias, np.zeros(2, np.int32))
        b.add_operation(Op.CONV_2D, [x, w, bias, *[b.scalar(n) for n in (1, 1, 1, 0)]], [y])
        b.identify_inputs_and_outputs([x, w], [y])
        return b.finish()

    here, there, same = (opened(compiled(conv(s), service)) for s in ((1.0, 1.0), (0.5, 0.5), (1.0, 1.0)))
    desc = MemoryDesc()
    desc.add_input_role(here, 1)
    with pytest.raises(InvalidArgument):
        desc.add_input_role(there, 1)
    desc.add_input_role(same, 1)


def test_REQ_MEM_085_set_dimensions(service: Service, opened: Any) -> None:
    compilation = opened(compiled(relu((0, 0)), service))
    desc = MemoryDesc()
    desc.set_dimensions(())  # says nothing
    desc.set_dimensions((2, 0))
    for wrong in ((3, 0), (2, 1, 1), (2,), (-1, 3), (2**32, 3)):
        with pytest.raises(InvalidArgument):
            desc.set_dimensions(wrong)
    with pytest.raises(InvalidArgument):
        desc.set_dimensions(None)  # type: ignore[arg-type]
    desc.set_dimensions((0, 3))
    desc.add_input_role(compilation, 0)
    with pytest.raises(InvalidArgument):
        desc.set_dimensions((2, 4))
    desc.finish()
    with pytest.raises(BadState):
        desc.set_dimensions(SHAPE)
    assert opened(desc.create_memory()).dimensions == SHAPE


def test_REQ_MEM_086_dimensions_and_then_a_scalar(service: Service, opened: Any) -> None:
    compilation = opened(compiled(add_with_activation(SHAPE), service))
    desc = MemoryDesc()
    desc.set_dimensions((2,))
    with pytest.raises(InvalidArgument):
        desc.add_input_role(compilation, 2)


def test_REQ_MEM_087_scalar_and_then_dimensions(service: Service, opened: Any) -> None:
    desc = MemoryDesc()
    desc.add_input_role(opened(compiled(add_with_activation(SHAPE), service)), 2)
    desc.set_dimensions(())
    with pytest.raises(InvalidArgument):
        desc.set_dimensions((2,))
    desc.finish()
    memory = opened(desc.create_memory())
    with shared([3], np.int32) as source:
        copy_memory(source, memory)
    assert memory.size == 4


def test_REQ_MEM_088_089_finish_and_create_memory(service: Service, opened: Any) -> None:
    desc = MemoryDesc()
    with pytest.raises(InvalidArgument, match="no role"):
        desc.finish()
    desc.add_input_role(opened(compiled(relu(SHAPE), service)), 0)
    with pytest.raises(BadState):
        desc.create_memory()
    desc.finish()
    with pytest.raises(BadState):
        desc.finish()
    first, second = opened(desc.create_memory()), opened(desc.create_memory())
    assert first.buffer.id != second.buffer.id
    del desc
    with shared(VALUES) as source:
        copy_memory(source, first)
    assert (contents(first) == VALUES).all()


# ---- who allocates --------------------------------------------------------------------------------------------------


class Odd(ReferenceDevice):
    """Answers an allocation as it is told."""

    answer: Any = None

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.answer, NNBurstError):
            raise self.answer
        return self.answer


def local(device: Device) -> Service:
    """A service with a device of this process."""
    return Service(LocalBackend((device,)), "test")


ANSWERS: dict[str, Any] = {
    "GeneralFailure": GeneralFailure("no"),
    "InvalidArgument": InvalidArgument("no"),
    "DeviceUnavailable": DeviceUnavailable("no"),
    "ResourceExhausted": ResourceExhausted("no"),
    "no buffer": None,
    "no token": SimpleNamespace(id=0, close=lambda: None),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_REQ_MEM_047_099_device_that_gives_no_buffer(answer: str, opened: Any) -> None:
    device = Odd()
    device.answer = ANSWERS[answer]
    default = opened(compiled(relu(SHAPE), local(device)))
    memory = opened(described((default, "input", 0), (default, "output", 0)).create_memory())
    assert memory.buffer is None
    assert memory.memory.kind == "hardware_buffer_blob"
    with shared(VALUES) as source:
        copy_memory(source, memory)
        assert (contents(memory) == VALUES).all()
    explicit = opened(compiled(relu(SHAPE), [device]))
    with pytest.raises(type(device.answer) if isinstance(device.answer, NNBurstError) else GeneralFailure):
        described((explicit, "input", 0)).create_memory()
    with pytest.raises(NNBurstError):
        described((explicit, "input", 0), (default, "input", 0)).create_memory()


@pytest.mark.representative
def test_REQ_MEM_047_098_100_buffer_of_the_device(service: Service, device_memory: DeviceMemory) -> None:
    assert device_memory.memory is None
    assert device_memory.pool == BufferId(device_memory.buffer.id)


def test_REQ_MEM_047_098_device_without_the_feature(opened: Any) -> None:
    for start in (nnburst.in_process, nnburst.launch):
        with start(devices=["nnburst-noop"]) as service:
            default, explicit = compiled(relu(SHAPE), service), compiled(relu(SHAPE), service.devices)
            with described((default, "input", 0)).create_memory() as memory:
                assert memory.buffer is None
                assert memory.memory.size == NBYTES
            with pytest.raises(GeneralFailure):
                described((explicit, "input", 0)).create_memory()
            default.close()
            explicit.close()


def test_REQ_MEM_048_roles_of_several_devices(opened: Any) -> None:
    """Here each compilation is for one device; a memory for two devices is what two partitions are there."""
    services = [local(create_device("nnburst-reference")) for _ in range(2)]
    first, second = (opened(compiled(relu(SHAPE), service)) for service in services)
    memory = opened(described((first, "output", 0), (second, "input", 0)).create_memory())
    assert memory.buffer is None
    with shared(VALUES) as source:
        producer = Execution(first)
        producer.set_input_from_memory(0, source, 0, NBYTES)
        producer.set_output_from_memory(0, memory)
        producer.compute()
    assert memory.initialised
    consumer, result = Execution(second), np.empty(SHAPE, np.float32)
    consumer.set_input_from_memory(0, memory)
    consumer.set_output(0, result)
    consumer.compute()
    assert (result == np.maximum(VALUES, 0)).all()
    explicit = opened(compiled(relu(SHAPE), services[0].devices))
    with pytest.raises(GeneralFailure):
        described((explicit, "output", 0), (second, "input", 0)).create_memory()


def test_REQ_MEM_049_dynamic_shape(service: Service, opened: Any) -> None:
    compilation = opened(compiled(relu((0, 3)), service))
    memory = opened(described((compilation, "output", 0)).create_memory())
    assert memory.buffer is not None
    assert memory.size == 0
    device = Odd()
    device.answer = GeneralFailure("no")
    for devices in (local(device), [device]):
        with pytest.raises(GeneralFailure):
            described((opened(compiled(relu((0, 3)), devices)), "output", 0)).create_memory()


def test_REQ_MEM_050_round_trip_over_two_devices(opened: Any) -> None:
    """Neither device may be asked to take a buffer of the other."""
    services = [local(create_device("nnburst-reference")), opened(nnburst.launch())]
    there, back = (
        opened(described((opened(compiled(relu(SHAPE), service)), "input", 0)).create_memory()) for service in services
    )
    with shared(np.full(SHAPE, 3.14, np.float32)) as source, shared(np.zeros(SHAPE)) as target:
        copy_memory(source, there)
        copy_memory(there, back)
        copy_memory(back, target)
        assert (target.array(np.float32, SHAPE) == np.float32(3.14)).all()


def test_REQ_MEM_100_101_dead_service_is_a_dead_object() -> None:
    """A buffer that is gone is never replaced by an empty one behind the caller's back."""
    with nnburst.launch() as service:
        compilation = compiled(relu(SHAPE), service)
        desc = described((compilation, "input", 0))
        memory = desc.create_memory()
        os.kill(service.pid, 9)
        with shared(VALUES) as source:
            with pytest.raises(DeadObject):
                copy_memory(source, memory)
            assert not memory.initialised
        with pytest.raises(DeadObject):
            desc.create_memory()
        memory.close()
        compilation.close()


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_REQ_MEM_090_copies_of_shared_memory(opened: Any) -> None:
    source, target = opened(shared(VALUES)), opened(shared(np.zeros(SHAPE)))
    for pair in ((None, target), (source, None), (VALUES, target)):
        with pytest.raises(InvalidArgument):
            copy_memory(*pair)
    copy_memory(source, source)
    copy_memory(source, target)
    assert (target.array(np.float32, SHAPE) == VALUES).all()
    for size in (NBYTES // 2, NBYTES * 2):
        with Memory.ashmem(size) as other:
            for pair in ((source, other), (other, target)):
                with pytest.raises(InvalidArgument):
                    copy_memory(*pair)
    read_only = opened(Memory.mmap_fd(target.fds[0], NBYTES, prot=1))
    with pytest.raises(InvalidArgument):
        copy_memory(source, read_only)


def test_REQ_MEM_090_copies_that_are_longer_than_one_piece(opened: Any) -> None:
    values = np.arange(9 << 18, dtype=np.float32)
    source, target = opened(shared(values)), opened(Memory.posix_shm(f"nnburst-{os.getpid()}", values.nbytes))
    Memory.unlink_posix_shm(f"nnburst-{os.getpid()}")
    copy_memory(source, target)
    assert (target.read(np.float32, values.shape) == values).all()


def test_REQ_MEM_090_images_are_copied_without_what_lies_between_rows(opened: Any) -> None:
    image, other = (opened(Memory.hardware_buffer(3, 5, "GRAY8", pitch=pitch)) for pitch in (64, 0))
    pixels = np.arange(15, dtype=np.uint8)
    with shared(pixels, np.uint8) as source, Memory.ashmem(15) as target:
        copy_memory(source, image)
        copy_memory(image, other)
        copy_memory(other, target)
        assert (target.array(np.uint8, (15,)) == pixels).all()


def test_REQ_MEM_090_copies_to_and_from_a_device(device_memory: DeviceMemory, opened: Any) -> None:
    source, target = opened(shared(VALUES)), opened(shared(np.zeros(SHAPE)))
    with pytest.raises(InvalidArgument):
        copy_memory(device_memory, target)  # without contents
    copy_memory(source, device_memory)
    assert device_memory.initialised
    for size in (NBYTES // 2, NBYTES * 2):
        with Memory.ashmem(size) as other:
            with pytest.raises(InvalidArgument):
                copy_memory(device_memory, other)
            assert device_memory.initialised  # the source is unharmed
            with pytest.raises(InvalidArgument):
                copy_memory(other, device_memory)
            assert not device_memory.initialised
            with pytest.raises(InvalidArgument):
                copy_memory(device_memory, target)
        copy_memory(source, device_memory)
    copy_memory(device_memory, target)
    assert (target.array(np.float32, SHAPE) == VALUES).all()


def test_REQ_MEM_113_copy_to_itself_initialises_nothing(device_memory: DeviceMemory, opened: Any) -> None:
    copy_memory(device_memory, device_memory)
    assert not device_memory.initialised


def test_REQ_MEM_091_copies_between_memories_of_a_device(service: Service, device_memory: Any, opened: Any) -> None:
    def of(shape: tuple[int, ...]) -> DeviceMemory:
        return opened(described((opened(compiled(relu(shape), service)), "input", 0)).create_memory())

    source = opened(shared(VALUES))
    same = of(SHAPE)
    with pytest.raises(InvalidArgument):
        copy_memory(device_memory, same)  # without contents
    copy_memory(source, device_memory)
    copy_memory(device_memory, same)
    assert (contents(same) == VALUES).all()
    for shape in ((6,), (3, 2), (1, 2, 3)):
        other = of(shape)
        with pytest.raises(InvalidArgument):
            copy_memory(device_memory, other)
        assert not other.initialised
    with Memory.ashmem(8) as wrong, pytest.raises(InvalidArgument):
        copy_memory(wrong, same)
    with pytest.raises(InvalidArgument):
        copy_memory(same, device_memory)  # its contents were lost
    assert not device_memory.initialised


def test_REQ_MEM_091_source_knows_what_the_target_leaves_open(service: Service, opened: Any) -> None:
    compilation = opened(compiled(relu((0, 3)), service))
    desc = described((compilation, "input", 0), (compilation, "output", 0))
    first, second = opened(desc.create_memory()), opened(desc.create_memory())
    source = opened(shared(VALUES))
    with pytest.raises(InvalidArgument):
        copy_memory(source, first)  # a plain memory does not know its dimensions
    execution = Execution(compilation)
    execution.set_input_from_memory(0, source, 0, NBYTES, dimensions=SHAPE)
    execution.set_output_from_memory(0, first)
    execution.compute()
    assert first.dimensions == SHAPE
    copy_memory(first, second)
    assert (second.dimensions, second.size) == (SHAPE, NBYTES)
    assert (contents(second) == np.maximum(VALUES, 0)).all()


# ---- executions -----------------------------------------------------------------------------------------------------


@every_way
def test_REQ_MEM_069_input_without_contents(device_memory: DeviceMemory, way: str, opened: Any) -> None:
    compilation = device_memory._roles[0].compilation
    source = opened(shared(VALUES))
    copy_memory(source, device_memory)
    execution = Execution(compilation, reusable=True)
    result = np.empty(SHAPE, np.float32)
    execution.set_input_from_memory(0, device_memory)
    execution.set_output(0, result)
    run(execution, way)
    assert (result == np.maximum(VALUES, 0)).all()
    with Memory.ashmem(8) as wrong, pytest.raises(InvalidArgument):
        copy_memory(wrong, device_memory)  # loses the contents between set and compute
    with pytest.raises(GeneralFailure):
        run(execution, way)


@pytest.mark.parametrize("region", [(1, 0), (0, 4), (0, NBYTES)])
@kinds
def test_REQ_MEM_069_070_region_of_device_memory(device_memory: Any, kind: str, region: tuple[int, int]) -> None:
    execution = Execution(device_memory._roles[0].compilation)
    with pytest.raises(InvalidArgument):
        getattr(execution, f"set_{kind}_from_memory")(0, device_memory, *region)
    getattr(execution, f"set_{kind}_from_memory")(0, device_memory)


@kinds
def test_REQ_MEM_069_070_wrong_role(service: Service, kind: str, opened: Any) -> None:
    other = "output" if kind == "input" else "input"
    compilation = opened(compiled(relu(SHAPE), service))
    memory = opened(described((compilation, other, 0)).create_memory())
    with pytest.raises(InvalidArgument):
        getattr(Execution(compilation), f"set_{kind}_from_memory")(0, memory)
    twin = opened(compiled(relu(SHAPE), service))
    with pytest.raises(InvalidArgument):
        getattr(Execution(twin), f"set_{other}_from_memory")(0, memory)


@every_way
def test_REQ_MEM_069_110_run_that_fails_leaves_no_contents(service: Service, way: str, opened: Any) -> None:
    compilation = opened(compiled(add_with_activation(SHAPE), service))
    memory = opened(described((compilation, "output", 0)).create_memory())
    for activation in (0, 999):
        execution = Execution(compilation)
        execution.set_input(0, VALUES)
        execution.set_input(1, VALUES)
        execution.set_input(2, np.array(activation, np.int32))
        execution.set_output_from_memory(0, memory)
        if activation:
            with pytest.raises(NNBurstError):
                run(execution, way)
            assert not memory.initialised
        else:
            run(execution, way)
            assert memory.initialised
            assert (contents(memory) == 2 * VALUES).all()


@kinds
def test_REQ_MEM_071_072_dimensions_that_contradict_the_memory(service: Service, kind: str, opened: Any) -> None:
    compilation = opened(compiled(relu((0,)), service))
    memory = opened(described((compilation, kind, 0), dimensions=(1,)).create_memory())
    execution = Execution(compilation)
    with pytest.raises(InvalidArgument):
        getattr(execution, f"set_{kind}_from_memory")(0, memory, dimensions=(2,))
    getattr(execution, f"set_{kind}_from_memory")(0, memory, dimensions=(1,))


@every_way
def test_REQ_MEM_071_contents_with_other_dimensions(service: Service, way: str, opened: Any) -> None:
    compilation = opened(compiled(relu((0, 3)), service))
    memory = opened(described((compilation, "input", 0), (compilation, "output", 0)).create_memory())
    fill = Execution(compilation)
    fill.set_input(0, VALUES)
    fill.set_output_from_memory(0, memory)
    run(fill, way)
    for rows, error in ((2, None), (3, GeneralFailure)):
        execution, result = Execution(compilation), np.empty((rows, 3), np.float32)
        execution.set_input_from_memory(0, memory, dimensions=(rows, 3))
        execution.set_output(0, result)
        if error is None:
            run(execution, way)
            assert (result == np.maximum(VALUES, 0)).all()
        else:
            with pytest.raises(error):
                run(execution, way)


@pytest.mark.parametrize("what", ["device", "shared"])
@pytest.mark.parametrize("first", ["memory", "burst"])
def test_REQ_MEM_077_078_REQ_API_005_to_007_burst_and_memory_end_in_any_order(
    service: Service, what: str, first: str, opened: Any
) -> None:
    compilation = opened(compiled(relu(SHAPE), service))
    memory: Any = shared(VALUES) if what == "shared" else described((compilation, "input", 0)).create_memory()
    if what == "device":
        with shared(VALUES) as source:
            copy_memory(source, memory)
    burst, result = Burst(compilation), np.empty(SHAPE, np.float32)
    region = (0, NBYTES) if what == "shared" else (0, 0)
    execution = Execution(compilation, reusable=True)
    execution.set_input_from_memory(0, memory, *region)
    execution.set_output(0, result)
    for _ in range(2):
        execution.burst_compute(burst)
    assert (result == np.maximum(VALUES, 0)).all()
    pool = memory if what == "shared" else memory.pool
    if first == "memory":
        if what == "shared":
            assert burst.free_memory(memory)
            assert not burst.free_memory(memory)
        memory.close()
        if what == "device":
            assert not burst.controller.free_memory(pool)  # the memory took itself out
            with pytest.raises(NNBurstError):
                execution.burst_compute(burst)
        burst.close()
    else:
        burst.close()
        execution.compute()
        memory.close()
    burst.close()  # once more, which is harmless
    memory.close()


def test_closed_memory_is_refused_everywhere(device_memory: DeviceMemory, opened: Any) -> None:
    source = opened(shared(VALUES))
    copy_memory(source, device_memory)
    device_memory.close()
    for pair in ((source, device_memory), (device_memory, source)):
        with pytest.raises(BadState):
            copy_memory(*pair)
    with pytest.raises(BadState):
        Execution(device_memory._roles[0].compilation).set_input_from_memory(0, device_memory)
    device_memory.close()


# ---- every model ----------------------------------------------------------------------------------------------------


def _through_device_memory(sample: Sample, model: Model, service: Service, way: str, opened: Any) -> list[np.ndarray]:
    compilation = opened(compiled(model, service))
    execution = Execution(compilation)
    for i, values in enumerate(sample.inputs):
        memory = opened(described((compilation, "input", i), dimensions=values.shape).create_memory())
        with shared(values, values.dtype) as source:
            copy_memory(source, memory)
        execution.set_input_from_memory(i, memory, dimensions=values.shape)
    outputs = []
    for i in range(len(sample.outputs)):
        outputs.append(opened(described((compilation, "output", i)).create_memory()))
        execution.set_output_from_memory(i, outputs[-1])
    run(execution, way)
    return [contents(memory, wanted.shape) for memory, wanted in zip(outputs, sample.outputs, strict=True)]


@every_way
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("outputs", ["REQ_MEM_094_known", "REQ_MEM_095_of_unknown_dimensions"])
def test_every_argument_in_described_memory(service: Service, name: str, way: str, outputs: str, opened: Any) -> None:
    sample = SAMPLES[name]()
    model = sample.model if "094" in outputs else with_unspecified_outputs(sample.model)
    for found, wanted in zip(_through_device_memory(sample, model, service, way, opened), sample.outputs, strict=True):
        np.testing.assert_allclose(found.astype(float), wanted.astype(float), atol=sample.atol, rtol=1e-5)
