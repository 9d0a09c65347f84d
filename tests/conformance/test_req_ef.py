"""REQ-EF: event flags and blocking transfers between two threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nnburst import Memory
from nnburst.errors import MissedDeadline
from nnburst.fmq import NOT_EMPTY, NOT_FULL, EventFlag, MessageQueue
from support.processes import wait_until_asleep
from support.waiting import PATIENCE

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
