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
    """The client of a burst as the server sees it, with the client's side of the slot table.

    Attributes:
        row: The client's row of statistics, closed by the server after the last request; None for no row.
        flow_queue: Queue of the group that serves the burst; None for a listener thread of its own.
        loop_timeout_ns: The client's limit for each WHILE of a run, in nanoseconds; 0 for the default.
        max_run: Seconds that a run may take; None for no limit. A longer run is ended if its kernel supports that.
        bell: Socket to ring for answers that the client awaits in an event loop, owned by the callback; None if the
            client cannot await. To ring means to send one byte without waiting (``MSG_DONTWAIT``) when the event word
            of the result channel says so (docs/WIRE.md).
        account: Account of its requests' working memory; None if it is not counted.
    """

    row: Row | None = None
    flow_queue: FlowQueue | None = None
    loop_timeout_ns: int = 0
    max_run: float | None = None
    bell: int | None = None
    account: Account | None = None

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that the client may run on; by default those of the calling thread."""
        return allowed_cpus()

    def ended(self, reason: str) -> None:
        """Note that the server has ended the burst by itself. Called from any thread; must not wait."""

    @abc.abstractmethod
    def get_memories(self, slots: Sequence[int]) -> tuple[ErrorStatus, tuple[Memory | Named, ...]]:
        """Return the memory behind each slot.

        Returns:
            (NONE, one memory per slot), or (INVALID_ARGUMENT, ()) if any slot is unknown.
        """


class BurstContext(abc.ABC):
    """The server's side of a burst, held by the client. Closing it ends the burst."""

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that the listener may run on; by default those of the calling thread."""
        return allowed_cpus()

    @property
    def pipelined(self) -> bool:
        """True if several requests may wait in the request channel and the server rings the callback's bell."""
        return False

    @abc.abstractmethod
    def free_memory(self, slot: int) -> None:
        """Forget a slot and every plan that uses it. An unknown slot is not an error (REQ-MODEL-051)."""

    def failure_reason(self) -> str:
        """Return the reason of the last failed execution; empty if unknown or already returned.

        Raises:
            NNBurstError: The server cannot be asked.
        """
        return ""

    def forget_memory(self, slot: int) -> None:
        """Forget a slot like `free_memory`, but without waiting."""
        self.free_memory(slot)

    def forget_plans(self) -> None:
        """Drop all plans, so that repeated requests are bound again. May be called from any thread."""

    def leave(self) -> None:
        """Note that the client no longer waits, so that a run of several steps ends early. For any thread."""

    def hang_up(self) -> None:
        """End the burst without waiting. For any thread or finaliser. Idempotent; `close` may follow."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the burst and release its memories and plans. Idempotent."""


class BurstExecutorWithCache:
    """Binds the requests of one burst, and keeps the memories of its slots between them.

    Its methods are never called concurrently, except for `remove_cache_entry`, which may be called at any time.

    Args:
        bind: Checks a request with its pools and returns a function that runs it. Raises the errors of the method
            `bind`.

    Attributes:
        loop_timeout_ns: See `BurstCallback`; set by the server before the first request.
    """

    loop_timeout_ns = 0

    def __init__(self, bind: Callable[[Request, RunOptions], Kernel]) -> None:
        self._bind = bind
        self._entries: dict[int, Memory | Named] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        """Return True if `add_cache_entry` has added the slot and it was not removed since."""
        return slot in self._entries

    def add_cache_entry(self, memory: Memory | Named, slot: int) -> None:
        """Remember the memory of a new slot.

        Raises:
            NNBurstError: The memory cannot be used; the request fails with the error's status.
        """
        self._entries[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        """Forget a slot. An unknown slot is ignored."""
        self._entries.pop(slot, None)

    def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> Kernel:
        """Check a request and return a kernel that runs it, for this packet and identical later ones.

        Args:
            request: Arguments; ``request.pools`` is empty, ``pool_index`` indexes `slots`.
            slots: Slot of each pool. All have cache entries.
            measure: True if results must carry a `Timing` with ``time_on_device``.

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
