"""What requests under way may hold in all, whichever protocol they came in by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..errors import ResourceExhausted


class Budget:
    """Counts requests, and the bytes that were received of them, until they are answered. The loop's thread only.

    Args:
        most_requests: How many may be under way.
        most_bytes: How many bytes they may have in all.
    """

    def __init__(self, most_requests: int = 1024, most_bytes: int = 1 << 30) -> None:
        self.most_requests = most_requests
        self._most_bytes = most_bytes
        self._requests = self._bytes = 0

    @contextlib.contextmanager
    def request(self, size: int = 0) -> Iterator[Callable[[int], None]]:
        """Count a request of so many bytes while the context lasts. Gives what counts more of them.

        Raises:
            ResourceExhausted: Too much is under way; also what it gives raises that.
        """
        held = 0

        def take(size: int) -> None:
            nonlocal held
            if self._bytes + size > self._most_bytes:
                raise ResourceExhausted(f"requests of {self._most_bytes} bytes are under way; send this one later")
            self._bytes += size
            held += size

        if self._requests >= self.most_requests:
            raise ResourceExhausted(f"{self.most_requests} requests are under way; send this one later")
        self._requests += 1
        try:
            take(size)
            yield take
        finally:
            self._requests -= 1
            self._bytes -= held
