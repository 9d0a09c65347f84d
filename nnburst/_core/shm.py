"""POSIX shared memory, through `posix_ipc` if it is installed, else through ``/dev/shm``."""

from __future__ import annotations

import os

try:
    import posix_ipc
except ImportError:
    posix_ipc = None


def shm_open(path: str, flags: int, mode: int = 0o600) -> int:
    """Open shared memory and return its descriptor.

    Args:
        path: A slash and a name without slashes.
        flags: O_RDWR or O_RDWR | O_CREAT | O_EXCL.

    Raises:
        OSError, ValueError: The memory cannot be opened.
    """
    if posix_ipc is None:
        return os.open(f"/dev/shm{path}", flags | os.O_NOFOLLOW, mode)
    try:
        fd: int = posix_ipc.SharedMemory(path, flags & (os.O_CREAT | os.O_EXCL), mode=mode).fd
    except posix_ipc.ExistentialError as error:
        raise (FileExistsError if flags & os.O_EXCL else FileNotFoundError)(str(error)) from None
    except posix_ipc.Error as error:
        raise OSError(str(error)) from None
    os.set_inheritable(fd, False)
    return fd


def shm_unlink(path: str) -> None:
    """Remove the name of shared memory. Raises the same errors as `shm_open`."""
    if posix_ipc is None:
        return os.unlink(f"/dev/shm{path}")
    try:
        posix_ipc.unlink_shared_memory(path)
    except posix_ipc.ExistentialError as error:
        raise FileNotFoundError(str(error)) from None
    except posix_ipc.Error as error:
        raise OSError(str(error)) from None
