"""Private copies of files: read once, sealed, then verified and used; the file itself is never looked at again."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat

from ._container import HEADER_SIZE, MAC_SIZE, Header, digest_of
from ._reasons import CacheReason, CacheRejected

__all__ = ["SealedCopy", "check_fd"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_PATH_ONLY = getattr(os, "O_PATH", 0o10000000)


def check_fd(fd: int) -> os.stat_result:
    """Check that a descriptor is a plain file that can be read and written anywhere (THR-16).

    Raises:
        CacheRejected: It is something else.
    """
    try:
        status, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS) if stat.S_ISREG(status.st_mode) else 0
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: no file that can have seals
            raise CacheRejected(CacheReason.BAD_FD, f"a descriptor cannot be used: {error.strerror}") from error
        seals = 0
    if not stat.S_ISREG(status.st_mode):
        raise CacheRejected(CacheReason.BAD_FD, "a cache file is no regular file")
    if flags & os.O_ACCMODE != os.O_RDWR or flags & os.O_APPEND or flags & _PATH_ONLY:
        raise CacheRejected(CacheReason.BAD_FD, "a cache file is not open for reading and writing at any place")
    if seals & ~fcntl.F_SEAL_SEAL:
        raise CacheRejected(CacheReason.BAD_FD, "a cache file is sealed")
    return status


class SealedCopy:
    """The bytes of one file at one moment, in memory that nobody can change.

    Attributes:
        header: As the file has it; not authentic by itself.
        digest: Of the payload.
        code: The file's last 32 bytes.
        payload: Read-only view; keeps the memory.
    """

    __slots__ = ("code", "digest", "header", "payload")

    def __init__(self, fd: int, most: int) -> None:
        """Copy a file.

        Args:
            fd: The file; its offset is neither used nor moved.
            most: Bytes that it may have.

        Raises:
            CacheRejected: It is no complete cache file, longer than allowed, or changed while it was read.
        """
        size = check_fd(fd).st_size
        if size > most:
            raise CacheRejected(CacheReason.TOO_BIG, f"a file of {size} bytes; at most {most}")
        raw = b"" if size < HEADER_SIZE else _read(fd, HEADER_SIZE, 0)
        self.header = Header.decode(raw, size)
        payload = self.header.payload
        memory = os.memfd_create("nnburst-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, payload)
            self.digest = self._fill(fd, memory, payload)
            self.code = _read(fd, MAC_SIZE, HEADER_SIZE + payload)
            if os.fstat(fd).st_size != size:
                raise CacheRejected(CacheReason.BAD_LENGTH, "a file changed its size while it was read")
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
            self.payload = (
                memoryview(mmap.mmap(memory, payload, mmap.MAP_SHARED, mmap.PROT_READ)) if payload else memoryview(b"")
            )
        except OSError as error:
            raise CacheRejected(CacheReason.IO_ERROR, f"a cache file cannot be read: {error.strerror}") from error
        finally:
            os.close(memory)

    @staticmethod
    def _fill(fd: int, memory: int, payload: int) -> bytes:
        """Read the payload into the memory and hash it there, each byte once."""
        if not payload:
            return digest_of(b"")
        writable = mmap.mmap(memory, payload)
        view = memoryview(writable)
        done = 0

        def ready(end: int) -> None:
            nonlocal done
            while done < end:
                got = os.preadv(fd, [view[done:end]], HEADER_SIZE + done)
                if got <= 0:
                    raise CacheRejected(CacheReason.BAD_LENGTH, "a file ended while it was read")
                done += got

        digest = digest_of(view, ready)
        view.release()
        writable.close()  # a memory that is mapped for writing cannot be sealed
        return digest


def _read(fd: int, count: int, offset: int) -> bytes:
    raw = os.pread(fd, count, offset)
    if len(raw) != count:
        raise CacheRejected(CacheReason.BAD_LENGTH, "a file ended while it was read")
    return raw
