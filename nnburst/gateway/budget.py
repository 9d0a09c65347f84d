"""What requests under way may hold in all, whichever protocol they came in by."""

from __future__ import annotations

import asyncio
import contextlib
import resource

from ..errors import DeviceUnavailable, ResourceExhausted

RETRY_S = 1
"""After which a client may try again what is refused for the moment."""
FAREWELL_S = 0.5
"""That sending the last answers may take when the gateway is stopped."""


class Budget:
    """Counts requests, and the bytes that were received of them, until they are answered. The loop's thread only.

    Attributes:
        most_connections: Of each protocol: what the process itself needs is left to it.
    """

    def __init__(self, most_requests: int = 1024, most_bytes: int = 1 << 30) -> None:
        self.most_requests = most_requests
        self.most_connections = min(1 << 16, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) // 3
        self._most_bytes = most_bytes
        self._requests = self._bytes = 0
        self._finished: asyncio.Event | None = None

    def request(self) -> BudgetShare:
        """Count a request, without bytes as yet, until the context that this gives ends.

        Raises:
            ResourceExhausted: Too many are under way.
            DeviceUnavailable: Requests are not taken any more.
        """
        if self._finished is not None:
            raise DeviceUnavailable("the gateway is being stopped; send this request again later")
        if self._requests >= self.most_requests:
            raise ResourceExhausted(f"{self.most_requests} requests are under way; send this one later")
        self._requests += 1
        return BudgetShare(self)

    def _add(self, size: int) -> None:
        if self._bytes + size > self._most_bytes:
            raise ResourceExhausted(f"requests of {self._most_bytes} bytes are under way; send this one later")
        self._bytes += size

    def end(self, size: int) -> None:
        """A request has ended, of so many bytes in all."""
        self._requests -= 1
        self._bytes -= size
        if self._finished is not None and not self._requests:
            self._finished.set()

    async def finish(self, seconds: float) -> None:
        """Take no more requests, and wait for those that are under way, no longer than so many seconds."""
        self._finished = asyncio.Event()
        if self._requests:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._finished.wait(), seconds)


class BudgetShare:
    """What one request holds of a budget; a context manager that gives it back."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes = 0

    def take(self, size: int) -> None:
        """Count more bytes.

        Raises:
            ResourceExhausted: Too many are under way.
        """
        self._budget._add(size)
        self._bytes += size

    def __enter__(self) -> BudgetShare:
        return self

    def __exit__(self, *error: object) -> None:
        self._budget.end(self._bytes)
