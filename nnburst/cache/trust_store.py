"""Records of the service about the files that clients keep: which generation of an entry is the right one.

The authentication code of a file says that this service wrote it. Only this store says that it is the newest: without
it an old file could be put back. It has a file for each entry of each device, which is replaced by rename::

    key   lock   trust/<device>/{epoch, lock, <entry>}

Such a file has the generations that count and a code over them and its name. What it lacks or what is damaged misses.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from msgspec import Struct, msgpack
from msgspec.structs import replace

from .files import default_state_directory, lock, make_directories, opened
from .reasons import CacheReason, CacheRejected
from .token import entry_name

_PENDING_SECONDS = 600
_MOST_ENTRIES = 10_000
"""Entries of a device, at most; the oldest go."""
_MOST_GENERATIONS = 64
"""Generations of an entry, in all places, at most."""
_CODE_SIZE = 32
_LOCK, _EPOCH, _NEW, _KEY = "lock", "epoch", "new", "key"
_KEY_SIZE = 32


class MasterKey:
    """32 random bytes in a file of the service's own. Everything else is derived from it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = hashlib.sha256(b"nnburst-key-id" + secret).digest()[:8]

    @classmethod
    def open(cls, directory: int) -> MasterKey:
        """Read the key of a state directory, or make one; `CacheRejected` if the file is not the user's alone."""
        if _KEY not in os.listdir(directory):
            with _alone(directory):
                if _KEY not in os.listdir(directory):  # which another process has made meanwhile
                    _replace(directory, _KEY, os.urandom(_KEY_SIZE))
        with open(_KEY, "rb", opener=_opener(directory)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise CacheRejected(CacheReason.NO_STORE, "the key file is not a private file of this user")
            secret = file.read(_KEY_SIZE + 1)
        if len(secret) != _KEY_SIZE:
            raise CacheRejected(CacheReason.NO_STORE, f"the key file has {len(secret)} bytes, not {_KEY_SIZE}")
        return cls(secret)

    def derive(self, label: str, salt: bytes = b"") -> bytes:
        """Return a key of 32 bytes for one purpose (HKDF-SHA256)."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(hashes.SHA256(), 32, salt, f"nnburst {label} v1".encode()).derive(self._secret)


class EntryRecord(Struct, frozen=True, array_like=True):
    """One generation of an entry."""

    generation: bytes
    epoch: bytes
    fingerprint: bytes
    files: tuple[tuple[int, bytes], ...]
    """Length and digest of each file: of the model files, then of the data files."""
    live: bool
    """False until the client has published it; then it counts for ten minutes only."""
    created: int
    place: bytes = b""
    """The place where the client keeps the entry: see `place_of`. A generation replaces the others of its place."""


class TrustStore:
    """Files in the service's own directory. Several services of a user may share them; thread safe.

    Args:
        directory: Made with mode 0700 if need be; default: see `default_state_directory`.

    Raises:
        CacheRejected: Reason NO_STORE, by every method: it cannot be used, and nothing can be cached.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = Path(directory) if directory is not None else default_state_directory()
        with self._root():
            pass

    @property
    def key(self) -> MasterKey:
        """The current key."""
        with self._root() as (_, key):
            return key

    @contextmanager
    def _root(self) -> Iterator[tuple[int, MasterKey]]:
        try:
            make_directories(self.directory)
            place = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                status = os.fstat(place)
                if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                    raise CacheRejected(
                        CacheReason.NO_STORE, f"{self.directory} is not a private directory of this user (mode 0700)"
                    )
                yield place, MasterKey.open(place)
            finally:
                os.close(place)
        except OSError as error:
            raise CacheRejected(CacheReason.NO_STORE, f"the trust store cannot be used: {error}") from error

    @contextmanager
    def _open(self, device: str, *, writing: bool) -> Iterator[tuple[int, bytes]]:
        """Open the directory of a device, with a key for its files; who writes is alone."""
        with (
            self._root() as (root, key),
            opened(root, "trust", create=True) as devices,
            opened(devices, hashlib.sha256(device.encode()).hexdigest(), create=True) as place,
            _alone(place) if writing else nullcontext(),
        ):
            yield place, key.derive("trust", device.encode())

    def set_epoch(self, device: str, epoch: bytes) -> None:
        """Say which build of a device runs now. Another one than before: all its entries are forgotten."""
        with self._open(device, writing=True) as (place, _):
            if _contents(place, _EPOCH) != epoch:
                for name in _entries(place):
                    os.unlink(name, dir_fd=place)
                _replace(place, _EPOCH, epoch)

    def records(self, token: bytes, device: str) -> list[EntryRecord]:
        """Return the generations of an entry that count; `CacheRejected` if their file was changed from outside."""
        with self._open(device, writing=False) as (place, key):
            return _read(place, key, entry_name(token))

    def put(self, token: bytes, device: str, record: EntryRecord) -> None:
        """Remember a generation. A live one replaces all others of its entry in its place."""
        with self._open(device, writing=True) as (place, key):
            known: list[EntryRecord] = []
            with suppress(CacheRejected):
                known = _read(place, key, entry_name(token))
            _add(place, key, entry_name(token), known, record)
            names = _entries(place)
            if len(names) > _MOST_ENTRIES:
                names.sort(key=lambda name: os.stat(name, dir_fd=place, follow_symlinks=False).st_mtime_ns)
                for name in names[: -_MOST_ENTRIES * 9 // 10]:
                    os.unlink(name, dir_fd=place)

    def confirm(self, token: bytes, device: str, generation: bytes) -> bool:
        """Make a published generation the only valid one in its place. Return False if it is unknown."""
        with self._open(device, writing=True) as (place, key):
            known = _read(place, key, entry_name(token))
            found = [record for record in known if record.generation == generation]
            if found:
                _add(place, key, entry_name(token), known, replace(found[0], live=True))
        return bool(found)

    def revoke(self, token: bytes, device: str, generation: bytes | None = None) -> None:
        """Forget an entry, or one generation of it."""
        with self._open(device, writing=True) as (place, key):
            known: list[EntryRecord] = []
            if generation is not None:
                with suppress(CacheRejected):
                    known = _read(place, key, entry_name(token))
            _write(place, key, entry_name(token), [record for record in known if record.generation != generation])


@contextmanager
def _alone(place: int) -> Iterator[None]:
    """Keep other writers out of a directory inside a with block."""
    held = lock(place, _LOCK, shared=False, patience=10.0)
    if held is None:
        raise CacheRejected(CacheReason.NO_STORE, "another process writes to the trust store all the time")
    try:
        yield
    finally:
        held.close()


def _entries(place: int) -> list[str]:
    return [name for name in os.listdir(place) if name not in (_LOCK, _EPOCH, _NEW)]


def _opener(place: int) -> Callable[[str, int], int]:
    return lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=place)


def _contents(place: int, name: str) -> bytes:
    """Return what is in a file; nothing if there is none."""
    try:
        with open(name, "rb", opener=_opener(place)) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _replace(place: int, name: str, contents: bytes, *, for_good: bool = True) -> None:
    """Write a file anew, in one step; what is not written for good may miss after a crash of the machine."""
    with open(_NEW, "wb", opener=_opener(place)) as file:
        file.write(contents)
        file.flush()
        if for_good:
            os.fsync(file.fileno())
    os.rename(_NEW, name, src_dir_fd=place, dst_dir_fd=place)
    if for_good:
        os.fsync(place)


def _read(place: int, key: bytes, name: str) -> list[EntryRecord]:
    contents = _contents(place, name)
    if not contents:
        return []
    code, text = contents[:_CODE_SIZE], contents[_CODE_SIZE:]
    if not hmac.compare_digest(code, hmac.digest(key, name.encode() + text, "sha256")):
        raise CacheRejected(CacheReason.NO_ROW, "a file of the trust store was changed from outside")
    horizon = int(time.time()) - _PENDING_SECONDS
    records = msgpack.decode(text, type=list[EntryRecord])
    return [record for record in records if record.live or record.created >= horizon]


def _add(place: int, key: bytes, name: str, known: list[EntryRecord], record: EntryRecord) -> None:
    """Write what was known but for what a generation replaces, and that."""
    kept = [
        other
        for other in known
        if other.generation != record.generation and not (record.live and other.place == record.place)
    ]
    kept.sort(key=lambda other: other.live)  # saves that are not published push no others out
    _write(place, key, name, [*kept, record][-_MOST_GENERATIONS:], for_good=record.live)


def _write(place: int, key: bytes, name: str, records: list[EntryRecord], *, for_good: bool = True) -> None:
    text = msgpack.encode(records)
    _replace(place, name, hmac.digest(key, name.encode() + text, "sha256") + text, for_good=for_good)
