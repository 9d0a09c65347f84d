"""REQ-IPC: both ends of a queue in processes of their own, for every layout."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nnburst._core._nnburst import ffi, lib
from nnburst.errors import GeneralFailure, InvalidArgument
from nnburst.fmq import MessageQueue
from support.processes import wait_until_asleep
from support.queue_peer import QueuePeer
from support.waiting import PATIENCE, Background

PAGE = resource.getpagesize()
CAPACITY = (PAGE - 16) // 4
UNSYNC_CAPACITY = 1024


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[QueuePeer, QueuePeer]]:
    """Two processes that serve all tests of this module."""
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(contextlib.closing(QueuePeer())) for _ in range(2))


@pytest.fixture(params=[("lines", 1), ("lines", 2), ("compat", 1), ("compat", 2)], ids=lambda p: f"{p[0]}-{p[1]}fd")
def form(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@contextlib.contextmanager
def new_queue(form: tuple[str, int], count: int, flavour: str) -> Iterator[MessageQueue]:
    layout, fds = form
    ring = None
    if fds == 2:
        ring = os.memfd_create("ring")
        os.ftruncate(ring, count * 4)
    try:
        with MessageQueue(np.int32, count, layout=layout, flavour=flavour, ring_fd=ring) as q:
            yield q
    finally:
        if ring is not None:
            os.close(ring)


@pytest.fixture
def peer(peers: tuple[QueuePeer, QueuePeer]) -> Iterator[QueuePeer]:
    yield peers[0]
    peers[0].call("close")


@pytest.fixture
def queue(form: tuple[str, int], peer: QueuePeer) -> Iterator[MessageQueue]:
    """A synchronized queue that the peer has attached to."""
    with new_queue(form, CAPACITY, "synchronized") as q:
        peer.attach(q.descriptor)
        yield q


@pytest.fixture
def unsync(form: tuple[str, int], peer: QueuePeer) -> Iterator[MessageQueue]:
    """An unsynchronized queue that the peer has attached to."""
    with new_queue(form, UNSYNC_CAPACITY, "unsynchronized") as q:
        peer.attach(q.descriptor)
        yield q


@pytest.fixture(params=["synchronized", "unsynchronized"])
def either(request: pytest.FixtureRequest, form: tuple[str, int], peer: QueuePeer) -> Iterator[MessageQueue]:
    """A queue of each flavour that the peer has attached to."""
    with new_queue(form, CAPACITY, request.param) as q:
        peer.attach(q.descriptor)
        yield q


@pytest.fixture
def readers(
    form: tuple[str, int], peers: tuple[QueuePeer, QueuePeer]
) -> Iterator[tuple[MessageQueue, QueuePeer, QueuePeer]]:
    """An unsynchronized queue with readers in two processes."""
    with new_queue(form, UNSYNC_CAPACITY, "unsynchronized") as q:
        for p in peers:
            p.attach(q.descriptor)
        yield q, *peers
        for p in peers:
            p.call("close")


def numbers(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


# -- blocking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [(PATIENCE,), ()], ids=["REQ_IPC_001", "REQ_IPC_002"])
def test_REQ_IPC_001_002_write_reaches_a_blocked_reader_and_a_full_write_follows(
    queue: MessageQueue, peer: QueuePeer, timeout: tuple[float, ...]
) -> None:
    peer.start("read_blocking", 0, 64, PATIENCE)
    wait_until_asleep(peer.pid)
    queue.write_blocking(numbers(64), *timeout)
    queue.write_blocking(numbers(CAPACITY), PATIENCE)
    assert peer.finish() == 1


@pytest.mark.parametrize(
    ("writes", "read_size"),
    [
        pytest.param(CAPACITY, 64, id="REQ_IPC_003"),
        pytest.param(CAPACITY, 128, id="REQ_IPC_004"),
        pytest.param(1024, 32, id="REQ_IPC_005"),
    ],
)
def test_REQ_IPC_003_004_005_many_blocking_writes_meet_blocking_reads(
    queue: MessageQueue, peer: QueuePeer, writes: int, read_size: int
) -> None:
    reads = writes * 64 // read_size
    peer.start("read_blocking", 0, read_size, PATIENCE, reads)
    for i in range(writes):
        queue.write_blocking(numbers(64, i * 64), PATIENCE)
    assert peer.finish() == reads
    queue.write_blocking(numbers(CAPACITY), PATIENCE)


def test_REQ_IPC_006_zero_elements_need_neither_data_nor_room(queue: MessageQueue, peer: QueuePeer) -> None:
    queue.write_blocking(numbers(0))
    assert queue.read_blocking(0).size == 0
    assert queue.write(numbers(CAPACITY))
    queue.write_blocking(numbers(0))
    assert peer.call("read_blocking", 0, 0, None) == 1


# -- synchronized -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        pytest.param(16, 1, id="REQ_IPC_007_031"),
        pytest.param(CAPACITY, 1, id="REQ_IPC_015_035"),
        pytest.param(500, 5, id="REQ_IPC_018_038"),
    ],
)
def test_REQ_IPC_007_015_018_031_035_038_peer_writes_we_read(
    either: MessageQueue, peer: QueuePeer, count: int, parts: int
) -> None:
    assert peer.call("write", 0, count)
    assert np.array_equal(np.concatenate([either.read(count // parts) for _ in range(parts)]), numbers(count))


def test_REQ_IPC_008_peer_writes_we_read_in_place(queue: MessageQueue, peer: QueuePeer) -> None:
    assert peer.call("begin_write", 5, 16) == [16, 0]
    with queue.begin_read(16) as tx:
        assert np.array_equal(tx.copy_from(), numbers(16, 5))


def test_REQ_IPC_009_we_write_peer_reads_and_the_room_comes_back(queue: MessageQueue, peer: QueuePeer) -> None:
    room = queue.available_to_write
    assert queue.write(numbers(16))
    assert queue.available_to_write == room - 16
    assert peer.call("read", 16) == list(range(16))
    assert queue.available_to_write == room


def test_REQ_IPC_010_we_write_in_place_peer_reads(queue: MessageQueue, peer: QueuePeer) -> None:
    room = queue.available_to_write
    with queue.begin_write(16) as tx:
        tx.copy_to(numbers(16))
    assert peer.call("begin_read", 16) == list(range(16))
    assert queue.available_to_write == room


def forge_write_counter(queue: MessageQueue, value: int) -> None:
    lib.nnb_mq_write_counter(queue.handle)[0] = value


def test_REQ_IPC_011_misaligned_write_counter_makes_the_peers_write_fail(queue: MessageQueue, peer: QueuePeer) -> None:
    forge_write_counter(queue, CAPACITY * 4 - 1)
    with pytest.raises(GeneralFailure):
        peer.call("write", 0, 1)
    assert peer.call("error_count") == 1
    forge_write_counter(queue, 0)
    with pytest.raises(GeneralFailure):  # corruption is for good
        peer.call("write", 0, 1)


def test_REQ_IPC_012_misaligned_write_counter_tells_the_error_handler(queue: MessageQueue) -> None:
    told: list[str] = []
    queue.set_error_handler(told.append)
    forge_write_counter(queue, CAPACITY * 4 - 1)
    with pytest.raises(GeneralFailure):
        queue.write([1])
    assert told == ["a shared counter has an impossible value"]
    assert queue.available_to_write == 0
    assert len(told) == 2
    queue.set_error_handler(None)
    assert queue.available_to_write == 0
    assert len(told) == 2


def test_REQ_IPC_013_033_read_when_empty_fails(either: MessageQueue, peer: QueuePeer) -> None:
    assert either.available_to_read == 0
    assert either.read(2) is None
    assert peer.call("read", 2) is None


def test_REQ_IPC_014_017_write_when_full_fails_and_the_peer_reads_all(queue: MessageQueue, peer: QueuePeer) -> None:
    assert queue.write(numbers(CAPACITY))
    assert queue.available_to_write == 0
    assert not queue.write([1])
    assert not queue.write(numbers(CAPACITY, 77))
    assert peer.call("read", CAPACITY) == list(range(CAPACITY))


def test_REQ_IPC_016_036_write_beyond_capacity_fails(either: MessageQueue, peer: QueuePeer) -> None:
    with pytest.raises(InvalidArgument):
        peer.call("write", 0, CAPACITY + 1)
    with pytest.raises(InvalidArgument):
        either.write(numbers(CAPACITY + 1))
    assert either.available_to_read == 0
    assert either.read(1) is None
    assert peer.call("read", 1) is None


def test_REQ_IPC_019_039_writes_in_parts_are_read_at_once(either: MessageQueue, peer: QueuePeer) -> None:
    for i in range(5):
        assert either.write(numbers(100, 100 * i))
    assert peer.call("available")[0] == 500
    assert peer.call("read", 500) == list(range(500))


def test_REQ_IPC_020_040_wrap_around(either: MessageQueue, peer: QueuePeer) -> None:
    half = CAPACITY // 2
    assert either.write(numbers(half))
    assert peer.call("read", half) == list(range(half))
    assert either.write(numbers(CAPACITY))
    assert peer.call("read", CAPACITY) == list(range(CAPACITY))


def test_REQ_IPC_021_wrap_around_through_slots(queue: MessageQueue, peer: QueuePeer) -> None:
    half = CAPACITY // 2
    assert queue.write(numbers(half))
    assert peer.call("read", half) == list(range(half))
    with queue.begin_write(CAPACITY) as tx:
        assert len(tx.first) + len(tx.second) == CAPACITY
        assert len(tx.second) == half
        for i in range(CAPACITY):
            tx[i] = i
    assert peer.call("read", CAPACITY) == list(range(CAPACITY))


# -- unsynchronized ---------------------------------------------------------------------------------------------------


def test_REQ_IPC_030_readers_recover_from_an_overflow_early_and_late(
    form: tuple[str, int], peers: tuple[QueuePeer, QueuePeer]
) -> None:
    early, late = peers
    with new_queue(form, UNSYNC_CAPACITY, "unsynchronized") as q:
        early.attach(q.descriptor)
        assert q.write(numbers(UNSYNC_CAPACITY))
        assert q.write([UNSYNC_CAPACITY])
        assert early.call("read", UNSYNC_CAPACITY) is None
        assert q.write([UNSYNC_CAPACITY + 1])
        half = UNSYNC_CAPACITY // 2
        newest = list(range(UNSYNC_CAPACITY + 1 - half, UNSYNC_CAPACITY + 2))
        assert early.call("read", half + 1) == newest
        late.attach(q.descriptor)
        assert late.call("read", 1) is None
        assert q.write([UNSYNC_CAPACITY + 2])
        assert late.call("read", half + 1) == [n + 1 for n in newest]
        for p in peers:
            p.call("close")


def test_REQ_IPC_032_peer_reads_its_own_writes(unsync: MessageQueue, peer: QueuePeer) -> None:
    assert peer.call("write", 0, 16)
    assert peer.call("read", 16) == list(range(16))


def test_REQ_IPC_034_write_when_full_succeeds_and_the_peers_read_fails(unsync: MessageQueue, peer: QueuePeer) -> None:
    assert unsync.write(numbers(UNSYNC_CAPACITY))
    assert unsync.available_to_write == 0
    assert unsync.write([1])
    assert peer.call("read", UNSYNC_CAPACITY) is None


def test_REQ_IPC_037_one_more_write_after_recovery_is_no_new_overflow(unsync: MessageQueue, peer: QueuePeer) -> None:
    assert unsync.write(numbers(UNSYNC_CAPACITY))
    assert unsync.write([UNSYNC_CAPACITY])
    assert peer.call("read", 1) is None
    assert unsync.write([UNSYNC_CAPACITY + 1])
    half = UNSYNC_CAPACITY // 2
    assert peer.call("read", half + 1) == list(range(half + 1, UNSYNC_CAPACITY + 2))


def test_REQ_IPC_041_042_two_readers_get_the_same_and_notice_the_overflow(readers: Any) -> None:
    queue, one, two = readers
    assert queue.write(numbers(16))
    assert one.call("read", 16) == two.call("read", 16) == list(range(16))
    assert queue.write(numbers(UNSYNC_CAPACITY))
    assert queue.write([1])
    assert one.call("read", UNSYNC_CAPACITY) is None
    assert two.call("read", UNSYNC_CAPACITY) is None


def test_REQ_IPC_043_descriptor_without_write_access_serves_readers(form: tuple[str, int], peer: QueuePeer) -> None:
    with new_queue(form, UNSYNC_CAPACITY, "unsynchronized") as q:
        with q.descriptor as full:
            peer.attach(full.without_write_access())
        assert peer.call("read_only")
        assert q.write(numbers(16))
        assert peer.call("read", 16) == list(range(16))
        with pytest.raises(InvalidArgument):
            peer.call("write", 0, 1)


def test_REQ_IPC_043_synchronized_queue_refuses_read_only_memory(form: tuple[str, int], peer: QueuePeer) -> None:
    with new_queue(form, CAPACITY, "synchronized") as q, q.descriptor as full:
        read_only = full.without_write_access()
        with pytest.raises(GeneralFailure):
            peer.attach(read_only)


# -- second bindings of upstream --------------------------------------------------------------------------------------


def test_REQ_IPC_044_attached_copy_in_a_thread_reads_first(form: tuple[str, int]) -> None:
    with new_queue(form, CAPACITY, "synchronized") as q:
        assert q.write(numbers(4))

        def first() -> list[int]:
            with q.descriptor as d, MessageQueue.attach(d, np.int32) as copy:
                return copy.read(1).tolist()  # type: ignore[no-any-return]

        assert Background(first).result() == [0]
        assert q.read(3).tolist() == [1, 2, 3]


def test_REQ_IPC_045_scoped_write_commits_at_the_end_of_the_block(queue: MessageQueue, peer: QueuePeer) -> None:
    with pytest.raises(ZeroDivisionError), queue.begin_write(16):
        raise ZeroDivisionError
    assert queue.available_to_read == 0, "an exception in the block commits nothing"
    with queue.begin_write(16) as tx:
        tx.copy_to(numbers(16))
        assert peer.call("available")[0] == 0
    assert peer.call("read", 16) == list(range(16))


def test_REQ_IPC_046_region_views_equal_the_data(queue: MessageQueue) -> None:
    assert queue.write([1, 2, 3])
    tx = queue.begin_read(3)
    assert tx.first.tolist() == [1, 2, 3]
    assert not tx.first.flags.writeable


def test_REQ_IPC_047_empty_regions_are_empty_views(queue: MessageQueue) -> None:
    tx = queue.begin_read(0)
    assert (tx.first.size, tx.second.size, len(tx)) == (0, 0, 0)
    assert tx.commit()
    region = ffi.new("nnb_mq_region *")
    assert lib.nnb_mq_begin_read(queue.handle, 1, region) < 0
    assert region.first == ffi.NULL
    assert region.second == ffi.NULL
