"""Plans with a kernel in C: run by a burst's listener without the interpreter, beside those that are Python's."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from nnburst import Memory, MissedDeadline
from nnburst._core._nnburst import ffi, lib
from nnburst.burst import ExecutionBurstController
from nnburst.burst.client.in_flight import InFlight
from nnburst.burst.interfaces import BurstCallback
from nnburst.burst.kernel import Kernel
from nnburst.burst.server.group import FlowQueue, ListenerGroup
from nnburst.devices.noop import _Nothing
from nnburst.devices.plan import Plan
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, GeneralFailure
from nnburst.model import Request
from nnburst.model.types import MeasureTiming
from support.local_burst import WINDOWS, Adder, LocalModel, adder_request, bind
from support.models import tiny_model
from support.waiting import PATIENCE, Background, Held, until

IN_C = 128
"""Where requests have their output that are run in C, from the second time on."""


class Function:
    """What C runs, in Python, so that a test sees it; that of `Still` is not."""

    def __init__(self) -> None:
        self.during: Callable[[int], int] = lambda deadline_ns: 0
        self.reason = ffi.new("char[]", b"a cat sat on it")
        self.runs = 0
        self.pointers = (
            ffi.callback("int(nnb_kernel *, uint64_t)", self._run),
            ffi.callback("const char *(nnb_kernel *)", lambda kernel: self.reason),
            ffi.callback("void(nnb_kernel *)", lambda kernel: None),
        )

    def _run(self, kernel: Any, deadline_ns: int) -> int:
        self.runs += 1
        return self.during(deadline_ns)


class InC:
    """A kernel that C runs; no run of it holds a reference to it."""

    def __init__(self) -> None:
        self.function = Function()
        self.c_kernel = ffi.new("nnb_kernel *", self.function.pointers)
        self.runs = 0

    def __call__(self) -> None:
        self.runs += 1


class Still:
    """A kernel that does nothing, in C only."""

    c_kernel = _Nothing.c_kernel

    def __call__(self) -> None: ...


class Mixed(Adder):
    """Adds one in Python, but has requests with their output at `IN_C` run by what `make` makes."""

    def __init__(self, make: Callable[[], Any] = InC) -> None:
        super().__init__()
        self._make = make
        self.kernels: list[Any] = []

    def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> Kernel:
        if request.outputs[0].location.offset != IN_C:
            return super().bind(request, slots, measure)
        kernel = self._make()
        self.kernels.append(kernel)
        return kernel


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory.ashmem(4096) as memory:
        yield memory


@pytest.fixture(params=["own thread", "group"])
def served(request: pytest.FixtureRequest) -> Iterator[Callable[[BurstCallback], BurstCallback]]:
    """What a burst's callback becomes, so that it is served in each of the two ways."""
    if request.param == "own thread":
        yield lambda callback: callback
        return
    group = ListenerGroup(2)
    flow = group.flow()

    def in_group(callback: BurstCallback) -> BurstCallback:
        callback.flow_queue = FlowQueue(flow)
        return callback

    try:
        yield in_group
    finally:
        group.close()


def model_of(executor: Adder, served: Callable[[BurstCallback], BurstCallback]) -> LocalModel:
    model = LocalModel(executor)
    model.callback = served
    return model


@WINDOWS
def test_kernels_in_c_and_in_python_share_a_burst(memory: Memory, served: Any, window: float) -> None:
    executor = Mixed()
    with ExecutionBurstController.create(model_of(executor, served), polling_window=window) as controller:
        in_c, in_python = bind(controller, adder_request(memory, IN_C)), bind(controller, adder_request(memory))
        for i in range(30):
            memory.array(np.float32, (4,))[:] = i
            for execution in (in_c, in_python, in_c)[: 1 + i % 3]:
                execution.run()
            if i % 3:
                assert (memory.array(np.float32, (4,), 64) == i + 1).all()
    (kernel,) = executor.kernels
    assert (kernel.runs, kernel.function.runs) == (1, 39)


@WINDOWS
def test_interpreter_that_is_held_delays_no_run_in_c(memory: Memory, served: Any, window: float) -> None:
    with ExecutionBurstController.create(model_of(Mixed(Still), served), polling_window=window) as controller:
        execution = bind(controller, adder_request(memory, IN_C))
        execution.run()
        for _ in range(3):  # the first one puts the listener into C
            execution.run()
        for _ in range(20):
            assert lib.nnb_execution_start(execution.pointer) == 0
            assert lib.nnb_execution_try(execution.pointer, 4 * 10**9) == 0, "the answer took the interpreter"


class Lockless:
    """A kernel that fails if its thread has the interpreter lock: its run is a function of the interpreter's."""

    def __init__(self) -> None:
        has_lock = ffi.cast("void *", ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p).value)
        self.kept = Function().pointers[1:]
        self.c_kernel = ffi.new("nnb_kernel *", (ffi.cast("int (*)(nnb_kernel *, uint64_t)", has_lock), *self.kept))

    def __call__(self) -> None: ...


@WINDOWS
def test_no_kernel_in_c_runs_with_the_interpreter_lock(memory: Memory, served: Any, window: float) -> None:
    """The request for it is there when a run in Python has ended, and the listener looks with the lock first."""
    executor = Mixed(Lockless)
    with ExecutionBurstController.create(model_of(executor, served), polling_window=window) as controller:
        in_c, in_python = bind(controller, adder_request(memory, IN_C)), bind(controller, adder_request(memory))
        in_c.run()
        in_python.run()
        for execution in (in_c, in_python):  # both answers have room, so both requests may be in the ring
            lib.nnb_execution_set_answer(execution.pointer, 2)
        started: list[InFlight] = []

        def start_in_c() -> None:
            started.append(in_c._start())

        def landed() -> bool:
            with closing(controller.flights.copy_bell()) as bell:
                controller.flights.collect(bell.fds[0])
            return started[-1].status is not None

        executor.during = start_in_c
        for i in range(20):
            in_python._start()
            until(lambda i=i: len(started) > i)
            until(landed)
        assert [flight.status for flight in started] == [0] * 20


def test_failure_in_c_has_the_sentence_of_its_run(memory: Memory, served: Any) -> None:
    executor = Mixed()
    with ExecutionBurstController.create(model_of(executor, served)) as controller:
        execution = bind(controller, adder_request(memory, IN_C))
        execution.run()
        (kernel,) = executor.kernels
        kernel.function.during = lambda deadline_ns: ErrorStatus.GENERAL_FAILURE
        with pytest.raises(GeneralFailure, match="a cat sat on it"):
            execution.run()
        kernel.function.reason = ffi.NULL
        with pytest.raises(GeneralFailure, match="does not say why"):
            execution.run()
        kernel.function.during = lambda deadline_ns: 0
        execution.run()
        assert (kernel.runs, kernel.function.runs) == (1, 3)


def test_kernel_in_c_ends_itself_at_the_deadline_of_the_service(memory: Memory, served: Any) -> None:
    executor, seen = Mixed(), list[int]()

    def with_little_time(callback: BurstCallback) -> BurstCallback:
        callback.max_run = 1e-6
        return served(callback)

    def late(deadline_ns: int) -> int:
        seen.append(deadline_ns)
        return ErrorStatus.MISSED_DEADLINE_TRANSIENT

    with ExecutionBurstController.create(model_of(executor, with_little_time)) as controller:
        execution = bind(controller, adder_request(memory, IN_C))
        execution.run()
        (kernel,) = executor.kernels
        kernel.function.during = late
        with pytest.raises(MissedDeadline, match="ends a run after 1e-06 s"):
            execution.run()
    assert len(seen) == 1
    assert seen[0] > 0


def test_kernel_stays_until_its_run_is_over_when_its_slot_is_freed(memory: Memory, served: Any) -> None:
    model, held = model_of(executor := Mixed(), served), Held(0)
    with ExecutionBurstController.create(model) as controller:
        execution = bind(controller, adder_request(memory, IN_C))
        execution.run()
        (function := executor.kernels[0].function).during = held
        kernel = weakref.ref(executor.kernels.pop())
        run = Background(execution.run)
        assert held.entered.wait(PATIENCE)
        assert model.server is not None
        for slot in executor.added:
            model.server.free_memory(slot)
        gc.collect()
        assert kernel() is not None
        held.go_on.set()
        assert run.result() is None
        until(lambda: gc.collect() is not None and kernel() is None, "the kernel outlives its plan")
        assert function.runs == 1


def test_kernel_is_gone_when_its_slot_is_freed_between_runs(memory: Memory, served: Any) -> None:
    model = model_of(executor := Mixed(), served)
    with ExecutionBurstController.create(model) as controller:
        execution = bind(controller, adder_request(memory, IN_C))
        for _ in range(3):
            execution.run()
        kernel = weakref.ref(executor.kernels.pop())
        assert model.server is not None
        for slot in executor.added:
            model.server.free_memory(slot)
        until(lambda: gc.collect() is not None and kernel() is None, "the kernel outlives its plan")


@pytest.mark.parametrize("measure", [False, True])
def test_device_that_does_nothing_does_it_in_c_unless_it_is_timed(memory: Memory, measure: bool) -> None:
    prepared = create_device("nnburst-noop").prepare_model(tiny_model())
    calls = list[Any]()
    call = Plan.call.fget

    def recorded(plan: Plan) -> Any:
        calls.append(call(plan))
        return calls[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "call", property(recorded))
        with ExecutionBurstController.create(prepared) as controller:
            execution = controller.bind(adder_request(memory), measure=measure)
            execution.run()
    assert [hasattr(call, "c_kernel") for call in calls] == [not measure]
