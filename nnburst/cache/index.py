"""Notes on the entries of a cache directory: for people and for eviction, never for trust.

Everything in it can be found again by looking at the directory, so damage and loss cost nothing but counts.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, suppress
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import astuple, fields, replace

from .reasons import CacheReason, CacheRejected

_log = logging.getLogger("nnburst.cache")
_NAME = "index.sqlite3"
_HIT_SECONDS = 60
"""A hit is noted at most so often."""
_T = TypeVar("_T")


class EntryInfo(Struct, frozen=True):
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
        compile_ms: Milliseconds that compiling took.
        hit_ms: Milliseconds that restoring it took; 0 if that never happened.
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
    hit_ms: float = 0.0
    pinned: bool = False

    @property
    def saves_ms(self) -> float:
        """Milliseconds that a hit saves, as far as is known."""
        return max(0.0, self.compile_ms - self.hit_ms)

    @classmethod
    def from_values(cls, values: Mapping[str, object], **known: Any) -> EntryInfo:
        """Take from a file or a row what makes sense; `known` are certain values, or better defaults than the usual."""
        given = {name: values[name] for name in _COLUMNS if name in values and _is_sound(name, values[name])}
        return cls(**{**known, **given})


def _is_sound(name: str, value: object) -> bool:
    if type(value) is not _KINDS[name]:
        return False
    if isinstance(value, str):
        return value.isprintable()  # it is shown on terminals
    most = 1 << 40 if name in ("created", "last_hit") else 1 << 53  # what calendars and honest numbers go up to
    return not isinstance(value, int | float) or (math.isfinite(value) and 0 <= value < most)


_COLUMNS = [field.name for field in fields(EntryInfo)]
_KINDS = {name: type(getattr(EntryInfo("", ""), name)) for name in _COLUMNS}
_MARKS = ", ".join("?" * len(_COLUMNS))
_VERSION = 2
_SCHEMA = (
    f"CREATE TABLE entry ({', '.join(_COLUMNS)}, PRIMARY KEY (entry, generation))",
    "CREATE TABLE counter (reason TEXT PRIMARY KEY, count INTEGER NOT NULL)",
    "CREATE TABLE declined (entry TEXT PRIMARY KEY, count INTEGER NOT NULL, reason TEXT NOT NULL)",
    "CREATE TABLE complete (yes INTEGER PRIMARY KEY)",
    f"PRAGMA user_version = {_VERSION}",
)


class _Unusable(Exception):
    """The file is not an index of this version."""


class Index:
    """The database beside the entries. No call raises: what cannot be noted is not noted."""

    def __init__(self, directory: Callable[[], AbstractContextManager[int]]) -> None:
        self._directory = directory

    def _use(self, work: Callable[[sqlite3.Connection], _T], otherwise: _T) -> _T:
        try:
            with self._directory() as place:
                for _ in range(2):
                    try:
                        with closing(_connected(place)) as database:
                            database.execute("BEGIN IMMEDIATE")
                            result = work(database)
                            database.execute("COMMIT")
                            return result
                    except (sqlite3.Error, _Unusable) as error:
                        if not _is_damage(error):
                            raise
                        for suffix in ("", "-journal", "-wal", "-shm"):
                            with suppress(FileNotFoundError):
                                os.unlink(_NAME + suffix, dir_fd=place)
        except (OSError, CacheRejected):
            pass  # there is none, or it is not ours
        except Exception as error:  # read-only, full, locked for long
            _log.debug("the index of a cache directory cannot be used: %s", error)
        return otherwise

    def _write(self, *statements: tuple[str, tuple[object, ...]]) -> None:
        """Execute statements, all or none."""

        def work(database: sqlite3.Connection) -> None:
            for statement, values in statements:
                database.execute(statement, values)

        self._use(work, None)

    def put(self, info: EntryInfo) -> None:
        """Note an entry; another generation of it is forgotten, but for its hits."""

        def work(database: sqlite3.Connection) -> None:
            old = database.execute("SELECT hits FROM entry WHERE entry = ?", (info.entry,)).fetchone()
            noted = info if old is None else replace(info, hits=old[0])
            database.execute("DELETE FROM entry WHERE entry = ?", (info.entry,))
            database.execute(f"INSERT INTO entry VALUES ({_MARKS})", astuple(noted))
            database.execute("DELETE FROM declined WHERE entry = ?", (info.entry,))

        self._use(work, None)

    def remove(self, entry: str, generation: str) -> None:
        self._write(("DELETE FROM entry WHERE entry = ? AND generation = ?", (entry, generation)))

    def all(self) -> dict[tuple[str, str], EntryInfo]:
        """Return the notes, by entry and generation. Nonsense is forgotten, to be found again."""

        def work(database: sqlite3.Connection) -> dict[tuple[str, str], EntryInfo]:
            found = {}
            rows = database.execute(f"SELECT rowid, {', '.join(_COLUMNS)} FROM entry").fetchall()
            for number, *row in rows:
                values = dict(zip(_COLUMNS, row, strict=True))
                values["pinned"] = values["pinned"] == 1
                if all(_is_sound(name, value) for name, value in values.items()):
                    info = EntryInfo(**values)
                    found[info.entry, info.generation] = info
                else:
                    database.execute("DELETE FROM entry WHERE rowid = ?", (number,))
                    database.execute("DELETE FROM complete")
            return found

        return self._use(work, {})

    @property
    def is_complete(self) -> bool:
        """Whether every entry of the directory was noted once; not so after the database was lost."""
        return self._use(lambda database: database.execute("SELECT 1 FROM complete").fetchone() is not None, False)

    def learn(self, infos: Iterable[EntryInfo], gone: Iterable[tuple[str, str]], *, complete: bool = False) -> None:
        """Note what the directory has told.

        Args:
            infos: Entries that were noted differently or not at all.
            gone: Entries and generations that are not there any more.
            complete: There are no other entries, but for those noted meanwhile.
        """
        rows = [astuple(info) for info in infos]

        def work(database: sqlite3.Connection) -> None:
            database.executemany("DELETE FROM entry WHERE entry = ? AND generation = ?", gone)
            database.executemany(f"INSERT OR REPLACE INTO entry VALUES ({_MARKS})", rows)
            if complete:
                database.execute("INSERT OR REPLACE INTO complete VALUES (1)")

        self._use(work, None)

    def hit(self, entry: str, nbytes: int, hit_ms: float) -> None:
        """Note that an entry was used, how large it is by now, and how long restoring it took."""
        now = int(time.time())
        used = "UPDATE entry SET hits = hits + 1, last_hit = ?, hit_ms = ? WHERE entry = ? AND last_hit <= ?"
        grown = "UPDATE entry SET nbytes = ? WHERE entry = ? AND nbytes != ?"
        self._write((used, (now, hit_ms, entry, now - _HIT_SECONDS)), (grown, (nbytes, entry, nbytes)))

    def count(self, reason: CacheReason) -> None:
        statement = "INSERT INTO counter VALUES (?, 1) ON CONFLICT (reason) DO UPDATE SET count = count + 1"
        self._write((statement, (reason.value,)))

    def counters(self) -> dict[str, int]:
        return self._use(lambda database: dict(database.execute("SELECT reason, count FROM counter").fetchall()), {})

    def decline(self, entry: str, reason: CacheReason) -> None:
        """Note that a device did not want to save an entry."""
        statement = (
            "INSERT INTO declined VALUES (?, 1, ?)"
            " ON CONFLICT (entry) DO UPDATE SET count = count + 1, reason = excluded.reason"
        )
        self._write((statement, (entry, reason.value)))

    def declined(self, entry: str) -> tuple[int, CacheReason]:
        """Return how often in a row a device did not want to save an entry, and why last."""

        def work(database: sqlite3.Connection) -> tuple[int, CacheReason]:
            row = database.execute("SELECT count, reason FROM declined WHERE entry = ?", (entry,)).fetchone()
            return (0, CacheReason.SAVED) if row is None else (int(row[0]), CacheReason(row[1]))

        return self._use(work, (0, CacheReason.SAVED))


def _connected(place: int) -> sqlite3.Connection:
    """Open the database of a directory, or make it; never through a link (THR-14)."""
    try:
        # An existing one must not be opened and closed: that would undo the locks of other threads.
        os.close(os.open(_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place))
    except FileExistsError:
        status = os.stat(_NAME, dir_fd=place, follow_symlinks=False)
        private = status.st_uid == os.geteuid() and status.st_nlink == 1 and not status.st_mode & 0o077
        if not stat.S_ISREG(status.st_mode) or not private:
            raise _Unusable("no private file with one name") from None
    database = sqlite3.connect(f"/proc/self/fd/{place}/{_NAME}", timeout=5, isolation_level=None)
    try:
        database.execute("PRAGMA synchronous=OFF")  # losing counts costs nothing
        if database.execute("PRAGMA user_version").fetchone() != (_VERSION,):
            database.execute("BEGIN IMMEDIATE")  # another process may be making it
            if database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
                for statement in _SCHEMA:
                    database.execute(statement)
            elif database.execute("PRAGMA user_version").fetchone() != (_VERSION,):
                raise _Unusable("another version")
            database.execute("COMMIT")
        return database
    except BaseException:
        database.close()
        raise


def _is_damage(error: Exception) -> bool:
    """Whether an error comes from the contents of the file, not from the disk, a lock or a lack of descriptors."""
    if isinstance(error, sqlite3.OperationalError):
        return any(words in str(error) for words in ("no such column", "no such table", "values were supplied"))
    return isinstance(error, _Unusable) or type(error) is sqlite3.DatabaseError
