"""Shared by the regression set; run it with ``pytest benchmarks``."""

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
    """Keep a service on the second CPU and this process on the first; a service in this process is left alone."""
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
    """A service child that hosts the device which does nothing."""
    with nnburst.launch(devices=["nnburst-noop"]) as service:
        yield service


@pytest.fixture(scope="session")
def reference_service() -> Iterator[Any]:
    """A service child that hosts the reference device."""
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        yield service


@pytest.fixture
def two_cpus() -> None:
    """Skip where polling makes no sense."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("polling needs 2 CPUs")


@pytest.fixture(scope="session")
def words() -> Any:
    """32 bytes as four elements."""
    return np.arange(4, dtype=np.uint64)
