"""Benchmarks of executions across two processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst.cli.demo.network import INPUT, OUTPUT, build_model, load_digits

from .conftest import POLLING_WINDOW, pinned_apart, relu_model


@pytest.fixture(scope="module")
def digit() -> Any:
    """Return an image of a handwritten digit."""
    return load_digits().images[0]


def _run_bound(benchmark: Any, service: Any, nbytes: int, polling_window: float) -> None:
    with service.session(relu_model(nbytes), polling_window=polling_window) as session, pinned_apart(service):
        bound = session.bind()
        bound.inputs["x"][...] = 1
        bound.run()
        benchmark(bound.run)


@pytest.mark.usefixtures("two_cpus")
def test_bench_burst_run_polling(benchmark: Any, noop_service: Any) -> None:
    _run_bound(benchmark, noop_service, 32, POLLING_WINDOW)


def test_bench_burst_run_without_polling(benchmark: Any, noop_service: Any) -> None:
    _run_bound(benchmark, noop_service, 32, 0.0)


@pytest.mark.usefixtures("two_cpus")
def test_bench_burst_run_polling_with_16_mib(benchmark: Any, noop_service: Any) -> None:
    _run_bound(benchmark, noop_service, 16 << 20, POLLING_WINDOW)


def test_bench_session_run(benchmark: Any, noop_service: Any) -> None:
    x = np.ones((1, 32), dtype=np.uint8)
    with noop_service.session(relu_model(32)) as session, pinned_apart(noop_service):
        outputs = benchmark(lambda: session.run(None, {"x": x}))
        assert outputs[0].shape == (1, 32)


def test_bench_reference_relu_across_processes(benchmark: Any, reference_service: Any) -> None:
    with reference_service.session(relu_model(32)) as session, pinned_apart(reference_service):
        bound = session.bind()
        bound.inputs["x"][...] = np.arange(32)
        benchmark(bound.run)
        assert (bound.outputs["y"] == np.arange(32)).all()


def test_bench_digits_in_process(benchmark: Any, digit: Any) -> None:
    with nnburst.in_process(devices=["nnburst-reference"]) as service:
        _run_digit(benchmark, service, digit)


def test_bench_digits_across_processes(benchmark: Any, reference_service: Any, digit: Any) -> None:
    _run_digit(benchmark, reference_service, digit)


def _run_digit(benchmark: Any, service: Any, digit: Any) -> None:
    with service.session(build_model()) as session, pinned_apart(service):
        bound = session.bind()
        bound.inputs[INPUT][...] = digit
        benchmark(bound.run)
        assert bound.outputs[OUTPUT].sum() == pytest.approx(1.0, abs=1e-4)
