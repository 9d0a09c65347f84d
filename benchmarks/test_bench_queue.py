"""Benchmarks of the queue and the event flag inside one process, without a second CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nnburst._core._nnburst import ffi, lib
from nnburst.cli.bench.rounds import allowed_cpus
from nnburst.fmq import EventFlag, MessageQueue

from .record.queues import queue_samples

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
    assert (benchmark(lambda: queue_samples(allowed_cpus(), 7, 4, 1000)) > 0).all()


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
