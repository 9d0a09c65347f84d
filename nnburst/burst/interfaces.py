"""Interfaces between the two ends of a burst."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..errors import ErrorStatus, InvalidArgument
from ..model.running import RunOptions
from ..model.types import MeasureTiming, Named, Request
from .polling import allowed_cpus

if TYPE_CHECKING:
    from ..memory.memory import Memory
    from ..watch.page import Row
    from .cancellation import Account
    from .kernel import Kernel
    from .server.group import FlowQueue


class BurstCallback(abc.ABC):
    """The server's view of a burst's client.

    Attributes:
        row: The client's row of statistics, closed by the server after the last request; None for no row.
        flow_queue: Queue in the `ListenerGroup` that serves the burst; None if the burst has its own thread.
        loop_timeout_ns: The client's limit for each WHILE operation, in nanoseconds; 0 for the default.
        max_run: Seconds that a run may take; None for no limit. After this time, the run ends if its kernel supports
            deadlines.
        bell: Socket on which the server sends a byte, without waiting, when the event word of the result channel asks
            for it (docs/WIRE.md). None if the client does not await answers in an event loop.
        account: Account of the requests' working memory; None to not count it.
    """

    row: Row | None = None
    flow_queue: FlowQueue | None = None
    loop_timeout_ns: int = 0
    max_run: float | None = None
    bell: int | None = None
    account: Account | None = None

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that the client may run on; by default the calling thread's CPUs."""
        return allowed_cpus()

    def report_end(self, reason: str) -> None:
        """Report that the server has ended the burst. Any thread may call this method, which must not wait."""

    @abc.abstractmethod
    def get_memories(self, slots: Sequence[int]) -> tuple[ErrorStatus, tuple[Memory | Named, ...]]:
        """Return the memory behind each slot.

        Returns:
            (NONE, one memory per slot), or (INVALID_ARGUMENT, ()) if any slot is unknown.

        Raises:
            ResourceExhausted: The memories would exceed a quota.
        """


class BurstContext(abc.ABC):
    """The client's handle on the server's side of a burst."""

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that the listener may run on; by default the calling thread's CPUs."""
        return allowed_cpus()

    @property
    def pipelined(self) -> bool:
        """True if the server uses `BurstCallback.bell`. Several requests may then wait in the request channel."""
        return False

    @abc.abstractmethod
    def free_memory(self, slot: int) -> None:
        """Drop a slot, and every prepared request that uses it. An unknown slot is not an error (REQ-MODEL-051)."""

    def failure_reason(self) -> str:
        """Return the reason of the last failed execution; empty if unknown or already returned."""
        return ""

    def forget_memory(self, slot: int) -> None:
        """Drop a slot like `free_memory`, but without waiting."""
        self.free_memory(slot)

    def forget_plans(self) -> None:
        """Drop all prepared requests, so that repeated requests are bound again. Any thread may call it."""

    def detach_client(self) -> None:
        """Report that the client no longer waits, so that a run of several steps ends early. Any thread may call it."""

    def hang_up(self) -> None:
        """End the burst without waiting. Any thread or finaliser may call it. Idempotent."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the burst, and release the memories and prepared requests of its server. Idempotent."""


class BurstExecutorWithCache:
    """The memory of each slot of one burst, and the function that binds the burst's requests.

    Methods are never called concurrently, except for `remove_cache_entry`, which may be called at any time.

    Args:
        bind: Function that checks a request with its pools and returns a kernel.

    Attributes:
        loop_timeout_ns: See `BurstCallback`; set by the server before the first request.
    """

    loop_timeout_ns = 0

    def __init__(self, bind: Callable[[Request, RunOptions], Kernel]) -> None:
        self._bind = bind
        self._entries: dict[int, Memory | Named] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        """Return True if a slot has a memory."""
        return slot in self._entries

    def add_cache_entry(self, memory: Memory | Named, slot: int) -> None:
        """Store the memory of a new slot.

        Raises:
            NNBurstError: The memory cannot be used; the request fails with the error's status.
        """
        self._entries[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        """Drop a slot. An unknown slot is ignored."""
        self._entries.pop(slot, None)

    def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> Kernel:
        """Check a request and return a kernel that runs it. The kernel also runs later requests that are identical.

        Args:
            request: Request without pools; each ``pool_index`` is an index of `slots`.
            slots: Slot of each pool. Every slot has a cache entry.
            measure: YES if results must carry a `Timing` with ``time_on_device``.

        Raises:
            NNBurstError: The request cannot run; the client receives the error's status.
        """
        try:
            pools = tuple(self._entries[slot] for slot in slots)
        except KeyError as error:
            raise InvalidArgument(f"slot {error.args[0]} names no memory; it was freed") from error
        return self._bind(replace(request, pools=pools), RunOptions(measure, loop_timeout_ns=self.loop_timeout_ns))

    def close(self) -> None:
        """Release every entry. Idempotent."""
        self._entries.clear()
