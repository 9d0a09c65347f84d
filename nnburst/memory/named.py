"""POSIX shared memory, which is found by name and cannot be sealed."""

from __future__ import annotations

import errno
import os

from .._core.shm import shm_open, shm_unlink
from ..errors import GeneralFailure, InvalidArgument, ResourceExhausted

_PIECE = 1 << 20

made: set[str] = set()
"""Names, with slash, that this process has made and not removed."""


def _add_slash(name: str) -> str:
    bare = name.removeprefix("/") if isinstance(name, str) and name.isprintable() else ""
    if not bare or "/" in bare or "\0" in bare or len(os.fsencode(bare)) > 250:
        raise InvalidArgument(f"expected a name of 1 to 250 bytes without slashes, got {name!r}")
    return "/" + bare


def _reserve(fd: int, path: str, size: int) -> None:
    """Allocate the pages of new memory now. Otherwise, a later write is a SIGBUS if no page is free."""
    place = os.fstatvfs(fd)
    free = place.f_bavail * place.f_frsize
    try:
        if place.f_blocks and size > free:  # Allocating even briefly could take room that other programs need.
            raise OSError(errno.ENOSPC, "")
        for start in range(0, size, _PIECE):  # After a signal the kernel begins the piece anew.
            os.posix_fallocate(fd, start, min(_PIECE, size - start))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise GeneralFailure(f"shared memory {path!r} cannot be made: {error}") from error
        raise ResourceExhausted(
            f"shared memory {path!r} of {size:,} bytes does not fit into /dev/shm, where {free:,} are free; remove "
            "what is left there, make it larger (docker run --shm-size=…), or use Memory.ashmem, which has no limit"
        ) from None


def open_shared(name: str, size: int | None) -> tuple[int, int]:
    """Create shared memory for this user alone, or open existing memory if `size` is None. Return (fd, size).

    Raises:
        InvalidArgument: The name is impossible or taken, or no memory has the name.
        ResourceExhausted: The memory does not fit; nothing is left behind.
        GeneralFailure: The memory cannot be opened.
    """
    path = _add_slash(name)
    try:
        fd = shm_open(path, os.O_RDWR if size is None else os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except (FileExistsError, FileNotFoundError):
        what = "does not exist; give a size to create it" if size is None else "exists; give no size to attach to it"
        raise InvalidArgument(f"shared memory {path!r} {what}") from None
    except (OSError, ValueError) as error:
        raise GeneralFailure(f"shared memory {path!r} cannot be opened: {error}") from error
    if size is not None:
        made.add(path)
        try:
            _reserve(fd, path, size)
        except BaseException:
            os.close(fd)
            unlink_shared(path)
            raise
    length = os.fstat(fd).st_size
    if length == 0:
        os.close(fd)
        raise InvalidArgument(f"shared memory {path!r} is empty; its creator has not given it a size")
    return fd, length


def unlink_shared(name: str) -> None:
    """Remove a name. Raises `InvalidArgument` if the name does not exist."""
    path = _add_slash(name)
    try:
        shm_unlink(path)
        made.discard(path)
    except FileNotFoundError:
        raise InvalidArgument(f"shared memory {path!r} does not exist") from None
    except OSError as error:
        raise GeneralFailure(f"shared memory {path!r} cannot be removed: {error}") from error
