"""Private copies of files: read once, sealed, then verified and used; the file itself is never looked at again.

A copy is memory that no other process can reach, read-only as soon as it is filled, also for this one.
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
    """Check that a descriptor is a plain file that can be read and written anywhere (THR-16)."""
    try:
        check_file_system(fd)  # before anything is asked of the file, which could wait for ever for its server
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
    """Name the directory in which a client keeps its entries, so that each has newest entries of its own.

    Asked from the file system and not from the client: a directory that it cannot open, it cannot name.

    Raises:
        CacheRejected: It is not a directory, or on a file system that could block this process for ever.
    """
    try:
        check_file_system(fd)
        status = os.fstat(fd)
        if not stat.S_ISDIR(status.st_mode):
            raise CacheRejected(CacheReason.BAD_FD, "the place of a cache entry is not a directory")
        # Device numbers may change when the machine starts anew; the id of the file system does not.
        return struct.pack("<QQ", os.fstatvfs(fd).f_fsid & (1 << 64) - 1, status.st_ino)
    except GeneralFailure as error:
        raise CacheRejected(CacheReason.REMOTE_FILES, str(error)) from error
    except OSError as error:
        raise CacheRejected(CacheReason.BAD_FD, f"a descriptor cannot be used: {error.strerror}") from error


class _Copy(mmap.mmap):
    """Memory with the payload of a file. `is_taken`: see `take`."""

    is_taken = False


def take(payload: memoryview) -> bool:
    """Make the memory of a verified payload the caller's, to give back parts of it; return whether it is: once only.

    Others who load the file meanwhile are handed the same memory, and get False here.
    """
    copy = payload.obj
    assert isinstance(copy, _Copy)
    was, copy.is_taken = copy.is_taken, True
    return not was


def anonymous_memory(nbytes: int) -> _Copy:
    """Return private memory, in huge pages where they are had: a fault for each 2 MiB instead of each 4 KiB."""
    memory = _Copy(-1, nbytes or 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class SealedCopies:
    """The bytes of files at one moment, verified, in memory that cannot change. Thread safe.

    As long as anything uses a copy, it is given out again for the same file, unless that was seen to change.
    """

    def __init__(self) -> None:
        self._used: WeakValueDictionary[tuple[object, ...], _Copy] = WeakValueDictionary()

    def get(self, fd: int, header: Header, key: MasterKey) -> memoryview:
        """Return a read-only view of the payload of a file; it keeps the memory.

        Args:
            fd: The file; its offset is neither used nor moved.
            header: What `read_header` has read; no more is copied than it says.

        Raises:
            CacheRejected: The file changed meanwhile, cannot be read, or is not what was written with the key.
        """
        size = header.payload + overhead()
        try:
            status = os.fstat(fd)
            if status.st_size != size:  # before memory is asked for
                raise CacheRejected(CacheReason.BAD_LENGTH, "a file changed its size while it was read")
            code = _read(fd, CODE_SIZE, HEADER_SIZE + header.payload)
            # Header and code are those of the copy, so that it is what was saved. The time of change, which no client
            # can set, is only there to notice that the file no longer is.
            name = (status.st_dev, status.st_ino, status.st_ctime_ns, header, code)
            memory = self._used.get(name)
            if memory is None:
                memory, opening = _copied(fd, header, key)
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
    """Read what a file says of itself, nothing of it authentic, and compare it with the length of the file.

    Args:
        fd: The file; its offset is neither used nor moved.
        most: Bytes that it may have.

    Raises:
        CacheRejected: It is no complete cache file, or longer than allowed.
    """
    size = check_fd(fd).st_size
    if size > most:
        raise CacheRejected(CacheReason.TOO_BIG, f"a file of {size} bytes; at most {most}")
    try:
        return Header.decode(b"" if size < HEADER_SIZE else _read(fd, HEADER_SIZE, 0), size)
    except OSError as error:
        raise CacheRejected(CacheReason.IO_ERROR, f"a cache file cannot be read: {error.strerror}") from error


def _copied(fd: int, header: Header, key: MasterKey) -> tuple[_Copy, Opening]:
    """Read a payload into memory of this process alone, each byte once; it is read-only then."""
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
