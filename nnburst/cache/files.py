"""Access to a cache directory's files through descriptors, without following links (`caching.md` THR-14, THR-15)."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .._core.deadline import Deadline
from .reasons import CacheReason, CacheRejected

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REASONS = {
    errno.ENOENT: CacheReason.MISSING,
    errno.ELOOP: CacheReason.UNSAFE_PATH,
    errno.ENOTDIR: CacheReason.UNSAFE_PATH,
    errno.EISDIR: CacheReason.UNSAFE_PATH,
    errno.EROFS: CacheReason.READ_ONLY,
    errno.EACCES: CacheReason.READ_ONLY,
    errno.EPERM: CacheReason.READ_ONLY,
    errno.ENOSPC: CacheReason.DISK_FULL,
    errno.EDQUOT: CacheReason.DISK_FULL,
}


def default_cache_directory() -> Path:
    """Return ``NNBURST_CACHE_DIR`` or a directory in the user's cache home. Raises `CacheRejected` if there is none."""
    path = _own_variable("NNBURST_CACHE_DIR")
    return Path(path) if path else _xdg_directory("XDG_CACHE_HOME", ".cache") / "nnburst" / "v1"


def default_state_directory() -> Path:
    """Return ``NNBURST_STATE_DIR`` or a directory in the user's state home. Raises `CacheRejected` if there is none."""
    path = _own_variable("NNBURST_STATE_DIR")
    return Path(path) if path else _xdg_directory("XDG_STATE_HOME", ".local/state") / "nnburst" / "v1"


def _own_variable(name: str) -> str:
    """Return an environment variable; "" in a setuid process, because another user set its variables."""
    return os.environ.get(name, "") if os.getuid() == os.geteuid() else ""


def _xdg_directory(variable: str, below_home: str) -> Path:
    """Return a base directory by the XDG specification. A relative path in `variable` is ignored."""
    path = _own_variable(variable)
    return Path(path) if os.path.isabs(path) else _home() / below_home


def _home() -> Path:
    home = _own_variable("HOME")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:  # In a container, a user id may lack a name.
            home = ""
    if not os.path.isabs(home):
        raise CacheRejected(
            CacheReason.NO_STORE, "this user has no home directory; set NNBURST_CACHE_DIR and NNBURST_STATE_DIR"
        )
    return Path(home)


def reason_of(error: OSError) -> CacheReason:
    """Return the `CacheReason` for an error of the file system."""
    return _REASONS.get(error.errno or 0, CacheReason.IO_ERROR)


def open_directory(path: str | os.PathLike[str], *, create: bool) -> int:
    """Open a directory of this user. Raises `CacheRejected` if other users can write to the directory."""
    if create:
        make_directories(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return _check(fd, str(path))


def make_directories(path: str | os.PathLike[str]) -> None:
    """Make a directory and its missing parents with mode 0700."""
    missing = []
    place = os.path.abspath(path)
    while not os.path.isdir(place):
        missing.append(place)
        place, before = os.path.dirname(place), place
        if place == before:
            break
    for place in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(place, 0o700)


def _check(fd: int, name: str) -> int:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(fd)
        raise CacheRejected(CacheReason.UNSAFE_PATH, f"{name} belongs to another user, or others may write to it")
    return fd


def open_file(parent: int, name: str) -> int:
    """Open a file for reading and writing. Raises `CacheRejected` for a link, or a file that other users can write."""
    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=parent)
    status = os.fstat(fd)
    ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or not ours:
        os.close(fd)
        raise CacheRejected(CacheReason.UNSAFE_PATH, f"{name} is not a private file with a single name")
    return fd


def whole_file(kind: int) -> bytes:
    """Return a ``struct flock`` for a whole file, as F_OFD_SETLK takes it.

    Args:
        kind: F_RDLCK, F_WRLCK or F_UNLCK.
    """
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


class FileLock:
    """A lock on a file until `close`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()

    def close(self) -> None:
        """Release the lock. Idempotent. After a call in a forked child, the parent still has the lock."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._pid == os.getpid():
            with suppress(OSError):  # A forked child's copy of the descriptor would keep the lock.
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file(fcntl.F_UNLCK))
        os.close(fd)


def lock(parent: int, name: str, *, shared: bool, timeout: float = 0.0) -> FileLock | None:
    """Take a lock; return None if it is not free within the timeout.

    Args:
        name: Name of the file, which is made if missing.
        shared: True for a lock that several holders can have at once.
        timeout: Seconds to wait.
    """
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    deadline = Deadline.after(timeout)
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
            return FileLock(fd)
        except BlockingIOError:
            if deadline.left() == 0:
                os.close(fd)
                return None
            time.sleep(0.005)
        except BaseException:
            os.close(fd)
            raise


@contextmanager
def open_in(parent: int, name: str, *, create: bool = False) -> Iterator[int]:
    """Open a subdirectory for a with block. Raises `CacheRejected` if other users can write to the subdirectory."""
    if create:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    fd = _check(os.open(name, _DIRECTORY, dir_fd=parent), name)
    try:
        yield fd
    finally:
        os.close(fd)


def remove_tree(parent: int, name: str) -> int:
    """Remove a directory and its files without following links; return its size in bytes."""
    freed = 0
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError:
        with suppress(OSError):
            os.unlink(name, dir_fd=parent)
        return 0
    try:
        for entry in os.listdir(fd):
            with suppress(OSError):
                freed += os.stat(entry, dir_fd=fd, follow_symlinks=False).st_size
                os.unlink(entry, dir_fd=fd)
    finally:
        os.close(fd)
    with suppress(OSError):
        os.rmdir(name, dir_fd=parent)
    return freed
