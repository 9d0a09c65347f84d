"""REQ-FMQ: queues in one process, for every layout, one and two memory objects. What they hold: test_fmq_model.py.

Upstream's "invalid queue" is an exception here; upstream's "fails" is False or None. Deliberate deviations are said in
the test's docstring.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest

from nnburst.errors import InvalidArgument
from nnburst.fmq import Grantor, MessageQueue, MQDescriptor
from nnburst.fmq.descriptor import Dialect, Flavour
from support.waiting import PATIENCE

CAPACITY = 2048
FORMS = [(layout, fds) for layout in ("lines", "compat") for fds in (1, 2)]


@contextlib.contextmanager
def memfd(size: int) -> Iterator[int]:
    fd = os.memfd_create("ring", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def pattern(count: int, start: int = 0, dtype: Any = np.uint8) -> np.ndarray:
    return (np.arange(start, start + count) % 256).astype(dtype)


Make = Callable[..., MessageQueue]


@pytest.fixture(params=FORMS, ids=lambda form: f"{form[0]}-{form[1]}fd")
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes queues in one layout, with the ring in the same or in a second memory object."""
    layout, fds = request.param
    with contextlib.ExitStack() as stack:

        def create(dtype: Any = np.uint8, count: int = CAPACITY, **kw: Any) -> MessageQueue:
            if fds == 2:
                with memfd(np.dtype(dtype).itemsize * count) as ring:
                    return stack.enter_context(MessageQueue(dtype, count, layout=layout, ring_fd=ring, **kw))
            return stack.enter_context(MessageQueue(dtype, count, layout=layout, **kw))

        yield create


@pytest.fixture
def sync(make: Make) -> MessageQueue:
    return make()


@pytest.fixture(params=list(Flavour), ids=lambda flavour: flavour.name.lower())
def either(request: pytest.FixtureRequest, make: Make) -> MessageQueue:
    return make(flavour=request.param)


def changed(queue: MessageQueue, index: int, **fields: int) -> MQDescriptor:
    """The queue's descriptor with one grantor altered."""
    with queue.descriptor as d:
        grantors = list(d.grantors)
        grantors[index] = grantors[index]._replace(**fields)
        return MQDescriptor(grantors, map(os.dup, d.fds), d.quantum, d.flags)


def refused(descriptor: MQDescriptor, dtype: Any = np.uint8) -> None:
    with descriptor, pytest.raises(InvalidArgument):
        MessageQueue.attach(descriptor, dtype)


# -- construction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["lines", "compat"])
def test_REQ_FMQ_001_size_too_large_is_refused(layout: str) -> None:
    with pytest.raises(InvalidArgument):
        MessageQueue(np.uint16, (1 << 63), layout=layout)


def test_REQ_FMQ_002_overlapping_grantors_are_refused() -> None:
    """Deviation: upstream accepts three identical grantors. Counters inside the ring cannot be told from data."""
    with memfd(4096) as fd, MQDescriptor([(0, 0, 0, 4096)] * 3, [os.dup(fd)], 1, 1) as d:
        with pytest.raises(InvalidArgument):
            MessageQueue.attach(d, np.uint8)


def test_REQ_FMQ_003_fd_index_beyond_the_fds_is_refused(sync: MessageQueue) -> None:
    refused(changed(sync, 0, fd_index=5))


def test_REQ_FMQ_004_extent_beyond_the_memory_is_refused(sync: MessageQueue) -> None:
    refused(changed(sync, 0, extent=0xFFFFF041))


def test_REQ_FMQ_005_failed_creations_leak_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        with pytest.raises(InvalidArgument):
            MessageQueue(np.uint8, (1 << 64) // 4)
    with memfd(8) as ring:
        for _ in range(100):
            with pytest.raises(InvalidArgument):
                MessageQueue(np.uint8, 4096, ring_fd=ring)
    assert len(os.listdir("/proc/self/fd")) == before


def test_REQ_FMQ_006_size_beyond_the_signed_descriptor_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        MessageQueue(np.uint8, (1 << 63) // 2 + 1)
    with pytest.raises(InvalidArgument):
        MessageQueue(np.uint8, (1 << 31))


def test_REQ_FMQ_007_negative_quantum_is_refused(sync: MessageQueue) -> None:
    with sync.descriptor as d:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(InvalidArgument):
            MQDescriptor(d.grantors, map(os.dup, d.fds), -10, d.flags)
        assert len(os.listdir("/proc/self/fd")) == before, "owned fds are closed when refused"


@pytest.mark.parametrize("field", ["fd_index", "offset", "extent"])
def test_REQ_FMQ_008_negative_grantor_is_refused(sync: MessageQueue, field: str) -> None:
    with pytest.raises(InvalidArgument):
        changed(sync, 1, **{field: -10})


def test_REQ_FMQ_009_mismatched_element_size_is_refused(make: Make) -> None:
    queue = make(np.uint16)
    with queue.descriptor as d:
        MessageQueue.attach(d, np.uint16).close()
        refused(MQDescriptor(d.grantors, map(os.dup, d.fds), 8, d.flags), np.uint16)
        with pytest.raises(InvalidArgument):
            MessageQueue.attach(d, np.uint64)


def test_REQ_FMQ_010_ring_fd_that_is_not_open_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        MessageQueue(np.uint16, CAPACITY, ring_fd=3000)


def test_REQ_FMQ_011_ring_too_small_is_refused() -> None:
    with memfd(CAPACITY * 2 - 8) as ring, pytest.raises(InvalidArgument):
        MessageQueue(np.uint16, CAPACITY, ring_fd=ring)


def test_REQ_FMQ_012_larger_ring_is_fine() -> None:
    with memfd(CAPACITY * 2 + 8) as ring, MessageQueue(np.uint16, CAPACITY, ring_fd=ring) as queue:
        assert queue.capacity == CAPACITY
        assert queue.write(pattern(CAPACITY, dtype=np.uint16))


def convert(queue: MessageQueue, dialect: Dialect) -> MQDescriptor:
    """The queue's descriptor after a trip through a binary form of libfmq."""
    with queue.descriptor as d:
        grantors = d.unpack_grantors(d.pack_grantors(dialect), dialect)
        assert grantors == d.grantors
        return MQDescriptor(grantors, map(os.dup, d.fds), d.quantum, d.flags)


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_REQ_FMQ_013_014_converted_descriptor_reaches_the_same_queue(either: MessageQueue, dialect: Dialect) -> None:
    with (
        convert(either, dialect) as d,
        MessageQueue.attach(d, np.uint8) as one,
        MessageQueue.attach(d, np.uint8) as two,
    ):
        assert either.write([1, 2, 3, 4])
        assert one.read(4).tolist() == [1, 2, 3, 4]
        if either.flavour == "unsynchronized":  # readers are independent
            assert two.read(4).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_REQ_FMQ_015_conversion_keeps_fd_index_1(dialect: Dialect) -> None:
    grantors = [Grantor(0, 0, 0, 8), Grantor(0, 0, 8, 8), Grantor(0, 1, 0, 64)]
    with MQDescriptor(grantors, [], 1, 1) as d:
        assert d.unpack_grantors(d.pack_grantors(dialect), dialect)[2].fd_index == 1


def test_REQ_FMQ_016_conversion_keeps_both_fds() -> None:
    with memfd(64) as ring, MessageQueue(np.uint8, 64, ring_fd=ring) as queue, convert(queue, "aidl") as d:
        assert [os.fstat(fd).st_ino for fd in d.fds][1] == os.fstat(ring).st_ino
        assert len({os.fstat(fd).st_ino for fd in d.fds}) == 2


class Colour(enum.IntEnum):
    RED = 3


TYPES: dict[str, tuple[Any, Any]] = {
    "bool": ("?", True),
    "int8": ("i1", -7),
    "char": ("S1", b"c"),
    "char16": ("U1", "ж"),
    "int32": ("i4", -70000),
    "int64": ("i8", 1 << 40),
    "float": ("f4", 0.5),
    "double": ("f8", 0.1),
    "enum": ("i4", Colour.RED),
    "struct": ([("a", "i4"), ("b", "f8", (2,))], (1, (2.0, 3.0))),
    "union": ({"names": ["i", "f"], "formats": ["u4", "f4"], "offsets": [0, 0]}, (0x3F800000, 1.0)),
    "datetime": ("M8[us]", np.datetime64("2024-01-01", "us")),
}


@pytest.mark.parametrize("name", TYPES)
def test_REQ_FMQ_017_every_fixed_size_type_makes_a_round_trip(make: Make, name: str) -> None:
    dtype, value = TYPES[name]
    queue = make(np.dtype(dtype), 64)
    element = np.array([value], dtype)
    assert queue.write(element)
    assert queue.read(1) == element


@pytest.mark.parametrize("dtype", ["O", [("a", "O")], "V0", "S0", np.dtype(("f4", (2,)))], ids=str)
def test_REQ_FMQ_017_types_that_cannot_live_in_shared_memory_are_refused(dtype: Any) -> None:
    with pytest.raises(InvalidArgument):
        MessageQueue(dtype, 16)


def test_REQ_FMQ_018_regions_tell_their_byte_length(make: Make) -> None:
    queue = make(np.uint32, 16)
    with queue.begin_write(5) as tx:
        assert (tx.first.nbytes, tx.second.nbytes) == (20, 0)


def test_REQ_FMQ_035_odd_size_has_an_aligned_event_word(make: Make) -> None:
    queue = make(count=2049)
    queue.write_blocking(pattern(2049), PATIENCE)
    assert np.array_equal(queue.read_blocking(2049, PATIENCE), pattern(2049))


def test_REQ_FMQ_053_overflow_between_begin_and_commit_voids_the_read(make: Make) -> None:
    queue = make(np.uint16, flavour="unsynchronized")
    assert queue.write(np.arange(CAPACITY, dtype=np.uint16))
    tx = queue.begin_read(CAPACITY)
    assert queue.write([CAPACITY])
    assert not tx.commit()
    assert (queue.overruns, queue.available_to_read) == (1, CAPACITY // 2)
    assert queue.read(CAPACITY // 2).tolist() == list(range(CAPACITY // 2 + 1, CAPACITY + 1))
