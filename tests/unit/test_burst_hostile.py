"""A burst against a service that answers what it likes, and channels that cannot be used."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from nnburst import InvalidArgument, Memory, MissedDeadline
from nnburst.burst import ExecutionBurstController, ExecutionBurstServer
from nnburst.burst.client import controller
from nnburst.burst.client.slots import SlotTable
from nnburst.burst.interfaces import BurstCallback, BurstContext
from nnburst.burst.polling import DATUM, default_polling_window, window_ns
from nnburst.burst.server import server
from nnburst.errors import ErrorStatus, GeneralFailure
from nnburst.fmq import MessageQueue, MQDescriptor
from support.local_burst import WINDOWS, Adder, LocalModel, bound
from support.waiting import PATIENCE, Background, meanwhile


@pytest.fixture
def model() -> LocalModel:
    return LocalModel()


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory.ashmem(4096) as memory:
        memory.array(np.float32, (4,))[:] = [1, 2, 3, 4]
        yield memory


class SilentService(LocalModel):
    """Leaves the server's ends of both channels to the test."""

    def configure_execution_burst(
        self,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        polling_window: float | None = None,
    ) -> BurstContext:
        self.requests = MessageQueue.attach(request_channel, DATUM)
        self.results = MessageQueue.attach(result_channel, DATUM)
        service = self

        class Context(BurstContext):
            def free_memory(self, slot: int) -> None: ...

            def close(self) -> None:
                service.requests.close()
                service.results.close()

        return Context()

    def answer(self, *datums: bytes) -> None:
        self.results.write_blocking(np.frombuffer(b"".join(datums), DATUM), timeout=PATIENCE)


def head(size: int, status: int = 0, operands: int = 0) -> bytes:
    return struct.pack("<B7xIiI4x", 0, size, status, operands)


TIMING = struct.pack("<B7xQQ", 3, 2**64 - 1, 2**64 - 1)
GOOD = head(2) + TIMING


@contextlib.contextmanager
def answered_by(service: SilentService, reply: Callable[[], Any]) -> Iterator[None]:
    """Have the service reply to one request."""

    def serve() -> None:
        service.requests.read_blocking(5, timeout=PATIENCE)
        reply()

    serving = Background(serve)
    yield
    assert serving.result() is None


@WINDOWS
@pytest.mark.parametrize(
    "packet",
    [
        head(3) + TIMING,
        head(1) + TIMING,
        head(0) + TIMING,
        head(2**32 - 1) + TIMING,
        TIMING + head(2),
        head(2, operands=2**32 - 1) + TIMING,
        head(3, operands=1) + struct.pack("<B7xB3xI8x", 1, 1, 2**32 - 1) + TIMING,
        head(3, operands=1) + struct.pack("<B7xB3xI8x", 1, 2, 0) + TIMING,
        head(2) + b"\xff" * 24,
        b"\xff" * 48,
        GOOD + b"\x01" * 24,
        bytes(24),
    ],
)
def test_malformed_result_is_a_failure_and_the_burst_lives(memory: Memory, packet: bytes, window: float) -> None:
    service = SilentService()
    with bound(service, memory, polling_window=window) as (controller, execution):
        for reply, expected in ((packet, GeneralFailure), (GOOD, None)):
            with answered_by(service, lambda reply=reply: service.answer(reply)):
                if expected is None:
                    execution.run()
                else:
                    with pytest.raises(expected) as caught:
                        execution.run()
                    assert "corrupted" not in str(caught.value)
        assert controller.stats.malformed == 1


@WINDOWS
def test_malformed_result_while_late_ones_are_due_ends_the_burst(memory: Memory, window: float) -> None:
    service = SilentService()
    with bound(service, memory, polling_window=window) as (_, execution):
        execution.timeout = 0.01
        with pytest.raises(MissedDeadline):
            execution.run()
        execution.timeout = PATIENCE
        with answered_by(service, lambda: service.answer(bytes(24))):
            for _ in range(2):  # nobody can tell any more which answer is whose
                with pytest.raises(GeneralFailure, match="corrupted"):
                    execution.run()


def test_unasked_result_is_dropped(memory: Memory) -> None:
    service = SilentService()
    with bound(service, memory) as (controller, execution):
        service.answer(head(2, 4) + TIMING)
        with answered_by(service, lambda: service.answer(GOOD)):
            execution.run()
        assert controller.stats.dropped == 1


def test_answer_that_wakes_nobody_is_found_all_the_same(memory: Memory) -> None:
    service = SilentService()
    with bound(service, memory, polling_window=0) as (_, execution):
        with answered_by(service, lambda: service.results.write(np.frombuffer(GOOD, DATUM))):
            execution.run()


@pytest.mark.parametrize("status", [5, 8, 9, -1, 2**31 - 1])
def test_status_beyond_the_list_is_a_general_failure(memory: Memory, status: int) -> None:
    service = SilentService()
    with bound(service, memory) as (_, execution):
        with answered_by(service, lambda: service.answer(head(2, status) + TIMING)):
            got = execution.execute()[0]
        assert got == (status if status in (5, 8) else ErrorStatus.GENERAL_FAILURE)


def test_peer_that_keeps_setting_bits_does_not_block_ctrl_c(memory: Memory) -> None:
    service = SilentService()
    with bound(service, memory, polling_window=0) as (_, execution):
        execution.timeout = 0.1
        with meanwhile(lambda: service.results.event_flag.wake(0x80000006)), pytest.raises(MissedDeadline):
            execution.run()


# ---- channels that cannot be used -------------------------------------------------------------------------------


def test_unusable_channels_are_refused() -> None:
    table = SlotTable()

    def create(request: MessageQueue, result: MessageQueue) -> None:
        with request.descriptor as a, result.descriptor as b, pytest.raises(InvalidArgument):
            ExecutionBurstServer.create(table, a, b, Adder())
        request.close()
        result.close()

    create(MessageQueue(np.uint8, 1024), MessageQueue(DATUM, 1024))
    create(MessageQueue(DATUM, 1024), MessageQueue(DATUM, 2))
    create(MessageQueue(DATUM, 64, event_flag=False, layout="compat"), MessageQueue(DATUM, 64))
    create(MessageQueue(DATUM, 64, flavour="unsynchronized"), MessageQueue(DATUM, 64))


def test_unsealed_channel_is_refused() -> None:
    good = MessageQueue(DATUM, 64)
    with good.descriptor as descriptor:
        fd = os.memfd_create("unsealed")
        os.ftruncate(fd, os.fstat(descriptor.fds[0]).st_size)
        bad = MQDescriptor(descriptor.grantors, [fd], descriptor.quantum, descriptor.flags)
        with pytest.raises(InvalidArgument, match="seal"):
            ExecutionBurstServer.create(SlotTable(), descriptor, bad, Adder())
        bad.close()
    good.close()


@pytest.mark.parametrize("wrong", [-1, float("nan"), 4000, float("inf")])
def test_polling_window_out_of_range_is_refused(model: LocalModel, wrong: float) -> None:
    with pytest.raises(InvalidArgument, match="polling_window"):
        ExecutionBurstController.create(model, polling_window=wrong)


def test_polling_window_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_POLLING_WINDOW_US", "12.5")
    assert default_polling_window() == pytest.approx(12.5e-6)
    monkeypatch.setenv("NNBURST_POLLING_WINDOW_US", "soon")
    with pytest.raises(InvalidArgument, match="NNBURST_POLLING_WINDOW_US"):
        default_polling_window()
    monkeypatch.delenv("NNBURST_POLLING_WINDOW_US")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert default_polling_window() == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert default_polling_window() == pytest.approx(50e-6)


@pytest.mark.parametrize(
    ("mine", "theirs", "seconds"),
    [({0}, {1}, 50e-6), ({0}, {0}, 0.0), ({0}, {0, 1}, 50e-6), ({0, 1}, {0}, 50e-6), ({3}, (), 0.0)],
)
def test_polling_window_depends_on_the_cpus_of_both_ends(
    monkeypatch: pytest.MonkeyPatch, mine: set[int], theirs: set[int], seconds: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mine)
    assert default_polling_window(theirs) == pytest.approx(seconds)


@pytest.mark.parametrize("apart", [True, False], ids=["a CPU each", "one CPU"])
def test_each_end_polls_if_the_other_one_has_another_cpu(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    windows: dict[Any, int] = {}

    def noted(end: Any, *how: Any) -> int:
        windows[end] = window_ns(*how)
        return windows[end]

    for end in (controller, server):
        monkeypatch.setattr(end, "window_ns", partial(noted, end))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    for peer in (SlotTable, ExecutionBurstServer):
        monkeypatch.setattr(peer, "cpus", frozenset({1 if apart else 0}))
    with ExecutionBurstController.create(model):
        assert {end: window > 0 for end, window in windows.items()} == {controller: apart, server: apart}


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_timeout_out_of_range_is_refused(model: LocalModel, memory: Memory, wrong: float) -> None:
    with bound(model, memory) as (_, execution):
        with pytest.raises(InvalidArgument, match="timeout"):
            execution.timeout = wrong
