"""An entry says what it was really made from, also if memory is written meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import Memory, Model, ModelBuilder, OperandType
from nnburst.cache.directory import Cache
from nnburst.cache.names import model_fingerprint
from nnburst.cache.reasons import CacheReason
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.reference.device import ReferenceDevice
from support.caches import cache_files
from support.models import ready
from support.samples import SAMPLES

R = CacheReason
SIZE = 100
GOOD, BAD = (np.full((SIZE, SIZE), value, np.float32) for value in (1, 7))
X = np.ones((1, SIZE), np.float32)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory.ashmem(GOOD.nbytes) as memory:
        memory.write(GOOD, 0)
        yield memory


def build(memory: Memory) -> Model:
    b = ModelBuilder()
    weights = b.constant_from_memory(memory, GOOD.shape)
    b.output("y", b.fully_connected(b.input("x", OperandType.TENSOR_FLOAT32, X.shape), weights))
    return b.build()


class Written(ReferenceDevice):
    """Somebody writes the weights while the model is compiled, and may put the old ones back."""

    def __init__(self, memory: Memory, put_back: bool, checks: bool) -> None:
        super().__init__()
        self.memory, self.put_back, self.checks = memory, put_back, checks

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> Any:
        self.memory.write(BAD, 0)
        if job.cache is not None and not self.checks:  # a device that saves whatever it has
            job = replace(job, cache=replace(job.cache, fingerprint=b""))
        prepared = super().prepare_model(model, job)
        if self.put_back:
            self.memory.write(GOOD, 0)
        return prepared


def compiled(device: Any, model: Model, directory: Path) -> tuple[Any, float]:
    """Compile or restore with caching, and return the report and the first result."""
    with nnburst.nnapi.Compilation(model, [device]) as compilation:
        compilation.set_caching_auto(directory)
        compilation.finish()
        y = np.empty((1, SIZE), np.float32)
        ready(compilation, X, y).compute()
        return compilation.cache_report, float(y[0, 0])


@pytest.mark.parametrize(
    ("put_back", "checks"), [(True, True), (False, True), (False, False)], ids=["put back", "left", "no check"]
)
def test_THR_12_weights_that_are_written_while_they_are_compiled(
    tmp_path: Path, memory: Memory, put_back: bool, checks: bool
) -> None:
    model = build(memory)
    report, y = compiled(Written(memory, put_back, checks), model, tmp_path / "c")
    assert (report.outcome, report.reason, y) == ("NOT_SAVED", R.CHANGED, 7 * SIZE)
    memory.write(GOOD, 0)
    for outcome in ("SAVED", "HIT"):
        report, y = compiled(ReferenceDevice(), model, tmp_path / "c")
        assert (report.outcome, y) == (outcome, SIZE)


def test_weights_that_are_written_before_the_device_sees_them(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across a process: between the fingerprint and the copy that the service makes."""
    model, real = build(memory), Cache.stage

    def stage(*args: Any, **options: Any) -> Any:
        memory.write(BAD, 0)
        return real(*args, **options)

    with nnburst.launch(devices=["nnburst-reference"]) as service:
        with monkeypatch.context() as patch:
            patch.setattr(Cache, "stage", stage)
            report, y = compiled(service.devices[0], model, tmp_path / "c")
        assert (report.outcome, report.reason, y) == ("NOT_SAVED", R.CHANGED, 7 * SIZE)
        memory.write(GOOD, 0)
        report, y = compiled(service.devices[0], model, tmp_path / "c")
        assert (report.outcome, y) == ("SAVED", SIZE)


def test_device_says_so_itself_when_it_is_asked_directly(tmp_path: Path, memory: Memory) -> None:
    """For a client in another process that does not look again."""
    model = build(memory)
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        for fingerprint, reason in ((b"x" * 32, R.CHANGED), (model_fingerprint(model), R.SAVED), (b"", R.SAVED)):
            with cache_files(tmp_path, fingerprint) as files:
                result = service.devices[0].prepare_model(model, CompileJob(cache=files)).cache_result
            assert result is not None
            assert result.reason is reason


def test_service_sees_the_fingerprint_that_its_client_sees(tmp_path: Path) -> None:
    """Over the wire: else a device would believe that everything had changed."""
    reasons = {}
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        device = service.devices[0]
        for name, make in SAMPLES.items():
            model = make().model
            if all(device.get_supported_operations(model)):
                with (
                    cache_files(tmp_path, model_fingerprint(model)) as files,
                    contextlib.closing(device.prepare_model(model, CompileJob(cache=files))) as prepared,
                ):
                    assert prepared.cache_result is not None
                    reasons[name] = prepared.cache_result.reason
    assert len(reasons) > 10
    assert set(reasons.values()) == {R.SAVED}, reasons


def test_fingerprint_does_not_depend_on_the_kind_of_a_number() -> None:
    """A service gets plain numbers, whatever the client had."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_QUANT8_ASYMM, (2,), scale=0.5, zero_point=1)
    b.output("y", b.dequantize(x))
    model, prints = b.build(), set()
    for kind in (float, np.float32, np.float64):
        first, *rest = model.main.operands
        operands = (replace(first, scale=kind(0.5), zero_point=np.int32(1) if kind is np.float32 else 1), *rest)
        prints.add(model_fingerprint(replace(model, main=replace(model.main, operands=operands))))
    assert len(prints) == 1
