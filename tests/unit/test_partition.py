"""A model in parts on several devices gives what it gives in one piece, whatever way it is run."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_control_flow import COUNT as TIMES
from test_control_flow import ONE, PAIR, TRUTH, counting_model, counting_parts, if_model

import nnburst
from nnburst import Memory, Model, ModelBuilder, OperandType, OperationType
from nnburst.burst import ExecutionBurstController
from nnburst.devices import Device, PreparedModel
from nnburst.devices.common import capabilities_of
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.partitioned import PartitionedDevice, PartitionedModel, _PartsKernel, _ThroughBurst
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
)
from nnburst.model import Capabilities, Request
from nnburst.model.partition import regions, split_model
from nnburst.model.performance import NEVER, operation_cost
from nnburst.model.types import NO_TIMING, DataLocation, OperandDesc, PerformanceInfo, RequestArgument
from nnburst.model.validate import validate_model
from nnburst.nnapi import Burst, Compilation, Execution
from nnburst.runtime.compile.compilation import _devices_for_whole
from support.models import built, compiled, described, doubling_model, relu
from support.services import in_process
from support.waiting import PATIENCE

O, T = OperationType, OperandType  # noqa: E741 - short, for tables
COUNT = 64
C = np.arange(COUNT, dtype=np.float32)


class Only(ReferenceDevice):
    """Supports some operations."""

    def __init__(self, name: str, *operations: int, failure: Exception | None = None) -> None:
        self.name = name
        self._operations = operations
        self.failure = failure
        self.prepared: list[int] = []
        super().__init__()

    def why_not(self, model: Model, operation: Any) -> str:
        return "" if not self._operations or operation.type in self._operations else "not here"

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> PreparedModel:
        if self.failure is not None:
            raise self.failure
        self.prepared.append(len(model.main.operations))
        return super().prepare_model(model, job)


def adders_and_multipliers() -> Model:
    """Parts by turns, an output that a later part reads, and constants that are in a pool."""
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (COUNT,))
    t = b.add(x, C)
    u = b.mul(t, C)
    v = b.add(u, t)
    b.output("v", v)
    b.output("w", b.mul(v, u))
    return b.build()


MODEL = adders_and_multipliers()


def wanted(x: Any) -> tuple[Any, Any]:
    """Outputs of that model."""
    t = x + C
    u = t * C
    return u + t, (u + t) * u


def cut_in_two(kind: type[Only] = Only) -> list[Any]:
    """The devices of its parts."""
    return [kind("test-add", O.ADD), kind("test-mul", O.MUL)]


@pytest.fixture(params=["local", "service", "two services", "mixed"])
def devices(request: pytest.FixtureRequest) -> Iterator[list[Device]]:
    own = cut_in_two()
    with contextlib.ExitStack() as stack:
        if request.param == "local":
            yield list(own)
        elif request.param == "service":
            yield list(stack.enter_context(in_process(own))[0].devices)
        else:
            first, second = (stack.enter_context(in_process([each]))[0].devices[0] for each in own)
            yield [own[0] if request.param == "mixed" else first, second]


@pytest.mark.parametrize("way", ["compute", "start", "fenced", "burst", "bind"])
def test_parts_give_what_the_whole_gives(devices: list[Device], way: str) -> None:
    x = np.random.default_rng(1).normal(size=COUNT).astype(np.float32)
    outputs = [np.zeros(COUNT, np.float32) for _ in range(2)]
    with compiled(MODEL, devices) as compilation:
        assert [(step.device, step.operations) for step in compilation.report.steps] == [
            ("test-add", (0,)), ("test-mul", (1,)), ("test-add", (2,)), ("test-mul", (3,)),
        ]  # fmt: skip
        with Burst(compilation) as burst, Execution(compilation, reusable=True) as execution:
            execution.set_input(0, x)
            for i, output in enumerate(outputs):
                execution.set_output(i, output)
            bound = burst.bind()
            for _ in range(2):
                if way == "compute":
                    execution.compute()
                elif way == "start":
                    execution.start_compute().wait(PATIENCE)
                elif way == "fenced":
                    execution.start_compute_with_dependencies().wait(PATIENCE)
                elif way == "burst":
                    execution.burst_compute(burst)
                else:
                    bound.inputs["x"][:] = x
                    bound.run()
                    for name, output in zip("vw", outputs, strict=True):
                        output[:] = bound.outputs[name]
                for found, right in zip(outputs, wanted(x), strict=True):
                    np.testing.assert_allclose(found, right, rtol=1e-6)
                x += 1
            bound.close()


def random_model(draw: Any) -> Model:
    b = ModelBuilder()
    values = [b.input(f"x{i}", T.TENSOR_FLOAT32, (2, 3)) for i in range(2)]
    used = set[int]()
    for n in range(draw(st.integers(1, 10))):
        code = draw(st.sampled_from([O.ADD, O.MUL, O.RELU, O.TANH, O.NEG]))
        picked = [draw(st.integers(0, len(values) - 1)) for _ in range(2 if code in (O.ADD, O.MUL) else 1)]
        arguments = [values[i] for i in picked]
        if len(arguments) == 2 and draw(st.booleans()):
            arguments[1] = b.constant(np.full((2, 3), n, np.float32), T.TENSOR_FLOAT32)
            picked.pop()
        used.update(picked)
        values += b.operation(code, *arguments, *([b.scalar(0)] if len(arguments) == 2 else []))
    for i in range(2, len(values)):
        if i not in used or draw(st.integers(0, 3)) == 0:
            b.output(f"y{i}", values[i])
    return b.build()


def outputs_of(prepared: PreparedModel, model: Model, inputs: Sequence[Any]) -> list[bytes]:
    count, nbytes = len(inputs), 24
    places = [RequestArgument(location=DataLocation(0, 64 * i, nbytes)) for i in range(count + len(model.output_names))]
    with Memory.ashmem(64 * len(places)) as memory:
        for i, array in enumerate(inputs):
            memory.write(array, 64 * i)
        request = Request(tuple(places[:count]), tuple(places[count:]), (memory,))
        assert prepared.execute_synchronously(request)[0] is ErrorStatus.NONE
        return [memory.read(np.uint8, (nbytes,), place.location.offset).tobytes() for place in places[count:]]


@pytest.mark.check
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_of_any_model_is_valid_and_computes_the_same(data: Any) -> None:
    model = random_model(data.draw)
    operations = len(model.main.operations)
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=operations, max_size=operations))
    parts = split_model(model, chosen)
    assert sorted(n for part in parts for n in part.operations) == list(range(operations))
    for part in parts:
        validate_model(part.model)
        assert {chosen[n] for n in part.operations} == {part.device}
    assert all(one.device != other.device for one, other in itertools.pairwise(parts))
    device = ReferenceDevice()
    inputs = [data.draw(st.integers(-3, 3)) + np.arange(6, dtype=np.float32).reshape(2, 3) for _ in range(2)]
    whole = device.prepare_model(model)
    together = PartitionedModel(model, parts, [device.prepare_model(part.model) for part in parts])
    assert outputs_of(together, model, inputs) == outputs_of(whole, model, inputs)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_values_that_live_at_the_same_time_do_not_overlap(values: list[tuple[int, int, int]]) -> None:
    values = sorted(((size, min(a, b), max(a, b)) for size, a, b in values), key=lambda value: value[1])
    sizes, lives = [size for size, _, _ in values], [(first, last) for _, first, last in values]
    offsets, end = regions(sizes, lives)
    for i, (first, last) in enumerate(lives):
        assert offsets[i] % 64 == 0
        assert offsets[i] + sizes[i] <= end
        for j in range(i):
            if lives[j][0] <= last and first <= lives[j][1]:
                assert offsets[j] + sizes[j] <= offsets[i] or offsets[i] + sizes[i] <= offsets[j]


def test_a_long_chain_takes_room_for_two_values() -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (COUNT,))
    for _ in range(10):
        x = b.tanh(b.neg(x))
    b.output("y", x)
    device = PartitionedDevice([Only("test-neg", O.NEG), Only("test-tanh", O.TANH)])
    assert device.prepare_model(b.build()).scratch_size <= 2 * COUNT * 4


def test_control_flow_stays_whole() -> None:
    """IF is one operation with its branches, between operations of another device."""
    then, other = built([PAIR], lambda b, x: b.add(x, np.float32([1]))), built([PAIR], lambda b, x: b.neg(x))
    model = built([TRUTH, PAIR], lambda b, c, x: b.tanh(*b.branch(c, then, other, [b.abs(x)])))
    devices = [Only("test-flow", O.IF), Only("test-rest", O.ABS, O.TANH)]
    x, y = np.float32([3, -4]), np.zeros(2, np.float32)
    with compiled(model, devices) as compilation:
        assert [step.operations for step in compilation.report.steps] == [(0,), (1,), (2,)]
        with Execution(compilation, reusable=True) as execution:
            execution.set_input(0, truth := np.uint8([1]))
            execution.set_input(1, x)
            execution.set_output(0, y)
            execution.compute()
            np.testing.assert_allclose(y, np.tanh(np.abs(x) + 1), rtol=1e-5)
            truth[0] = 0
            execution.compute()
            np.testing.assert_allclose(y, np.tanh(-np.abs(x)), rtol=1e-5)


@pytest.mark.parametrize("where", ["in process", "service"])
def test_loops_of_parts_may_take_what_those_of_the_burst_may(where: str) -> None:
    parts = counting_parts(step=0.0)
    endless = built([TIMES, ONE], lambda b, n, x: (*b.loop(*parts, [n, x], 1), b.neg(x)))
    loops: Device = Only("test-loops", O.WHILE)
    with contextlib.ExitStack() as stack:
        if where == "service":
            loops = stack.enter_context(in_process([loops]))[0].devices[0]
        compilation = stack.enter_context(compiled(endless, [loops, Only("test-rest", O.NEG)]))
        burst = stack.enter_context(Burst(compilation, loop_timeout=0.05))
        with burst.bind() as execution, pytest.raises(MissedDeadline, match=r"0\.05 s"):
            execution.run()


def test_open_dimensions_are_not_handed_on() -> None:
    rows = {"dimensions": (0, 2)}
    model = built([OperandDesc(T.TENSOR_FLOAT32, (0, 2))], lambda b, x: b.tanh(b.neg(x, **rows), **rows))
    with (
        Compilation(model, [Only("test-neg", O.NEG), Only("test-tanh", O.TANH)]) as compilation,
        pytest.raises(GeneralFailure, match=r"cannot be cut behind operation 0 \(NEG\)"),
    ):
        compilation.finish()


def test_outputs_with_open_dimensions_of_the_last_part_are_reported() -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (2, 3))
    b.output("y", b.tanh(b.neg(x), dimensions=(0, 3)))
    with compiled(b.build(), [Only("test-neg", O.NEG), Only("test-tanh", O.TANH)]) as compilation:
        with Burst(compilation) as burst, burst.bind(_rooms={"y": 8}) as small:
            with pytest.raises(nnburst.OutputInsufficientSize) as caught:
                small.run()
            assert caught.value.output_shapes[0].dimensions == (2, 3)
            with burst.bind() as enough:
                enough.inputs["x"][:] = 1
                enough.run()
                assert enough.output_shapes[0].dimensions == (2, 3)


def test_bad_requests_are_refused_with_the_names_of_the_whole() -> None:
    prepared = PartitionedDevice(cut_in_two()).prepare_model(MODEL)
    with Memory.ashmem(2048) as memory:
        bad = Request((RequestArgument(location=DataLocation(1, 0, 256)),), (RequestArgument(),) * 2, (memory,))
        result = prepared.execute_synchronously(bad)
        assert result[0] is ErrorStatus.INVALID_ARGUMENT
        with pytest.raises(InvalidArgument, match="input 0"):
            prepared.execute_fenced(bad)


def test_durations_are_those_of_all_parts() -> None:
    devices = cut_in_two()
    with compiled(MODEL, devices) as compilation:
        with Burst(compilation) as burst, burst.bind(measure=True) as execution:
            execution.run()
            assert execution.timing.time_on_device is not None


def test_deadline_is_that_of_all_parts() -> None:
    given: list[int] = []

    class Part:
        def __call__(self) -> None:
            raise AssertionError("it has a deadline")

        def run_until(self, deadline_ns: int) -> None:
            given.append(deadline_ns)
            while len(given) == 2 and time.monotonic_ns() < deadline_ns:
                time.sleep(0.001)

    kernel = _PartsKernel(object(), Request((), ()), [Part(), Part(), Part()], False, tells=False)
    deadline_ns = time.monotonic_ns() + 10**7
    with pytest.raises(MissedDeadline):
        kernel.run_until(deadline_ns)
    assert given == [deadline_ns] * 2


def test_part_in_another_process_gets_what_is_left_of_the_time() -> None:
    bound = SimpleNamespace(timeout=None, result=(ErrorStatus.NONE, (), NO_TIMING), seen=[])
    bound.run = lambda: bound.seen.append(bound.timeout)
    part = _ThroughBurst(bound)
    part.run_until(time.monotonic_ns() + 10**10)
    part()
    part.run_until(time.monotonic_ns() - 1)
    assert 0 < bound.seen[0] <= 10
    assert bound.seen[1:] == [None, 0]


def test_death_of_one_service_ends_a_burst_on_all() -> None:
    with in_process([Only("test-add", O.ADD)]) as (one, _), in_process([Only("test-mul", O.MUL)]) as (two, host):
        with compiled(MODEL, [one.devices[0], two.devices[0]]) as compilation:
            with Burst(compilation) as burst, burst.bind() as execution:
                execution.run()
                host.close()
                with pytest.raises((DeadObject, BadState, GeneralFailure)):
                    execution.run()


def test_parts_forget_a_memory_with_its_last_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[Memory] = []
    monkeypatch.setattr(ExecutionBurstController, "forget", lambda _, memory: forgotten.append(memory))
    with in_process([Only("test-add", O.ADD)]) as (one, _), in_process([Only("test-mul", O.MUL)]) as (two, _):
        prepared = PartitionedDevice([one.devices[0], two.devices[0]]).prepare_model(MODEL)
        executor = prepared.burst_executor()
        with Memory.ashmem(64) as memory, Memory.ashmem(64) as other:
            for slot, each in enumerate((memory, memory, other)):
                executor.add_cache_entry(each, slot)
            executor.remove_cache_entry(0)
            assert forgotten == []  # it has another slot
            executor.remove_cache_entry(1)
            assert forgotten == [memory] * len(prepared.prepared)
            assert [executor.is_cache_entry_present(slot) for slot in range(3)] == [False, False, True]
            executor.close()
            assert not executor.is_cache_entry_present(2)  # nor is its memory kept
        prepared.close()


def test_REQ_MEM_048_memory_of_a_device_is_not_shared_by_parts() -> None:
    with compiled(MODEL, cut_in_two()) as compilation:
        desc = described((compilation, "input", 0))
        with pytest.raises(GeneralFailure, match="cannot allocate"):
            desc.create_memory()  # devices were named: nothing may stand in


# ---- the next device ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GeneralFailure, DeviceUnavailable, ResourceExhausted])
def test_a_device_that_cannot_compile_gives_way_to_the_next(kind: type[Exception]) -> None:
    devices = [Only("test-broken", failure=kind("it broke")), Only("test-works")]
    with compiled(MODEL, devices) as compilation:
        assert compilation.device is devices[1]
        assert compilation.report.refusals == (("test-broken", "it broke"),)
        assert [step.device for step in compilation.report.steps] == ["test-works"]


def test_a_part_that_cannot_be_compiled_gives_way_to_the_next() -> None:
    broken = Only("test-broken", O.ADD, failure=GeneralFailure("it broke"))
    devices = [broken, Only("test-mul", O.MUL), Only("test-add", O.ADD)]
    with compiled(MODEL, devices) as compilation:
        assert [step.device for step in compilation.report.steps] == ["test-add", "test-mul"] * 2
        assert compilation.report.refusals == (("test-broken", "it broke"),)


@pytest.mark.parametrize("kind", [InvalidArgument, MissedDeadline])
def test_what_no_device_can_mend_is_raised_at_once(kind: type[Exception]) -> None:
    second = Only("test-works")
    with Compilation(MODEL, [Only("test-broken", failure=kind("no use")), second]) as compilation:
        with pytest.raises(kind, match="no use"):
            compilation.finish()
    assert second.prepared == []


def test_the_reasons_of_all_are_told() -> None:
    broken = [Only(f"test-broken{i}", failure=GeneralFailure(f"reason {i}")) for i in range(2)]
    with Compilation(MODEL, broken) as compilation:
        with pytest.raises(GeneralFailure, match="test-broken0: reason 0; test-broken1: reason 1"):
            compilation.finish()
    with Compilation(MODEL, broken[:1]) as alone:
        with pytest.raises(GeneralFailure, match=r"^reason 0$"):
            alone.finish()


# ---- caching ------------------------------------------------------------------------------------------------


def tokens(tmp_path: Path, devices: Sequence[Any], **options: Any) -> list[bytes]:
    tmp_path.mkdir(mode=0o700)
    with Compilation(MODEL, devices) as compilation:
        compilation.set_caching(tmp_path, options.get("token", bytes(32)))
        compilation.set_preference(options.get("preference", "fast_single_answer"))
        compilation.set_priority(options.get("priority", "medium"))
        compilation.finish()
    return [token for device in devices for token in device.tokens]


class Recording(Only):
    """Writes down the tokens that it is given."""

    version_string = "1"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tokens: list[bytes] = []

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> PreparedModel:
        if job.cache is not None:
            self.tokens.append(job.cache.cache_key)
        return super().prepare_model(model, replace(job, cache=None))


def test_REQ_CACHE_039_every_part_has_a_token_of_its_own(tmp_path: Path) -> None:
    """Also two parts on one device, and the same operations in another cut."""
    found = tokens(tmp_path / "a", cut_in_two(Recording))
    assert len(set(found)) == 4
    assert tokens(tmp_path / "b", cut_in_two(Recording)) == found
    whole = tokens(tmp_path / "c", [Recording("test-add")])
    assert len({*found, *whole}) == 5


def test_REQ_CACHE_034_to_038_tokens_of_parts_depend_on_everything_that_counts(tmp_path: Path) -> None:
    changed = [Recording("test-plus", O.ADD), Recording("test-times", O.MUL)]
    newer = cut_in_two(Recording)
    for device in newer:
        device.version_string = "2"
    found = [
        tokens(tmp_path / "plain", cut_in_two(Recording)),
        tokens(tmp_path / "names", changed),
        tokens(tmp_path / "versions", newer),
        tokens(tmp_path / "low", cut_in_two(Recording), preference="low_power"),
        tokens(tmp_path / "long", cut_in_two(Recording), preference="sustained_speed"),
        tokens(tmp_path / "urgent", cut_in_two(Recording), priority="high"),
        tokens(tmp_path / "token", cut_in_two(Recording), token=bytes([1]) * 32),
    ]
    assert len({token for each in found for token in each}) == 4 * len(found)


def test_REQ_CACHE_033_no_token_of_the_application_no_token_for_parts() -> None:
    devices = cut_in_two(Recording)
    with compiled(MODEL, devices):
        assert [device.tokens for device in devices] == [[], []]


def test_parts_are_restored_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    outcomes = []
    for _ in range(2):
        with Compilation(MODEL, cut_in_two()) as compilation:
            compilation.set_caching(tmp_path / "cache", bytes(32))
            compilation.finish()
            outcomes.append({step.cache.outcome for step in compilation.report.steps})
            assert compilation.cache_report.outcome in outcomes[-1]
            with Burst(compilation) as burst, burst.bind() as execution:
                execution.inputs["x"][:] = 2
                execution.run()
                np.testing.assert_allclose(execution.outputs["w"], wanted(np.full(COUNT, 2, np.float32))[1])
    assert outcomes == [{"SAVED"}, {"HIT"}]


# ---- the runtime's choice ------------------------------------------------------------------------------------------


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
    model = built([PAIR], lambda b, x: b.add(b.neg(b.relu(x)), np.ones(2, np.float32)))
    devices = [Slow("test-slow", O.RELU, O.NEG, O.FULLY_CONNECTED), Only("test-quick", O.NEG, O.ADD, O.FULLY_CONNECTED)]
    assert chosen(devices, model, monkeypatch, by_runtime=True) == ["test-slow", "test-quick"]
    with compiled(model, devices) as compilation:
        assert [step.operations for step in compilation.report.steps] == [(0, 1), (2,)]  # the order that was given


def test_a_device_that_computes_nothing_is_never_preferred() -> None:
    with (
        nnburst.in_process(devices=["nnburst-noop", "nnburst-reference"]) as service,
        compiled(relu(), service) as compilation,
    ):
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
    device = ReferenceDevice()
    assert _devices_for_whole(relu(), [(device, (True,))], [unknown]) == [(math.inf, device)]
