"""A mapping that lives as long as anything looks at it."""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np

from .._core._nnburst import ffi, lib
from .._core.errno import check
from ..errors import GeneralFailure, ResourceExhausted


class MemoryMapping:
    """Maps a range of a memory object; NumPy views on it hold a reference, the last one unmaps.

    Args:
        fd: The object; not needed any more afterwards.
        offset: First byte; need not be page-aligned.
        prot: PROT_READ and/or PROT_WRITE.
        guarded: Survive a peer that truncates the object. The caller looks at `faults` after each use.

    Raises:
        GeneralFailure: The object cannot be mapped like this.
        ResourceExhausted: The process has no room for it, or the machine no memory.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_mapping", "address", "size", "writable")

    def __init__(self, fd: int, offset: int, size: int, prot: int, *, guarded: bool) -> None:
        raw = ffi.new("nnb_mapping *")
        rc = lib.nnb_map(raw, fd, offset, size, prot, guarded)
        if rc < 0:
            kind = ResourceExhausted if rc == -errno.ENOMEM else GeneralFailure
            check(rc, special={-rc: kind(f"cannot map {size} bytes at {offset} of fd {fd}: {os.strerror(-rc)}")})
        self._mapping = ffi.gc(raw, lib.nnb_unmap)
        self.address = int(ffi.cast("uintptr_t", raw.addr))
        self.size = size
        self.writable = bool(prot & 2)
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, not self.writable),
            "version": 3,
        }

    @property
    def faults(self) -> int:
        """Accesses that found a page gone and were given a zero page instead; 0 for good if it is not guarded."""
        return lib.nnb_map_faults(self._mapping)

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All of it as uint8; the array keeps the mapping alive."""
        return np.asarray(self)


def private_bytes(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return so many zeroed bytes of this process alone; `ResourceExhausted` if there is no memory for them."""
    try:
        return np.zeros(nbytes, np.uint8)
    except (MemoryError, ValueError, OverflowError) as error:
        raise ResourceExhausted(f"there is no memory for {nbytes} bytes") from error
