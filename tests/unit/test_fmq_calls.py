"""Small reads and writes of a MessageQueue, which are one call of C: what they take, what they hold, what they cost."""

from __future__ import annotations

import gc
import itertools
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from nnburst._core._nnburst import queue_calls
from nnburst.errors import InvalidArgument
from nnburst.fmq import MessageQueue
from support.processes import mappings

WORD = np.dtype("u8")


@pytest.fixture
def queue() -> Iterator[MessageQueue]:
    with MessageQueue(WORD, 8) as queue:
        yield queue


@pytest.fixture
def no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a call by cffi fail."""
    monkeypatch.delattr(MessageQueue, "_source")
    monkeypatch.delattr(MessageQueue, "_output_array")


@pytest.mark.usefixtures("no_other_way")
@pytest.mark.parametrize("flavour", ["synchronized", "unsynchronized"])
def test_arrays_bytes_and_counts_of_elements_need_one_call(flavour: str) -> None:
    out, twice = np.zeros(4, WORD), np.dtype([("a", "u4"), ("b", "u4")])
    with MessageQueue(WORD, 8, flavour=flavour) as queue, MessageQueue(twice, 4) as pairs:
        assert queue.read(out=out) is None
        assert queue.read(1) is queue.read() is None
        assert queue.write(np.arange(4, dtype=WORD))
        assert queue.write(np.arange(4, 8, dtype=pickle.loads(pickle.dumps(WORD))))
        if flavour == "synchronized":
            assert queue.write(out) is queue.write(bytes(8)) is False
        assert queue.read(out=out[:3]).tolist() == [0, 1, 2]
        assert queue.read(out=np.zeros((2, 2), WORD)).tolist() == [[3, 4], [5, 6]]
        assert queue.read(1).tolist() == [7]
        assert queue.write(bytes(range(16)))
        assert queue.read(2).tobytes() == bytes(range(16))
        assert queue.read(0).size == 0
        assert pairs.write(np.array([(1, 2), (3, 4)], twice))
        assert pairs.read(2).tolist() == [(1, 2), (3, 4)]


@pytest.mark.usefixtures("no_other_way")
def test_reader_that_was_overtaken_is_told_in_one_call() -> None:
    with MessageQueue(WORD, 8, flavour="unsynchronized") as queue:
        for start in range(0, 24, 8):
            assert queue.write(np.arange(start, start + 8, dtype=WORD))
        assert queue.read(4) is None
        assert queue.overruns == 1
        assert queue.read(4).tolist() == [20, 21, 22, 23]


class _Words(np.ndarray):
    pass


@pytest.mark.parametrize(
    "data",
    [
        np.arange(3, dtype=WORD).view(_Words),
        np.arange(6, dtype=WORD)[::2] // 2,
        np.arange(6, dtype=WORD)[::2],
        bytearray(np.arange(3, dtype=WORD)),
        memoryview(np.arange(3, dtype=WORD)),
        [0, 1, 2],
        range(3),
    ],
    ids=lambda data: type(data).__name__,
)
def test_other_data_goes_the_other_way(queue: MessageQueue, data: Any) -> None:
    assert queue.write(data)
    words = np.asarray(data).view(WORD) if isinstance(data, (bytearray, memoryview)) else np.asarray(data)
    assert queue.read(np.int64(3)).tolist() == words.tolist()


@pytest.mark.parametrize("out", [bytearray(8), memoryview(np.zeros(1, WORD)), [0]])
def test_target_that_is_no_array_is_refused(queue: MessageQueue, out: Any) -> None:
    for read in (queue.read, partial(queue.read_blocking, timeout=0)):
        with pytest.raises(InvalidArgument, match="out must be a writable, contiguous array of uint64"):
            read(out=out)


@pytest.mark.parametrize("dtype", ["M8[s]", ">u8", "V8", "U2", "f8"])
def test_type_of_another_meaning_is_refused_and_the_own_is_carried(dtype: str) -> None:
    with MessageQueue(dtype, 8) as queue:
        with pytest.raises(InvalidArgument, match="holds"):
            queue.write(np.zeros(1, WORD))
        with pytest.raises(InvalidArgument, match="out must be"):
            queue.read(out=np.zeros(1, WORD))
        data = np.frombuffer(bytes(range(3 * queue.quantum)) if dtype != "U2" else "abcdef".encode("utf-32-le"), dtype)
        assert queue.write(data)
        assert queue.read(out=np.zeros(3, dtype)).tobytes() == data.tobytes()


def test_array_that_is_too_large_is_refused_before_it_is_copied(queue: MessageQueue) -> None:
    huge = np.broadcast_to(np.zeros(1, WORD), 1 << 40)
    for write in (queue.write, partial(queue.write_blocking, timeout=0)):
        with pytest.raises(InvalidArgument, match="exceeds the capacity of 8"):
            write(huge)


def test_number_is_no_target(queue: MessageQueue) -> None:
    assert queue.write(np.zeros(3, WORD))
    with pytest.raises(InvalidArgument, match="out must be"):
        queue.read(out=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        queue.read(np.zeros(3, WORD))  # type: ignore[arg-type]
    assert queue.available_to_read == 3


def _peak(call: Callable[[], object]) -> int:
    """Bytes that 100 calls in turn allocate at most at a time."""
    times = itertools.repeat(None, 100)
    tracemalloc.start()
    try:
        for _ in times:
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_miss_allocates_nothing(queue: MessageQueue) -> None:
    out = np.zeros(4, WORD)
    with MessageQueue(WORD, 8) as full:
        assert full.write(np.zeros(8, WORD))
        for miss in (lambda: queue.read(out=out), lambda: queue.read(4), lambda: full.write(out)):
            assert not miss()
            assert min(_peak(miss) for _ in range(9)) == 0, "once the interpreter has settled"


def test_calls_keep_no_reference_to_what_they_are_given(queue: MessageQueue) -> None:
    array, wrong, frozen, data = np.zeros(1, WORD), np.zeros(1, "i4"), np.zeros(1, WORD), bytes(8)
    frozen.flags.writeable = False
    things = (array, wrong, frozen, data, queue.dtype, None, True, False, NotImplemented, np.ndarray, np.empty)
    write, read = queue._handle.write, queue._handle.read
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(50):
        for thing in (array, wrong, data, None, 1):
            write(thing)
            write(thing)
        for thing in (array, wrong, frozen, data, None, 1, 2, -1, 1 << 80, True):
            read(thing)
            read(thing)
        while queue.read(out=array) is not None:
            pass
    after = [sys.getrefcount(thing) for thing in things]
    assert all(abs(now - then) < 10 for now, then in zip(after, before, strict=True)), (before, after)


def test_call_that_is_under_way_keeps_the_memory_of_a_closed_queue() -> None:
    gc.collect()
    before = mappings("MessageQueue")
    queue = MessageQueue(WORD, 8)
    read = queue._handle.read
    queue.close()
    assert mappings("MessageQueue") == before + 1
    assert read(np.zeros(1, WORD)) is None
    del read
    assert mappings("MessageQueue") == before


def test_arrays_that_look_otherwise_are_left_to_cffi(queue: MessageQueue) -> None:
    probe = np.zeros(2, WORD)
    start = probe.__array_interface__["data"][0]
    bound = (0, None, WORD, np.ndarray, np.empty)
    assert queue_calls(bound, probe, start) is not None
    frozen = probe.view()
    frozen.flags.writeable = False
    for array, address in ((probe, start + 8), (probe[:1], start), (probe[None], start), (frozen, start)):
        assert queue_calls(bound, array, address) is None
    assert queue_calls((0, None, np.dtype("i8"), np.ndarray, np.empty), probe, start) is None
