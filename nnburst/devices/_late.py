"""Saving a compilation after the call that brought the files has returned (facts sheet `caching.md` §4)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Sequence

from ..cache import CacheReason, SaveResult
from ._caching import DeviceCacheHome

__all__ = ["LateSave"]

_LOCK = struct.Struct("hhqqi4x")
"""``struct flock``: type, whence, start, length, pid."""


class LateSave:
    """Cache files of a client, kept for later. Duplicates are closed by `save` or `close`.

    A write takes a lock of its own file description, so that two late writers of one file exclude each other and a
    reader is told that the entry is busy. Files that the client removed meanwhile are left alone.

    Args:
        home: The device's cache.
        token: 32 bytes.
        fingerprint: Of the model, or empty.
        model_fds: As the device was given them.
        data_fds: Likewise.
    """

    def __init__(
        self, home: DeviceCacheHome, token: bytes, fingerprint: bytes, model_fds: Sequence[int], data_fds: Sequence[int]
    ) -> None:
        self._home, self._token, self._fingerprint = home, token, fingerprint
        self._counts = len(model_fds), len(data_fds)
        self._fds: list[int] = []
        with contextlib.suppress(OSError):  # what is wrong with a descriptor is found out at the save
            for fd in (*model_fds, *data_fds):
                self._fds.append(os.dup(fd))

    def save(
        self, payloads: Callable[[], tuple[Sequence[bytes | memoryview], Sequence[bytes | memoryview]] | None]
    ) -> SaveResult:
        """Write the entry in place of what is there. Nothing is raised; the result says what came of it."""
        own: list[int] = []
        try:
            if (len(self._fds), self._home.counts) != (sum(self._counts), self._counts):
                return SaveResult(False, CacheReason.BAD_FD)
            for fd in self._fds:
                if os.fstat(fd).st_nlink == 0:
                    return SaveResult(False, CacheReason.MISSING)  # the client has removed the entry
                # A duplicate would share offset and locks with the client's descriptor.
                own.append(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
            for fd in own:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            models = self._counts[0]
            return self._home.save(self._token, payloads, own[:models], own[models:], fingerprint=self._fingerprint)
        except OSError as error:
            busy = error.errno in (errno.EAGAIN, errno.EACCES)
            return SaveResult(False, CacheReason.BUSY if busy else CacheReason.IO_ERROR)
        finally:
            for fd in own:
                os.close(fd)
            self.close()

    def close(self) -> None:
        """Close the duplicates. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())
