"""The execution and the session on it: who may run when, shapes by name, what a service may tell, timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import (
    BadState,
    GeneralFailure,
    InvalidArgument,
    Memory,
    MissedDeadline,
    Model,
    ModelBuilder,
    NNBurstError,
    OperandType,
    OutputInsufficientSize,
    Service,
)
from nnburst._options import SessionKeywords
from nnburst.burst.interfaces import BurstContext
from nnburst.errors import ErrorStatus, OutputShape
from nnburst.fmq import MessageQueue
from nnburst.model import Request, Timing
from nnburst.model.extensions import ImportedModel
from nnburst.model.running import Failure
from nnburst.model.types import DataLocation, Lifetime, OperandDesc
from nnburst.nnapi import Burst, Compilation, Execution
from nnburst.runtime.compile.model_files import _with_pools
from nnburst.runtime.service import LocalBackend
from nnburst.runtime.session import Options
from support.doubles import ScriptedDevice, ScriptedModel
from support.models import built, compiled, counter, described, ready, relu
from support.waiting import PATIENCE, Background, until

F = OperandType.TENSOR_FLOAT32
ONE = np.ones(4, np.float32)


def add_model() -> Model:
    b = ModelBuilder()
    b.output("z", b.add(b.input("x", F, (4,)), b.input("y", F, (4,))))
    return b.build()


@pytest.fixture(params=["child", "in process"])
def service(request: pytest.FixtureRequest) -> Iterator[nnburst.Service]:
    with (nnburst.launch if request.param == "child" else nnburst.in_process)(devices=["nnburst-reference"]) as service:
        yield service


# ---- who may run at once ---------------------------------------------------------------------------------------------

WAITING = """
import threading
from nnburst.devices.function import Tensor, declare

entered, refused = threading.Event(), threading.Event()

@declare(inputs=[Tensor("x", "float32", ("n",))], outputs=[Tensor("y", "float32", ("n",))])
def until_refused(x):
    entered.set()
    assert refused.wait(30), "the other call was neither answered nor refused"
    return x + 1
"""


@contextlib.contextmanager
def of_function(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> Iterator[nnburst.Session]:
    """A session on a function, which is in a module of its own."""
    (directory / f"{name}_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(directory))
    with nnburst.in_process(devices=[f"nnburst-function:call={name}_module:{name}"]) as service:
        with service.session(name) as session:
            yield session
    sys.modules.pop(f"{name}_module", None)


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nnburst.Session]:
    """A session whose runs, in this process, set `entered` and end when `refused` is set."""
    with of_function(tmp_path, monkeypatch, "until_refused", WAITING) as session:
        yield session


@pytest.fixture
def entered(waits: nnburst.Session) -> threading.Event:
    return sys.modules["until_refused_module"].entered  # type: ignore[no-any-return]


@pytest.fixture
def refused(waits: nnburst.Session) -> threading.Event:
    return sys.modules["until_refused_module"].refused  # type: ignore[no-any-return]


def test_run_of_one_execution_is_refused_wherever_another_one_overtakes_it(
    waits: nnburst.Session, entered: threading.Event, refused: threading.Event
) -> None:
    """One thread stops before each line of a run with a time limit, while another one runs; others have no lines."""
    execution = waits.bind(shapes={"n": 4})
    execution.inputs["x"][:] = ONE
    stopped_at: set[str] = set()
    refused.set()
    execution.run()
    for line in range(1, 200):
        refused.clear()
        entered.clear()
        stopped, go_on, outcomes = threading.Event(), threading.Event(), list[str]()
        stop = _stop_before(line, stopped, go_on, stopped_at)
        overtaken = threading.Thread(target=_run_traced, args=(partial(execution.run, None), refused, outcomes, stop))
        overtaken.start()
        while not stopped.is_set() and not entered.is_set():
            stopped.wait(0.001)
        if not stopped.is_set():  # it came to the service: all lines before that have been tried
            go_on.set()
            refused.set()
            overtaken.join()
            break
        other = threading.Thread(target=_run_traced, args=(partial(execution.run, None), refused, outcomes, None))
        other.start()
        assert entered.wait(PATIENCE)
        go_on.set()
        overtaken.join()
        other.join()
        assert sorted(outcomes) == ["refused", "right"], f"before line {line} of the call"
    execution.close()
    assert len(stopped_at) >= 2


@pytest.mark.parametrize("concurrency", [1, 2])
def test_any_number_of_threads_may_run_a_session_wherever_one_overtakes_another(
    service: nnburst.Service, concurrency: int
) -> None:
    """One thread stops before each line of `Session.run` in turn, while another one runs or waits."""
    with service.session(add_model(), concurrency=concurrency) as session:
        for line in range(1, 200):
            stopped, go_on, seen = threading.Event(), threading.Event(), set[str]()
            outcomes = list[str]()
            call = partial(session.run, None, {"x": ONE, "y": ONE})
            stop = _stop_before(line, stopped, go_on, seen)
            overtaken = threading.Thread(target=_run_traced, args=(call, go_on, outcomes, stop))
            overtaken.start()
            while overtaken.is_alive() and not stopped.is_set():
                stopped.wait(0.001)
            other = threading.Thread(target=_run_traced, args=(call, go_on, outcomes, None))
            other.start()
            while other.is_alive() and not session._waiting:
                other.join(0.001)
            go_on.set()
            overtaken.join()
            other.join()
            assert outcomes == ["right"] * 2, f"before line {line} of the call"
            assert len(session._idle) == concurrency
            if not seen:
                break
        assert line > 10


def test_executions_of_one_session_run_at_once_and_are_never_refused(service: nnburst.Service) -> None:
    """More threads than CPUs, all with executions of their own, and one that copies."""
    rounds, wrong = 300, list[object]()
    with service.session(add_model()) as session:
        bound = [session.bind() for _ in range(4)]

        def run_bound(execution: nnburst.Execution, i: int) -> None:
            for n in range(rounds):
                execution.inputs["x"][:] = n
                execution.inputs["y"][:] = i
                execution.run()
                if (execution.outputs["z"] != n + i).any():
                    wrong.append(execution.outputs["z"].copy())

        def run_copying() -> None:
            for n in range(rounds):
                (z,) = session.run(None, {"x": n * ONE, "y": ONE})
                if (z != n + 1).any():
                    wrong.append(z)

        running = [Background(partial(run_bound, execution, i)) for i, execution in enumerate(bound)]
        running += [Background(run_copying) for _ in range(3)]
        assert [each.result() for each in running] == [None] * 7
        assert not wrong
        assert session.stats.received == 7 * rounds
        assert 1 <= len(session._pool._bursts) <= 6
        for execution in bound:
            execution.close()
            with pytest.raises(BadState, match="closed"):
                execution.run()


def test_one_thread_needs_one_burst(service: nnburst.Service) -> None:
    with service.session(add_model()) as session:
        for execution in [session.bind() for _ in range(5)]:
            execution.run()
            session.run(None, {"x": ONE, "y": ONE})
        assert session.burst.stats.sent == 10


def test_run_that_waits_for_others_ends_at_its_deadline(
    waits: nnburst.Session, entered: threading.Event, refused: threading.Event
) -> None:
    with waits.service.session("until_refused", concurrency=1, timeout=PATIENCE) as busy:
        first = Background(lambda: busy.run(None, {"x": ONE})[0].tolist())
        assert entered.wait(PATIENCE)
        busy._timeout = 0.01
        for _ in range(3):
            with pytest.raises(MissedDeadline, match="1 runs were under way"):
                busy.run(None, {"x": ONE})
        busy._timeout = 0
        with pytest.raises(MissedDeadline, match="not started"):
            busy.run(None, {"x": ONE})
        assert not busy._waiting
        refused.set()
        assert first.result() == [2] * 4
        busy._timeout = PATIENCE
        assert busy.run(None, {"x": ONE})[0].tolist() == [2] * 4


def test_those_who_wait_are_served_in_order_and_have_what_is_left_of_their_time(
    waits: nnburst.Session, entered: threading.Event, refused: threading.Event
) -> None:
    with waits.service.session("until_refused", concurrency=1, timeout=PATIENCE) as busy:
        ended = list[int]()

        def run(i: int) -> None:
            busy.run(None, {"x": ONE})
            ended.append(i)

        running = list[Background]()
        for i in range(5):
            running.append(Background(partial(run, i)))
            if i == 0:
                assert entered.wait(PATIENCE)
            until(lambda i=i: len(busy._waiting) == i)
        refused.set()
        assert [each.result() for each in running] == [None] * 5
        assert ended == list(range(5))
        assert busy._idle[0].execution is not None
        assert busy._idle[0].execution.timeout == PATIENCE


@pytest.mark.parametrize("concurrency", [1, 2])
def test_run_below_a_run_of_the_same_thread_has_a_permit_of_its_own_or_is_told(
    service: nnburst.Service, concurrency: int
) -> None:
    """As of a signal handler, here in the middle of copying the inputs."""
    inner = list[str]()
    with service.session(add_model(), concurrency=concurrency) as session:
        session.run(None, {"x": ONE, "y": ONE})
        execution: Any = session._idle[-1].execution
        feed = execution._set_inputs

        def handler(inputs: object) -> bool:
            execution._set_inputs = feed  # once
            try:
                inner.append(str(session.run(None, {"x": ONE, "y": ONE})[0].tolist()))
            except BadState as error:
                inner.append(str(error))
            return bool(feed(inputs))

        execution._set_inputs = handler
        assert session.run(None, {"x": ONE, "y": ONE})[0].tolist() == [2] * 4
    assert ("1 runs of the session are under way in this thread" if concurrency == 1 else str([2.0] * 4)) in inner[0]


def test_permit_that_an_interrupt_loses_comes_back(service: nnburst.Service) -> None:
    with service.session(add_model(), concurrency=1) as session:
        permit = session._idle.pop()
        waiting = Background(lambda: session.run(None, {"x": ONE, "y": ONE})[0].tolist())
        until(lambda: session._waiting)
        del permit
        assert waiting.result() == [2] * 4
        assert len(session._idle) == 1


def _run_traced(call: Callable[[], object], refused: threading.Event, outcomes: list[str], trace: Any) -> None:
    sys.settrace(trace)
    try:
        call()
        outcomes.append("right")
    except BadState:
        outcomes.append("refused")
        refused.set()
    except NNBurstError as error:
        outcomes.append(str(error))
    finally:
        sys.settrace(None)


def _stop_before(line: int, stopped: threading.Event, go_on: threading.Event, seen: set[str]) -> Any:
    """Return a trace function that waits before the nth line in `nnburst.runtime`."""
    left = [line]

    def trace(frame: Any, event: str, _: object) -> Any:
        if "/nnburst/runtime/" not in frame.f_code.co_filename and "/nnburst/burst/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                seen.add(f"{frame.f_code.co_name}:{frame.f_lineno}")
                stopped.set()
                assert go_on.wait(PATIENCE)
        return trace

    return trace


def test_refused_run_leaves_nothing_in_the_way_of_the_next(waits: nnburst.Session, refused: threading.Event) -> None:
    execution = waits.bind(shapes={"n": 4})
    execution.inputs["x"][:] = ONE
    run = Background(execution.run)
    until(lambda: waits.stats.sent)
    for _ in range(20):
        with pytest.raises(BadState, match="the execution is running"):
            execution.run()
    assert len(waits._pool._bursts) == 1
    refused.set()
    assert run.result() is None
    assert execution.outputs["y"].tolist() == [2] * 4
    execution.run()
    assert execution.outputs["y"].tolist() == [2] * 4
    execution.close()


# ---- a device that answers what a test says ------------------------------------------------------------------------


class Scripted(ScriptedDevice):
    def import_model(self, source: str, pools: Any = ()) -> ImportedModel:
        """What RELU is with dimensions that are not known: ``n×4``, ``m``, or of open rank."""
        if source == "name:same":
            return ImportedModel(relu((0, 0)), ("",), (("n", 4),), (("n", 4),))
        if source == "name:fixed":
            return ImportedModel(relu((2, 4)), ("",), ((2, 4),), ((2, 4),))
        shape = {"name:n×4": ("n", 4), "name:m": ("m",), "name:open": None}[source]
        return ImportedModel(relu(tuple(0 for _ in shape or (1, 1))), ("",), (shape,), (shape and ("k", *shape[1:]),))


@pytest.fixture
def scripted() -> Iterator[tuple[Service, Scripted]]:
    device = Scripted()
    with Service(LocalBackend((device,)), "scripted") as service:
        yield service, device


FORGED = {
    "no shape": (),
    "two shapes for one output": (OutputShape((2,)), OutputShape((2,))),
    "long dimensions": (OutputShape((2**31, 2**31, 2**31, 2**31)),),
    "more than the room": (OutputShape((2**20, 4)),),
    "product beyond 64 bits": (OutputShape((2**32 - 1, 4)),),
    "rank beyond all arrays": (OutputShape((1,) * 65),),
}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("model", ["n×4", "open"])
def test_forged_shapes_are_a_general_failure(scripted: tuple[Service, Scripted], forged: str, model: str) -> None:
    service, prepared = scripted
    shapes = FORGED[forged]
    with service.session(model) as session:
        x = {"x": np.ones((2, 4), np.float32)}
        prepared.result = ErrorStatus.NONE, (OutputShape((2, 4)),), Timing()
        for _ in range(2):  # the first run and the short way
            assert session.run(None, x)[0].shape == (2, 4)
        prepared.result = ErrorStatus.NONE, shapes, Timing()
        with pytest.raises(GeneralFailure, match="shape"):
            session.run(None, x)
        execution = session.bind(shapes={"x": (2, 4)})
        execution.run()
        if shapes:
            with pytest.raises(GeneralFailure, match="shape"):
                _ = execution.output_shapes
        step = ready(session.compilation, x["x"], np.zeros(8, np.float32), reusable=True)
        for way in (step.compute, lambda: step.burst_compute(session.burst)):
            if shapes:
                with pytest.raises(GeneralFailure, match="shape"):
                    way()
            else:
                way()
        prepared.result = ErrorStatus.NONE, (OutputShape((2, 4)),), Timing()
        assert session.run(None, x)[0].shape == (2, 4)


@pytest.mark.parametrize("dims", [(2**16, 2**16, 4), (2**32 - 1,) * 3, (1,) * 65])
def test_forged_need_is_a_general_failure(scripted: tuple[Service, Scripted], dims: tuple[int, ...]) -> None:
    service, prepared = scripted
    prepared.result = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape(dims, False),), Timing()
    with service.session("open") as session, pytest.raises(GeneralFailure, match="shape"):
        session.run(None, {"x": ONE})


def test_output_that_never_fits_ends(scripted: tuple[Service, Scripted]) -> None:
    service, prepared = scripted
    prepared.result = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((4,), False),), Timing()
    with service.session("m") as session:
        with pytest.raises(GeneralFailure, match="still does not fit"):
            session.run(None, {"x": ONE})
        prepared.result = ErrorStatus.NONE, (OutputShape((4,)),), Timing()
        assert session.run(None, {"x": ONE})[0].shape == (4,)
        assert len(session.burst.controller._slots) == 1
    with service.session(relu()) as session:
        prepared.result = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((4,), False),), Timing()
        with pytest.raises(OutputInsufficientSize):
            session.run(None, {"x": ONE})


@pytest.mark.parametrize("model", ["same", "fixed"])
@pytest.mark.parametrize("real", [(1, 4), (3, 4), (2, 5), (24,)], ids=str)
def test_shape_that_a_file_says_wrongly_is_that_of_the_run(
    scripted: tuple[Service, Scripted], model: str, real: tuple[int, ...]
) -> None:
    """The file's names, or its numbers: a device answers what there is, and has room for it from then on."""
    service, prepared = scripted
    answers: list[Any] = []

    def answer(request: Request) -> Any:
        (output,) = request.outputs
        fits = output.location.length >= 4 * int(np.prod(real)) and answers != [] and output.dimensions == ()
        if fits:
            request.pools[0].array(np.float32, real, output.location.offset)[...] = 7  # type: ignore[union-attr]
        answers.append(fits)
        return (
            (ErrorStatus.NONE if fits else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE),
            (OutputShape(real, fits),),
            Timing(),
        )

    prepared.hooks["execute"] = answer
    with service.session(model) as session:
        for _ in range(3):
            (y,) = session.run(None, {"x": np.ones((2, 4), np.float32)})
            assert (y.shape, y.dtype) == (real, np.float32)
            assert (y == 7).all()
        assert answers == [False, True, True, True]


# ---- preference, priority, options ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["session", "compilation"])
@pytest.mark.parametrize(
    ("preference", "given", "expected"),
    [("low_power", None, 0.0), ("low_power", 1e-5, 1e-5), ("sustained_speed", None, None)],
)
def test_low_power_never_polls_on_either_side(
    scripted: tuple[Service, Scripted],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    preference: str,
    given: float | None,
    expected: float | None,
) -> None:
    service, _ = scripted
    windows: list[float | None] = []
    configure = ScriptedModel.configure_execution_burst

    def noted(model: ScriptedModel, callback: Any, requests: Any, results: Any, window: float | None) -> BurstContext:
        windows.append(window)
        return configure(model, callback, requests, results, window)

    monkeypatch.setattr(ScriptedModel, "configure_execution_burst", noted)
    if way == "session":
        service.session(relu(), preference=preference, polling_window=given).close()
    else:
        with Compilation(relu(), service) as compilation:
            compilation.set_preference(preference)
            compilation.finish()
            with Burst(compilation, polling_window=given) as burst:
                execution = burst.bind()
                from nnburst._core._nnburst import lib

                if expected == 0.0:
                    assert lib.nnb_execution_spins(execution.pointer) == 0
    assert windows == [expected]


def test_preference_and_priority_may_be_given_in_each_way_and_nothing_else(scripted: tuple[Service, Scripted]) -> None:
    service, _ = scripted
    compilation = Compilation(relu(), service)
    for value in ("low_power", "LOW_POWER", 0, nnburst.model.ExecutionPreference.LOW_POWER):
        compilation.set_preference(value)  # type: ignore[arg-type]
        assert compilation.preference is nnburst.model.ExecutionPreference.LOW_POWER
    for wrong in ("fast", 7, -1, None, 1.5, [], ""):
        with pytest.raises(InvalidArgument, match="'low_power', 'fast_single_answer'"):
            compilation.set_preference(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="'medium', 'high'"):
            service.session(relu(), priority=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="'on_hardware'"):
            Execution.get_duration(object(), wrong)  # type: ignore[arg-type]


def test_type_checkers_know_the_options_of_a_session_and_no_others(scripted: tuple[Service, Scripted]) -> None:
    assert tuple(SessionKeywords.__annotations__) == Options.__struct_fields__
    with pytest.raises(TypeError, match="timout"):
        scripted[0].session(relu(), timout=1)  # type: ignore[call-arg]


# ---- one meaning of a timeout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, -1e-9, float("nan"), "1", [1]])
def test_timeout_that_is_none_is_refused_everywhere(scripted: tuple[Service, Scripted], wrong: Any) -> None:
    service, _ = scripted
    with service.session(relu()) as session, Compilation(relu(), service.devices) as compilation:
        queue = MessageQueue(np.int32, 4)
        calls: list[Callable[[], Any]] = [
            lambda: service.session(relu(), timeout=wrong),
            lambda: service.session(relu(), open_timeout=wrong),
            lambda: nnburst.launch(open_timeout=wrong),
            lambda: compilation.set_timeout(wrong),
            lambda: Execution(session.compilation).set_timeout(wrong),
            lambda: setattr(session.bind(), "timeout", wrong),
            lambda: session.burst.bind(timeout=wrong),
            lambda: queue.read_blocking(1, timeout=wrong),
            lambda: queue.write_blocking(np.zeros(1, np.int32), timeout=wrong),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument, match="None to wait without a limit"):
                call()
        queue.close()


def test_zero_is_what_is_ready_now(waits: nnburst.Session, refused: threading.Event) -> None:
    step = ready(waits.compilation, ONE, np.zeros(4, np.float32))
    step.set_timeout(0)
    with pytest.raises(MissedDeadline):
        step.burst_compute(waits.burst)
    with pytest.raises(MissedDeadline), waits.service.session("until_refused", timeout=0) as other:
        other.run(None, {"x": ONE})
    refused.set()
    with pytest.raises(MissedDeadline):
        nnburst.launch(devices=["nnburst-noop"], open_timeout=0)


# ---- shapes by the names of dimensions -----------------------------------------------------------------------------

NAMED = """
import numpy as np
from nnburst.devices.function import Tensor, declare

@declare(
    inputs=[Tensor("a", "float32", ("n", 2)), Tensor("b", "float32", ("n", "m"))],
    outputs=[
        Tensor("both", "float32", ("m", "n")), Tensor("rows", "float32", ("n",)), Tensor("some", "float32", ("k", 2)),
    ],
)
def named(a, b):
    return np.ones((b.shape[1], b.shape[0]), np.float32), a.sum(axis=1), a[a[:, 0] > 0]
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nnburst.Session]:
    with of_function(tmp_path, monkeypatch, "named", NAMED) as session:
        yield session


@pytest.mark.parametrize(
    "shapes",
    [{"n": 3, "m": 5}, {"n": np.int64(3), "b": (3, 5)}, {"b": [3, 5]}, {"a": (3, 2), "m": 5}, {"both": (5, 3)}],
    ids=str,
)
def test_outputs_follow_from_the_names_of_dimensions(named: nnburst.Session, shapes: dict[str, Any]) -> None:
    with named.bind(shapes=shapes) as bound:
        assert bound.inputs["a"].shape == (3, 2)
        assert bound.inputs["b"].shape == (3, 5)
        assert (bound.outputs["both"].shape, bound.outputs["both"].dtype) == ((5, 3), np.float32)
        assert bound.outputs["rows"].shape == (3,)
        assert bound.outputs["some"].dtype == np.uint8  # only a run tells
        bound.inputs["a"][:] = [[1, 2], [-3, 4], [5, 6]]
        bound.run()
        assert bound.outputs["rows"].tolist() == [3, 1, 11]
        assert bound.outputs["both"].tolist() == [[1.0] * 3] * 5
        assert bound.output_shapes[2].dimensions == (2, 2)
        assert bound.outputs["some"].view(np.float32)[:4].tolist() == [1, 2, 5, 6]


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"n": 3}, r"'b'.*bind\(shapes=\{'m'"),
        ({}, r"'a'.*bind\(shapes=\{'n'"),
        ({"n": 3, "m": 5, "batch": 8}, r"unknown name 'batch'.*\['k', 'm', 'n'\]"),
        ({"n": 3, "b": (4, 5)}, r"'b' of shape \(4, 5\) contradicts 'n' = 3"),
        ({"a": (3, 3), "m": 1}, "does not admit"),
        ({"a": (3,), "m": 1}, "does not admit"),
        ({"a": (-3, 2), "m": 1}, "does not admit"),
        ({"n": -1, "m": 1}, "'n' cannot be -1"),
        ({"n": (3, 4), "m": 1}, "one size for a dimension"),
        ({"n": 3.5, "m": 1}, "one size for a dimension"),
        ({"n": "3", "m": 1}, "one size for a dimension"),
        ({"a": 3, "m": 1}, "a tuple of sizes for an argument"),
        ({"a": (3.5, 2), "m": 1}, "a tuple of sizes for an argument"),
        ({"a": "32", "m": 1}, "a tuple of sizes for an argument"),
    ],
)
def test_shapes_that_cannot_be_are_refused(named: nnburst.Session, shapes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        named.bind(shapes=shapes)


def test_names_that_a_file_uses_for_two_things_say_nothing_about_outputs(scripted: tuple[Service, Scripted]) -> None:
    service, _ = scripted
    b = ModelBuilder()
    x, z = b.input("x", F, (0, 4)), b.input("z", F, (0, 4))
    b.output("y", b.add(x, z))
    found = ImportedModel(b.build(), ("",), (("n", 4), ("n", 4)), (("n", 4),))
    with compiled(found, service) as compilation:
        with Burst(compilation) as burst:
            assert burst.bind(shapes={"n": 2}).outputs["y"].shape == (2, 4)
            assert burst.bind(shapes={"x": (2, 4), "z": (2, 4)}).outputs["y"].shape == (2, 4)
            assert burst.bind(shapes={"x": (2, 4), "z": (1, 4)}).outputs["y"].dtype == np.uint8


def test_all_shapes_of_runs_lie_in_the_room_of_one_execution(named: nnburst.Session) -> None:
    for n in (29, 2, 1, 3, *range(1, 30), 1, 29):
        both, rows, some = named.run(None, {"a": np.ones((n, 2), np.float32), "b": np.ones((n, 1), np.float32)})
        assert (both.shape, rows.shape, some.shape) == ((1, n), (n,), (n, 2))
    assert len(named.burst.controller._slots) == 1
    (rows,) = named.run(["rows"], {"a": np.ones((2, 2), np.float32), "b": np.ones((2, 1), np.float32)})
    assert rows.tolist() == [2, 2]


OF_THE_DECLARED_TYPE: list[tuple[OperandType, tuple[int, ...], Any, Any]] = [
    (F, (1, 2), [[1.5, 2]], [[1.5, 2]]),
    (F, (1, 2), ((1, 2),), [[1, 2]]),
    (F, (0, 2), [[1, 2], [3, np.float64(4)]], [[1, 2], [3, 4]]),
    (OperandType.TENSOR_FLOAT16, (2,), [float("inf"), -0.5], [float("inf"), -0.5]),
    (OperandType.TENSOR_INT32, (2,), [1, -2], [1, -2]),
    (OperandType.TENSOR_INT32, (2,), [1.0, 2.0], "got a list, which becomes an array of float64"),
    (OperandType.TENSOR_INT32, (2,), [2**31, 0], "is int32, which has no 2147483648"),
    (F, (1, 1), 3, [[3]]),
    (F, (1, 1), np.float64(0.5), [[0.5]]),
    (F, (1, 1), np.float32([3]), [[3]]),
    (F, (1,), np.float32([[3]]), [3]),
    (F, (1, 1), np.float64([3]), "got float64; convert it"),
    (F, (0, 1), np.float32(3), r"has shape \(None, 1\), got \(\)"),
    (F, (2,), [True, False], r"float32, got a list, which becomes an array of bool; give numpy\.array\(…, 'float32'\)"),
    (F, (2,), ["1", "2"], "got a list, which becomes an array of <U1"),
    (F, (2,), [1, None], "got a list, which becomes an array of object"),
    (F, (2,), [[1], [2, 3]], "cannot be made an array"),
    (F, (2,), [1e39, 0], "which has no 1e"),
    (F, (2,), [16777217, 0], "which has no 16777217"),
    (F, (2,), 1.0, r"has shape \(2,\), got \(\)"),
    (F, (2,), np.zeros(2), r"got float64; convert it with \.astype\('float32'\)"),
]


@pytest.mark.parametrize(("kind", "shape", "value", "expected"), OF_THE_DECLARED_TYPE)
def test_numbers_lists_and_arrays_of_one_element_are_taken_where_the_declared_type_is_plain(
    kind: OperandType, shape: tuple[int, ...], value: Any, expected: Any
) -> None:
    b = ModelBuilder()
    x = b.input("x", kind, shape)
    b.output("y", b.maximum(x, x))
    with nnburst.in_process(devices=["nnburst-reference"]) as service, service.session(b.build()) as session:
        if isinstance(expected, str):
            with pytest.raises(InvalidArgument, match=expected):
                session.run(None, {"x": value})
            return
        (y,) = session.run(None, {"x": value})
        assert (y.dtype, y.tolist()) == (session.get_inputs()[0].dtype, expected)
        assert [y.tolist() for (y,) in session.run_many([{"x": value}] * 2)] == [expected] * 2


@pytest.mark.parametrize("names", [None, [], ()])
def test_no_names_of_outputs_are_all_of_them(named: nnburst.Session, names: Any) -> None:
    feed = {"a": np.ones((3, 2), np.float32), "b": np.ones((3, 1), np.float32)}
    shapes = [(1, 3), (3,), (3, 2)]
    assert [output.shape for output in named.run(names, feed)] == shapes
    assert [output.shape for output in asyncio.run(named.arun(names, feed))] == shapes


# ---- one noun ------------------------------------------------------------------------------------------------------


def test_step_that_fails_keeps_its_turn() -> None:
    with nnburst.launch(devices=["nnburst-reference"]) as service, service.session(counter()) as session:
        with session.bind(state={"t_out": "t"}) as step:
            step.run()
            tokens = step._requests[0].pools
            session.burst.controller.free_memory(tokens[0])
            with pytest.raises(NNBurstError):
                step.run()
            assert step.turn == 1
            assert step.get_state()["t"].tolist() == [1] * 4


def test_request_that_does_not_fit_the_channel_passes_the_turn_too() -> None:
    with nnburst.in_process(devices=["nnburst-reference"]) as service, service.session(counter()) as session:
        create = nnburst.burst.ExecutionBurstController.create
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "nnburst.runtime.run.burst.ExecutionBurstController.create",
                lambda prepared, **options: create(prepared, channel_length=4),
            )
            burst = Burst(session.compilation)
        with burst, burst.bind(state={"t_out": "t"}) as step:
            for i in range(1, 4):
                step.run()
                assert step.get_state()["t"].tolist() == [i] * 4
            assert burst.stats.fallbacks == 3


def test_state_passes_its_turn_and_can_be_measured() -> None:
    with nnburst.launch(devices=["nnburst-reference"]) as service, service.session(counter()) as session:
        with session.bind(state={"t_out": "t"}, measure=True) as step:
            for i in range(1, 4):
                step.run()
                assert step.get_state()["t"].tolist() == [i] * 4
                assert step.timing.time_on_device < 10**9


def test_execution_whose_arguments_are_copied_leaves_nothing_in_the_burst() -> None:
    with nnburst.in_process(devices=["nnburst-reference"]) as service, service.session(relu()) as session:
        y = np.zeros(4, np.float32)
        step = ready(session.compilation, ONE, y, reusable=True)
        for _ in range(2):
            y[:] = 0
            step.burst_compute(session.burst)
            assert y.tolist() == [1] * 4
        assert len(session.burst.controller._slots) == 0
        step.close()
        step.close()
        for again in (step.compute, lambda: step.burst_compute(session.burst)):
            with pytest.raises(BadState, match="closed"):
                again()


def test_run_that_failed_says_so_though_another_one_overtakes_it_then(
    service: nnburst.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = ModelBuilder()
    b.output("y", b.gather(b.input("x", F, (4,)), 0, b.input("i", OperandType.TENSOR_INT32, (1,))))
    with service.session(b.build()) as session, session.bind() as bound:
        bound.inputs["i"][:] = 4

        def overtake(request: object) -> None:
            bound.inputs["i"][:] = 0
            bound.run()

        monkeypatch.setattr("nnburst.burst.client.request.check_open", overtake)
        with pytest.raises(GeneralFailure, match=r"^the execution failed: operation 0 \(GATHER\)"):
            bound.run()
        assert bound.result[0] is ErrorStatus.NONE


def test_result_of_the_last_run_is_not_that_of_one_before(waits: nnburst.Session, refused: threading.Event) -> None:
    refused.set()
    with waits.bind(shapes={"n": 4}) as bound:
        bound.run()
        assert bound.result[0] is ErrorStatus.NONE
        refused.clear()
        bound.timeout = 0
        with pytest.raises(MissedDeadline):
            bound.run()
        try:
            status = bound.result[0]
        except BadState as error:
            assert "gave no answer" in str(error)
        else:  # the service found the deadline passed, and the answer was there before the client looked at its clock
            assert status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
        refused.set()


def test_memory_of_the_device_knows_nothing_after_a_forged_answer(scripted: tuple[Service, Scripted]) -> None:
    """Shared memory stands in for the device's, so the answer alone says what was written."""
    service, prepared = scripted
    with compiled(relu(), service) as compilation:
        with described((compilation, "output", 0)).create_memory() as memory:
            execution = Execution(compilation, reusable=True)
            execution.set_input(0, ONE)
            execution.set_output_from_memory(0, memory)
            execution.compute()
            assert memory.initialised
            for shapes in ((OutputShape((5,)),), (OutputShape((4,)),) * 2):
                prepared.result = ErrorStatus.NONE, shapes, Timing()
                with pytest.raises(GeneralFailure):
                    execution.compute()
                assert not memory.initialised


# ---- what a session asks of the cache, and why a run failed --------------------------------------------------------


@pytest.mark.parametrize("change", [{"preference": "sustained_speed"}, {"priority": "high"}], ids=str)
@pytest.mark.parametrize("token", [None, b"t" * 32], ids=["automatic", "given"])
def test_cached_compilation_is_for_its_preference_and_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], token: bytes | None
) -> None:
    """Also under a token of the application's own, which says that it is the same: the fingerprint knows better."""
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    with nnburst.launch(devices=["nnburst-reference"]) as service:

        def outcome(preference: str = "low_power", priority: str = "low") -> str:
            with Compilation(relu(), service) as compilation:
                compilation.set_preference(preference)
                compilation.set_priority(priority)
                if token is None:
                    compilation.set_caching_auto(tmp_path / "cache")
                else:
                    compilation.set_caching(tmp_path / "cache", token)
                compilation.finish()
                return compilation.cache_report.outcome

        assert [outcome(), outcome()] == ["SAVED", "HIT"]
        assert [outcome(**change), outcome(**change), outcome()] == ["SAVED", "HIT", "HIT"]


def test_scalar_output_has_no_dimensions(service: nnburst.Service) -> None:
    rank = built([OperandDesc(F, (2, 3))], lambda b, x: b.rank(x))
    with compiled(rank, service) as compilation:
        execution = ready(compilation, np.zeros((2, 3), np.float32), np.zeros((), np.int32))
        execution.compute()
        with pytest.raises(InvalidArgument, match="output 0 is a scalar"):
            execution.get_output_dimensions(0)


def test_reason_of_a_failure_is_in_the_exception(scripted: tuple[Service, Scripted]) -> None:
    service, prepared = scripted
    prepared.hooks["execute"] = lambda request: Failure(ErrorStatus.GENERAL_FAILURE, "the third weight is odd")
    with service.session(relu()) as session:
        step = ready(session.compilation, ONE, np.zeros(4, np.float32), reusable=True)
        with pytest.raises(GeneralFailure, match="failed: the third weight is odd"):
            step.compute()


def test_output_that_needs_more_room_leaves_no_reason_for_the_next_failure(scripted: tuple[Service, Scripted]) -> None:
    """The client knows this one's reason, and never asks."""
    service, prepared = scripted
    with service.session(relu()) as session:
        context = session.burst.controller._context
        prepared.hooks["execute"] = lambda request: Failure(
            ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, "an output needs more room", (OutputShape((4,), False),)
        )
        with session.bind() as execution, pytest.raises(OutputInsufficientSize):
            execution.run()
        assert context.failure_reason() == ""


def test_reason_of_a_failure_on_the_burst_is_asked_for(scripted: tuple[Service, Scripted]) -> None:
    service, prepared = scripted
    prepared.result = ErrorStatus.INVALID_ARGUMENT, (), Timing()
    with service.session(relu()) as session:
        context = session.burst.controller._context
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(context), "failure_reason", lambda self: "input 0 has no memory")
            with pytest.raises(InvalidArgument, match="failed: input 0 has no memory"):
                session.run(None, {"x": ONE})

            def silent(self: object) -> str:
                raise MissedDeadline("no answer")

            patch.setattr(type(context), "failure_reason", silent)
            with pytest.raises(InvalidArgument, match="the service refused the request"):
                session.run(None, {"x": ONE})


# ---- what is left behind, and what a device may say of files -------------------------------------------------------


def test_arguments_that_cannot_be_laid_out_leave_no_memory(scripted: tuple[Service, Scripted]) -> None:
    """Also while the exception, with all its frames, is still at hand."""
    service, _ = scripted
    with compiled(relu(), service) as compilation:
        memory = described((compilation, "output", 0)).create_memory()
        execution = Execution(compilation, reusable=True)
        execution.set_input(0, ONE)
        execution.set_output_from_memory(0, memory)
        memory.close()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(BadState, match="closed") as caught:
            execution.compute()
        assert len(os.listdir("/proc/self/fd")) == before
        assert caught.value.__traceback__ is not None


@pytest.mark.parametrize(("index", "length"), [(0, 32), (1, 0), (2, 0)])
def test_file_of_an_imported_model_is_used_whole_where_the_device_names_one(index: int, length: int) -> None:
    model = relu()
    constant = OperandDesc(
        F, (8,), lifetime=Lifetime.CONSTANT_REFERENCE, location=DataLocation(pool_index=index, offset=0, length=0)
    )
    model = replace(model, main=replace(model.main, operands=(*model.main.operands, constant)))
    with Memory.ashmem(32) as file:
        (*others, found) = _with_pools(model, (file,)).main.operands
        assert found.location == DataLocation(index, 0, length)
        assert tuple(others) == model.main.operands[:-1]


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.float16, ">f4"])
def test_array_of_another_type_is_refused(scripted: tuple[Service, Scripted], dtype: Any) -> None:
    service, _ = scripted
    with service.session(relu()) as session:
        execution = Execution(session.compilation)
        for give in (execution.set_input, execution.set_output):
            with pytest.raises(InvalidArgument, match="is float32, got"):
                give(0, np.zeros(4, dtype))
