"""Fixtures of the benchmarks that ``pytest benchmarks`` runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import ModelBuilder, OperandType
from nnburst.cli.bench.rounds import allowed_cpus, pin_process

POLLING_WINDOW = 50e-6


def relu_model(nbytes: int) -> Any:
    """Return a model with one input ``x`` and one output ``y`` of `nbytes` bytes."""
    builder = ModelBuilder()
    x = builder.input("x", OperandType.TENSOR_QUANT8_ASYMM, (1, nbytes), scale=1.0, zero_point=0)
    builder.output("y", builder.relu(x))
    return builder.build()


@contextmanager
def pinned_apart(service: Any) -> Iterator[None]:
    """Pin a service to the second CPU and this process to the first, unless the service is in this process."""
    cpus = allowed_cpus()
    if service.pid == os.getpid():
        yield
        return
    before = os.sched_getaffinity(0)
    pin_process(os.getpid(), {cpus.client})
    pin_process(service.pid, {cpus.server})
    try:
        yield
    finally:
        pin_process(os.getpid(), before)


@pytest.fixture(scope="session")
def noop_service() -> Iterator[Any]:
    """Start a child service with the device that does nothing."""
    with nnburst.launch(devices=["nnburst-noop"]) as service:
        yield service


@pytest.fixture(scope="session")
def reference_service() -> Iterator[Any]:
    """Start a child service with the reference device."""
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        yield service


@pytest.fixture
def two_cpus() -> None:
    """Skip the test on a single CPU, where polling makes no sense."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("polling needs 2 CPUs")


@pytest.fixture(scope="session")
def words() -> Any:
    """Return 32 bytes as an array of four elements."""
    return np.arange(4, dtype=np.uint64)
