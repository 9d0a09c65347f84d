"""Limits of an execution: time, loops, memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from ...burst.cancellation import WorkingMemory
from ...errors import MissedDeadline, ResourceExhausted
from ..deadline import deadline_passed

PASSING = (MissedDeadline, ResourceExhausted, MemoryError)
"""Exceptions that end an execution unchanged, since each has its own status."""
LONGEST_LOOP_NS = 15_000_000_000
"""Largest time limit of a WHILE in nanoseconds."""
_LEAST_MEMORY = 1 << 28
_MEMORY_FACTOR = 64
"""Limit of an execution's results, as a multiple of the size of request and constants. The limit is at least 256 MiB.
Kernels need up to eight times the size of their operands.
"""


class RunLimits(Struct):
    """The limits of a `Program`'s executions. Each execution sets its own deadline.

    Attributes:
        deadline_ns: Absolute CLOCK_MONOTONIC nanoseconds; 0 for none.
        loop_ns: Time limit of one WHILE in nanoseconds.
        is_cancelled: True to end the run. Any thread may set this attribute.
    """

    deadline_ns: int = 0
    loop_ns: int = 2_000_000_000
    is_cancelled: bool = False

    def require_time(self) -> None:
        """Raise `MissedDeadline` after the deadline or a cancellation."""
        if self.is_cancelled:
            raise MissedDeadline("the execution was ended, for its client has gone or closed the burst")
        if deadline_passed(self.deadline_ns):
            raise MissedDeadline("the execution's deadline has passed")


class MemoryBudget(WorkingMemory):
    """The memory budget of one execution, including its subgraphs.

    Attributes:
        results: Bytes that results take as long as later operations need them.
        scratch: Bytes that the kernels' own arrays take.
    """

    __slots__ = ("_most", "results", "scratch")

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._most = max(_LEAST_MEMORY, _MEMORY_FACTOR * nbytes)
        self.results = self.scratch = 0

    def take_result(self, nbytes: int, dims: tuple[int, ...]) -> None:
        """Count a result. Raises `ResourceExhausted` if the budget or the client's quota is exceeded."""
        if self.results + nbytes > self._most:
            raise ResourceExhausted(f"results take more than {self._most} bytes; the last has dimensions {list(dims)}")
        self.take(nbytes)
        self.results += nbytes

    def drop_results(self, nbytes: int) -> None:
        """Count bytes of results as free."""
        self.give_back(nbytes)
        self.results -= nbytes

    def take_scratch(self, shape: tuple[int, ...], nbytes: int) -> None:
        """Count a kernel's own array.

        Raises:
            ResourceExhausted: The array alone exceeds the budget, or the sum exceeds the client's quota.
        """
        if nbytes > self._most:
            raise ResourceExhausted(f"{list(shape)} elements of working memory are more than {self._most} bytes")
        self.take(nbytes)
        self.scratch += nbytes

    def drop_scratch(self, to: int) -> None:
        """Reduce the counted bytes of the kernels' own arrays to `to`."""
        self.give_back(self.scratch - to)
        self.scratch = to

    @contextmanager
    def release_after_run(self) -> Iterator[None]:
        results, scratch = self.results, self.scratch
        try:
            with super().release_after_run():
                yield
        finally:
            self.results, self.scratch = results, scratch
