"""What one of several may do, once."""

from __future__ import annotations


class Once:
    """A token: threads, signal handlers and finalisers may race for it without a lock, and one of them takes it."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token = [None]

    def take(self) -> bool:
        """Whether the caller is the first."""
        try:
            self._token.pop()  # one step, between two of which alone anything else may run
        except IndexError:
            return False
        return True
