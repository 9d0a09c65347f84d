"""What the service remembers of the files that clients keep: which generation of an entry is the right one.

The authentication code of a file says that this service wrote it. Only this store says that it is the newest: without
it an old file could be put back.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import sqlite3
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from .files import lock, make_directories
from .keys import MasterKey
from .places import default_state_directory
from .reasons import CacheReason, CacheRejected

_SCHEMA_VERSION = 2
_META = "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT"
_TABLES = {
    "device": "CREATE TABLE device (name TEXT PRIMARY KEY, epoch BLOB NOT NULL) STRICT",
    "entry": """CREATE TABLE entry (
        token BLOB NOT NULL, device TEXT NOT NULL, generation BLOB NOT NULL, place BLOB NOT NULL,
        live INTEGER NOT NULL, epoch BLOB NOT NULL, fingerprint BLOB NOT NULL, created INTEGER NOT NULL,
        files BLOB NOT NULL, mac BLOB NOT NULL,
        PRIMARY KEY (token, device, generation)) STRICT""",
}
_INDEXES = (
    "CREATE UNIQUE INDEX one_live ON entry (token, device, place) WHERE live = 1",
    "CREATE INDEX by_age ON entry (created)",
)
_INSERT = "INSERT OR REPLACE INTO entry VALUES (?,?,?,?,?,?,?,?,?,?)"
_REPLACED = "DELETE FROM entry WHERE token = ? AND device = ? AND place = ?"
_PENDING_SECONDS = 600
_MOST_ROWS = 20_000
_FILE = struct.Struct("<HHQ32s")
_SUFFIXES = ("", "-wal", "-shm")
_MOST_DAMAGED = 3
"""Databases that were set aside, for a later look at why."""


class FileRecord(Struct, frozen=True):
    """One file of an entry, as it was written."""

    kind: int
    index: int
    length: int
    digest: bytes


class EntryRecord(Struct, frozen=True):
    """One generation of an entry."""

    token: bytes
    device: str
    generation: bytes
    epoch: bytes
    fingerprint: bytes
    files: tuple[FileRecord, ...]
    live: bool
    """False until the client has published it; then it counts for ten minutes only."""
    created: int
    place: bytes = b""
    """Where the client keeps the entry: see `place_of`. A generation replaces the others of its place."""

    def encoded_files(self) -> bytes:
        return b"".join(_FILE.pack(f.kind, f.index, f.length, f.digest) for f in self.files)

    def row_mac(self, key: bytes) -> bytes:
        name = self.device.encode()
        fixed = struct.pack("<H", len(name)) + name + struct.pack("<?q", self.live, self.created)
        where = struct.pack("<H", len(self.place)) + self.place
        text = self.token + self.generation + self.epoch + self.fingerprint + fixed + where + self.encoded_files()
        return hmac.digest(key, text, "sha256")


class TrustStore:
    """A small database in the service's own directory. Several services of a user may share it; thread safe.

    Args:
        directory: Made with mode 0700 if need be; default: see `default_state_directory`.

    Raises:
        CacheRejected: Reason NO_STORE: it cannot be used, and nothing can be cached.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = Path(directory) if directory is not None else default_state_directory()
        self._path = self.directory / "trust.sqlite3"
        self._lock = threading.Lock()
        self._closed = self._damaged = False
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise CacheRejected(CacheReason.NO_STORE, f"the trust store cannot be used: {error}") from error

    def _open(self) -> None:
        """Open key and database, whatever there is by now."""
        make_directories(self.directory)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise CacheRejected(
                    CacheReason.NO_STORE, f"{self.directory} is not a private directory of this user (mode 0700)"
                )
            self.key = MasterKey.open(fd)
            self._row_key = self.key.derive("row")
            try:
                self._database = self._connected(fd)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._repair(fd)
        finally:
            os.close(fd)
        self._damaged = False

    def _repair(self, directory: int) -> None:
        """Set a damaged database aside and start empty: all entries miss, nothing else happens. One process does it."""
        held = lock(directory, "repair.lock", shared=False, patience=10.0)
        if held is None:
            raise CacheRejected(CacheReason.NO_STORE, "another process is repairing the trust store")
        try:
            try:
                self._database = self._connected(directory)  # another process was first
                return
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
            aside = f"{self._path}.{time.time_ns():020}.damaged"
            for suffix in _SUFFIXES:
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self._path}{suffix}", f"{aside}{suffix}")
            older = sorted(self.directory.glob(f"{self._path.name}.*.damaged"))[:-_MOST_DAMAGED]
            for path in (f"{old}{suffix}" for old in older for suffix in _SUFFIXES):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            self._database = self._connected(directory)
        finally:
            held.close()

    def _connected(self, directory: int) -> sqlite3.Connection:
        name, status = self._path.name, None
        while status is None:
            with contextlib.suppress(FileExistsError):
                # An existing file is not opened and closed here: that would undo the locks of other connections to it.
                os.close(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory))
            with contextlib.suppress(FileNotFoundError):  # another process has set it aside just now
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise CacheRejected(CacheReason.NO_STORE, f"{self._path} does not belong to this user")
        self._identity = status.st_dev, status.st_ino
        database = sqlite3.connect(self._path, timeout=10, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.execute("PRAGMA temp_store=MEMORY")  # a sandbox has no other place
            if database.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("the check of the database found damage")
            with _transaction(database):
                database.execute(_META)
                found = dict(database.execute("SELECT name, value FROM meta").fetchall())
                wanted = {"schema": struct.pack("<I", _SCHEMA_VERSION), "key": self.key.id}
                if found != wanted:  # a new key or schema makes everything miss
                    database.execute("DELETE FROM meta")
                    for name, create in _TABLES.items():
                        database.execute(f"DROP TABLE IF EXISTS {name}")
                        database.execute(create)
                    for create in _INDEXES:
                        database.execute(create)
                    database.executemany("INSERT INTO meta VALUES (?, ?)", wanted.items())
        except BaseException:
            database.close()
            raise
        return database

    def _is_elsewhere(self) -> bool:
        """Whether the database was set aside by another process, or removed."""
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return (status.st_dev, status.st_ino) != self._identity

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                if not self._closed and (self._damaged or self._is_elsewhere()):
                    self._damaged = True  # until it is open again
                    self._database.close()
                    self._open()
                with _transaction(self._database):
                    yield self._database
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and _is_damage(error):
                self._damaged = True  # looked at closely, and repaired, the next time
            raise CacheRejected(CacheReason.NO_STORE, f"the trust store failed: {error}") from error

    def set_epoch(self, device: str, epoch: bytes) -> None:
        """Say which build of a device runs now. Another one than before: all its entries are forgotten."""
        with self._using() as database:
            row = database.execute("SELECT epoch FROM device WHERE name = ?", (device,)).fetchone()
            if row is None or row[0] != epoch:
                database.execute("DELETE FROM entry WHERE device = ?", (device,))
                database.execute("INSERT OR REPLACE INTO device VALUES (?, ?)", (device, epoch))

    def put(self, record: EntryRecord) -> None:
        """Remember a generation. A live one replaces all others of its entry in its place."""
        with self._using() as database:
            if record.live:
                database.execute(_REPLACED, (record.token, record.device, record.place))
            database.execute(_INSERT, self._row(record))
            horizon = int(time.time()) - _PENDING_SECONDS
            database.execute("DELETE FROM entry WHERE live = 0 AND created < ?", (horizon,))
            (rows,) = database.execute("SELECT count(*) FROM entry").fetchone()
            if rows > _MOST_ROWS:
                database.execute(
                    "DELETE FROM entry WHERE rowid IN (SELECT rowid FROM entry ORDER BY created LIMIT ?)",
                    (rows - _MOST_ROWS,),
                )

    def _row(self, r: EntryRecord) -> tuple[object, ...]:
        files = r.encoded_files()
        return (
            r.token, r.device, r.generation, r.place, int(r.live), r.epoch, r.fingerprint, r.created, files,
            r.row_mac(self._row_key),
        )  # fmt: skip

    def get(self, token: bytes, device: str, generation: bytes) -> EntryRecord | None:
        """Return the record of a generation that counts, or None; `CacheRejected` if the row was changed."""
        with self._using() as database:
            return self._got(database, token, device, generation)

    def _got(self, database: sqlite3.Connection, token: bytes, device: str, generation: bytes) -> EntryRecord | None:
        row = database.execute(
            "SELECT place, live, epoch, fingerprint, created, files, mac FROM entry"
            " WHERE token = ? AND device = ? AND generation = ?",
            (token, device, generation),
        ).fetchone()
        if row is None:
            return None
        place, live, epoch, fingerprint, created, files, mac = row
        if len(files) % _FILE.size:
            raise CacheRejected(CacheReason.NO_ROW, "a row of the trust store is damaged")
        records = tuple(FileRecord(*_FILE.unpack_from(files, at)) for at in range(0, len(files), _FILE.size))
        record = EntryRecord(token, device, generation, epoch, fingerprint, records, bool(live), created, place)
        if not hmac.compare_digest(record.row_mac(self._row_key), mac):
            raise CacheRejected(CacheReason.NO_ROW, "a row of the trust store was changed from outside")
        if not record.live and created < time.time() - _PENDING_SECONDS:
            return None
        return record

    def knows(self, token: bytes, device: str) -> bool:
        """Whether any generation of an entry is known."""
        with self._using() as database:
            found = database.execute("SELECT 1 FROM entry WHERE token = ? AND device = ?", (token, device)).fetchone()
        return found is not None

    def confirm(self, token: bytes, device: str, generation: bytes) -> bool:
        """A client has published a generation: from now on no other counts in its place. False if it is not known."""
        with self._using() as database:  # all at once: replaced or revoked generations do not come back
            record = self._got(database, token, device, generation)
            if record is None:
                return False
            if not record.live:
                database.execute(_REPLACED, (token, device, record.place))
                database.execute(_INSERT, self._row(replace(record, live=True)))
        return True

    def revoke(self, token: bytes, device: str, generation: bytes | None = None) -> None:
        """Forget an entry, or one generation of it."""
        with self._using() as database:
            if generation is None:
                database.execute("DELETE FROM entry WHERE token = ? AND device = ?", (token, device))
            else:
                database.execute(
                    "DELETE FROM entry WHERE token = ? AND device = ? AND generation = ?", (token, device, generation)
                )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._database.close()


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether a database is broken: not locked, full, read-only, or beyond the limit of descriptors just now."""
    return type(error) is sqlite3.DatabaseError  # what SQLITE_CORRUPT and SQLITE_NOTADB become, and nothing else
