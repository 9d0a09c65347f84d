"""The queue against collections.deque, by random sequences of operations."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from nnburst.errors import InvalidArgument, MissedDeadline
from nnburst.fmq import MessageQueue
from nnburst.fmq.descriptor import Flavour

COUNTS = st.integers(0, 12)


class _Machine(RuleBasedStateMachine):
    """Two handles of one queue, a writer and a reader, and what should be in it."""

    flavour: Flavour

    @initialize(
        capacity=st.integers(1, 9),
        dtype=st.sampled_from(["u1", "i4", [("a", "u1"), ("b", "u2")], "V24"]),
        layout=st.sampled_from(["lines", "compat"]),
        two_files=st.booleans(),
        exclusive=st.booleans(),
    )
    def make(self, capacity: int, dtype: Any, layout: str, two_files: bool, exclusive: bool) -> None:
        self.dtype = np.dtype(dtype)
        ring = None
        if two_files:
            ring = os.memfd_create("ring")
            os.ftruncate(ring, capacity * self.dtype.itemsize)
        self.writer = MessageQueue(
            dtype, capacity, flavour=self.flavour, layout=layout, ring_fd=ring, exclusive=exclusive
        )
        if ring is not None:
            os.close(ring)
        with self.writer.descriptor as descriptor:
            self.reader = MessageQueue.attach(descriptor, exclusive=exclusive)
        self.capacity = capacity
        self.model: deque[bytes] = deque()
        self.written = self.overruns = 0

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
            self.reader.close()

    def fresh(self, count: int) -> np.ndarray:
        """`count` elements, all different from the ones before."""
        numbers = np.arange(self.written, self.written + count * self.dtype.itemsize, dtype=np.uint64)
        self.written += count * self.dtype.itemsize
        return (numbers * 7 + numbers // 251).astype(np.uint8).view(self.dtype)

    def push(self, data: np.ndarray) -> None:
        self.model.extend(element.tobytes() for element in data)

    def pop(self, count: int) -> list[bytes]:
        return [self.model.popleft() for _ in range(count)]

    def fits(self, count: int) -> bool:
        return self.flavour is Flavour.UNSYNCHRONIZED or len(self.model) + count <= self.capacity

    @rule(count=COUNTS)
    def write(self, count: int) -> None:
        data = self.fresh(count)
        if count > self.capacity:
            with pytest.raises(InvalidArgument):
                self.writer.write(data)
            return
        assert self.writer.write(data) == self.fits(count)
        if self.fits(count):
            self.push(data)

    @rule(count=COUNTS, keep=COUNTS, start=COUNTS)
    def write_in_place(self, count: int, keep: int, start: int) -> None:
        if count > self.capacity:
            with pytest.raises(InvalidArgument):
                self.writer.begin_write(count)
            return
        tx = self.writer.begin_write(count)
        assert (tx is not None) == self.fits(count)
        if tx is not None:
            data = self.fresh(count)
            assert len(tx.first) + len(tx.second) == len(tx) == count
            start = min(start, count)
            tx.copy_to(data[:start])
            for i in range(start, min(start + 1, count)):
                tx[i] = data[i]
            tx.copy_to(data[start + 1 :], min(start + 1, count))
            with pytest.raises(InvalidArgument):
                tx.copy_to(data[start:], start + 1)
            if self.flavour is Flavour.UNSYNCHRONIZED:
                keep = count  # what was overwritten but not published is lost to readers all the same
            assert tx.commit(min(keep, count))
            self.push(data[:keep])

    def expect(self, count: int) -> list[bytes] | None:
        """What a read of `count` must give; None if it must fail."""
        if len(self.model) > self.capacity:  # overtaken: half a ring is left
            self.pop(len(self.model) - self.capacity // 2)
            self.overruns += 1
            return None
        return self.pop(count) if count <= len(self.model) else None

    @rule(count=COUNTS)
    def read(self, count: int) -> None:
        if count > self.capacity:
            with pytest.raises(InvalidArgument):
                self.reader.read(count)
            return
        want, data = self.expect(count), self.reader.read(count)
        assert (None if data is None else [e.tobytes() for e in data]) == want

    @rule(count=COUNTS, keep=COUNTS)
    def read_in_place(self, count: int, keep: int) -> None:
        if count > self.capacity:
            with pytest.raises(InvalidArgument):
                self.reader.begin_read(count)
            return
        ahead = list(self.model)[:count]
        overtaken = len(self.model) > self.capacity
        tx = self.reader.begin_read(count)
        if overtaken or len(ahead) < count:
            assert tx is None
            self.expect(count)
            return
        assert [e.tobytes() for e in tx.copy_from()] == ahead
        assert [np.asarray(tx[i]).tobytes() for i in range(count)] == ahead
        start = min(keep, count)
        assert [e.tobytes() for e in tx.copy_from(start)] == ahead[start:]
        assert [e.tobytes() for e in tx.copy_from(count - start, start)] == ahead[count - start :]
        with pytest.raises(IndexError):
            tx[count]
        assert tx.commit(min(keep, count))
        self.pop(min(keep, count))

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "writer"):
            return
        assert self.reader.available_to_read == len(self.model)
        assert self.reader.overruns == self.overruns
        assert self.reader.available_to_write == max(0, self.capacity - len(self.model))
        if self.flavour is Flavour.SYNCHRONIZED:
            assert self.writer.available_to_write == self.capacity - len(self.model)


class _Synchronized(_Machine):
    flavour = Flavour.SYNCHRONIZED

    @rule(count=COUNTS)
    def write_blocking_without_patience(self, count: int) -> None:
        data = self.fresh(min(count, self.capacity))
        if self.fits(len(data)):
            self.writer.write_blocking(data, 0)
            self.push(data)
        else:
            with pytest.raises(MissedDeadline):
                self.writer.write_blocking(data, 0)

    @rule(count=COUNTS)
    def read_blocking_without_patience(self, count: int) -> None:
        count = min(count, self.capacity)
        if count <= len(self.model):
            assert [e.tobytes() for e in self.reader.read_blocking(count, 0)] == self.pop(count)
        else:
            with pytest.raises(MissedDeadline):
                self.reader.read_blocking(count, 0)


class _Unsynchronized(_Machine):
    flavour = Flavour.UNSYNCHRONIZED


_SETTINGS = settings(max_examples=75, stateful_step_count=40, deadline=None)


def test_REQ_FMQ_020_to_034_synchronized_queue_is_a_deque() -> None:
    run_state_machine_as_test(_Synchronized, settings=_SETTINGS)


def test_REQ_FMQ_040_to_052_054_unsynchronized_queue_is_a_deque_that_forgets() -> None:
    run_state_machine_as_test(_Unsynchronized, settings=_SETTINGS)
