"""How blobs are kept in a file: everything explicit, nothing left unset.

::

    0  magic "NNBBLOBS"   8 version u32   12 device version u32   16 zero u64
    24 length of the rest u64   32 digest of the build[32]   64 code over bytes 0-63 and the rest[32]
    96 entries as (key, value), least recently used first: MessagePack

The code is SHA-256, or HMAC-SHA256 with a key. Without a key it tells damage, not intent: such a file belongs where
only the device can write. It is compared before anything behind it is looked at, on bytes that are in memory already.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

_MAGIC = b"NNBBLOBS"
_VERSION = 2
_HEAD = struct.Struct("<8sIIQQ32s")
_CODE = 32
_START = _HEAD.size + _CODE
_entries = msgspec.msgpack.Decoder(tuple[tuple[bytes, bytes], ...])


class BlobFileError(ValueError):
    """The bytes are damaged or something else, or there is too little room for them."""


def _code(head: bytes, rest: bytes, key: bytes) -> bytes:
    return hmac.digest(key, head + rest, "sha256") if key else hashlib.sha256(head + rest).digest()


def pack_blobs(items: Iterable[tuple[bytes, bytes]], *, device_version: int, build: str, key: bytes) -> bytes:
    """Return entries as bytes, in their order."""
    rest = msgspec.msgpack.encode(tuple(items))
    build_digest = hashlib.sha256(build.encode()).digest()
    head = _HEAD.pack(_MAGIC, _VERSION, device_version, 0, len(rest), build_digest)
    return head + _code(head, rest, key) + rest


def unpack_blobs(
    data: bytes | bytearray | memoryview, *, device_version: int, build: str, key: bytes
) -> Iterator[tuple[bytes, bytes]]:
    """Return the entries, all checked before the first; none if another version, device or build wrote them.

    Raises:
        BlobFileError: The bytes are damaged or something else.
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
    """Replace a file as a whole: readers see the old one or the new one, whatever ends meanwhile."""
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
    """Return the bytes of a file, read once; `BlobFileError` if it is not this user's alone, or too large."""
    try:
        with open(path, "rb", opener=_opened) as file:
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


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
