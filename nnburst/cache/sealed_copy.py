"""Private copies of files. A file is read once; its copy is verified, made read-only and used.

No other process can access the memory of a copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
from weakref import WeakValueDictionary

from .._core._nnburst import ffi, lib
from .._core.errno import check
from .._core.file_system import check_file_system
from ..errors import GeneralFailure, NNBurstError
from .container import CODE_SIZE, HEADER_SIZE, Header, Opening, chunks_of, overhead
from .reasons import CacheReason, CacheRejected
from .trust_store import MasterKey

_PATH_ONLY = getattr(os, "O_PATH", 0o10000000)


def check_fd(fd: int) -> os.stat_result:
    """Check that a descriptor is a regular file, open for reading and writing (THR-16). Return the file's status."""
    try:
        check_file_system(fd)  # Check first: other calls could wait forever for a file server.
        status, flags, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL), check(lib.nnb_seals(fd))
    except GeneralFailure as error:
        raise CacheRejected(CacheReason.REMOTE_FILES, str(error)) from error
    except (OSError, NNBurstError) as error:
        raise CacheRejected(CacheReason.BAD_FD, f"a descriptor cannot be used: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CacheRejected(CacheReason.BAD_FD, "a cache file is not a regular file")
    if flags & os.O_ACCMODE != os.O_RDWR or flags & os.O_APPEND or flags & _PATH_ONLY:
        raise CacheRejected(CacheReason.BAD_FD, "a cache file is not open for reading and writing at any place")
    if seals & ~fcntl.F_SEAL_SEAL:
        raise CacheRejected(CacheReason.BAD_FD, "a cache file is sealed")
    return status


def place_of(fd: int) -> bytes:
    """Identify a client's cache directory by the id of its file system and by its inode number.

    Raises:
        CacheRejected: The descriptor is no directory, or is on a file system that could block this process forever.
    """
    try:
        check_file_system(fd)
        status = os.fstat(fd)
        if not stat.S_ISDIR(status.st_mode):
            raise CacheRejected(CacheReason.BAD_FD, "the place of a cache entry is not a directory")
        # Unlike a device number, the id of a file system survives a restart of the machine.
        return struct.pack("<QQ", os.fstatvfs(fd).f_fsid & (1 << 64) - 1, status.st_ino)
    except GeneralFailure as error:
        raise CacheRejected(CacheReason.REMOTE_FILES, str(error)) from error
    except OSError as error:
        raise CacheRejected(CacheReason.BAD_FD, f"a descriptor cannot be used: {error.strerror}") from error


class _Copy(mmap.mmap):
    """Memory that contains the payload of a file."""

    is_claimed = False


def claim(payload: memoryview) -> bool:
    """Claim the right to release parts of a verified payload's memory. Several loads of a file share the memory.

    Returns:
        False if another load has already claimed the right.
    """
    copy = payload.obj
    assert isinstance(copy, _Copy)
    was_claimed, copy.is_claimed = copy.is_claimed, True
    return not was_claimed


def anonymous_memory(nbytes: int) -> _Copy:
    """Return private memory, in huge pages where possible, for fewer page faults."""
    memory = _Copy(-1, nbytes or 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class SealedCopies:
    """Verified copies of files in read-only memory. Requests for an unchanged file share a copy. Thread safe."""

    def __init__(self) -> None:
        self._used: WeakValueDictionary[tuple[object, ...], _Copy] = WeakValueDictionary()

    def get(self, fd: int, header: Header, key: MasterKey) -> memoryview:
        """Return a read-only view of the payload of a file. The view keeps the memory alive.

        Args:
            header: The result of `read_header`.

        Raises:
            CacheRejected: The file changed since `read_header`, cannot be read, or was written with another key.
        """
        size = header.payload + overhead()
        try:
            status = os.fstat(fd)
            if status.st_size != size:  # Check before memory is allocated.
                raise CacheRejected(CacheReason.BAD_LENGTH, "a file changed its size while it was read")
            code = _read(fd, CODE_SIZE, HEADER_SIZE + header.payload)
            # Header and code identify the contents. The change time, which no client can set, detects a later write.
            name = (status.st_dev, status.st_ino, status.st_ctime_ns, header, code)
            memory = self._used.get(name)
            if memory is None:
                memory, opening = _copy(fd, header, key)
                if os.fstat(fd).st_size != size:
                    raise CacheRejected(CacheReason.BAD_LENGTH, "a file changed its size while it was read")
                opening.finish(code)
                self._used[name] = memory
        except OSError as error:
            raise CacheRejected(CacheReason.IO_ERROR, f"a cache file cannot be read: {error.strerror}") from error
        except MemoryError as error:
            raise CacheRejected(CacheReason.IO_ERROR, f"there is no memory for a file of {size} bytes") from error
        return memoryview(memory)[: header.payload].toreadonly()


def read_header(fd: int, most: int) -> Header:
    """Check the size of a file and return its header. The header is not authenticated.

    Args:
        most: Largest size of the file in bytes.

    Raises:
        CacheRejected: The file is not a complete cache file, or is too long.
    """
    size = check_fd(fd).st_size
    if size > most:
        raise CacheRejected(CacheReason.TOO_BIG, f"a file of {size} bytes; at most {most}")
    try:
        return Header.decode(b"" if size < HEADER_SIZE else _read(fd, HEADER_SIZE, 0), size)
    except OSError as error:
        raise CacheRejected(CacheReason.IO_ERROR, f"a cache file cannot be read: {error.strerror}") from error


def _copy(fd: int, header: Header, key: MasterKey) -> tuple[_Copy, Opening]:
    """Read each byte of a payload once into private memory, and make the memory read-only."""
    memory = anonymous_memory(header.payload)
    opening = Opening(header, key)
    end = HEADER_SIZE
    for chunk in chunks_of(memoryview(memory)[: header.payload]):
        if os.preadv(fd, [chunk], end) != len(chunk):
            raise CacheRejected(CacheReason.BAD_LENGTH, "a file ended while it was read")
        opening.add(chunk)
        end += len(chunk)
    check(
        lib.nnb_make_read_only(ffi.from_buffer("char[]", memory), len(memory)), "cannot seal the copy of a cache file"
    )
    return memory, opening


def _read(fd: int, count: int, offset: int) -> bytes:
    raw = os.pread(fd, count, offset)
    if len(raw) != count:
        raise CacheRejected(CacheReason.BAD_LENGTH, "a file ended while it was read")
    return raw
