"""The runtime's choice follows from what devices declare; a choice of the caller's does not."""

from __future__ import annotations

import numpy as np
import pytest
from test_control_flow import counting_model, if_model
from test_partition import O, Only, T

import nnburst
from nnburst import Model, ModelBuilder
from nnburst.devices.common import capabilities_of
from nnburst.model import Capabilities
from nnburst.model.performance import NEVER, operation_cost
from nnburst.model.types import PerformanceInfo
from nnburst.nnapi import Compilation
from support.models import doubling_model, relu


class Slow(Only):
    """Declares that it takes twice as long as others."""

    capabilities = capabilities_of(2.0)


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
