"""MessageQueue: life cycle, arguments, corruption."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nnburst._core._nnburst import lib
from nnburst.errors import BadState, GeneralFailure, InvalidArgument, MissedDeadline
from nnburst.fmq import Grantor, MessageQueue, MQDescriptor
from support.processes import mappings
from support.waiting import PATIENCE, Background, handling


@pytest.fixture(params=["one call", "cffi"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All holds for both ways into C; the second is for data that the first does not take."""
    if request.param == "cffi":
        monkeypatch.setattr("nnburst.fmq.queue.queue_calls", lambda *_: None)


def test_close_gives_memory_and_descriptors_back() -> None:
    before = mappings("MessageQueue"), len(os.listdir("/proc/self/fd"))
    queue = MessageQueue("u1", 64)
    assert mappings("MessageQueue") == before[0] + 1
    queue.close()
    queue.close()
    assert (mappings("MessageQueue"), len(os.listdir("/proc/self/fd"))) == before


def test_collected_queue_and_descriptor_give_everything_back() -> None:
    gc.collect()  # what earlier tests have left to it
    before = mappings("MessageQueue"), len(os.listdir("/proc/self/fd"))
    queue = MessageQueue("u1", 64)
    descriptor: MQDescriptor | None = queue.descriptor
    ref = weakref.ref(queue)
    del queue, descriptor
    gc.collect()
    assert ref() is None
    assert (mappings("MessageQueue"), len(os.listdir("/proc/self/fd"))) == before


def test_views_outlive_the_queue() -> None:
    before = mappings("MessageQueue")
    queue = MessageQueue("u2", 64)
    assert queue.write([1, 2, 3])
    view = queue.begin_read(3).first
    queue.close()
    assert view.tolist() == [1, 2, 3]
    del view, queue
    gc.collect()
    assert mappings("MessageQueue") == before


CALLS: dict[str, Any] = {
    "write": lambda q: q.write([1]),
    "read": lambda q: q.read(1),
    "begin_write": lambda q: q.begin_write(1),
    "begin_read": lambda q: q.begin_read(1),
    "write_blocking": lambda q: q.write_blocking([1], 1),
    "read_blocking": lambda q: q.read_blocking(1, 1),
    "available_to_read": lambda q: q.available_to_read,
    "available_to_write": lambda q: q.available_to_write,
    "capacity": lambda q: q.capacity,
    "handle": lambda q: q.handle,
    "descriptor": lambda q: q.descriptor,
    "event_flag": lambda q: q.event_flag,
}


@pytest.mark.parametrize("name", CALLS)
def test_use_after_close_is_bad_state(name: str) -> None:
    queue = MessageQueue("u1", 4)
    queue.close()
    with pytest.raises(BadState, match="closed"):
        CALLS[name](queue)


def test_commit_after_close_is_bad_state() -> None:
    queue = MessageQueue("u1", 4)
    tx = queue.begin_write(1)
    queue.close()
    with pytest.raises(BadState):
        tx.commit()


def test_transaction_commits_once_and_not_more_than_it_has() -> None:
    with MessageQueue("u1", 4) as queue:
        tx = queue.begin_write(2)
        with pytest.raises(InvalidArgument):
            tx.commit(3)
        assert tx.commit(1)
        with pytest.raises(BadState):
            tx.commit()
        assert queue.available_to_read == 1


def test_newer_transaction_voids_the_older() -> None:
    with MessageQueue("u1", 4) as queue:
        old = queue.begin_write(4)
        queue.begin_write(1)
        with pytest.raises(InvalidArgument):
            old.commit()
        assert queue.available_to_read == 0


def test_close_ends_a_wait_in_another_thread() -> None:
    queue = MessageQueue("u1", 4)
    waiting = threading.Event()
    wait = Background(lambda: (waiting.set(), queue.read_blocking(1)))
    assert waiting.wait(PATIENCE)
    queue.close()
    assert isinstance(wait.result(), BadState)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("call", ["read_blocking", "write_blocking", "wait"])
def test_signal_handler_ends_a_wait(call: str) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    with handling(signal.SIGALRM, interrupt), MessageQueue("u1", 4) as queue:
        waits: dict[str, Callable[[], object]] = {
            "read_blocking": lambda: queue.read_blocking(1),
            "write_blocking": lambda: queue.write_blocking([1]),
            "wait": lambda: queue.event_flag.wait(1),
        }
        if call == "write_blocking":
            assert queue.write([0] * 4)
        with pytest.raises(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            waits[call]()
        assert queue.write([1]) == (call != "write_blocking"), "still usable"


@pytest.mark.parametrize(
    "data", [np.zeros(2, "i8"), np.zeros(2, ">i4"), b"123", "text", [1.5e300], [None], [[1, 2], [3]]], ids=repr
)
def test_data_of_the_wrong_kind_is_refused_and_nothing_is_written(data: Any) -> None:
    with MessageQueue("i4", 4) as queue:
        with pytest.raises(InvalidArgument):
            queue.write(data)
        assert queue.available_to_read == 0


def test_out_must_fit() -> None:
    with MessageQueue("i4", 4) as queue:
        assert queue.write([5, 6])
        out = np.zeros(2, "i4")
        frozen = np.zeros(2, "i4")
        frozen.flags.writeable = False
        for wrong in (np.zeros(2, "i8"), np.zeros(4, "i4")[::2], frozen):
            with pytest.raises(InvalidArgument):
                queue.read(out=wrong)
        assert queue.read(out=out) is out
        assert out.tolist() == [5, 6]


@pytest.mark.parametrize(
    "arguments",
    [
        {"count": 0},
        {"count": -1},
        {"flavour": "sync"},
        {"flavour": 3},
        {"layout": "lines ", "count": 2},
        {"event_flag": False},
        {"ring_fd": -1},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        MessageQueue("u1", **{"count": 16, **arguments})


@pytest.mark.parametrize("call", ["read_blocking", "write_blocking"])
@pytest.mark.parametrize("case", ["no event word", "unsynchronized", "no bits"])
def test_blocking_call_that_could_never_end_is_refused(call: str, case: str) -> None:
    flavour = "unsynchronized" if case == "unsynchronized" else "synchronized"
    bits = {"read_notification": 0, "write_notification": 0} if case == "no bits" else {}
    with MessageQueue("u1", 4, layout="compat", event_flag=case != "no event word", flavour=flavour) as queue:
        with pytest.raises(InvalidArgument, match="synchronized"):
            getattr(queue, call)(1 if call == "read_blocking" else [1], 1, **bits)


def test_blocking_call_times_out_and_transfers_nothing() -> None:
    with MessageQueue("u1", 4) as queue:
        assert queue.write([1, 2, 3])
        with pytest.raises(MissedDeadline):
            queue.read_blocking(4, 0.01)
        with pytest.raises(MissedDeadline):
            queue.write_blocking([4, 5], 0.01)
        with pytest.raises(MissedDeadline):
            queue.write_blocking([4, 5], 0)
        assert queue.read(3).tolist() == [1, 2, 3]


def test_attach_without_a_type_gives_raw_elements() -> None:
    with MessageQueue("u4", 4) as queue, queue.descriptor as d:
        plain = MQDescriptor(d.grantors, map(os.dup, d.fds), d.quantum, d.flags)
        with plain, MessageQueue.attach(plain) as raw:
            assert queue.write([0x01020304])
            assert raw.read(1).tobytes() == b"\4\3\2\1"


def test_attach_refuses_a_flavour_that_is_none() -> None:
    with MessageQueue("u1", 4) as queue, queue.descriptor as d:
        with MQDescriptor(d.grantors, map(os.dup, d.fds), 1, 7) as odd, pytest.raises(InvalidArgument):
            MessageQueue.attach(odd)


def test_attach_can_insist_on_sealed_memory() -> None:
    ring = os.memfd_create("ring")
    os.ftruncate(ring, 64)
    with MessageQueue("u1", 64) as sealed, MessageQueue("u1", 64, ring_fd=ring) as open_ended:
        os.close(ring)
        with sealed.descriptor as d:
            MessageQueue.attach(d, sealed=True).close()
        with open_ended.descriptor as d, pytest.raises(InvalidArgument, match="seal"):
            MessageQueue.attach(d, sealed=True)


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("flavour", ["synchronized", "unsynchronized"])
def test_queue_whose_peer_truncates_the_ring_neither_gives_nor_takes_anything(flavour: Any, exclusive: bool) -> None:
    ring = os.memfd_create("ring")
    os.ftruncate(ring, 4096)
    for use in (lambda q: q.read(100), lambda q: q.write([1] * 50)):
        os.ftruncate(ring, 4096)
        with MessageQueue("u1", 4096, ring_fd=ring, flavour=flavour, exclusive=exclusive) as queue:
            assert queue.write([7] * 100)
            os.ftruncate(ring, 0)
            for _ in range(2):
                with pytest.raises(GeneralFailure, match="pages of the memory are gone"):
                    use(queue)
    os.close(ring)


EXTENT_RULES = {
    "two grantors": lambda g: g[:2],
    "extent not a multiple of the element": lambda g: [*g[:2], g[2]._replace(extent=g[2].extent - 1), g[3]],
    "no data": lambda g: [*g[:2], g[2]._replace(extent=0), g[3]],
    "short counter": lambda g: [g[0]._replace(extent=4), *g[1:]],
    "short event word": lambda g: [*g[:3], g[3]._replace(extent=2)],
    "misaligned counter": lambda g: [g[0]._replace(offset=4), *g[1:]],
    "misaligned event word": lambda g: [*g[:3], g[3]._replace(offset=g[3].offset + 2)],
    "counter inside the ring": lambda g: [g[0]._replace(offset=g[2].offset), *g[1:]],
    "both counters in one place": lambda g: [g[0], g[1]._replace(offset=g[0].offset), *g[2:]],
    "beyond the file": lambda g: [*g[:2], g[2]._replace(offset=1 << 31), g[3]],
}


@pytest.mark.parametrize("rule", EXTENT_RULES)
def test_malformed_descriptor_is_refused_without_a_trace(rule: str) -> None:
    with MessageQueue("u2", 64) as queue, queue.descriptor as d:
        gc.collect()  # what earlier tests left in cycles
        before = mappings("MessageQueue"), len(os.listdir("/proc/self/fd"))
        grantors: list[Grantor] = EXTENT_RULES[rule](list(d.grantors))
        with MQDescriptor(grantors, map(os.dup, d.fds), d.quantum, d.flags) as bad, pytest.raises(InvalidArgument):
            MessageQueue.attach(bad, "u2")
        assert (mappings("MessageQueue"), len(os.listdir("/proc/self/fd"))) == before


def test_unknown_extra_grantors_are_ignored() -> None:
    with MessageQueue("u2", 64) as queue, queue.descriptor as d:
        extra = [*d.grantors, Grantor(0, 9, 3, 0), Grantor(7, 7, 7, 7)]
        with MQDescriptor(extra, map(os.dup, d.fds), 2, d.flags) as odd, MessageQueue.attach(odd, "u2") as other:
            assert other.write([1])
            assert queue.read(1).tolist() == [1]


COUNTER_FORGERIES = [(0, 8), (8, 3), (1 << 63, 0), (3, 0), (0, 3), (400, 0), ((1 << 64) - 2, 0)]


@pytest.mark.parametrize(("w", "r"), COUNTER_FORGERIES)
def test_impossible_counters_end_a_synchronized_queue_for_good(w: int, r: int) -> None:
    with MessageQueue("u2", 64) as queue:
        lib.nnb_mq_write_counter(queue.handle)[0] = w
        lib.nnb_mq_read_counter(queue.handle)[0] = r
        with pytest.raises(GeneralFailure, match="corrupt"):
            queue.read(1)
        lib.nnb_mq_write_counter(queue.handle)[0] = 0
        lib.nnb_mq_read_counter(queue.handle)[0] = 0
        with pytest.raises(GeneralFailure, match="corrupt"):
            queue.write([1])


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize(
    ("flavour", "end"), [("synchronized", "writer"), ("synchronized", "reader"), ("unsynchronized", "writer")]
)
def test_counter_forged_between_begin_and_commit_is_noticed_for_good(flavour: Any, end: str, exclusive: bool) -> None:
    with MessageQueue("u2", 64, flavour=flavour, exclusive=exclusive) as queue:
        assert queue.write(range(8))
        if end == "writer":
            transaction, counter, use = queue.begin_write(2), lib.nnb_mq_write_counter, lambda: queue.write([1])
        else:
            transaction, counter, use = queue.begin_read(2), lib.nnb_mq_read_counter, lambda: queue.read(1)
        counter(queue.handle)[0] = 8
        for call in (transaction.commit, use):
            with pytest.raises(GeneralFailure, match="corrupt"):
                call()


def test_counter_of_an_exclusive_end_that_another_one_moves_is_noticed() -> None:
    with MessageQueue("u2", 64) as writer, writer.descriptor as d, MessageQueue.attach(d) as second:
        assert writer.write([1])
        assert second.write([2]), "a handle takes the role with its first write, where it is then"
        assert second.read(2).tolist() == [1, 2]
        with pytest.raises(GeneralFailure, match="exclusive=False"):
            writer.write([3])
        assert second.write([4])


def test_several_objects_take_turns_where_the_queue_is_not_exclusive() -> None:
    with MessageQueue("u2", 4, exclusive=False) as one, one.descriptor as d:
        with MessageQueue.attach(d, exclusive=False) as two, MessageQueue.attach(d, exclusive=False) as three:
            for i in range(20):
                assert (one if i % 2 else two).write([i, i + 1])
                assert (three if i % 3 else one).read(2).tolist() == [i, i + 1]


def test_attaching_drops_nothing() -> None:
    with MessageQueue("u2", 8) as queue, queue.descriptor as d:
        queue.write([1, 2, 3])
        with MessageQueue.attach(d) as other:
            assert other.read(3).tolist() == [1, 2, 3]
        with MessageQueue.attach(d, reset=True) as other:
            assert other.available_to_read == 0


def test_readers_without_write_access_cannot_map_it_for_writing() -> None:
    with MessageQueue("u2", 8, flavour="unsynchronized") as queue, queue.descriptor as d:
        with d.without_write_access() as given:
            (fd,) = given.fds
            size = os.fstat(fd).st_size
            # As libfmq maps: for writing, and on EPERM for reading.
            with pytest.raises(PermissionError) as refused:
                mmap.mmap(fd, size)
            assert refused.value.errno == errno.EPERM
            mmap.mmap(fd, size, prot=mmap.PROT_READ).close()
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # which a reader of the same user can do
            with pytest.raises(PermissionError):
                mmap.mmap(again, size)
            os.close(again)
            with MessageQueue.attach(given) as reader:
                assert reader.read_only
                assert queue.write([1, 2]), "whoever had it mapped goes on"
                assert reader.read(2).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("field", "limit"), [("flags", 2**32), ("fd_index", 2**32), ("offset", 2**32), ("extent", 2**64)]
)
def test_grantor_holds_every_number_of_its_format_and_no_other(field: str, limit: int) -> None:
    good = Grantor(0, 0, 0, 8)._asdict()
    for value in (0, limit - 1):
        with MQDescriptor([tuple((good | {field: value}).values())], [], 4, 1) as descriptor:
            assert getattr(descriptor.grantors[0], field) == value
    for value in (-1, limit):
        with pytest.raises(InvalidArgument, match=f"grantor 0: {field}"):
            MQDescriptor([tuple((good | {field: value}).values())], [], 4, 1)


@pytest.mark.parametrize("name", ["quantum", "flags"])
def test_descriptor_refuses_numbers_outside_of_its_format(name: str) -> None:
    good = {"quantum": 4, "flags": 1}
    for value in (0, 2**31 - 1):
        with MQDescriptor([], [], **(good | {name: value})) as descriptor:
            assert getattr(descriptor, name) == value
    for value in (-1, 2**31):
        with pytest.raises(InvalidArgument, match=name):
            MQDescriptor([], [], **(good | {name: value}))


def test_queue_tells_what_it_is() -> None:
    with MessageQueue("u4", 8, flavour="unsynchronized") as queue:
        assert (queue.dtype, queue.quantum, queue.capacity) == (np.dtype("u4"), 4, 8)
        assert queue.flavour == "unsynchronized"
        assert repr(queue) == "MessageQueue(uint32, 8, flavour='unsynchronized')"
    assert repr(queue) == "MessageQueue(closed)"


@pytest.mark.parametrize("count", [-1, 2**64])
def test_count_that_is_no_64_bit_number_is_refused(count: int) -> None:
    with MessageQueue("u1", 4) as queue:
        for call in (queue.begin_read, queue.begin_write, queue.read, lambda n: MessageQueue("u1", n)):
            with pytest.raises(InvalidArgument):
                call(count)
        with pytest.raises(InvalidArgument, match="capacity"):
            queue.begin_write(2**64 - 1)


def test_reset_forgets_what_a_writer_of_an_unsynchronized_queue_announced() -> None:
    with MessageQueue("u1", 8, flavour="unsynchronized") as queue, queue.descriptor as descriptor:
        for _ in range(5):
            queue.write([0] * 8)
        with MessageQueue.attach(descriptor, reset=True) as writer, MessageQueue.attach(descriptor) as reader:
            empty = reader.read(0)
            assert empty is not None
            assert empty.size == 0
            assert writer.write([1, 2])
            assert reader.read(2).tolist() == [1, 2]
            assert reader.overruns == 0
