"""REQ-EF: event flags and blocking transfers between two threads; arguments, one round, several waiters."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nnburst import Memory
from nnburst.errors import BadState, InvalidArgument, MissedDeadline
from nnburst.fmq import EventFlag, MessageQueue
from support.processes import wait_until_asleep
from support.waiting import PATIENCE

NOT_FULL, NOT_EMPTY = EventFlag.NOT_FULL, EventFlag.NOT_EMPTY
SHORT = 1e-9


@pytest.fixture(params=["lines", "compat"])
def queue(request: pytest.FixtureRequest) -> Iterator[MessageQueue]:
    with MessageQueue(np.uint8, 2048, layout=request.param) as q:
        yield q


@pytest.fixture
def other_thread() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def test_REQ_EF_001_reader_is_woken_by_the_writer(queue: MessageQueue, other_thread: Any) -> None:
    flag = queue.event_flag

    def reader() -> np.ndarray:
        while (data := queue.read(64)) is None:
            assert flag.wait(NOT_EMPTY, PATIENCE) == NOT_EMPTY
        flag.wake(NOT_FULL)
        return data

    result = other_thread(reader)
    wait_until_asleep(os.getpid())
    assert not result.done()
    assert queue.write(np.arange(64, dtype=np.uint8))
    flag.wake(NOT_EMPTY)
    assert result.result(PATIENCE).tolist() == list(range(64))
    assert flag.wait(NOT_FULL, PATIENCE) == NOT_FULL


@pytest.mark.parametrize("with_own_word", [True, False])
def test_REQ_EF_002_blocking_calls_with_an_external_flag(
    with_own_word: bool, other_thread: Any, queue: MessageQueue
) -> None:
    with Memory.ashmem(64) as memory, MessageQueue(np.uint8, 2048, layout="compat", event_flag=with_own_word) as q:
        flag = EventFlag(memory.buffer, 4)
        result = other_thread(q.read_blocking, 64, PATIENCE, event_flag=flag)
        q.write_blocking(np.arange(64, dtype=np.uint8), PATIENCE, event_flag=flag)
        assert result.result(PATIENCE).tolist() == list(range(64))
        assert memory.array(np.uint32, (2,))[0] == 0, "only the word at offset 4 is used"
        if with_own_word:
            with pytest.raises(MissedDeadline):
                q.event_flag.wait(NOT_EMPTY | NOT_FULL, 0)


def test_REQ_EF_003_wait_for_a_bit_that_nobody_sets_times_out(queue: MessageQueue) -> None:
    begin = time.monotonic()
    with pytest.raises(MissedDeadline):
        queue.event_flag.wait(NOT_EMPTY, 1.0)
    assert time.monotonic() - begin >= 1.0


def test_REQ_EF_004_pending_bit_wins_over_a_short_timeout(queue: MessageQueue) -> None:
    flag = queue.event_flag
    flag.wake(NOT_EMPTY)
    assert flag.wait(NOT_EMPTY, SHORT, True) == NOT_EMPTY


def test_REQ_EF_005_short_timeout_without_a_bit(queue: MessageQueue) -> None:
    with pytest.raises(MissedDeadline):
        queue.event_flag.wait(NOT_EMPTY, SHORT, True)


@pytest.mark.parametrize("bits", [(NOT_FULL, NOT_EMPTY), (NOT_EMPTY, NOT_FULL), (0, 4), (1 << 31, 1 << 30)])
def test_REQ_EF_006_data_present_wins_over_a_short_timeout(queue: MessageQueue, bits: tuple[int, int]) -> None:
    assert queue.write([1, 2, 3])
    data = queue.read_blocking(3, SHORT, read_notification=bits[0], write_notification=bits[1])
    assert data.tolist() == [1, 2, 3]


# ---- beyond the list -----------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory.ashmem(64) as m:
        yield m


@pytest.fixture
def word(memory: Memory) -> np.ndarray:
    return memory.array(np.uint32, (1,), 8)


@pytest.fixture
def flag(memory: Memory) -> EventFlag:
    return EventFlag(memory.buffer, 8)


def test_wake_sets_bits_and_wait_consumes_only_its_own(flag: EventFlag, word: np.ndarray) -> None:
    flag.wake(0b1011)
    assert word[0] == 0b1011
    assert flag.wait(0b0110, 0) == 0b0010
    assert word[0] == 0b1001
    assert flag.wait(0xFFFFFFFF) == 0b1001
    assert word[0] == 0


@pytest.mark.parametrize("mask", [-1, 1 << 32])
def test_mask_has_32_bits_and_to_wait_for_none_is_refused(flag: EventFlag, word: np.ndarray, mask: int) -> None:
    for call in (flag.wait, flag.wake):
        with pytest.raises(InvalidArgument):
            call(mask)
    with pytest.raises(InvalidArgument):
        flag.wait(0, 0)
    flag.wake(0)
    assert word[0] == 0
    flag.wake(0x80000000)
    assert flag.wait(0x80000000, 0) == 0x80000000


def test_huge_and_infinite_timeouts_wait_for_the_bit(flag: EventFlag) -> None:
    for timeout in (1e30, float("inf")):
        timer = threading.Timer(0.01, flag.wake, [4])
        timer.start()
        assert flag.wait(4, timeout) == 4
        timer.join()
    with pytest.raises(InvalidArgument):
        flag.wait(4, float("nan"))


def test_one_round_comes_back_after_a_signal_and_retry_does_not(flag: EventFlag) -> None:
    ticks: list[int] = []

    def tick(number: int, frame: object) -> None:
        ticks.append(number)
        if len(ticks) == 5:
            flag.wake(1)

    previous = signal.signal(signal.SIGALRM, tick)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        assert flag.wait(1, PATIENCE, retry=False) == 0
        assert flag.wait(1, PATIENCE, retry=True) == 1
        assert len(ticks) >= 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_flag_of_a_queue_is_the_word_of_its_descriptor(memory: Memory) -> None:
    with MessageQueue("u1", 4) as queue, queue.descriptor as d, MessageQueue.attach(d) as other:
        queue.event_flag.wake(8)
        assert EventFlag(other).wait(8, 0) == 8


def test_flag_keeps_the_memory_of_a_closed_queue_mapped() -> None:
    queue = MessageQueue("u1", 4)
    flag = queue.event_flag
    queue.close()
    flag.wake(1)
    assert flag.wait(1, 0) == 1


BAD_SOURCES: dict[str, Any] = {
    "none": (None, 0),
    "read-only": (bytes(8), 0),
    "no buffer": (17, 0),
    "too small": (bytearray(3), 0),
    "beyond the end": (bytearray(8), 8),
    "negative offset": (bytearray(8), -4),
    "misaligned": (np.zeros(8, np.uint32).view(np.uint8), 2),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources_are_refused(case: str) -> None:
    source, offset = BAD_SOURCES[case]
    with pytest.raises(InvalidArgument):
        EventFlag(source, offset)


def test_queue_without_event_word_has_no_flag() -> None:
    with MessageQueue("u1", 4, layout="compat", event_flag=False) as queue, pytest.raises(InvalidArgument):
        EventFlag(queue)


def test_closed_flag_is_bad_state(flag: EventFlag) -> None:
    with flag:
        pass
    flag.close()
    with pytest.raises(BadState):
        flag.wake(1)
    with pytest.raises(BadState):
        flag.wait(1, 0)
