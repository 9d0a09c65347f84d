"""Who wants to know of a connection's end."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["DeathListeners"]

_log = logging.getLogger(__name__)


class DeathListeners:
    """Functions that are called once when something ends, or at once if it has ended. No locks: see `_pending`."""

    def __init__(self) -> None:
        self._listeners: dict[object, Callable[[], None]] = {}
        self._ended = False

    def add(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Keep a listener until it was called; returns a function that forgets it, which takes no lock."""
        key = object()
        self._listeners[key] = listener
        if self._ended and self._listeners.pop(key, None) is not None:  # else `call_all` has found it
            listener()

        def unlink() -> None:
            self._listeners.pop(key, None)

        return unlink

    def call_all(self) -> None:
        """It has ended. What a listener raises is logged."""
        self._ended = True
        while True:
            try:
                _, listener = self._listeners.popitem()
            except KeyError:
                return
            try:
                listener()
            except Exception:
                _log.exception("a death listener failed")
