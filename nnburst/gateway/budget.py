"""Limits on the number and the bytes of requests in progress."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable, Iterator

from ..errors import DeviceUnavailable, ResourceExhausted

RETRY_S = 1
"""Seconds after which a client should repeat a request that was refused for lack of resources."""
FAREWELL_S = 0.5
"""Time in seconds for the last answers to be sent when the gateway is stopped."""
_PATIENCE_S, _LEAST_RATE = 30.0, 1 << 16


def seconds_for(size: int) -> float:
    """Return the seconds that a client may take to send or receive a number of bytes."""
    return _PATIENCE_S + size / _LEAST_RATE


class Budget:
    """Counter and limit of requests in progress, and of their bytes (answers included).

    Only the event loop's thread may use the counter.

    Attributes:
        most_connections: Maximum number of connections of each protocol: a third of the process's descriptors.
    """

    def __init__(self, most_requests: int = 1024, most_bytes: int = 1 << 30) -> None:
        self.most_requests = most_requests
        self.most_connections = min(1 << 16, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) // 3
        self._most_bytes = most_bytes
        self._requests = self._bytes = 0
        self._is_finishing, self._idle = False, asyncio.Event()

    @contextlib.contextmanager
    def request(self) -> Iterator[Callable[[int], None]]:
        """Count a request until the ``with`` block ends. Yields a function that adds to the bytes of the request.

        Raises:
            ResourceExhausted: Too many requests are in progress. The yielded function raises this error if the requests
                in progress have too many bytes.
            DeviceUnavailable: The gateway is stopping.
        """
        if self._is_finishing:
            raise DeviceUnavailable("the gateway is being stopped; send this request again later")
        if self._requests >= self.most_requests:
            raise ResourceExhausted(f"{self.most_requests} requests are under way; send this one later")
        self._requests += 1
        own = 0

        def take(size: int) -> None:
            nonlocal own
            if self._bytes + size > self._most_bytes:
                raise ResourceExhausted(f"requests of {self._most_bytes} bytes are under way; send this one later")
            self._bytes += size
            own += size

        try:
            yield take
        finally:
            self._requests -= 1
            self._bytes -= own
            if not self._requests:
                self._idle.set()

    async def finish(self, seconds: float) -> None:
        """Refuse new requests, and wait up to `seconds` for requests in progress."""
        self._is_finishing = True
        if self._requests:
            self._idle.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
