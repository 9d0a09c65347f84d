"""REQ-MODEL-045, 050, 052: models at random, with control flow: a few, hundreds each night, thousands each week."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from random_models import Author, changed

from nnburst.devices import Device
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, NNBurstError
from nnburst.model.types import DeviceStatus
from nnburst.service.process.launch import start_child
from support.samples import run
from support.waiting import until

DRAWS = pytest.mark.parametrize(
    "draws",
    [
        pytest.param(range(20), id="few"),
        pytest.param(range(20, 300), marks=pytest.mark.nightly, id="some"),
        pytest.param(range(300, 20_300), marks=[pytest.mark.soak, pytest.mark.timeout(0)], id="many"),
    ],
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Device, int]]:
    """A device in a service, and the service's process."""
    connection = start_child(devices=("nnburst-reference",))
    try:
        yield connection.devices[0], connection.pid
    finally:
        connection.close()


def held(pid: int) -> tuple[int, int]:
    """Descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@DRAWS
def test_REQ_MODEL_052_a_burst_gives_the_bits_of_the_device_in_process(
    served: tuple[Device, int], draws: range
) -> None:
    device, pid = served
    local = create_device("nnburst-reference")
    before = held(pid)
    for seed in draws:
        model, inputs, dims = Author(seed).model()
        here, there = local.prepare_model(model), device.prepare_model(model)
        mine = run(here, model, inputs, dims, "sync")
        theirs = run(there, model, inputs, dims, "burst")
        for prepared in (here, there):
            prepared.close()
        assert mine.status is theirs.status is ErrorStatus.NONE, f"draw {seed}"
        assert [out.tobytes() for out in mine.outputs] == [out.tobytes() for out in theirs.outputs], f"draw {seed}"
        assert [out.shape for out in mine.outputs] == [out.shape for out in theirs.outputs] == dims, f"draw {seed}"
    until(lambda: all(n <= old + 2 for n, old in zip(held(pid), before, strict=True)), "more is held than before")
    local.close()


@DRAWS
def test_REQ_MODEL_045_050_a_changed_model_is_refused_or_runs_to_a_status(
    served: tuple[Device, int], draws: range
) -> None:
    device, pid = served
    local = create_device("nnburst-reference")
    before, seen = held(pid), Counter[str]()
    for seed in draws:
        author = Author(10**6 + seed)
        model, inputs, dims = author.model()
        broken = changed(model, author)
        outcomes = []
        for where, way in ((local, "sync"), (device, "burst")):
            try:
                prepared = where.prepare_model(broken)
            except NNBurstError as error:
                outcomes.append(f"refused: {ErrorStatus(error.status).name}")
                continue
            try:
                outcomes.append(run(prepared, broken, inputs, dims, way).status.name)
            except NNBurstError as error:  # the request no longer fits the model
                outcomes.append(f"unfit: {ErrorStatus(error.status).name}")
            except (ValueError, KeyError, TypeError):
                outcomes.append("the test cannot make a request")
            finally:
                prepared.close()
        assert outcomes[0] == outcomes[1], f"draw {seed}"
        seen[outcomes[0]] += 1
    assert device.status is DeviceStatus.AVAILABLE
    until(lambda: all(n <= old + 2 for n, old in zip(held(pid), before, strict=True)), "more is held than before")
    assert seen["refused: INVALID_ARGUMENT"] > len(draws) / 2
    local.close()
