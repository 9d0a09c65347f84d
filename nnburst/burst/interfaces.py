"""What the two ends of a burst ask of each other."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..errors import ErrorStatus, InvalidArgument
from ..model import MeasureTiming, Named, Request, RunOptions
from .polling import allowed_cpus

if TYPE_CHECKING:
    from ..memory import Memory
    from ..watch import Row
    from .cancellation import Account
    from .kernel import Kernel
    from .server.group import FlowQueue


class BurstCallback(abc.ABC):
    """The client as the server sees it: its side of the slot table.

    Attributes:
        row: Where the server counts what it does for this client; None: nowhere but in its `stats`. The server closes
            it when it has served the last request.
        flow_queue: Where the burst is served; None for a listener thread of its own.
        loop_timeout_ns: Nanoseconds that each WHILE of a run may take, as the client wants it; 0 for the default.
        max_run: Seconds that a run may take; None for no limit. A longer one is ended, if its kernel knows how to.
        bell: A socket of the callback's, to be rung for answers that the client awaits in an event loop; None: it
            cannot. To ring is to send one byte without waiting (``MSG_DONTWAIT``) when the event word of the result
            channel says so (docs/WIRE.md).
        account: Where the working memory of its requests counts; None: nowhere.
    """

    row: Row | None = None
    flow_queue: FlowQueue | None = None
    loop_timeout_ns: int = 0
    max_run: float | None = None
    bell: int | None = None
    account: Account | None = None

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that the client may run on; by default it is the thread that asks."""
        return allowed_cpus()

    def ended(self, reason: str) -> None:
        """The server has ended the burst by itself: no more answers come. Any thread; must not wait."""

    @abc.abstractmethod
    def get_memories(self, slots: Sequence[int]) -> tuple[ErrorStatus, tuple[Memory | Named, ...]]:
        """Return the memory behind each slot.

        Returns:
            (NONE, one memory per slot), or (INVALID_ARGUMENT, ()) if any slot is unknown. All or nothing.
        """


class BurstContext(abc.ABC):
    """The server's side of a burst, held by the client. Closing it ends the burst."""

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that the listener may run on; by default the thread that asks has started it."""
        return allowed_cpus()

    @property
    def pipelined(self) -> bool:
        """Whether several requests may wait in the request channel, and the callback's bell is rung."""
        return False

    @abc.abstractmethod
    def free_memory(self, slot: int) -> None:
        """Forget a slot and every plan that uses it. An unknown slot is not an error (REQ-MODEL-051)."""

    def failure_reason(self) -> str:
        """Say why the last execution failed that did; empty if that is not known, or was asked before.

        Raises:
            NNBurstError: The server cannot be asked.
        """
        return ""

    def forget_memory(self, slot: int) -> None:
        """As `free_memory`, but do not wait until it is forgotten."""
        self.free_memory(slot)

    def forget_plans(self) -> None:
        """Let go of what is kept for requests that come again: they are bound anew then. Any thread."""

    def leave(self) -> None:
        """Its answers are not awaited any more: a run of several steps ends between two of them. Any thread."""

    def hang_up(self) -> None:
        """End the burst without waiting, from any thread, also in a finaliser. Idempotent; `close` may follow."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the burst and release its memories and plans. Idempotent."""


class BurstExecutorWithCache:
    """Binds the requests of one burst, and keeps the memories of its slots between them.

    Never called concurrently, except for `remove_cache_entry`, which may come from the control plane at any time.

    Args:
        bind: Checks a request that carries its pools and returns what runs it; raises as the method of that name.

    Attributes:
        loop_timeout_ns: See `BurstCallback`; set by the server before the first request.
    """

    loop_timeout_ns = 0

    def __init__(self, bind: Callable[[Request, RunOptions], Kernel]) -> None:
        self._bind = bind
        self._entries: dict[int, Memory | Named] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        """Whether `add_cache_entry` was called for the slot and `remove_cache_entry` was not."""
        return slot in self._entries

    def add_cache_entry(self, memory: Memory | Named, slot: int) -> None:
        """Remember the memory of a slot that is not present.

        Raises:
            NNBurstError: The memory cannot be used; the request fails with the error's status.
        """
        self._entries[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        """Forget a slot; nothing happens if it is not present."""
        self._entries.pop(slot, None)

    def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> Kernel:
        """Check a request and return a callable that runs it; it is called once per identical packet.

        Args:
            request: Arguments; ``request.pools`` is empty, ``pool_index`` indexes `slots`.
            slots: Slot of each pool. All are present.
            measure: Whether results must carry a `Timing` with ``time_on_device``.

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
