"""EventFlag beyond the REQ-EF list: arguments, one round, several waiters."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nnburst import Memory
from nnburst.errors import BadState, InvalidArgument
from nnburst.fmq import EventFlag, MessageQueue
from support.waiting import PATIENCE


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
