"""Facts about the files behind descriptors, and access to their bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import Any

import numpy as np
from msgspec import Struct

from .._core._nnburst import ffi, lib
from .._core.errno import check
from ..errors import GeneralFailure, NNBurstError, ResourceExhausted
from ..model.types import Array

_DMA_BUF = 0x444D4142
_HUGETLBFS = 0x958458F6
_UNUSABLE = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_ANONYMOUS = 0
"""File type of dma-bufs, eventfds, epolls and other objects that are in no directory."""

_DMA_BUF_SYNC = 0x40086200
_SYNC_END = 4


class MemoryMapping:
    """A mapping of part of a memory object, kept until its last NumPy view is dropped.

    Args:
        fd: Descriptor of the object; not needed afterwards.
        offset: First byte; need not be page-aligned.
        prot: PROT_READ and/or PROT_WRITE.
        guarded: True to survive a truncation of the object: lost pages read as zeros, and the caller checks `faults`.
            Otherwise, an access to a lost page is a SIGBUS.

    Raises:
        GeneralFailure: The object cannot be mapped with these arguments.
        ResourceExhausted: There is no address space or memory left.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_mapping", "address", "size", "writable")

    def __init__(self, fd: int, offset: int, size: int, prot: int, *, guarded: bool) -> None:
        # Ctrl-C may come right after `nnb_map`, so the owner of the mapping exists first.
        raw = self._mapping = ffi.gc(ffi.new("nnb_mapping *"), lib.nnb_unmap)
        rc = lib.nnb_map(raw, fd, offset, size, prot, guarded)
        if rc < 0:
            kind = ResourceExhausted if rc == -errno.ENOMEM else GeneralFailure
            check(rc, special={-rc: kind(f"cannot map {size} bytes at {offset} of fd {fd}: {os.strerror(-rc)}")})
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
        """Number of accesses to pages beyond the end of a truncated file; always 0 without a guard against SIGBUS."""
        return lib.nnb_map_faults(self._mapping)

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The whole mapping as a uint8 array, which keeps the mapping alive."""
        return np.asarray(self)


def private_bytes(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return zeroed private memory as uint8. Raises `ResourceExhausted`."""
    try:
        return np.zeros(nbytes, np.uint8)
    except (MemoryError, ValueError, OverflowError) as error:
        raise ResourceExhausted(f"there is no memory for {nbytes} bytes") from error


class MemoryObject(Struct, frozen=True):
    """Facts about a file or memory object; `examine` returns them.

    Attributes:
        size: Size in bytes when examined.
        fixed: True if the size cannot change, so that the object may be mapped.
        can_fail: True if an access may fault although the size is fixed, because huge pages can run out.
        dma_buf: True if `sync_dma_buf` must begin and end CPU access.
        writable: True if the descriptor allows a shared writable mapping.
        appends: True if every write goes to the end of the file.
    """

    size: int
    fixed: bool
    can_fail: bool
    dma_buf: bool
    writable: bool
    appends: bool


def examine(fd: int) -> MemoryObject:
    """Return facts about the object behind a descriptor. The caller must first call `check_file_system`."""
    try:
        status, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
        filesystem = check(lib.nnb_fd_filesystem(fd))
        kind = stat.S_IFMT(status.st_mode)
        if kind in _UNUSABLE:
            raise GeneralFailure(f"fd {fd} is {_UNUSABLE[kind]}, which cannot be mapped")
        dma_buf = filesystem == _DMA_BUF
        if kind == _ANONYMOUS and not dma_buf:
            raise GeneralFailure(f"fd {fd} has no bytes that could be mapped")
        # Read the seals first: once they fix the size, the size that is read later stays true.
        sealed = lib.nnb_seals(fd) & lib.NNB_SEALS_FIXED_SIZE == lib.NNB_SEALS_FIXED_SIZE
        access = flags & os.O_ACCMODE
        if access == os.O_WRONLY or flags & getattr(os, "O_PATH", 0):
            raise GeneralFailure(f"fd {fd} is not open for reading; memory is read even where it is written")
        return MemoryObject(
            size=check(lib.nnb_fd_size(fd)),
            fixed=sealed or dma_buf,
            can_fail=filesystem == _HUGETLBFS,
            dma_buf=dma_buf,
            writable=access == os.O_RDWR,
            appends=bool(flags & os.O_APPEND),
        )
    except OSError as error:
        raise GeneralFailure(f"fd {fd} cannot be used: {error.strerror}") from error
    except (GeneralFailure, ResourceExhausted):
        raise
    except NNBurstError as error:
        raise GeneralFailure(f"fd {fd} cannot be used: {error}") from error


def read_into(fd: int, offset: int, target: Array) -> None:
    """Read bytes of a file into a dense array. Unlike a mapping, reading cannot fault.

    Raises:
        GeneralFailure: The file is too short.
    """
    view = target.data.cast("B") if target.nbytes else memoryview(b"")
    while view:
        count = _retry(os.preadv, fd, [view], offset)
        if count == 0:
            raise GeneralFailure(f"the memory object ended at byte {offset}: it was truncated")
        view, offset = view[count:], offset + count


def write_from(fd: int, offset: int, source: Array) -> None:
    """Write a dense array of bytes to a file. The caller has checked that the array fits."""
    if not source.nbytes:
        return
    view = source.data.cast("B")
    while view:
        count = _retry(os.pwrite, fd, view, offset)
        view, offset = view[count:], offset + count


def _retry(call: Any, *args: Any) -> int:
    try:
        return int(call(*args))  # Python repeats interrupted calls.
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "?")
        kind = ResourceExhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else GeneralFailure
        raise kind(f"the memory object cannot be copied: {error.strerror} [{name}]") from error


def sync_dma_buf(fd: int, *, write: bool, end: bool) -> None:
    """Begin or end CPU access to a dma-buf."""
    flags = (3 if write else 1) | (_SYNC_END if end else 0)
    try:
        fcntl.ioctl(fd, _DMA_BUF_SYNC, flags.to_bytes(8, "little"))
    except OSError as error:
        raise GeneralFailure(f"the dma-buf cannot be synchronised: {error.strerror}") from error
