"""Ways in and out of a pool without a copy: NumPy, DLPack, ``multiprocessing.shared_memory``, ``mmap``."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.leaving import ProcessLock
from ..errors import InvalidArgument
from ..model import Array
from . import named
from .kinds import PROT_READ, PROT_WRITE

if TYPE_CHECKING:
    from multiprocessing.shared_memory import SharedMemory

    from .memory import Memory


_pools: weakref.WeakSet[Memory] = weakref.WeakSet()
_lock = ProcessLock()


def register(memory: Memory) -> None:
    """Remember a pool while it lives, so that an array in it can be recognised."""
    with _lock.lock:
        _pools.add(memory)


def locate_array(exporter: Any) -> tuple[Memory, int, int, int]:
    """Find the open pool that an array lies in. Return (pool, offset in it, bytes, rights)."""
    if not hasattr(exporter, "__dlpack__"):
        raise InvalidArgument(f"{type(exporter).__name__} has no __dlpack__; give an array")
    try:
        array = np.from_dlpack(exporter)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"the array cannot be looked at from here: {error}") from error
    if not array.flags.c_contiguous or array.nbytes == 0:
        raise InvalidArgument("only an array that is dense and not empty can be memory of its own")
    memory, offset = locate_view(array)
    return memory, offset, array.nbytes, memory.prot if array.flags.writeable else PROT_READ


def locate_view(array: Array) -> tuple[Memory, int]:
    """Find the open `Memory` that a dense array lies in, and where in it; `InvalidArgument` if in none."""
    start = array.__array_interface__["data"][0]
    with _lock.lock:
        pools = list(_pools)
    for memory in pools:
        mapping = memory._mapping
        if mapping is None or memory.closed or memory.image is not None:
            continue
        if mapping.address <= start and start + array.nbytes <= mapping.address + mapping.size:
            return memory, start - mapping.address
    raise InvalidArgument(
        "the array is not in shared memory that an open pool of this process knows; copy it into "
        "Memory.ashmem(nbytes).array(...), or give its source to from_shared_memory or from_mmap"
    )


def fd_of_shared_memory(shared: SharedMemory) -> int:
    fd = getattr(shared, "_fd", -1)
    if isinstance(fd, int) and fd >= 0:
        try:
            return os.dup(fd)
        except OSError as error:
            raise InvalidArgument(f"the SharedMemory is closed: {error.strerror}") from error
    if getattr(shared, "_buf", None) is None:
        raise InvalidArgument("the SharedMemory is closed; make the pool before closing it")
    return named.open_shared(shared.name, None)[0]


def locate_mmap(mapped: mmap.mmap) -> tuple[int, int, int]:
    """Find the descriptor that a mapping was made with. Return (fd, borrowed; offset in the object; rights).

    The mmap module keeps a duplicate of the descriptor but does not tell its number: the kernel's list of mappings
    names the object, and among our descriptors is one of the same.
    """
    if not isinstance(mapped, mmap.mmap):
        raise InvalidArgument(f"expected a mmap.mmap, got {type(mapped).__name__}")
    try:
        address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    except ValueError as error:
        raise InvalidArgument(f"the mmap cannot be used: {error}") from error
    with open("/proc/self/maps") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            first, _, last = fields[0].partition("-")
            if int(first, 16) <= address < int(last, 16):
                break
        else:
            raise InvalidArgument("the mmap is not in the list of mappings of this process")
    rights, offset, inode = fields[1], int(fields[2], 16) + address - int(first, 16), int(fields[4])
    path = fields[5].rstrip("\n") if len(fields) > 5 else ""
    if "s" not in rights:
        raise InvalidArgument("the mmap is private: no other process sees what is written to it. Map it shared")
    prot = (PROT_READ if "r" in rights else 0) | (PROT_WRITE if "w" in rights else 0)
    needed = os.O_RDWR if prot & PROT_WRITE else os.O_RDONLY
    for entry in os.listdir("/proc/self/fd"):
        if _names(int(entry), path, inode, needed):
            return int(entry), offset, prot
    raise InvalidArgument("no open descriptor of the mmap's object is left; make Memory.mmap_fd of its file instead")


def _names(fd: int, path: str, inode: int, needed: int) -> bool:
    try:
        if os.fstat(fd).st_ino != inode or os.readlink(f"/proc/self/fd/{fd}") != path:
            return False
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        return False
    return access in (os.O_RDWR, needed)
