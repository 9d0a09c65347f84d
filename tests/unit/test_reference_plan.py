"""Plans of the reference device: what is bound once, deadlines between operations, failures as statuses."""

from __future__ import annotations

import time
import weakref
from functools import partial

import numpy as np
import pytest

from nnburst import Memory, Model, ModelBuilder, OperandType, OperationType
from nnburst.burst.kernel import Kernel
from nnburst.devices.reference.call import KernelCall
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.reference.prepared import ReferencePreparedModel
from nnburst.errors import BadState, ErrorStatus, GeneralFailure, InvalidArgument
from nnburst.model import Request, RunOptions
from nnburst.model.operation_view import OutputSpec
from nnburst.model.running import ExecutionResult, failure_of
from nnburst.model.types import NO_TIMING, DataLocation, MeasureTiming, RequestArgument
from support.waiting import without_collector

T, O = OperandType, OperationType  # noqa: E741
NO, YES = MeasureTiming.NO, MeasureTiming.YES


def prepare(model: Model) -> ReferencePreparedModel:
    return ReferenceDevice().prepare_model(model)


def relu_chain(length: int) -> Model:
    b = ModelBuilder()
    h = b.input("x", T.TENSOR_FLOAT32, (4,))
    for _ in range(length):
        h = b.relu(h)
    b.output("y", h)
    return b.build()


def request_on(memory: Memory, *regions: tuple[int, int], outputs: int = 1) -> Request:
    arguments = tuple(RequestArgument(location=DataLocation(0, *region)) for region in regions)
    return Request(arguments[:-outputs], arguments[-outputs:], (memory,))


def answer(kernel: Kernel) -> ExecutionResult | None:
    """What a client gets."""
    try:
        return kernel()
    except Exception as error:
        return failure_of(error)


def test_timed_plan_reports_time_on_device_only() -> None:
    with Memory.ashmem(128) as memory:
        plan = prepare(relu_chain(1)).plan(request_on(memory, (0, 16), (64, 16)), RunOptions(YES)).call
        started = time.monotonic_ns()
        status, shapes, timing = plan()
        assert status is ErrorStatus.NONE
        assert shapes == ()
        assert timing.time_on_device <= (time.monotonic_ns() - started) // 1000
        assert timing.time_in_driver == NO_TIMING.time_in_driver


def test_misaligned_regions_work() -> None:
    with Memory.ashmem(128) as memory:
        memory.array(np.uint8, (16,), 3)[:] = np.frombuffer(np.array([-1, 2, -3, 4], np.float32).tobytes(), np.uint8)
        status, _, _ = prepare(relu_chain(1)).execute_synchronously(request_on(memory, (3, 16), (65, 16)))
        assert status is ErrorStatus.NONE
        found = np.frombuffer(memory.array(np.uint8, (16,), 65).tobytes(), np.float32)
        assert found.tolist() == [0, 2, 0, 4]


def test_deadline_is_looked_at_between_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    with Memory.ashmem(128) as memory:
        prepared, request = prepare(relu_chain(3)), request_on(memory, (0, 16), (64, 16))
        plan = prepared.plan(request, RunOptions(deadline_ns=50)).call
        ran = []
        plan._steps = [[partial(ran.append, 1), *steps] for steps in plan._steps]
        clock = iter([1, 2, 99])
        monkeypatch.setattr("nnburst.devices.deadline.time.monotonic_ns", lambda: next(clock))
        assert answer(plan) == (ErrorStatus.MISSED_DEADLINE_TRANSIENT, (), NO_TIMING)
        assert len(ran) == 2
        monkeypatch.undo()
        assert prepared.plan(request)() is None


def test_what_a_kernel_raises_is_a_status() -> None:
    with Memory.ashmem(128) as memory:
        plan = prepare(relu_chain(2)).plan(request_on(memory, (0, 16), (64, 16))).call

        def broken() -> None:
            raise ZeroDivisionError

        def starved() -> None:
            raise MemoryError

        good = plan._steps
        plan._steps = [*good[:1], [broken]]
        assert answer(plan) == (ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)
        plan._steps = [[starved], *good[1:]]
        assert answer(plan) == (ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, (), NO_TIMING)
        plan._steps = good
        assert plan() is None


def reshape_by_input() -> Model:
    """RESHAPE whose target is an input, so that shapes are known only when it runs; RELU after it."""
    b = ModelBuilder()
    x, shape = b.input("x", T.TENSOR_FLOAT32, (6,)), b.input("shape", T.TENSOR_INT32, (2,))
    h = b.reshape(b.relu(x), shape, dimensions=(0, 0))
    b.output("y", b.transpose(h, perm=np.array([1, 0], np.int32)))
    return b.build()


def test_a_shape_that_is_an_input_is_read_in_every_run() -> None:
    with Memory.ashmem(256) as memory:
        plan = prepare(reshape_by_input()).plan(request_on(memory, (0, 24), (64, 8), (128, 24))).call
        x, shape = memory.array(np.float32, (6,)), memory.array(np.int32, (2,), 64)
        x[:] = np.arange(6)
        for target in ((2, 3), (3, -1), (6, 1)):
            shape[:] = target
            status, shapes, _ = plan()
            wanted = np.arange(6).reshape(target).T
            assert status is ErrorStatus.NONE
            assert shapes[0].dimensions == wanted.shape
            np.testing.assert_array_equal(memory.array(np.float32, wanted.shape, 128), wanted)
        shape[:] = (4, 2)
        assert answer(plan) == (ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)
        shape[:] = (1, 6)
        assert plan()[0] is ErrorStatus.NONE


def test_a_parameter_that_changes_between_two_looks_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    b = ModelBuilder()
    x, multiples = b.input("x", T.TENSOR_FLOAT32, (2,)), b.input("multiples", T.TENSOR_INT32, (1,))
    b.output("y", b.operation(O.TILE, x, multiples, outputs=[{"dimensions": (0,)}])[0])
    with Memory.ashmem(256) as memory:
        plan = prepare(b.build()).plan(request_on(memory, (0, 8), (64, 4), (128, 64))).call
        infer, given = KernelCall.infer, memory.array(np.int32, (1,), 64)

        def then_written(call: KernelCall) -> tuple[OutputSpec, ...]:
            found = infer(call)
            given[:] = 8
            return found

        monkeypatch.setattr(KernelCall, "infer", then_written)
        given[:] = 3
        memory.array(np.float32, (2,))[:] = [1, 2]
        assert plan()[1][0].dimensions == (6,)
        assert memory.array(np.float32, (6,), 128).tolist() == [1, 2] * 3


def test_too_small_output_of_a_late_shape() -> None:
    with Memory.ashmem(256) as memory:
        plan = prepare(reshape_by_input()).plan(request_on(memory, (0, 24), (64, 8), (128, 23))).call
        memory.array(np.int32, (2,), 64)[:] = (2, 3)
        status, shapes, timing = answer(plan)
        assert status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert [(shape.dimensions, shape.is_sufficient) for shape in shapes] == [((3, 2), False)]
        assert timing == NO_TIMING
        assert not memory.array(np.uint8, (23,), 128).any()  # nothing was written to it


def test_larger_output_region_than_needed_is_fine_when_dimensions_are_open() -> None:
    with Memory.ashmem(256) as memory:
        plan = prepare(reshape_by_input()).plan(request_on(memory, (0, 24), (64, 8), (128, 100))).call
        memory.array(np.int32, (2,), 64)[:] = (2, 3)
        assert plan()[0] is ErrorStatus.NONE


def test_result_that_contradicts_the_request_fails_the_execution() -> None:
    with Memory.ashmem(256) as memory:
        b = ModelBuilder()
        y = b.operand(b.add_operand(T.TENSOR_FLOAT32, (0, 0)))
        b.add_operation(O.RESHAPE, [b.input("x", T.TENSOR_FLOAT32, (6,)), b.constant([2, 3])], [y])
        b.output("y", y)
        request = request_on(memory, (0, 24), (64, 24))
        wrong = Request(request.inputs, (RequestArgument(False, request.outputs[0].location, (3, 2)),), (memory,))
        prepared = prepare(b.build())
        with pytest.raises(GeneralFailure, match="RESHAPE"):
            prepared.plan(wrong)
        assert prepared.execute_synchronously(wrong)[0] is ErrorStatus.GENERAL_FAILURE
        assert prepared.execute_synchronously(request)[0] is ErrorStatus.NONE


def test_constants_are_private_once_prepared() -> None:
    with Memory.ashmem(256) as memory:
        memory.array(np.float32, (3,), 128)[:] = [1, 2, 3]
        b = ModelBuilder()
        w = b.operand(b.add_operand(T.TENSOR_FLOAT32, (3,)))
        b.set_operand_value_from_memory(w, memory, 128, 12)
        b.output("y", b.add(b.input("x", T.TENSOR_FLOAT32, (3,)), w))
        prepared = prepare(b.build())
        memory.array(np.float32, (3,), 128)[:] = 0
        assert prepared.execute_synchronously(request_on(memory, (0, 12), (64, 12)))[0] is ErrorStatus.NONE
        assert memory.array(np.float32, (3,), 64).tolist() == [1, 2, 3]


def test_what_is_derived_from_constants_is_made_once() -> None:
    b = ModelBuilder()
    b.output("y", b.fully_connected(b.input("x", T.TENSOR_FLOAT32, (1, 3)), np.ones((2, 3), np.float32)))
    prepared = prepare(b.build())
    with Memory.ashmem(128) as memory:
        request = request_on(memory, (0, 12), (64, 8))
        prepared.plan(request)
        first = dict(prepared.graph.derived)
        prepared.plan(request)
        assert first
        assert all(prepared.graph.derived[key] is value for key, value in first.items())


def test_executor_forgets_slots_and_refuses_unknown_ones() -> None:
    prepared = prepare(relu_chain(1))
    executor = prepared.burst_executor()
    with Memory.ashmem(128) as memory:
        whole = request_on(memory, (0, 16), (64, 16))
        request = Request(whole.inputs, whole.outputs)
        executor.add_cache_entry(memory, 7)
        assert executor.is_cache_entry_present(7)
        plan = executor.bind(request, [7], NO)
        assert plan() is None
        executor.remove_cache_entry(7)
        executor.remove_cache_entry(7)
        assert not executor.is_cache_entry_present(7)
        with pytest.raises(InvalidArgument, match="slot 7"):
            executor.bind(request, [7], NO)
        assert plan() is None  # what is bound keeps its mapping
        executor.close()


def test_closed_model_says_so() -> None:
    prepared = prepare(relu_chain(1))
    prepared.close()
    prepared.close()
    with Memory.ashmem(128) as memory, pytest.raises(BadState, match="closed"):
        prepared.execute_synchronously(request_on(memory, (0, 16), (64, 16)))


def test_a_dropped_plan_is_freed_at_once() -> None:
    """Mappings of a client's memory must go with the plan, not with the next garbage collection."""
    b = ModelBuilder()
    x, filters = b.input("x", T.TENSOR_FLOAT32, (1, 8, 8, 1)), np.ones((2, 3, 3, 1), np.float32)
    b.output("y", b.conv_2d(x, filters, padding="same", activation="relu"))
    prepared = prepare(b.build())
    with without_collector():
        memory = Memory.ashmem(4096)
        request = request_on(memory, (0, 256), (1024, 512))
        executor = prepared.burst_executor()
        executor.add_cache_entry(memory, 0)
        plan = executor.bind(Request(request.inputs, request.outputs), [0], MeasureTiming.NO)
        assert plan() is None
        gone = weakref.ref(plan), weakref.ref(memory)
        executor.close()
        memory.close()
        del plan, memory, request, executor
        assert [reference() for reference in gone] == [None, None]
    prepared.close()
