"""How blobs are kept in a file: everything explicit, nothing left unset.

::

    0  magic "NNBBLOBS"   8 version u32   12 device version u32   16 entries u32   20 zero u32
    24 length of the rest u64   32 digest of the build[32]   64 code over bytes 0-63 and the rest[32]
    96 entries, least recently used first: key length u32, value length u32, key, value

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

_MAGIC = b"NNBBLOBS"
_VERSION = 1
_HEAD = struct.Struct("<8sIIIIQ32s")
_CODE = 32
_ENTRY = struct.Struct("<II")
_START = _HEAD.size + _CODE


class BlobFileError(ValueError):
    """The bytes are damaged or something else, or there is too little room for them."""


def flattened_size(items: Iterable[tuple[bytes, bytes]]) -> int:
    """Bytes that these entries take, exactly."""
    return _START + sum(_ENTRY.size + len(key) + len(value) for key, value in items)


def _code(head: bytes, rest: bytes | memoryview, key: bytes) -> bytes:
    if key:
        code = hmac.new(key, head, "sha256")
        code.update(rest)
        return code.digest()
    digest = hashlib.sha256(head)
    digest.update(rest)
    return digest.digest()


def pack_blobs(items: Iterable[tuple[bytes, bytes]], *, device_version: int, build: str, key: bytes) -> bytes:
    """Return entries as bytes, in their order."""
    rest, count = bytearray(), 0
    for name, value in items:
        rest += _ENTRY.pack(len(name), len(value)) + name + value
        count += 1
    build_digest = hashlib.sha256(build.encode()).digest()
    head = _HEAD.pack(_MAGIC, _VERSION, device_version, count, 0, len(rest), build_digest)
    return head + _code(head, bytes(rest), key) + bytes(rest)


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
    magic, version, device, count, zero, length, build_digest = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        raise BlobFileError("no blob file")
    if version != _VERSION or device != device_version:
        return iter(())
    if build_digest != hashlib.sha256(build.encode()).digest():
        return iter(())
    if zero or length > len(raw) - _START:
        raise BlobFileError("a blob file is cut off")
    rest = memoryview(raw)[_START : _START + length]
    if not hmac.compare_digest(_code(raw[: _HEAD.size], rest, key), raw[_HEAD.size : _START]):
        raise BlobFileError("a blob file is damaged")
    return iter(_entries(rest, count))


def _entries(rest: memoryview, count: int) -> list[tuple[bytes, bytes]]:
    found, at = [], 0
    for _ in range(count):
        if at + _ENTRY.size > len(rest):
            raise BlobFileError("an entry begins behind the end")
        key_size, value_size = _ENTRY.unpack_from(rest, at)
        at += _ENTRY.size
        if at + key_size + value_size > len(rest):
            raise BlobFileError("an entry ends behind the end")
        found.append((bytes(rest[at : at + key_size]), bytes(rest[at + key_size : at + key_size + value_size])))
        at += key_size + value_size
    if at != len(rest):
        raise BlobFileError("there is more than the entries")
    return found


def write_blob_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file as a whole: readers see the old one or the new one, whatever ends meanwhile.

    Raises:
        OSError: It could not be written; the old one is still there.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.write(fd, view[done:])
            os.fsync(fd)
        finally:
            os.close(fd)
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
    """Return the bytes of a file, read once.

    Raises:
        FileNotFoundError: There is none.
        BlobFileError: It is no private file of this user, larger than allowed, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BlobFileError(f"{os.fspath(path)!r} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise BlobFileError(f"{os.fspath(path)!r} is not a private file of this user")
        if status.st_size > most:
            raise BlobFileError(f"{os.fspath(path)!r} has {status.st_size} bytes; at most {most}")
        data = bytearray()
        while len(data) <= most and (piece := os.read(fd, min(1 << 20, most + 1 - len(data)))):
            data += piece
        return bytes(data)
    except OSError as error:
        raise BlobFileError(f"{os.fspath(path)!r} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
