"""The runtime's choice follows from what devices declare; a choice of the caller's does not."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from test_control_flow import counting_model, if_model
from test_partition import O, Only, T

import nnburst
from nnburst import Burst, Compilation, Execution, GeneralFailure
from nnburst.burst import Kernel
from nnburst.devices import CompileJob, LocalModel, NoopDevice
from nnburst.devices.common import capabilities_of
from nnburst.model import (
    NEVER,
    Capabilities,
    ExecutionResult,
    Model,
    ModelBuilder,
    PerformanceInfo,
    Request,
    RunOptions,
    operation_cost,
)
from support.models import doubling_model, relu


class Slow(Only):
    """Declares that it takes twice as long as others."""

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(2.0)


def chosen(devices: list, model: Model, monkeypatch: pytest.MonkeyPatch, *, by_runtime: bool) -> list[str]:  # type: ignore[type-arg]
    with Compilation(model, devices) as compilation:
        if by_runtime:  # as with a service
            monkeypatch.setattr(compilation, "_names_devices", False)
        compilation.finish()
        return [step.device for step in compilation.report.steps]


def test_the_faster_device_gets_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Slow("test-slow"), Only("test-quick")]
    assert chosen(devices, relu(), monkeypatch, by_runtime=True) == ["test-quick"]
    assert chosen(devices, relu(), monkeypatch, by_runtime=False) == ["test-slow"]


def test_the_faster_device_gets_what_both_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (4,))
    b.output("y", b.add(b.neg(b.relu(x)), np.ones(4, np.float32)))
    devices = [Slow("test-slow", O.RELU, O.NEG, O.FULLY_CONNECTED), Only("test-quick", O.NEG, O.ADD, O.FULLY_CONNECTED)]
    assert chosen(devices, b.build(), monkeypatch, by_runtime=True) == ["test-slow", "test-quick"]
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (4,))
    b.output("y", b.add(b.neg(b.relu(x)), np.ones(4, np.float32)))
    with Compilation(b.build(), devices) as compilation:
        compilation.finish()
        assert [step.operations for step in compilation.report.steps] == [(0, 1), (2,)]  # the order that was given


def test_a_device_that_computes_nothing_is_never_preferred() -> None:
    with (
        nnburst.in_process(devices=["nnburst-noop", "nnburst-reference"]) as service,
        Compilation(relu(), service) as compilation,
    ):
        compilation.finish()
        assert compilation.report.steps[0].device == "nnburst-reference"


class Failing(Only):
    """Fails where a model begins with RELU."""

    def compile(self, model: Model) -> LocalModel:
        prepared = super().compile(model)
        if model.main.operations[0].type == O.RELU:

            def bind(request: Request, options: RunOptions) -> Kernel:
                def run() -> None:
                    raise RuntimeError("it overheats")

                return run

            prepared.bind = bind  # type: ignore[method-assign]
        return prepared


@pytest.mark.parametrize("way", ["compute", "burst", "bind"])
def test_a_run_that_fails_goes_to_the_next_device(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    second = Slow("test-second")
    with Compilation(relu(), [Failing("test-first"), second, NoopDevice()]) as compilation:
        monkeypatch.setattr(compilation, "_names_devices", False)
        compilation.finish()
        assert compilation.report.steps[0].device == "test-first"
        x, y = np.array([-1, 2, -3, 4], np.float32), np.zeros(4, np.float32)
        with Burst(compilation) as burst, Execution(compilation, reusable=True) as execution, burst.bind() as bound:
            execution.set_input(0, x)
            execution.set_output(0, y)
            bound.inputs["x"][:] = x
            for _ in range(2):
                y[:] = 9
                if way == "compute":
                    execution.compute()
                elif way == "burst":
                    execution.burst_compute(burst)
                else:
                    bound.run()
                    y[:] = bound.outputs["y"]
                assert y.tolist() == [0, 2, 0, 4]
        ((name, reason),) = compilation.report.refusals
        assert name == "test-first"
        assert "goes to test-second instead" in reason
        assert "it overheats" in reason


@pytest.mark.parametrize("way", ["compute", "bind", "compute, then run"])
def test_next_device_gets_what_is_left_of_the_time(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    limit, began, deadlines = 60.0, list[int](), list[int]()

    class Late(Failing):
        def compile(self, model: Model) -> LocalModel:
            prepared = super().compile(model)
            bind = prepared.bind

            def slow(request: Request, options: RunOptions) -> Kernel:
                def run() -> None:
                    began.append(time.monotonic_ns())
                    time.sleep(0.01)
                    bind(request, options)()

                return run

            prepared.bind = slow  # type: ignore[method-assign]
            return prepared

    class Watched(Slow):
        def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> LocalModel:
            prepared = super().prepare_model(model, job)
            execute = prepared.execute_synchronously

            def execute_synchronously(request: Request, options: RunOptions) -> ExecutionResult:
                deadlines.append(options.deadline_ns)
                return execute(request, options)

            prepared.execute_synchronously = execute_synchronously  # type: ignore[method-assign]
            return prepared

    with Compilation(relu(), [Late("test-first"), Watched("test-second"), NoopDevice()]) as compilation:
        monkeypatch.setattr(compilation, "_names_devices", False)
        compilation.finish()
        began.clear()
        deadlines.clear()
        with Burst(compilation) as burst, Execution(compilation) as execution, burst.bind() as bound:
            if way == "compute":
                execution.set_input(0, np.ones(4, np.float32))
                execution.set_output(0, np.zeros(4, np.float32))
                execution.timeout = limit
                execution.compute()
            else:
                bound.timeout = limit
                if way == "compute, then run":
                    bound.compute()
                bound.run()
    assert 0 < deadlines[-1] <= began[-1] + limit * 1e9
    assert len(set(deadlines)) == len(deadlines), "each run has a deadline of its own"


@pytest.mark.parametrize("second", [NoopDevice, lambda: None], ids=["untrustworthy", "none"])
def test_a_run_that_fails_goes_to_no_device_that_is_wrong_or_was_not_chosen_by_the_runtime(
    monkeypatch: pytest.MonkeyPatch, second: Callable[[], NoopDevice | None]
) -> None:
    devices = [Failing("test-first"), second() or Only("test-named")]
    with Compilation(relu(), devices) as compilation:
        monkeypatch.setattr(compilation, "_names_devices", second is not NoopDevice)
        compilation.finish()
        with Burst(compilation) as burst, burst.bind() as bound, pytest.raises(GeneralFailure, match="it overheats"):
            bound.run()


def test_costs_of_control_flow_are_those_of_what_is_inside() -> None:
    types = tuple((int(code), PerformanceInfo(2.0)) for code in (T.TENSOR_FLOAT32, T.TENSOR_INT32, T.TENSOR_BOOL8))
    speeds = Capabilities(
        operand_performance=types, if_performance=PerformanceInfo(10.0), while_performance=PerformanceInfo(100.0)
    )
    an_element = 2 * 16  # of an operation that is no product of matrices
    for model, cost in ((if_model(), 10 + 2 * an_element), (counting_model(), 100 + 3 * an_element)):
        assert operation_cost(model, model.main, model.main.operations[0], speeds) == cost
    flow = Capabilities(if_performance=PerformanceInfo(1.0))
    doubling = doubling_model(1000)  # each subgraph is looked at once, not 2 ** 1000 times, however deep it is
    assert operation_cost(doubling, doubling.main, doubling.main.operations[0], flow) > 2.0**999
    unknown = Capabilities()
    assert operation_cost(relu(), relu().main, relu().main.operations[0], unknown) == NEVER
