"""Nothing grows: descriptors, mappings and memory of both processes after many rounds of allocate, run, free."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import nnburst
from nnburst import Memory
from nnburst.burst import ExecutionBurstController
from nnburst.devices import Device, PreparedModel
from nnburst.errors import ErrorStatus
from nnburst.model import Request
from nnburst.model.types import BufferDesc, BufferId, BufferRole, DataLocation, RequestArgument
from support.memory_kinds import KINDS
from support.models import relu
from support.waiting import until

pytestmark = pytest.mark.check

SHAPE = (16, 64)
NBYTES = 4096
ROLE = [BufferRole(0, 0)]
WARM_UP = 200
"""Rounds, at most, until allocators, caches and plan tables have what they need."""
ROUNDS = pytest.mark.parametrize("rounds", [50, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
MOST_GROWTH = 4 << 20
"""Bytes of resident memory. Over the 10,000 rounds of a soak that is 420 bytes a round, less than any object here."""


def whole(pool: int) -> tuple[RequestArgument, ...]:
    return (RequestArgument(False, DataLocation(pool, 0, 0)),)


def shared(pool: int) -> tuple[RequestArgument, ...]:
    return (RequestArgument(False, DataLocation(pool, 0, NBYTES)),)


class Rig:
    """One service, one model, one burst, and what a round does with them."""

    def __init__(self, service: nnburst.Service) -> None:
        self.service = service
        self.device: Device = service.devices[0]
        self.prepared: PreparedModel = self.device.prepare_model(relu(SHAPE))
        self.burst = ExecutionBurstController.create(self.prepared)
        self.session = service.session(relu(SHAPE))

    def compute(self, request: Request) -> None:
        assert self.burst.compute(request)[0] is ErrorStatus.NONE

    def execute(self, request: Request) -> None:
        assert self.prepared.execute_synchronously(request)[0] is ErrorStatus.NONE

    def domain_round(self, run: Callable[[Request], None], *, free_slots: bool) -> None:
        """Fill a buffer, run from it into another, read that."""
        with (
            Memory.ashmem(NBYTES) as memory,
            self.device.allocate(BufferDesc(), [self.prepared], ROLE, ROLE) as source,
            self.device.allocate(BufferDesc(), [self.prepared], ROLE, ROLE) as target,
        ):
            source.copy_from(memory)
            tokens = BufferId(source.id), BufferId(target.id)
            run(Request(whole(0), whole(1), tokens))
            target.copy_to(memory)
            if free_slots:
                for token in tokens:
                    assert self.burst.free_memory(token)

    def slot_round(self) -> None:
        for make, _ in KINDS.values():
            with make(NBYTES) as source, Memory.ashmem(NBYTES) as target:
                request = Request(shared(0), shared(1), (source, target))
                self.execute(request)
                self.compute(request)
                assert self.burst.free_memory(source)
                assert self.burst.free_memory(target)

    def state_round(self) -> None:
        with self.session.bind(state={"y": "x"}) as bound:
            bound.run()
            bound.run()

    def session_round(self) -> None:
        self.session.run(None, {"x": np.zeros(SHAPE, np.float32)})

    def close(self) -> None:
        self.session.close()
        self.burst.close()
        self.prepared.close()


ROUND: dict[str, Callable[[Rig], None]] = {
    "buffers": lambda rig: rig.domain_round(rig.execute, free_slots=False),
    "buffers in bursts": lambda rig: rig.domain_round(rig.compute, free_slots=True),
    "slots of every kind": Rig.slot_round,
    "state": Rig.state_round,
    "session": Rig.session_round,
}


@pytest.fixture
def rig() -> Iterator[Rig]:
    with nnburst.launch() as service:
        rig = Rig(service)
        yield rig
        rig.close()


def usage(pid: int) -> dict[str, int]:
    with open(f"/proc/{pid}/maps") as file:
        maps = sum("nnburst" in line for line in file)
    with open(f"/proc/{pid}/status") as file:
        resident = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))
    return {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "mappings": maps, "resident": resident}


def growth(before: list[dict[str, int]], now: list[dict[str, int]]) -> list[str]:
    allowed = {"descriptors": 0, "mappings": 0, "resident": MOST_GROWTH}
    return [
        f"{who}: {what} {old[what]} -> {new[what]}"
        for who, old, new in zip(("client", "service"), before, now, strict=True)
        for what, most in allowed.items()
        if new[what] - old[what] > most
    ]


@ROUNDS
@pytest.mark.parametrize("what", ROUND)
@pytest.mark.timeout(300)
def test_REQ_MEM_115_many_rounds_leave_nothing_on_either_side(rig: Rig, what: str, rounds: int) -> None:
    both = (os.getpid(), rig.service.pid)
    for _ in range(min(WARM_UP, rounds)):
        ROUND[what](rig)
    gc.collect()
    before = [usage(pid) for pid in both]
    for _ in range(rounds):
        ROUND[what](rig)
    gc.collect()

    def grown() -> list[str]:
        return growth(before, [usage(pid) for pid in both])

    until(lambda: not grown(), grown)  # a service answers first, then closes
