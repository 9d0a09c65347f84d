"""REQ-API: the application's side of bursts and executions, in process and across processes."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

import nnburst
from nnburst import BadState, InvalidArgument, MissedDeadline, Model
from nnburst.errors import ErrorStatus, GeneralFailure, OutputShape
from nnburst.model import Request, Timing
from nnburst.model.running import ExecutionResult
from nnburst.nnapi import Burst, Compilation, Duration, Event, Execution
from nnburst.testing import FakeClock
from support.doubles import ScriptedDevice
from support.models import add_model, compiled, open_model, ready
from support.waiting import PATIENCE, Background

X = np.array([1, 2, 3, 4], np.float32)
Y = X + X


@pytest.fixture(scope="module", params=["in_process", pytest.param("child", marks=pytest.mark.check)])
def service(request: pytest.FixtureRequest) -> Iterator[nnburst.Service]:
    start = nnburst.in_process if request.param == "in_process" else nnburst.launch
    with start(devices=["nnburst-reference"]) as service:
        yield service


@pytest.fixture
def compilation(service: nnburst.Service) -> Iterator[Compilation]:
    with compiled(add_model(), service.devices) as compilation:
        yield compilation


@pytest.fixture
def burst(compilation: Compilation) -> Iterator[Burst]:
    with Burst(compilation) as burst:
        yield burst


def execution_for(compilation: Compilation, *, reusable: bool = False) -> tuple[Execution, np.ndarray]:
    y = np.zeros(4, np.float32)
    return ready(compilation, X, y, reusable=reusable), y


def both_at_once(first: Callable[[], None], second: Callable[[], None]) -> list[BaseException | None]:
    """Run two calls in two threads that start together, and return what each raised."""
    gate = threading.Barrier(2)
    calls = [Background(lambda call=call: (gate.wait(), call())[1]) for call in (first, second)]
    return [call.result() for call in calls]


# ---- a device that does as it is told ---------------------------------------------------------------------------


@dataclass
class Script:
    """What the next execution does."""

    result: ExecutionResult = (ErrorStatus.NONE, (), Timing())
    entered: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, request: Request) -> None:
        self.entered.set()
        assert self.go.wait(PATIENCE)


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.go.set()


@contextlib.contextmanager
def scripted(script: Script, model: Model) -> Iterator[tuple[Compilation, Burst]]:
    device = ScriptedDevice(execute=script)
    device.result = script.result
    with compiled(model, [device]) as compilation, Burst(compilation) as burst:
        yield compilation, burst


WAYS: dict[str, Callable[[Execution, Burst], None]] = {
    "compute": lambda execution, burst: execution.compute(),
    "start": lambda execution, burst: execution.start_compute().wait(),
    "burst": lambda execution, burst: execution.burst_compute(burst),
}


# ---- the requirements -------------------------------------------------------------------------------------------


def test_REQ_API_001_missing_objects_are_refused(compilation: Compilation, burst: Burst) -> None:
    execution, _ = execution_for(compilation)
    with burst.bind() as bound:
        for no_burst in (None, execution, bound):  # an execution has a compilation and a controller, too
            with pytest.raises(InvalidArgument, match="needs a Burst"):
                execution.burst_compute(no_burst)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="needs a Compilation"):
        Burst(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="needs a Compilation"):
        Execution(None)  # type: ignore[arg-type]
    execution.burst_compute(burst)  # and none of that used the execution up


def test_REQ_API_002_REQ_MODEL_079_burst_on_unfinished_compilation_is_bad_state(service: nnburst.Service) -> None:
    compilation = Compilation(add_model(), service.devices)
    with pytest.raises(BadState, match="not finished"):
        Burst(compilation)
    with pytest.raises(BadState, match="not finished"):
        Execution(compilation)
    compilation.close()


def test_REQ_API_003_burst_of_another_compilation_is_refused(
    service: nnburst.Service, compilation: Compilation
) -> None:
    with compiled(add_model(), service.devices) as other, Burst(other) as foreign:
        execution, y = execution_for(compilation)
        with pytest.raises(InvalidArgument, match="another compilation"):
            execution.burst_compute(foreign)
        execution.compute()
        assert (y == Y).all()


def test_REQ_API_004_two_executions_at_once_on_one_burst(compilation: Compilation, burst: Burst) -> None:
    for _ in range(20):
        (a, ya), (b, yb) = execution_for(compilation), execution_for(compilation)
        raised = both_at_once(lambda a=a: a.burst_compute(burst), lambda b=b: b.burst_compute(burst))
        assert None in raised
        assert all(error is None or isinstance(error, BadState) for error in raised)
        assert all((y == Y).all() for y, error in zip((ya, yb), raised, strict=True) if error is None)


def test_REQ_API_004_second_execution_during_the_first_is_bad_state(script: Script) -> None:
    with scripted(script, add_model()) as (compilation, burst):
        (first, _), (second, _) = execution_for(compilation), execution_for(compilation)
        event = Event.start(lambda: first.burst_compute(burst))
        assert script.entered.wait(PATIENCE)
        with pytest.raises(BadState, match="one at a time"):
            second.burst_compute(burst)
        script.go.set()
        event.wait()
        second.burst_compute(burst)


@pytest.mark.representative
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_REQ_API_009_single_use_execution_twice_at_once(
    compilation: Compilation, burst: Burst, first: str, second: str
) -> None:
    execution, y = execution_for(compilation)
    raised = both_at_once(lambda: WAYS[first](execution, burst), lambda: WAYS[second](execution, burst))
    assert sum(error is None for error in raised) == 1
    assert sum(isinstance(error, BadState) for error in raised) == 1
    assert (y == Y).all()


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_REQ_API_010_reusable_execution_twice_at_once(
    compilation: Compilation, burst: Burst, first: str, second: str
) -> None:
    execution, y = execution_for(compilation, reusable=True)
    raised = both_at_once(lambda: WAYS[first](execution, burst), lambda: WAYS[second](execution, burst))
    assert None in raised
    assert all(error is None or isinstance(error, BadState) for error in raised)
    execution.burst_compute(burst)
    assert (y == Y).all()


def test_REQ_API_011_timing_and_timeout_states(compilation: Compilation, burst: Burst) -> None:
    execution, _ = execution_for(compilation)
    execution.set_measure_timing(True)
    with pytest.raises(BadState):
        execution.get_duration(Duration.ON_HARDWARE)
    execution.burst_compute(burst)
    with pytest.raises(BadState):
        execution.set_measure_timing(False)
    with pytest.raises(BadState):
        execution.set_timeout(1)
    for code in (-1, 4):
        with pytest.raises(InvalidArgument):
            execution.get_duration(code)  # type: ignore[arg-type]
    in_driver = execution.get_duration(Duration.IN_DRIVER)
    assert in_driver is None or in_driver >= (execution.get_duration(Duration.ON_HARDWARE) or 0)


def test_REQ_API_011_timing_needs_exactly_one_device(service: nnburst.Service) -> None:
    with nnburst.in_process() as other, Compilation(add_model(), [*service.devices, *other.devices]) as compilation:
        with pytest.raises(InvalidArgument, match="one device"):
            compilation.set_timeout(1)
        compilation.finish()
        execution, _ = execution_for(compilation)
        for change in (lambda: execution.set_measure_timing(True), lambda: execution.set_timeout(1)):
            with pytest.raises(InvalidArgument, match="one device"):
                change()


@pytest.mark.parametrize("way", WAYS)
def test_REQ_API_012_REQ_WIRE_009_short_timeout_ends_well_or_misses_the_deadline(
    compilation: Compilation, burst: Burst, way: str
) -> None:
    execution, y = execution_for(compilation)
    execution.set_timeout(1e-9)
    try:
        WAYS[way](execution, burst)
        assert (y == Y).all()
    except MissedDeadline:
        pass
    execution, y = execution_for(compilation)  # the burst is as good as before, and its late answer goes nowhere
    WAYS[way](execution, burst)
    assert (y == Y).all()


def test_REQ_API_012_stuck_device_is_left_at_the_deadline(script: Script) -> None:
    with scripted(script, add_model()) as (compilation, burst):
        execution, _ = execution_for(compilation)
        execution.set_timeout(100)
        run = Background(lambda: execution.burst_compute(burst))
        assert script.entered.wait(PATIENCE)
        FakeClock().advance(101)
        assert isinstance(missed := run.result(), MissedDeadline)
        assert "100 s" in str(missed)
        script.go.set()
        for expected in (0, 1):
            execution, _ = execution_for(compilation)
            execution.burst_compute(burst)
            assert burst.stats.dropped == 1, expected  # the late answer, and only that


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seconds", [None, 1e300, (2**64 - 1) / 1e9])
def test_REQ_API_013_REQ_WIRE_009_longest_timeout_is_no_timeout(
    compilation: Compilation, burst: Burst, way: str, seconds: float | None
) -> None:
    execution, y = execution_for(compilation)
    execution.set_timeout(seconds)
    WAYS[way](execution, burst)
    assert (y == Y).all()


TIMES = {"none": Timing(), "device": Timing(time_on_device=5), "driver": Timing(time_in_driver=7), "both": Timing(5, 7)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("known", [*TIMES, "fail"])
def test_REQ_API_014_durations_are_those_of_the_driver(script: Script, way: str, known: str) -> None:
    status = ErrorStatus.GENERAL_FAILURE if known == "fail" else ErrorStatus.NONE
    script.result = (status, (), TIMES.get(known, Timing(5, 7)))
    with scripted(script, add_model()) as (compilation, burst):
        execution, _ = execution_for(compilation)
        execution.set_measure_timing(True)
        event = Event.start(lambda: WAYS[way](execution, burst))
        assert script.entered.wait(PATIENCE)
        with pytest.raises(BadState):
            execution.get_duration(Duration.ON_HARDWARE)
        script.go.set()
        if known == "fail":
            with pytest.raises(GeneralFailure):
                event.wait()
            with pytest.raises(BadState):
                execution.get_duration(Duration.ON_HARDWARE)
            return
        event.wait()
        on_device, in_driver = TIMES[known].time_on_device, TIMES[known].time_in_driver
        wanted = None if on_device is None else on_device * 1000
        assert execution.get_duration(Duration.ON_HARDWARE) == wanted
        assert execution.get_duration(Duration.FENCED_ON_HARDWARE) == wanted
        seen = execution.get_duration(Duration.IN_DRIVER)
        if way != "burst":
            assert seen == (None if in_driver is None else in_driver * 1000)
        else:  # from dequeuing the request to enqueuing the result, measured by the burst itself
            assert seen is not None
            assert seen >= (wanted or 0)
        assert execution.get_duration(Duration.FENCED_IN_DRIVER) == seen


OUTCOMES = {
    ErrorStatus.NONE: None,
    ErrorStatus.DEVICE_UNAVAILABLE: nnburst.DeviceUnavailable,
    ErrorStatus.GENERAL_FAILURE: nnburst.GeneralFailure,
    ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: nnburst.OutputInsufficientSize,
    ErrorStatus.INVALID_ARGUMENT: nnburst.InvalidArgument,
    ErrorStatus.MISSED_DEADLINE_PERSISTENT: nnburst.MissedDeadline,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: nnburst.ResourceExhausted,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("status", OUTCOMES, ids=lambda status: status.name)
def test_REQ_API_015_status_becomes_the_exception_and_decides_what_can_be_asked(
    script: Script, way: str, status: ErrorStatus
) -> None:
    small = status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    shapes = (OutputShape((3, 2), not small),) if small or status is ErrorStatus.NONE else ()
    script.result = (status, shapes, Timing())
    with scripted(script, open_model()) as (compilation, burst):
        execution = Execution(compilation)
        execution.set_input(0, np.zeros((3, 2), np.float32))
        execution.set_output(0, np.zeros((3, 2), np.float32))
        event = Event.start(lambda: WAYS[way](execution, burst))
        assert script.entered.wait(PATIENCE)
        with pytest.raises(BadState):
            execution.get_output_dimensions(0)
        script.go.set()
        expected = OUTCOMES[status]
        if expected is None:
            event.wait()
            assert execution.get_output_dimensions(0) == (3, 2)
            assert execution.get_output_rank(0) == 2
            return
        with pytest.raises(expected) as caught:
            event.wait()
        assert caught.value.status is status
        if small:
            with pytest.raises(nnburst.OutputInsufficientSize) as asked:
                execution.get_output_dimensions(0)
            assert asked.value.output_shapes == shapes
        else:
            with pytest.raises(BadState):
                execution.get_output_dimensions(0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("status", [ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, ErrorStatus.GENERAL_FAILURE])
def test_REQ_MODEL_077_results_that_contradict_themselves_are_a_general_failure(
    script: Script, way: str, status: ErrorStatus
) -> None:
    """OUTPUT_INSUFFICIENT_SIZE without shapes; shapes and times with another error."""
    shapes = () if status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE else (OutputShape((3, 2), False),)
    script.result = (status, shapes, Timing(1, 2))
    script.go.set()
    with scripted(script, open_model()) as (compilation, burst):
        execution = Execution(compilation)
        execution.set_input(0, np.zeros((3, 2), np.float32))
        execution.set_output(0, np.zeros((3, 2), np.float32))
        with pytest.raises(nnburst.GeneralFailure):
            WAYS[way](execution, burst)
        with pytest.raises(BadState):
            execution.get_output_dimensions(0)


@pytest.mark.representative
def test_REQ_API_016_every_way_gives_the_same_answer(compilation: Compilation, burst: Burst) -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        x = rng.normal(size=4).astype(np.float32)
        answers = []
        for way in WAYS.values():
            execution, y = Execution(compilation), np.zeros(4, np.float32)
            execution.set_input(0, x)
            execution.set_output(0, y)
            way(execution, burst)
            answers.append(y.tobytes())
        assert len(set(answers)) == 1
    gc.collect()
