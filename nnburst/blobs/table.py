"""A bounded table of blobs by key, for devices that cache on their own, and its file format.

::

    0  magic "NNBBLOBS"   8 version u32   12 device version u32   16 zero u64
    24 length of the rest u64   32 digest of the build[32]   64 code[32] over bytes 0-63 and 96-
    96 entries as (key, value), least recently used first: MessagePack

The code is SHA-256, or HMAC-SHA256 with a key. Without a key the code detects only accidental damage, so the file must
be where only the device can write.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import random
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

Writable = bytearray | memoryview
Allocator = Callable[[int], Writable | None]


Policy = tuple[Literal["random", "lru"], Literal["halve", "fit", "fit_halve"]]
"""Order and amount of eviction: see `NNCache.initialize`."""


class BlobCache:
    """A table of bytes by key, for one thread at a time. Arguments as for `NNCache.initialize`."""

    def __init__(
        self, max_key: int, max_value: int, max_total: int, policy: Policy, *, seed: int | None = None
    ) -> None:
        self.max_key, self.max_value, self.max_total = max_key, max_value, max_total
        self._select, self._capacity = policy
        self._random = random.Random(seed)
        self._values: dict[bytes, bytes] = {}
        """Entries, least recently used first."""
        self._total = 0

    # ---- using ---------------------------------------------------------------------------------------------------

    def set(self, key: bytes, value: bytes) -> None:
        """Store a value. Do nothing if key or value is empty or too large, or if both together exceed `max_total`.

        If there is no room, older values are evicted first. The policy "halve" evicts until half of the room is free. A
        value that still does not fit is then not stored.
        """
        if not (0 < len(key) <= self.max_key and 0 < len(value) <= self.max_value):
            return
        if len(key) + len(value) > self.max_total:
            return
        key, value = bytes(key), bytes(value)
        needed = len(key) + len(value)
        old = self._values.get(key)
        if old is not None and self._total - len(old) + len(value) <= self.max_total:
            self._remove(key)
        elif self._total + needed > self.max_total and not self._make_room(key, needed):
            return
        elif key in self._values:  # The old entry survived the eviction.
            self._remove(key)
        self._values[key] = value
        self._total += needed

    def get(self, key: bytes, out: Writable | None = None) -> int:
        """Copy a value into a buffer, as `NNCache.get_blob` does."""
        return self.get_with(key, lambda size: out)[0]

    def get_with(self, key: bytes, allocate: Allocator) -> tuple[int, Writable | None]:
        """Copy a value, as `NNCache.get_blob_with` does. The value counts as used only if it was copied."""
        value = self._values.get(bytes(key)) if len(key) <= self.max_key else None
        if value is None:
            return 0, None
        out = allocate(len(value))
        if out is None or len(out) < len(value):
            return len(value), None
        self._touch(bytes(key))
        out[: len(value)] = value
        return len(value), out

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._values)

    @property
    def total(self) -> int:
        """Bytes of all keys and values."""
        return self._total

    def clear(self) -> None:
        self._values.clear()
        self._total = 0

    # ---- as bytes ------------------------------------------------------------------------------------------------

    def flattened_size(self) -> int:
        """Number of bytes that `flatten` writes."""
        return len(pack_blobs(self._values.items(), device_version=0, build="", key=b""))

    def flatten(self, out: Writable, *, device_version: int = 1, build: str = "", key: bytes = b"") -> None:
        """Write all entries into a buffer, least recently used first. Raises `BlobFileError` if they do not fit."""
        data = pack_blobs(self._values.items(), device_version=device_version, build=build, key=key)
        if len(out) < len(data):
            raise BlobFileError(f"{len(out)} bytes for a cache that takes {len(data)}")
        out[: len(data)] = data

    def unflatten(self, data: bytes | Writable, *, device_version: int = 1, build: str = "", key: bytes = b"") -> None:
        """Replace all entries by those in the output of `flatten`. Entries beyond this cache's limits are left out.

        Data from another build or device version leave the cache empty.

        Raises:
            BlobFileError: The data are damaged or in another format. The cache is empty afterwards.
        """
        self.clear()
        for name, value in unpack_blobs(data, device_version=device_version, build=build, key=key):
            self.set(name, value)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _make_room(self, key: bytes, needed: int) -> bool:
        """Evict entries by the policy. Return True if an entry of `needed` bytes then fits."""
        capacity, half = self._capacity, self.max_total // 2
        if capacity == "halve" and self._total <= half:
            return False
        victims = list(self._values)
        if self._select == "random":
            self._random.shuffle(victims)
        for victim in victims:
            over_half = capacity != "fit" and self._total > half
            no_fit = capacity != "halve" and self._total + needed - self._size_of(key) > self.max_total
            if not over_half and not no_fit:
                break
            self._remove(victim)
        return self._total + needed - self._size_of(key) <= self.max_total

    def _size_of(self, key: bytes) -> int:
        value = self._values.get(key)
        return 0 if value is None else len(key) + len(value)

    def _remove(self, key: bytes) -> None:
        self._total -= len(key) + len(self._values.pop(key))

    def _touch(self, key: bytes) -> None:
        self._values[key] = self._values.pop(key)


# ---- the file ----------------------------------------------------------------------------------------------------

_MAGIC = b"NNBBLOBS"
_VERSION = 2
_HEAD = struct.Struct("<8sIIQQ32s")
_CODE = 32
_START = _HEAD.size + _CODE
_entries = msgspec.msgpack.Decoder(tuple[tuple[bytes, bytes], ...])


class BlobFileError(ValueError):
    """The bytes are damaged or in another format, or a buffer is too small."""


def _code(head: bytes, rest: bytes, key: bytes) -> bytes:
    return hmac.digest(key, head + rest, "sha256") if key else hashlib.sha256(head + rest).digest()


def pack_blobs(items: Iterable[tuple[bytes, bytes]], *, device_version: int, build: str, key: bytes) -> bytes:
    """Return the bytes of a file with these entries."""
    rest = msgspec.msgpack.encode(tuple(items))
    build_digest = hashlib.sha256(build.encode()).digest()
    head = _HEAD.pack(_MAGIC, _VERSION, device_version, 0, len(rest), build_digest)
    return head + _code(head, rest, key) + rest


def unpack_blobs(
    data: bytes | bytearray | memoryview, *, device_version: int, build: str, key: bytes
) -> Iterator[tuple[bytes, bytes]]:
    """Return the entries of a file; none if another device version or build wrote the file.

    Raises:
        BlobFileError: The bytes are damaged or in another format.
    """
    raw = bytes(data)
    if len(raw) < _START:
        raise BlobFileError(f"these {len(raw)} bytes are not a blob file")
    magic, version, device, zero, length, build_digest = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        raise BlobFileError("no blob file")
    ours = _VERSION, device_version, hashlib.sha256(build.encode()).digest()
    if (version, device, build_digest) != ours:
        return iter(())
    if zero or length > len(raw) - _START:
        raise BlobFileError("a blob file is cut off")
    rest = raw[_START : _START + length]
    if not hmac.compare_digest(_code(raw[: _HEAD.size], rest, key), raw[_HEAD.size : _START]):
        raise BlobFileError("a blob file is damaged")
    try:
        return iter(_entries.decode(rest))
    except msgspec.MsgspecError as error:
        raise BlobFileError(f"a blob file has no entries: {error}") from error


def write_blob_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file atomically, even if the machine crashes."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_blob_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Return a file's bytes. Raises `BlobFileError` if other users can write the file, or it exceeds `most` bytes."""
    try:
        with open(path, "rb", opener=_open_nofollow) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise BlobFileError(f"{os.fspath(path)!r} is not a private file of this user")
            if status.st_size > most:
                raise BlobFileError(f"{os.fspath(path)!r} has {status.st_size} bytes; at most {most}")
            return file.read(most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BlobFileError(f"{os.fspath(path)!r} cannot be read: {error.strerror}") from error


def _open_nofollow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
