"""REQ-MODEL-048, 057 … 063 and REQ-MEM-031, 032, 035, 036: fenced executions, in process and in a service."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst import Memory, Model, ModelBuilder
from nnburst.devices import Device, PreparedModel
from nnburst.devices.fence import Fence, FenceSignal, FenceState
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline
from nnburst.model import Request, RunOptions
from nnburst.model.types import MeasureTiming
from support.samples import SAMPLES, T, check_outputs, execute, make_request, placed, ran, with_unspecified_outputs
from support.waiting import PATIENCE

FIXED = [name for name in SAMPLES if name != "unknown_batch"]


def increment() -> Model:
    b = ModelBuilder()
    b.output("y", b.add(b.input("x", T.TENSOR_FLOAT32, (4,)), np.ones(4, np.float32)))
    return b.build()


@pytest.fixture
def prepared(device: Device) -> Iterator[PreparedModel]:
    made = device.prepare_model(increment())
    yield made
    made.close()


@pytest.fixture
def chain() -> Iterator[list[Request]]:
    """Requests of which each adds 1 to the result of the one before."""
    with Memory.ashmem(64 * 8) as memory:
        request, own = make_request(increment(), [np.zeros(4, np.float32)], [(4,)])
        own.close()
        x, y = request.inputs[0], request.outputs[0]

        def at(argument, place):  # type: ignore[no-untyped-def]
            return replace(argument, location=replace(argument.location, offset=64 * place))

        yield [Request((at(x, k),), (at(y, k + 1),), (memory,)) for k in range(7)]


def value(requests: list[Request], place: int) -> list[float]:
    memory = requests[0].pools[0]
    assert isinstance(memory, Memory)
    return memory.array(np.float32, (4,), 64 * place).tolist()


@pytest.mark.parametrize("name", FIXED)
def test_REQ_MODEL_059_REQ_MEM_035_without_fences_it_runs_at_once(device: Device, name: str) -> None:
    sample = SAMPLES[name]()
    check_outputs(sample, ran(device, sample.model, sample.inputs, [a.shape for a in sample.outputs], "fenced"))


def test_REQ_MODEL_060_REQ_MEM_035_fences_are_waited_for_and_become_readable(
    prepared: PreparedModel, chain: list[Request]
) -> None:
    with FenceSignal() as gate:
        fences = [gate.fence]
        for request in chain:
            fences.append(prepared.execute_fenced(request, [fences[-1]]).fence)
        poll = select.poll()
        poll.register(fences[-1], select.POLLIN)
        assert [fence.state for fence in fences] == [FenceState.ACTIVE] * 8
        assert not poll.poll(0)
        assert value(chain, 1) == [0] * 4
        gate.set()
        assert poll.poll(PATIENCE * 1000)
    for fence in fences:
        fence.wait(PATIENCE)
        fence.close()
    assert value(chain, 7) == [7] * 4


def test_REQ_MODEL_060_all_fences_are_waited_for(prepared: PreparedModel, chain: list[Request]) -> None:
    with FenceSignal() as one, FenceSignal() as other, one.fence, other.fence:
        execution = prepared.execute_fenced(chain[0], [one.fence, other.fence, one.fence])
        one.set()
        with execution.fence as fence:
            with pytest.raises(MissedDeadline):
                fence.wait(0.05)
            other.set()
            fence.wait(PATIENCE)
    assert value(chain, 1) == [1] * 4


def test_REQ_MODEL_061_asked_too_early_it_cannot_tell(prepared: PreparedModel, chain: list[Request]) -> None:
    with FenceSignal() as gate, gate.fence:
        execution = prepared.execute_fenced(chain[0], [gate.fence], RunOptions(MeasureTiming.YES))
        with pytest.raises(GeneralFailure, match="has not ended"):
            execution.info()
        with pytest.raises(MissedDeadline):
            execution.fence.wait(0.05)
        gate.set()
        with execution.fence as fence:
            fence.wait(PATIENCE)
    info = execution.info()
    assert info.status is ErrorStatus.NONE
    launched, fenced = info.launched.time_in_driver, info.fenced.time_in_driver
    assert launched is not None
    assert fenced is not None
    assert launched - fenced >= 50_000  # µs of waiting
    assert info.fenced.time_on_device is not None
    assert info.fenced.time_on_device <= fenced


def test_REQ_MODEL_062_a_fence_that_is_in_error_is_refused(prepared: PreparedModel, chain: list[Request]) -> None:
    gate = FenceSignal()
    gate.fail()
    with gate.fence, pytest.raises(InvalidArgument, match=r"wait_for\[0\] is in error"):
        prepared.execute_fenced(chain[0], [gate.fence])


def test_REQ_MODEL_062_an_error_goes_down_the_chain(prepared: PreparedModel, chain: list[Request]) -> None:
    with FenceSignal() as never, never.fence, FenceSignal() as gate, gate.fence:
        first = prepared.execute_fenced(chain[0], [never.fence, gate.fence])
        second = prepared.execute_fenced(chain[1], [first.fence])
        gate.fail()
        for execution in (second, first):
            with execution.fence as fence, pytest.raises(GeneralFailure):
                fence.wait(PATIENCE)
            assert fence_error(execution) is ErrorStatus.GENERAL_FAILURE
            assert "went into error" in execution.info().reason
    assert value(chain, 1) == value(chain, 2) == [0] * 4


def fence_error(execution) -> ErrorStatus:  # type: ignore[no-untyped-def]
    info = execution.info()
    assert info.launched.time_in_driver is info.fenced.time_in_driver is None
    return ErrorStatus(info.status)


def test_REQ_MODEL_048_no_fence_is_refused(prepared: PreparedModel, chain: list[Request]) -> None:
    with pytest.raises(InvalidArgument, match=r"wait_for\[0\]"):
        prepared.execute_fenced(chain[0], [None])  # type: ignore[list-item]
    for fd in (-1, 10**6):
        with pytest.raises(InvalidArgument):
            Fence(fd)


@pytest.mark.parametrize("name", ["conv_float", "two_outputs", "unknown_batch"])
def test_REQ_MODEL_057_REQ_MEM_031_outputs_must_be_known(device: Device, name: str) -> None:
    sample = SAMPLES[name]()
    model = with_unspecified_outputs(sample.model)
    outcome = ran(device, model, sample.inputs, [a.shape for a in sample.outputs], "fenced")
    assert (outcome.status, outcome.shapes) == (ErrorStatus.INVALID_ARGUMENT, ())


def test_REQ_MODEL_057_REQ_MEM_032_outputs_must_fit(device: Device) -> None:
    sample = SAMPLES["two_outputs"]()
    for model in (sample.model, with_unspecified_outputs(sample.model)):
        with placed(device, model, sample.inputs, [a.shape for a in sample.outputs], short=1) as (made, request, _):
            outcome = execute(made, request, "fenced")
            assert (outcome.status, outcome.shapes) == (ErrorStatus.INVALID_ARGUMENT, ())


def test_REQ_MODEL_058_REQ_MEM_036_outputs_are_never_empty(device: Device) -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (2, 2))
    place = [b.constant(np.array(v, np.int32)) for v in ([0, 0], [0, 2])]
    b.output("y", b.relu(b.slice(x, *place, dimensions=(0, 2))))
    model = with_unspecified_outputs(b.build())
    outcome = ran(device, model, [np.zeros((2, 2), np.float32)], [(0, 2)], "fenced")
    assert outcome.status is ErrorStatus.INVALID_ARGUMENT


def test_REQ_MODEL_073_a_fence_that_is_never_signalled_ends_with_the_deadline(
    prepared: PreparedModel, chain: list[Request]
) -> None:
    with FenceSignal() as never, never.fence:
        execution, ahead_ns = None, 25_000_000
        while execution is None:  # a busy machine may come to it too late, and then has twice the time
            ahead_ns *= 2
            deadline_ns = time.monotonic_ns() + ahead_ns
            with contextlib.suppress(MissedDeadline):
                execution = prepared.execute_fenced(chain[0], [never.fence], RunOptions(deadline_ns=deadline_ns))
        with execution.fence as fence, pytest.raises(GeneralFailure):
            fence.wait(PATIENCE)
        assert time.monotonic_ns() >= deadline_ns
        assert fence_error(execution) is ErrorStatus.MISSED_DEADLINE_TRANSIENT
        with pytest.raises(MissedDeadline):
            prepared.execute_fenced(chain[0], [never.fence], RunOptions(deadline_ns=1))


def test_a_duration_counts_from_the_last_fence(prepared: PreparedModel, chain: list[Request]) -> None:
    with FenceSignal() as gate, gate.fence:
        short = prepared.execute_fenced(chain[0], [gate.fence], duration_ns=1)
        enough = prepared.execute_fenced(chain[1], [gate.fence], duration_ns=60_000_000_000)
        with pytest.raises(MissedDeadline):
            short.fence.wait(0.02)  # the waiting does not count
        gate.set()
        with short.fence as fence, pytest.raises(GeneralFailure):
            fence.wait(PATIENCE)
        assert fence_error(short) is ErrorStatus.MISSED_DEADLINE_TRANSIENT
        with enough.fence as fence:
            fence.wait(PATIENCE)
        with pytest.raises(InvalidArgument):
            prepared.execute_fenced(chain[0], duration_ns=-1)


def test_what_is_cancelled_does_not_begin(prepared: PreparedModel, chain: list[Request]) -> None:
    with FenceSignal() as gate, gate.fence:
        execution = prepared.execute_fenced(chain[0], [gate.fence])
        execution.cancel()
        with execution.fence as fence, pytest.raises(GeneralFailure):
            fence.wait(PATIENCE)
        assert "cancelled" in execution.info().reason
        gate.set()
    assert value(chain, 1) == [0] * 4


def test_what_is_dropped_runs_on(prepared: PreparedModel, chain: list[Request]) -> None:
    with FenceSignal() as gate, gate.fence:
        with prepared.execute_fenced(chain[0], [gate.fence]).fence as middle:
            last = prepared.execute_fenced(chain[1], [middle])
        gate.set()
        with last.fence as fence:
            fence.wait(PATIENCE)
    assert value(chain, 2) == [2] * 4


def test_fences_of_other_makers(prepared: PreparedModel, chain: list[Request]) -> None:
    reader, writer = os.pipe()
    one, other = socket.socketpair()
    event = os.eventfd(0)
    try:
        with Fence(reader) as pipe, Fence(one.fileno()) as stream, Fence(event) as counter:
            execution = prepared.execute_fenced(chain[0], [pipe, stream, counter])
            os.write(writer, b"x")
            other.send(b"x")
            assert execution.fence.state is FenceState.ACTIVE
            os.eventfd_write(event, 1)
            with execution.fence as fence:
                fence.wait(PATIENCE)
    finally:
        for fd in (reader, writer, event):
            os.close(fd)
        one.close()
        other.close()
    assert value(chain, 1) == [1] * 4
