"""Saving a compilation after the call that brought the files has returned."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from .._core.fds import close_fds
from ..cache import CacheReason, CacheRejected, SaveResult, check_fd, whole_file
from .caching import DeviceCacheHome
from .interfaces import CacheFiles


class DeferredSave:
    """Cache files of a client, kept for later. Duplicates are closed by `save` or `close`.

    A write takes a lock of the file description, which the client opens for each call, so that two deferred writers of
    one file exclude each other and a reader is told that the entry is busy. Files that the client removed meanwhile are
    left alone. No file is opened again: what the client may not write is not written (THR-16).
    """

    def __init__(self, home: DeviceCacheHome, files: CacheFiles) -> None:
        self._home = home
        self._files = replace(files, staged=False, only_if_worth=False)  # they are visible by then
        self._fds: list[int] = []
        self.refused: CacheReason | None = None
        """Why nothing will be written, if that is known already."""
        try:
            if (len(files.model_fds), len(files.data_fds)) != home.counts:
                raise CacheRejected(CacheReason.BAD_FD, "another number of files")
            for fd in (*files.model_fds, *files.data_fds):
                check_fd(fd)
            for fd in files.fds:
                self._fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0))
        except CacheRejected as error:
            self.refused = error.reason
            self.close()
        except OSError:
            self.refused = CacheReason.IO_ERROR
            self.close()

    def save(
        self,
        payloads: Callable[[], tuple[Sequence[bytes | memoryview], Sequence[bytes | memoryview]] | None],
        compiled: Callable[[], bytes] | None = None,
    ) -> SaveResult:
        """Write the entry in place of the old one, as `DeviceCacheHome.save` does. The result tells the outcome."""
        try:
            if self.refused is not None or not self._fds:
                return SaveResult(False, self.refused or CacheReason.IO_ERROR)
            count = sum(self._home.counts)
            for fd in self._fds[:count]:
                if check_fd(fd).st_nlink == 0:  # the client may have changed the flags since
                    return SaveResult(False, CacheReason.MISSING)  # the client has removed the entry
            for fd in self._fds[:count]:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file(fcntl.F_WRLCK))
            return self._home.save(self._files.with_fds(self._fds), payloads, compiled=compiled)
        except CacheRejected as error:
            return SaveResult(False, error.reason)
        except OSError as error:
            busy = error.errno in (errno.EAGAIN, errno.EACCES)
            return SaveResult(False, CacheReason.BUSY if busy else CacheReason.IO_ERROR)
        finally:
            self.close()

    def close(self) -> None:
        close_fds(self._fds)
