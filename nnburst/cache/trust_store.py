"""The service's records of its clients' cache files: the valid generations (saves) of each entry.

A cache file's authentication code proves that this service wrote the file. This store proves that the file is the
newest: without the store, a client could put back an old file. The state directory contains::

    key   lock   trust/<device>/{epoch, lock, <entry>}

The file <entry> contains the entry's valid generations, and a code over them and the file's name. A change replaces
the file by a rename. If the file is damaged, the entry is not restored.
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

from .files import default_state_directory, lock, make_directories, open_in
from .names import entry_name
from .reasons import CacheReason, CacheRejected

_PENDING_SECONDS = 600
_MOST_ENTRIES = 10_000
"""Largest number of entries of a device. If there are more, the oldest are removed until nine tenths remain."""
_MOST_GENERATIONS = 64
"""Largest number of generations of an entry, over all directories."""
_CODE_SIZE = 32
_LOCK, _EPOCH, _NEW, _KEY = "lock", "epoch", "new", "key"
_KEY_SIZE = 32


class MasterKey:
    """32 random bytes in the service's state directory. All other keys are derived from them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = hashlib.sha256(b"nnburst-key-id" + secret).digest()[:8]

    @classmethod
    def open(cls, directory: int) -> MasterKey:
        """Read or make the key of a state directory. Raises `CacheRejected` if other users may read the key's file."""
        if _KEY not in os.listdir(directory):
            with _lock_directory(directory):
                if _KEY not in os.listdir(directory):  # Another process may have made the key.
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
    """The record of one generation of an entry."""

    generation: bytes
    epoch: bytes
    fingerprint: bytes
    files: tuple[tuple[int, bytes], ...]
    """(length, digest) of each model file, then of each data file."""
    live: bool
    """False until the client has published the generation. An unpublished record expires after ten minutes."""
    created: int
    place: bytes = b""
    """The client's directory, from `place_of`. A live generation replaces the entry's other generations in the
    directory.
    """


class TrustStore:
    """The records of trusted cache files, in the state directory. Several services can share them. Thread safe.

    Args:
        directory: Made with mode 0700 if missing; by default, `default_state_directory`.

    Raises:
        CacheRejected: The directory cannot be used (NO_STORE). Every method can raise this error.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = Path(directory) if directory is not None else default_state_directory()
        with self._root():
            pass

    @property
    def key(self) -> MasterKey:
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
        """Yield the descriptor of a device's directory, and the key that authenticates its files.

        With `writing`, other writers wait.
        """
        with (
            self._root() as (root, key),
            open_in(root, "trust", create=True) as devices,
            open_in(devices, hashlib.sha256(device.encode()).hexdigest(), create=True) as place,
            _lock_directory(place) if writing else nullcontext(),
        ):
            yield place, key.derive("trust", device.encode())

    def set_epoch(self, device: str, epoch: bytes) -> None:
        """Record the running build of a device. If the build has changed, remove the device's entries."""
        with self._open(device, writing=True) as (place, _):
            if _contents(place, _EPOCH) != epoch:
                for name in _entries(place):
                    os.unlink(name, dir_fd=place)
                _replace(place, _EPOCH, epoch)

    def records(self, cache_key: bytes, device: str) -> list[EntryRecord]:
        """Return the valid generations of an entry. Raises `CacheRejected` if the entry's file is damaged."""
        with self._open(device, writing=False) as (place, key):
            return _read(place, key, entry_name(cache_key))

    def put(self, cache_key: bytes, device: str, record: EntryRecord) -> None:
        """Record a generation, which is one save of an entry.

        If `record.live`, it replaces the records of the entry's other generations in the same cache directory."""
        with self._open(device, writing=True) as (place, key):
            known: list[EntryRecord] = []
            with suppress(CacheRejected):
                known = _read(place, key, entry_name(cache_key))
            _add(place, key, entry_name(cache_key), known, record)
            names = _entries(place)
            if len(names) > _MOST_ENTRIES:
                names.sort(key=lambda name: os.stat(name, dir_fd=place, follow_symlinks=False).st_mtime_ns)
                for name in names[: -_MOST_ENTRIES * 9 // 10]:
                    os.unlink(name, dir_fd=place)

    def confirm(self, cache_key: bytes, device: str, generation: bytes) -> bool:
        """Make a published generation the only valid one of its entry in its directory.

        Returns:
            False if the generation is unknown.
        """
        with self._open(device, writing=True) as (place, key):
            known = _read(place, key, entry_name(cache_key))
            found = [record for record in known if record.generation == generation]
            if found:
                _add(place, key, entry_name(cache_key), known, replace(found[0], live=True))
        return bool(found)

    def revoke(self, cache_key: bytes, device: str, generation: bytes | None = None) -> None:
        """Remove an entry, or one generation of it."""
        with self._open(device, writing=True) as (place, key):
            known: list[EntryRecord] = []
            if generation is not None:
                with suppress(CacheRejected):
                    known = _read(place, key, entry_name(cache_key))
            _write(place, key, entry_name(cache_key), [record for record in known if record.generation != generation])


@contextmanager
def _lock_directory(place: int) -> Iterator[None]:
    held = lock(place, _LOCK, shared=False, timeout=10.0)
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
    """Return the contents of a file in the open directory `place`; empty if the file does not exist."""
    try:
        with open(name, "rb", opener=_opener(place)) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _replace(place: int, name: str, contents: bytes, *, durable: bool = True) -> None:
    """Replace a file in one step. Without `durable`, the new file may be lost if the machine crashes."""
    with open(_NEW, "wb", opener=_opener(place)) as file:
        file.write(contents)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.rename(_NEW, name, src_dir_fd=place, dst_dir_fd=place)
    if durable:
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
    """Write an entry's file: the new generation, and the known generations that the new one does not replace."""
    kept = [
        other
        for other in known
        if other.generation != record.generation and not (record.live and other.place == record.place)
    ]
    kept.sort(key=lambda other: other.live)  # Unpublished generations are dropped first.
    _write(place, key, name, [*kept, record][-_MOST_GENERATIONS:], durable=record.live)


def _write(place: int, key: bytes, name: str, records: list[EntryRecord], *, durable: bool = True) -> None:
    text = msgpack.encode(records)
    _replace(place, name, hmac.digest(key, name.encode() + text, "sha256") + text, durable=durable)
