"""Memory as a driver would share it: the first backing that this machine has."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Callable

from .._core._nnburst import lib
from .._core.errno import check
from ..errors import GeneralFailure, InvalidArgument, NNBurstError

_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 0x2
_MFD_HUGETLB = 0x4
_DMA_HEAP_ALLOC = 0xC0184800
_UDMABUF_CREATE = 0x40187542
_UDMABUF_CLOEXEC = 1


def _dma_heap(size: int) -> int:
    from glob import glob

    heaps = sorted(glob("/dev/dma_heap/*"), key=lambda path: (not path.endswith("/system"), path))
    if not heaps:
        raise OSError("there is no /dev/dma_heap")
    heap = os.open(heaps[0], os.O_RDWR | os.O_CLOEXEC)
    try:
        request = bytearray(struct.pack("=QIIQ", _pages(size), 0, os.O_RDWR | os.O_CLOEXEC, 0))
        fcntl.ioctl(heap, _DMA_HEAP_ALLOC, request)
    finally:
        os.close(heap)
    return int(struct.unpack("=QIIQ", request)[1])


def _udmabuf(size: int) -> int:
    maker = os.open("/dev/udmabuf", os.O_RDWR | os.O_CLOEXEC)
    try:
        memfd = os.memfd_create("nnburst-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memfd, _pages(size))
            fcntl.fcntl(memfd, _F_ADD_SEALS, _F_SEAL_SHRINK)
            request = struct.pack("=IIQQ", memfd, _UDMABUF_CLOEXEC, 0, _pages(size))
            return fcntl.ioctl(maker, _UDMABUF_CREATE, request)  # type: ignore[return-value]  # the new descriptor
        finally:
            os.close(memfd)
    finally:
        os.close(maker)


def _hugetlb(size: int) -> int:
    huge = _huge_page()
    length = -(-size // huge) * huge
    fd = os.memfd_create("nnburst-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_HUGETLB)
    try:
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, _F_ADD_SEALS, lib.NNB_SEALS_FIXED_SIZE)
        mmap.mmap(fd, length).close()  # reserves the pages for the file, or fails with ENOMEM
    except BaseException:
        os.close(fd)
        raise
    return fd


def _memfd(size: int) -> int:
    return check(
        lib.nnb_memfd_create(b"nnburst-blob", size, lib.NNB_SEALS_FIXED_SIZE), f"shared memory of {size} bytes"
    )


BACKINGS: dict[str, Callable[[int], int]] = {
    "dma-heap": _dma_heap,
    "udmabuf": _udmabuf,
    "hugetlb": _hugetlb,
    "memfd": _memfd,
}
"""Makers of objects of at least so many bytes, best first."""


def allocate(size: int, backing: str | None) -> tuple[int, str]:
    """Return a descriptor that the caller owns, and the name of its backing."""
    if backing is not None and (not isinstance(backing, str) or backing not in BACKINGS):
        raise InvalidArgument(f"backing {backing!r} is unknown; {', '.join(BACKINGS)} are the ones there are")
    reasons = []
    for name in BACKINGS if backing is None else [backing]:
        try:
            return BACKINGS[name](size), name
        except (OSError, OverflowError, ValueError, NNBurstError) as error:
            reasons.append(f"{name}: {error}")
    raise GeneralFailure(f"no buffer of {size} bytes could be made ({'; '.join(reasons)})")


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _huge_page() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("Hugepagesize:"):
                return int(line.split()[1]) * 1024
    raise OSError("this kernel has no huge pages")
