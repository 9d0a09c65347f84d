"""Devices to test: each in this process, and as a proxy of one in a service process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import nnburst
from nnburst.devices import Device
from nnburst.devices.registry import create_device
from nnburst.service.process.launch import start_child


@pytest.fixture(scope="module", params=["in_process", pytest.param("service", marks=pytest.mark.check)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The reference device. A test that uses it holds for both sides of a process boundary."""
    if request.param == "in_process":
        local = create_device("nnburst-reference")
        yield local
        local.close()
        return
    connection = start_child(devices=("nnburst-reference",))
    try:
        yield connection.devices[0]
    finally:
        connection.close()


@pytest.fixture(scope="module", params=["in_process", pytest.param("child", marks=pytest.mark.check)])
def service(request: pytest.FixtureRequest) -> Iterator[nnburst.Service]:
    """A service with all devices, here and in a process of its own."""
    with (nnburst.in_process if request.param == "in_process" else nnburst.launch)() as service:
        yield service
