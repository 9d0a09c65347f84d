"""Queue and event flag, inside one process: what the calls cost without a second core in play."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nnburst._core._nnburst import ffi, lib
from nnburst._core.errno import check
from nnburst.fmq import EventFlag, MessageQueue

DATUM = np.dtype("V24")


@pytest.fixture
def queue() -> Iterator[MessageQueue]:
    with MessageQueue(np.uint64, 1024, exclusive=False) as queue:
        yield queue


def test_bench_c_queue_write_and_read_of_a_packet(benchmark: Any) -> None:
    packet = np.zeros(7 * DATUM.itemsize, dtype=np.uint8)
    with MessageQueue(DATUM, 1024) as queue:
        handle, data = queue.handle, ffi.from_buffer("uint8_t[]", packet)
        write, read = lib.nnb_mq_write, lib.nnb_mq_read

        def write_and_read() -> int:
            return int(write(handle, data, 7) or read(handle, data, 7))

        assert benchmark(write_and_read) == 0


@pytest.mark.usefixtures("two_cpus")
def test_bench_c_queue_round_trip_between_two_threads(benchmark: Any) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    samples = np.zeros(1000, dtype=np.uint32)
    out = ffi.from_buffer("uint32_t[]", samples)
    benchmark(lambda: check(lib.nnb_bench_queue(cpus[0], cpus[1], 7, 4, 1100, len(samples), out)))
    assert (samples > 0).all()


def test_bench_message_queue_write_and_read(benchmark: Any, queue: MessageQueue, words: Any) -> None:
    answer = np.zeros_like(words)

    def write_and_read() -> object:
        queue.write(words)
        return queue.read(out=answer)

    assert (benchmark(write_and_read) == words).all()


def test_bench_message_queue_zero_copy_write_and_read(benchmark: Any, queue: MessageQueue, words: Any) -> None:
    def write_and_read() -> int:
        with_room = queue.begin_write(4)
        assert with_room is not None
        with_room.copy_to(words)
        with_room.commit()
        with_data = queue.begin_read(4)
        assert with_data is not None
        last = int(with_data[3])
        with_data.commit()
        return last

    assert benchmark(write_and_read) == words[3]


def test_bench_event_flag_wake_nobody_and_take(benchmark: Any, queue: MessageQueue) -> None:
    flag = EventFlag(queue)

    def wake_and_wait() -> int:
        flag.wake(2)
        return flag.wait(2)

    assert benchmark(wake_and_wait) == 2
