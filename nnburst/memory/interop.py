"""Ways into a pool without a copy: arrays of open pools, ``multiprocessing.shared_memory``."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.leaving import ProcessLock
from ..errors import InvalidArgument
from ..model import Array
from . import named
from .kinds import PROT_READ

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
        "Memory.ashmem(nbytes).array(...), or give its source to from_shared_memory or mmap_fd"
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
