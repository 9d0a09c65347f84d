"""Bursts on driver-managed buffers: C admits and commits, Python only runs, and nothing outlives its buffer."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nnburst import Memory, OperandType
from nnburst.burst import ExecutionBurstController, ExecutionBurstServer
from nnburst.devices.interfaces import Buffer
from nnburst.devices.plan import Plan
from nnburst.devices.reference.prepared import ReferencePreparedModel
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, InvalidArgument, NNBurstError
from nnburst.memory.managed import BufferSet, gate
from nnburst.model import Request
from nnburst.model.types import BufferDesc, BufferId, BufferRole, DataLocation, OperandDesc, RequestArgument
from support.models import built
from support.users import in_forked_child
from support.waiting import PATIENCE, Background, Held

SHAPE = (2, 8)
NBYTES = math.prod(SHAPE) * 4
WHOLE = (RequestArgument(False, DataLocation(0, 0, 0)),), (RequestArgument(False, DataLocation(1, 0, 0)),)


class Rig:
    """A model that adds its input to itself, a burst on it, and two buffers that it is run between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers: list[ExecutionBurstServer] = []
        self.careful = 0
        create, call = ExecutionBurstServer.create, Plan.__call__

        def counted(plan: Plan) -> Any:
            self.careful += plan.gate is not None
            return call(plan)

        def remembered(*args: Any, **kwargs: Any) -> ExecutionBurstServer:
            self.servers.append(create(*args, **kwargs))
            return self.servers[-1]

        monkeypatch.setattr(Plan, "__call__", counted)
        monkeypatch.setattr(ExecutionBurstServer, "create", remembered)
        model = built([OperandDesc(OperandType.TENSOR_FLOAT32, SHAPE)], lambda b, x: b.add(x, x))
        self.device = create_device("nnburst-reference")
        self.prepared = self.device.prepare_model(model)
        role = [BufferRole(0, 0)]
        self.buffers = [self.device.allocate(BufferDesc(), [self.prepared], role, role) for _ in range(2)]
        self.burst = ExecutionBurstController.create(self.prepared)
        first, second = (BufferId(buffer.id) for buffer in self.buffers)
        self.turns = [
            self.burst.bind(Request(*WHOLE, pools))
            for pools in ((first, second), (second, first))  # there and back
        ]
        for turn in self.turns:
            turn.timeout = 30
        self.write(1)

    @property
    def server(self) -> ExecutionBurstServer:
        return self.servers[0]

    def write(self, value: float) -> None:
        with Memory.ashmem(NBYTES) as memory:
            memory.array(np.float32, SHAPE)[:] = value
            self.buffers[0].copy_from(memory)

    def read(self, which: int = 0) -> np.ndarray:
        with Memory.ashmem(NBYTES) as memory:
            self.buffers[which].copy_to(memory)
            return memory.array(np.float32, SHAPE).copy()

    def round(self, times: int = 1) -> None:
        for turn in self.turns * times:
            turn.run()

    def hold_runs(self) -> Held:
        """Have runs of what is bound wait."""
        held = Held()
        plans = self.server._end._plans
        plans[:] = [lambda plan=plan: (held(), plan())[-1] for plan in plans]
        return held

    def close(self) -> None:
        self.burst.close()
        for buffer in self.buffers:
            buffer.close()
        self.prepared.close()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.close()


def storage(buffer: Buffer) -> weakref.ref[Any]:
    return weakref.ref(buffer._managed.storage)  # type: ignore[attr-defined]


def test_python_neither_admits_nor_commits_what_is_repeated(rig: Rig) -> None:
    rig.round(2)
    before, generation = rig.careful, rig.buffers[0]._managed.generation  # type: ignore[attr-defined]
    for _ in range(10):
        rig.round()
    assert rig.careful == before
    assert rig.buffers[0]._managed.generation == generation + 10  # type: ignore[attr-defined]
    assert (rig.read() == 4.0**12).all()


def test_closed_buffer_is_freed_although_its_slot_is_not(rig: Rig) -> None:
    rig.round(2)
    bytes_of_it = storage(rig.buffers[1])
    assert bytes_of_it() is not None
    rig.buffers[1].close()
    assert bytes_of_it() is None
    for turn in rig.turns:
        with pytest.raises(InvalidArgument):
            turn.run()
    assert (rig.read() == 4.0**2).all()


def test_buffer_that_is_closed_during_a_run_is_freed_after_it(rig: Rig) -> None:
    rig.round(2)
    held = rig.hold_runs()
    bytes_of_it = storage(rig.buffers[1])
    run = Background(rig.turns[0].run)
    assert held.entered.wait(PATIENCE)
    rig.buffers[1].close()
    assert bytes_of_it() is not None
    held.go_on.set()
    run.result()
    with pytest.raises(NNBurstError):
        rig.turns[0].run()  # answered after the listener has freed what was closed
    assert bytes_of_it() is None


def test_plan_that_is_dropped_between_look_up_and_call_is_bound_again(rig: Rig) -> None:
    rig.round(2)
    before = rig.careful
    server = rig.server
    listener = server._end
    listener._plans[:] = [listener._rebind] * len(listener._plans)
    rig.round()
    assert rig.careful == before + 2
    assert (rig.read() == 4.0**3).all()


@pytest.mark.parametrize("when", ["first run", "first run after the input moved"])
@pytest.mark.parametrize(
    ("error", "status"),
    [(SystemExit, ErrorStatus.GENERAL_FAILURE), (MemoryError, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT)],
)
def test_plan_that_raises_once_costs_one_run(
    when: str, error: type[BaseException], status: ErrorStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was admitted in C before or is from then on, and to the bytes that are there now."""
    bad = False
    bind = ReferencePreparedModel.bind

    def raising(prepared: ReferencePreparedModel, request: Request, options: Any) -> Any:
        kernel = bind(prepared, request, options)

        def run() -> Any:
            if bad:
                raise error("enough")
            return kernel()

        return run

    monkeypatch.setattr(ReferencePreparedModel, "bind", raising)
    rig = Rig(monkeypatch)
    other = rig.device.allocate(BufferDesc(), [rig.prepared], [BufferRole(0, 0)], [])
    with rig.burst, Memory.ashmem(NBYTES) as memory:
        if when != "first run":
            for _ in range(3):
                rig.turns[0].run()
        memory.array(np.float32, SHAPE)[:] = 100
        other.copy_from(memory)
        rig.buffers[0].copy_buffer(other)
        bad = True
        with pytest.raises(NNBurstError, match="enough") as raised:
            rig.turns[0].run()
        assert raised.value.status is status
        bad = False
        for _ in range(3):
            rig.turns[0].run()
            assert (rig.read(1) == 200).all()


def test_buffer_that_is_freed_while_its_plan_is_handed_to_c_is_not_used_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`current` is read, then the buffer is freed, then what was read is stored: it has to go again."""
    freed = threading.Event()

    def read_then_freed(buffers: BufferSet) -> Any:
        found = vars(buffers)["current"]
        if found is not None and not freed.is_set():
            freed.set()
            rig.buffers[1].close()
        return found

    rig.turns[0].run()
    bytes_of_it = storage(rig.buffers[1])
    rig.write(1)
    gate.note_move()  # so that the plan is handed over anew
    keep = property(read_then_freed, lambda buffers, made: vars(buffers).update(current=made))
    monkeypatch.setattr(BufferSet, "current", keep, raising=False)
    rig.turns[0].run()
    with pytest.raises(NNBurstError):
        rig.turns[0].run()  # answered after the listener has freed what was closed
    assert freed.is_set()
    assert bytes_of_it() is None


def test_forked_child_has_the_buffers_that_were_in_use(rig: Rig) -> None:
    """The thread that used them is not there."""
    rig.round(2)
    held = rig.hold_runs()
    run = Background(rig.turns[0].run)  # reads the first, writes the second
    assert held.entered.wait(PATIENCE)

    def in_child() -> None:
        assert (rig.read(0) == 4.0**2).all()
        with pytest.raises(NNBurstError):  # what was being written is lost
            rig.read(1)
        rig.write(7)
        rig.buffers[1].close()
        assert rig.buffers[1]._managed.storage.nbytes == 0  # type: ignore[attr-defined]  # frames keep the bytes

    try:
        in_forked_child(in_child)
    finally:
        held.go_on.set()
    assert run.result() is None
    assert (rig.read(1) == 2 * 4.0**2).all()
