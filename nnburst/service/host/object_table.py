"""The table of the objects that one connection owns in a service."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from ...burst.cancellation import Account, CancelFlag
from ...errors import DeadObject, InvalidArgument
from ..connection.serving import ConnectionEnds


class Thing(Protocol):
    """An object that a client owns; `what` is its name in error messages."""

    what: ClassVar[str]


T = TypeVar("T", bound=Thing)
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Entry:
    value: object
    dispose: Callable[[], None]
    hang_up: Callable[[], None] | None
    leave: Callable[[], None] | None
    users: int = 1  # the table counts as one user


class ObjectTable:
    """A table of objects by number. An object is disposed of once it is removed *and* no longer used.

    Numbers are never reused. No callback runs under the lock.

    Args:
        account: Function that charges working memory of the client's requests, or None.

    Attributes:
        cancel_flag: The flag that is raised when the client has left.
    """

    def __init__(self, account: Account | None = None) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._numbers = itertools.count(1)
        self._closed: type[DeadObject] | None = None
        self._kept: set[_Entry] = set()  # it includes entries that are being disposed of
        self.cancel_flag = CancelFlag(account=account)

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self,
        value: object,
        dispose: Callable[[], None],
        hang_up: Callable[[], None] | None = None,
        leave: Callable[[], None] | None = None,
    ) -> int:
        """Add an object and return its number.

        Args:
            dispose: Called once, to dispose of the object.
            hang_up: Called before `dispose` if the connection ends. It lets the object's own threads end.
            leave: Called before `dispose` if the client has disconnected or released the object.

        Raises:
            DeadObject: The connection has ended; the object has been disposed of.
        """
        with self._lock:
            closed = self._closed
            number = next(self._numbers)
            if not closed:
                entry = self._entries[number] = _Entry(value, dispose, hang_up, leave)
                self._kept.add(entry)
        if closed:
            dispose()
            raise closed("the connection has ended")
        return number

    def find(self, number: int, kind: type[T]) -> T | None:
        """Return an object, or None.

        The caller may only read the object's fields, because another thread may close the object at any time.
        """
        entry = self._entries.get(number)
        return entry.value if entry is not None and isinstance(entry.value, kind) else None

    @contextmanager
    def lease(self, number: int, kind: type[T]) -> Iterator[T]:
        """Keep an object alive inside a ``with`` block, which may end in another thread.

        Raises:
            InvalidArgument: There is no such object, or it has another type.
            DeadObject: The connection has ended.
        """
        with self._lock:
            entry = self._entries.get(number)
            if entry is None and self._closed:
                raise self._closed("the connection has ended")
            if entry is None or not isinstance(entry.value, kind):
                raise InvalidArgument(f"there is no {kind.what} {number} on this connection")
            entry.users += 1
        try:
            yield entry.value
        finally:
            self._release(entry)

    def remove(self, number: int) -> None:
        """Drop an object; an unknown number is ignored."""
        with self._lock:
            entry = self._entries.pop(number, None)
        if entry is not None:
            if entry.leave is not None:
                entry.leave()
            self._release(entry)

    def detach_client(self) -> None:
        """Let runs end early, because the client has disconnected."""
        self.cancel_flag.cancel()
        for entry in tuple(self._kept):
            if entry.leave is not None:
                entry.leave()

    def hang_up(self, error: type[DeadObject] = ConnectionEnds) -> None:
        """Refuse new objects, and let the objects' own threads end after their current runs.

        Args:
            error: Class of the errors that later calls raise. If this method is called again, the first class remains.
        """
        with self._lock:
            self._closed = self._closed or error
            entries = list(self._entries.values())
        for entry in entries:
            if entry.hang_up is not None:
                entry.hang_up()

    def close(self) -> None:
        """Drop all objects and refuse new ones. Idempotent."""
        self.hang_up()
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in reversed(entries):
            self._release(entry)

    def _release(self, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            unused = entry.users == 0
        if unused:
            try:
                entry.dispose()
            except Exception:
                _log.exception("releasing %r failed", entry.value)
            self._kept.discard(entry)
