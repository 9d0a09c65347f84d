"""What is known of the entries of a cache directory: for people and for eviction, never for trust.

Everything in it can be found again by looking at the directory, so damage and loss cost nothing but counts.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ._reasons import CacheReason

__all__ = ["EntryInfo", "Index"]

_HIT_SECONDS = 60
"""A hit is noted at most so often."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry of a cache directory.

    Attributes:
        entry: 64 hex digits that name it.
        generation: 32 hex digits.
        device: Name of the device.
        version: Its version string.
        epoch: Hex digits of its build.
        files: How many.
        nbytes: Of all files.
        created: Seconds since 1970.
        last_hit: Likewise; 0 if never.
        hits: At most one a minute is counted.
        compile_ms: What the entry saves.
        pinned: Whether it is never evicted.
    """

    entry: str
    generation: str
    device: str = "?"
    version: str = "?"
    epoch: str = ""
    files: int = 0
    nbytes: int = 0
    created: int = 0
    last_hit: int = 0
    hits: int = 0
    compile_ms: float = 0.0
    pinned: bool = False


_COLUMNS = [field.name for field in fields(EntryInfo)]
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS entry ({", ".join(_COLUMNS)}, PRIMARY KEY (entry, generation));
CREATE TABLE IF NOT EXISTS counter (reason TEXT PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS declined (entry TEXT PRIMARY KEY, count INTEGER NOT NULL, reason TEXT NOT NULL);
"""


class Index:
    """The database beside the entries. No call raises: what cannot be noted is not noted.

    Args:
        path: Of the database; through ``/proc/self/fd`` if the directory is held by a descriptor.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def _use(self, work: Callable[[sqlite3.Connection], _T], otherwise: _T) -> _T:
        for attempt in range(2):
            try:
                database = sqlite3.connect(self._path, timeout=5, isolation_level=None)
                try:
                    database.execute("PRAGMA synchronous=OFF")  # losing counts costs nothing
                    database.executescript(_SCHEMA)
                    database.execute("BEGIN IMMEDIATE")
                    result = work(database)
                    database.execute("COMMIT")
                    return result
                finally:
                    database.close()
            except sqlite3.OperationalError:
                return otherwise  # read-only, full, locked for long
            except (sqlite3.Error, ValueError):
                if attempt == 0:
                    for suffix in ("", "-journal", "-wal", "-shm"):
                        try:
                            os.unlink(self._path + suffix)
                        except OSError:
                            continue
        return otherwise

    def put(self, info: EntryInfo) -> None:
        """Note an entry; another generation of it is forgotten, but for its pin and its hits."""

        def work(database: sqlite3.Connection) -> None:
            old = database.execute("SELECT hits, pinned FROM entry WHERE entry = ?", (info.entry,)).fetchone()
            values: dict[str, Any] = {name: getattr(info, name) for name in _COLUMNS}
            if old is not None:
                values |= {"hits": old[0], "pinned": old[1]}
            database.execute("DELETE FROM entry WHERE entry = ?", (info.entry,))
            marks = ", ".join("?" * len(_COLUMNS))
            database.execute(f"INSERT INTO entry VALUES ({marks})", [values[name] for name in _COLUMNS])
            database.execute("DELETE FROM declined WHERE entry = ?", (info.entry,))

        self._use(work, None)

    def remove(self, entry: str, generation: str) -> None:
        """Forget a generation."""

        def work(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM entry WHERE entry = ? AND generation = ?", (entry, generation))

        self._use(work, None)

    def all(self) -> dict[tuple[str, str], EntryInfo]:
        """Return what is noted, by entry and generation."""

        def work(database: sqlite3.Connection) -> dict[tuple[str, str], EntryInfo]:
            rows = database.execute(f"SELECT {', '.join(_COLUMNS)} FROM entry").fetchall()
            infos = [EntryInfo(**dict(zip(_COLUMNS, row, strict=True))) for row in rows]
            return {(info.entry, info.generation): info for info in infos}

        return self._use(work, {})

    def hit(self, entry: str) -> None:
        """Note that an entry was used."""

        def work(database: sqlite3.Connection) -> None:
            now = int(time.time())
            database.execute(
                "UPDATE entry SET hits = hits + 1, last_hit = ? WHERE entry = ? AND last_hit <= ?",
                (now, entry, now - _HIT_SECONDS),
            )

        self._use(work, None)

    def pin(self, entries: Iterable[str], pinned: bool) -> int:
        """Pin or unpin; returns how many entries there are."""

        def work(database: sqlite3.Connection) -> int:
            rows = 0
            for entry in entries:
                rows += database.execute("UPDATE entry SET pinned = ? WHERE entry = ?", (pinned, entry)).rowcount
            return rows

        return self._use(work, 0)

    def count(self, reason: CacheReason) -> None:
        """Count an outcome."""

        def work(database: sqlite3.Connection) -> None:
            database.execute(
                "INSERT INTO counter VALUES (?, 1) ON CONFLICT (reason) DO UPDATE SET count = count + 1",
                (reason.value,),
            )

        self._use(work, None)

    def counters(self) -> dict[str, int]:
        """Return the outcomes so far."""
        return self._use(lambda database: dict(database.execute("SELECT reason, count FROM counter").fetchall()), {})

    def decline(self, entry: str, reason: CacheReason) -> None:
        """Note that a device did not want to save an entry."""

        def work(database: sqlite3.Connection) -> None:
            database.execute(
                "INSERT INTO declined VALUES (?, 1, ?)"
                " ON CONFLICT (entry) DO UPDATE SET count = count + 1, reason = excluded.reason",
                (entry, reason.value),
            )

        self._use(work, None)

    def declined(self, entry: str) -> tuple[int, CacheReason]:
        """Return how often in a row a device did not want to save an entry, and why last."""

        def work(database: sqlite3.Connection) -> tuple[int, CacheReason]:
            row = database.execute("SELECT count, reason FROM declined WHERE entry = ?", (entry,)).fetchone()
            return (0, CacheReason.SAVED) if row is None else (int(row[0]), CacheReason(row[1]))

        return self._use(work, (0, CacheReason.SAVED))
