"""Several steps in one request: Session.bind(steps=…), in this process, in a service's, alone and shared."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_session_state import UNITS, cell, expected

import nnburst
from nnburst import Memory, ModelBuilder, OperandType, Service
from nnburst.burst.cancellation import CancelFlag, present_cancel_flag, use_cancel_flag
from nnburst.burst.server.group import ListenerGroup
from nnburst.devices import local
from nnburst.devices.function import FunctionDevice, Tensor, declare
from nnburst.devices.registry import create_device
from nnburst.errors import GeneralFailure, InvalidArgument, MissedDeadline, NNBurstError
from nnburst.model import Request
from nnburst.model.types import DataLocation, RequestArgument, Steps
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.host.host import ServiceHost
from nnburst.service.host.object_table import ObjectTable
from support.connections import socket_pair
from support.models import relu
from support.waiting import PATIENCE, Background, until

RNG = np.random.default_rng(7)
STATE = {"h_out": "h_in"}
F32 = OperandType.TENSOR_FLOAT32


class Accumulator(FunctionDevice):
    """h_out = h_in + x, y = 2 h_out; `hook` is called with each x first."""

    def __init__(self) -> None:
        super().__init__()
        self.hook: Callable[[np.ndarray], object] = lambda x: None
        self.host: ServiceHost | None = None
        x, y, h, g = (Tensor(name, "float32", (4,)) for name in ("x", "y", "h_in", "h_out"))
        self._functions["add"] = declare(inputs=[x, h], outputs=[g, y], name="add")(lambda x, h: self._add(x, h))

    def _add(self, x: Any, h_in: Any) -> tuple[Any, Any]:
        self.hook(x)
        return x + h_in, 2 * (x + h_in)


@pytest.fixture(params=["own listener", "shared"])
def rig(request: pytest.FixtureRequest) -> Iterator[tuple[Service, Accumulator]]:
    device = Accumulator()
    mine, theirs = socket_pair()
    group = ListenerGroup(runs=2) if request.param == "shared" else None
    host = ServiceHost([create_device("nnburst-reference"), device], listeners=group)
    device.host = host
    host.serve(theirs)
    with Service(ServiceConnection(mine), "test") as service:
        yield service, device
    host.close()
    if group is not None:
        group.close()


@pytest.fixture(scope="module", params=["in_process", "child"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with (nnburst.in_process if request.param == "in_process" else nnburst.launch)() as service:
        yield service


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_steps_do_what_as_many_runs_do(service: Service, steps: int) -> None:
    start = RNG.normal(size=(1, UNITS)).astype(np.float32)
    with (
        service.session(cell()) as session,
        session.bind(steps=steps, state=STATE, initial_state={"h_in": start}) as execution,
    ):
        assert execution.inputs["x"].shape == (steps, 1, 3)
        assert execution.outputs["y"].shape == (steps, 1, UNITS)
        before = session.stats.sent
        xs = RNG.normal(size=(3 * steps, 1, 3)).astype(np.float32)
        found = []
        for ring in np.split(xs, 3):
            execution.inputs["x"][:] = ring
            execution.run()
            found += list(execution.outputs["y"].copy())
        assert session.stats.sent - before == 3
        np.testing.assert_allclose(found, expected(xs, start), atol=1e-5)
        np.testing.assert_allclose(2 * execution.get_state()["h_in"], found[-1], atol=1e-5)
        execution.reset_state({"h_in": start})
        execution.inputs["x"][:] = xs[:steps]
        execution.run()
        np.testing.assert_allclose(execution.outputs["y"], expected(xs[:steps], start), atol=1e-5)


def test_steps_without_state_are_a_ring(service: Service) -> None:
    b = ModelBuilder()
    b.output("y", b.add(b.input("x", F32, (2, 3)), np.ones((1, 1), np.float32)))
    with service.session(b.build()) as session, Memory.ashmem(4096) as memory:
        ring = memory.array(np.float32, (5, 2, 3), 64)
        with session.bind(steps=5, memory={"x": ring}, measure=True) as execution:
            ring[:] = np.arange(30).reshape(5, 2, 3)
            execution.run()
            assert (execution.outputs["y"] == ring + 1).all()
            assert execution.timing.time_on_device is not None


def test_open_dimensions_are_those_of_one_step(service: Service) -> None:
    with service.session(relu((0, 3))) as session:
        with pytest.raises(InvalidArgument, match="not known before"):
            session.bind(steps=3, shapes={"x": (2, 3)})
        with session.bind(steps=3, shapes={"x": (2, 3), "y": (2, 3)}) as execution:
            execution.inputs["x"][:] = values = RNG.normal(size=(3, 2, 3)).astype(np.float32)
            execution.run()
            assert (execution.outputs["y"] == np.maximum(values, 0)).all()


def test_failure_of_a_step_is_named_and_leaves_the_state(rig: tuple[Service, Accumulator]) -> None:
    service, device = rig
    with service.session("add") as session, session.bind(steps=8, state=STATE) as execution:
        execution.inputs["x"][:] = 1
        execution.run()

        def fail(x: np.ndarray) -> None:
            if x[0] == 5:
                raise KeyError("no such frame")

        device.hook = fail
        execution.inputs["x"][:] = np.arange(8)[:, None]
        place = r"add \(.*test_steps\.py, line \d+\)"
        with pytest.raises(GeneralFailure, match=f"step 5 of 8: {place}: KeyError: 'no such frame'"):
            execution.run()
        assert execution.get_state()["h_in"].tolist() == [8.0] * 4
        device.hook = lambda x: None
        execution.run()  # from the state before
        assert execution.outputs["y"][:, 0].tolist() == [2 * (8 + k * (k + 1) / 2) for k in range(8)]


def held(device: Accumulator) -> tuple[list[float], threading.Event, threading.Event]:
    """Have each step wait. Returns what steps have seen, what says that one has begun, and what lets them go on."""
    seen: list[float] = []
    begun, go_on = threading.Event(), threading.Event()

    def wait(x: np.ndarray) -> None:
        seen.append(x[0])
        begun.set()
        assert go_on.wait(PATIENCE)

    device.hook = wait
    return seen, begun, go_on


def test_deadline_is_kept_between_steps(rig: tuple[Service, Accumulator]) -> None:
    service, device = rig
    with service.session("add") as session, session.bind(steps=50, state=STATE) as execution:
        execution.run()
        seen: list[float] = []

        def until_it_is_over(x: np.ndarray) -> None:
            seen.append(time.monotonic())
            while len(seen) == 3 and time.monotonic() < seen[0] + 0.02:
                time.sleep(0.001)

        device.hook = until_it_is_over
        execution.timeout = 0.02
        with pytest.raises(MissedDeadline):
            execution.run()
        device.hook = lambda x: None
        execution.timeout = PATIENCE
        execution.inputs["x"][:] = 1
        execution.run()
        assert execution.outputs["y"][:, 0].tolist() == [2.0 * (k + 1) for k in range(50)]
        assert len(seen) <= 3


def test_awaited_run_that_is_cancelled_has_no_more_steps_run(rig: tuple[Service, Accumulator]) -> None:
    service, device = rig
    seen, begun, go_on = held(device)
    with service.session("add") as session, session.bind(steps=4096, state=STATE) as execution:

        async def cancelled() -> None:
            task = asyncio.create_task(execution.arun())
            while not begun.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(asyncio.wait_for(cancelled(), PATIENCE))
        go_on.set()
        until(lambda: not execution.is_in_flight)
        assert len(seen) == 1
        device.hook = lambda x: None
        execution.inputs["x"][:] = 1
        execution.run()  # from the state as it was
        assert execution.outputs["y"][:3, 0].tolist() == [2.0, 4.0, 6.0]


def test_client_that_is_gone_has_no_more_steps_run(
    rig: tuple[Service, Accumulator], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, device = rig
    flags: list[CancelFlag | None] = []
    seen, begun, go_on = held(device)

    def noting() -> CancelFlag | None:
        flags.append(present_cancel_flag())
        return flags[-1]

    monkeypatch.setattr(local, "present_cancel_flag", noting)
    with service.session("add") as session, session.bind(steps=4096, state=STATE) as execution:
        future = execution.submit()
        assert begun.wait(PATIENCE)
        assert device.host is not None
        closing = Background(device.host.close)
        until(lambda: any(flag and flag.cancelled[0] for flag in flags))
        go_on.set()
        with pytest.raises(NNBurstError):
            future.result(PATIENCE)
        assert closing.result() is None
    assert len(seen) == 1


def test_service_that_is_stopped_finishes_all_steps(
    rig: tuple[Service, Accumulator], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, device = rig
    seen, begun, go_on = held(device)
    told, hang_up = threading.Event(), ObjectTable.hang_up

    def telling(table: ObjectTable) -> None:
        hang_up(table)
        told.set()

    monkeypatch.setattr(ObjectTable, "hang_up", telling)
    with service.session("add") as session, session.bind(steps=8, state=STATE) as execution:
        future = execution.submit()
        assert begun.wait(PATIENCE)
        assert device.host is not None
        closing = Background(partial(device.host.close, "it was told to stop"))
        assert told.wait(PATIENCE)
        go_on.set()
        assert future.result(PATIENCE) is execution
        assert closing.result() is None
    assert len(seen) == 8


def test_connection_that_has_ended_has_no_more_steps_run_without_a_burst() -> None:
    device, table = create_device("nnburst-reference"), ObjectTable()
    with Memory.ashmem(4096) as memory, use_cancel_flag(table.cancel_flag):
        request = Request((at(0, 64),), (at(2048, 64),), (memory, Steps(4)))
        prepared = device.prepare_model(relu((1, 4)))
        assert prepared.execute_synchronously(request)[0] is nnburst.errors.ErrorStatus.NONE
        table.hang_up()
        assert prepared.execute_synchronously(request)[0] is nnburst.errors.ErrorStatus.NONE
        table.detach_client()
        ended = prepared.execute_synchronously(request)
        assert "its client has gone" in ended.reason  # type: ignore[attr-defined]
        with use_cancel_flag(None):
            assert prepared.execute_synchronously(request)[0] is nnburst.errors.ErrorStatus.NONE
        prepared.close()


def test_rings_that_a_packet_cannot_say_are_refused_by_name(service: Service) -> None:
    b = ModelBuilder()
    x, z = b.input("x", F32, (1, 1 << 14)), b.input("z", F32, (1, 4))
    b.output("y", b.add(x, x))
    b.output("w", b.relu(z))
    with service.session(b.build()) as session:
        with pytest.raises(InvalidArgument, match=r"'x' of shape .* takes 4294967296 bytes.*fewer steps"):
            session.bind(steps=65536)
        with pytest.raises(InvalidArgument, match=r"'x' of shape .* takes 2621440000 bytes.*fewer steps"):
            session.bind(steps=40000)  # each of them would fit


@pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs the extra nnburst[onnx]")
def test_steps_run_with_onnx(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
    helper, kinds = onnx.helper, onnx.TensorProto
    values = {name: helper.make_tensor_value_info(name, kinds.FLOAT, ["n", 4]) for name in ("x", "y")}
    values |= {name: helper.make_tensor_value_info(name, kinds.FLOAT, [4]) for name in ("h_in", "h_out")}
    values |= {name: helper.make_tensor_value_info(name, kinds.INT64, [2]) for name in ("i", "j")}
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=1),
        helper.make_node("Squeeze", ["s"], ["t"]),
        helper.make_node("Add", ["h_in", "t"], ["h_out"]),
        helper.make_node("Add", ["x", "h_out"], ["y"]),
        helper.make_node("Add", ["i", "i"], ["j"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [values[n] for n in ("x", "h_in", "i")], [values[n] for n in ("h_out", "y", "j")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with nnburst.Session(path) as session, session.bind(steps=6, state=STATE, shapes={"n": 2}) as execution:
        for _ in range(2):
            xs = execution.inputs["x"][:] = RNG.normal(size=(6, 2, 4)).astype(np.float32)
            numbers = execution.inputs["i"][:] = RNG.integers(0, 99, (6, 2))
            h = execution.get_state()["h_in"]
            execution.run()
            for k in range(6):
                h = h + xs[k].sum()
                np.testing.assert_allclose(execution.outputs["y"][k], xs[k] + h, atol=1e-4)
            assert (execution.outputs["j"] == 2 * numbers).all()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": True}, "steps=True"),
        ({"steps": "4"}, "steps='4'"),
        ({"steps": 65537}, "65536"),
        ({"steps": 4, "state": {"y": "h_in"}}, "is no input of shape"),
        ({"steps": 4, "state": {"h_out": "x"}}, "is no input of shape"),
        ({"steps": 4, "state": {"nothing": "h_in"}}, "h_out"),
    ],
)
def test_wrong_steps_are_refused(service: Service, given: Mapping[str, Any], what: str) -> None:
    b = ModelBuilder()
    x, h = b.input("x", F32, (1, 2)), b.input("h_in", F32, (1, 4))
    b.output("h_out", b.relu(h))
    b.output("y", b.relu(x))
    with service.session(b.build()) as session, pytest.raises(InvalidArgument, match=what):
        session.bind(**given)


def test_views_hold_as_many_steps_as_are_run(service: Service) -> None:
    with service.session(relu((1, 4))) as session, Memory.ashmem(4096) as memory:
        with pytest.raises(InvalidArgument, match="steps=4"):
            session.bind(steps=4, memory={"x": memory.array(np.float32, (3, 1, 4))})
        with pytest.raises(InvalidArgument, match="takes 4800 bytes"):
            session.bind(steps=300, memory={"x": memory})
        with Memory.hardware_buffer(2, 2, "GRAY8") as image, pytest.raises(InvalidArgument, match="image"):
            session.bind(steps=4, memory={"x": image})


def at(offset: int, length: int, pool: int = 0) -> RequestArgument:
    return RequestArgument(False, DataLocation(pool, offset, length))


def test_forged_requests_of_steps_are_refused(service: Service) -> None:
    """Whatever a client writes, not only what `bind` makes."""
    prepared = service.device("nnburst-reference").prepare_model(relu((1, 4)))
    with Memory.ashmem(4096) as memory, contextlib.closing(prepared):

        def refusal(inputs: RequestArgument, outputs: RequestArgument, *named: Steps) -> str:
            result = prepared.execute_synchronously(Request((inputs,), (outputs,), (memory, *named)))
            assert result[0] is nnburst.errors.ErrorStatus.INVALID_ARGUMENT
            return result.reason  # type: ignore[attr-defined, no-any-return]

        four = Steps(4)
        assert "needs 16 in each of 4 steps" in refusal(at(0, 16), at(2048, 64), four)
        assert "equal parts" in refusal(at(0, 63), at(2048, 64), four)
        assert "a pool of 4096 bytes" in refusal(at(0, 64), at(4080, 64), four)
        assert "overlaps" in refusal(at(0, 64), at(48, 64), four)
        assert "not both" in refusal(at(0, 64), at(2048, 64), Steps(4, ((0, 0),)))
        assert "1 outputs and 1 inputs" in refusal(at(0, 64), at(2048, 64), Steps(4, ((1, 0),)))
        assert "one state only" in refusal(at(0, 64), at(2048, 64), Steps(4, ((0, 0), (0, 0))))
        assert "twice" in refusal(at(0, 64), at(2048, 64), four, Steps(5))
        assert "no memory" in refusal(at(0, 64, 1), at(2048, 64), four)


def test_number_of_steps_is_forgotten_with_its_last_execution(service: Service) -> None:
    with service.session(relu((1, 4))) as session:
        slots = session.burst.controller._slots
        first, second = session.bind(steps=3), session.bind(steps=3)
        first.run()
        second.run()
        assert sum(isinstance(pool, Steps) for pool in slots._slots) == 1
        first.close()
        second.run()
        second.close()
        session.burst.controller.forget_dropped()
        assert not any(isinstance(pool, Steps) for pool in slots._slots)


def test_model_that_takes_no_steps_says_so(service: Service) -> None:
    class OneStep:
        takes_steps = False

    with service.session(relu((1, 4))) as session:
        compilation = session.compilation
        real = compilation._prepared
        compilation._prepared = OneStep()  # type: ignore[assignment]
        try:
            with pytest.raises(GeneralFailure, match="one step at a time"):
                session.bind(steps=2)
        finally:
            compilation._prepared = real
