"""Memory pools and the plain value that stands for one on the wire."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import FdSet, check, lib
from ..errors import BadState, InvalidArgument
from ._mapping import Mapping

__all__ = ["PROT_READ", "PROT_WRITE", "Memory", "MemoryHandle"]

PROT_READ = 1
PROT_WRITE = 2

_MAX_SIZE = (1 << 63) - 1
_KINDS = ("ashmem", "mmap_fd")


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """A memory pool without its file descriptors.

    Attributes:
        kind: ``"ashmem"`` (a sealed memfd, mapped whole) or ``"mmap_fd"`` (a range of any object that can be mapped).
        size: Bytes.
        prot: PROT_READ and/or PROT_WRITE.
        offset: First byte in the object.
    """

    kind: str
    size: int
    prot: int = PROT_READ | PROT_WRITE
    offset: int = 0


class Memory:
    """A pool of shared memory. It is mapped when it is first looked at; views keep the mapping alive.

    Made by `ashmem`, `mmap_fd` or `from_handle`. Usable in forked children.
    """

    __slots__ = ("__weakref__", "_bytes", "_fds", "_handle", "_map_prot", "_mapping")

    def __init__(self, handle: MemoryHandle, fds: FdSet, map_prot: int) -> None:
        self._handle = handle
        self._fds = fds
        self._map_prot = map_prot
        self._mapping: Mapping | None = None
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    @classmethod
    def ashmem(cls, size: int, name: str = "nnburst") -> Memory:
        """Create zeroed shared memory whose size nobody can change.

        Args:
            size: Bytes, at least 1.
            name: For debugging; seen in ``/proc/<pid>/maps``.

        Raises:
            InvalidArgument: `size` is not positive.
            ResourceExhausted: Out of memory or file descriptors.
        """
        length = _size(size)
        fd = check(lib.nnb_memfd_create(name.encode()[:200], length), f"shared memory of {length} bytes")
        return cls(MemoryHandle("ashmem", length), FdSet([fd]), PROT_READ | PROT_WRITE)

    @classmethod
    def mmap_fd(cls, fd: int, size: int, *, prot: int = PROT_READ | PROT_WRITE, offset: int = 0) -> Memory:
        """Use a range of an existing file or other object. Whether it can be mapped turns out at the first look.

        Args:
            fd: The object; duplicated.
            size: Bytes, at least 1.
            prot: PROT_READ and/or PROT_WRITE; without PROT_WRITE all views are read-only.
            offset: First byte; need not be page-aligned.

        Raises:
            InvalidArgument: A number is out of range, or `fd` is not open.
        """
        handle = _checked(MemoryHandle("mmap_fd", _size(size), prot, offset))
        return cls(handle, FdSet.duplicate([fd]), prot)

    @classmethod
    def from_handle(cls, handle: MemoryHandle, fds: Iterable[int], *, prot: int | None = None) -> Memory:
        """Take over a pool that a peer sent, trusting nothing that it says.

        Args:
            handle: What the peer said.
            fds: What came with it; owned by the pool from now on, closed if it is refused.
            prot: Map with these rights only; None for those of the handle.

        Raises:
            InvalidArgument: The handle contradicts itself, its descriptors or `prot`, or the peer could truncate the
                object: seal it with F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL.
            GeneralFailure: The object cannot be mapped.
        """
        owned = FdSet(fds)
        try:
            handle = _checked(handle)
            rights = handle.prot if prot is None else _prot(prot)
            if rights & ~handle.prot:
                raise InvalidArgument(f"prot {rights} asks for more than the pool's {handle.prot}")
            _check_object(handle, owned.fds)
            memory = cls(handle, owned, rights)
            if rights:
                memory._map()
        except BaseException:
            owned.close()
            raise
        return memory

    @property
    def kind(self) -> str:
        """``"ashmem"`` or ``"mmap_fd"``."""
        return self._handle.kind

    @property
    def size(self) -> int:
        """Bytes."""
        return self._handle.size

    @property
    def prot(self) -> int:
        """What the pool allows: PROT_READ and/or PROT_WRITE."""
        return self._handle.prot

    @property
    def offset(self) -> int:
        """First byte in the object."""
        return self._handle.offset

    @property
    def handle(self) -> MemoryHandle:
        """The plain value that a peer makes the same pool from, together with `fds`."""
        return self._handle

    @property
    def fds(self) -> tuple[int, ...]:
        """The file descriptors, still owned by the pool.

        Raises:
            BadState: The pool is closed.
        """
        return self._fds.fds

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._fds.closed

    @property
    def sealed(self) -> bool:
        """Whether nobody can change the size of the object any more."""
        return all(_is_sealed(fd) for fd in self.fds)

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """(device, inode, offset, size): equal for two pools over the same bytes."""
        status = os.fstat(self.fds[0])
        return status.st_dev, status.st_ino, self.offset, self.size

    @property
    def faults(self) -> int:
        """How many accesses found that somebody had truncated the object. They saw zeros; their result is void."""
        return 0 if self._mapping is None else self._mapping.faults

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0) -> np.ndarray[Any, np.dtype[Any]]:
        """View part of the pool as an array, without a copy.

        Args:
            dtype: Element type without object fields.
            shape: Lengths of the axes, elements.
            offset: First byte in the pool.

        Returns:
            A C-contiguous view, read-only if the pool is. It stays valid after `close`.

        Raises:
            InvalidArgument: The view exceeds the pool, or the pool cannot be read.
            GeneralFailure: The object cannot be mapped.
            BadState: The pool is closed.
        """
        element = np.dtype(dtype)
        if element.hasobject:
            raise InvalidArgument(f"{element} cannot live in shared memory; use a dtype without objects")
        lengths = tuple(shape)
        if any(length < 0 for length in lengths):
            raise InvalidArgument(f"shape {lengths} has a negative length")
        nbytes = math.prod(lengths) * element.itemsize
        if offset < 0 or offset + nbytes > self.size:
            raise InvalidArgument(f"{nbytes} bytes at offset {offset} exceed a pool of {self.size} bytes")
        return self._map()[offset : offset + nbytes].view(element).reshape(lengths)

    @property
    def buffer(self) -> memoryview:
        """The whole pool as bytes, without a copy; read-only if the pool is.

        Raises:
            As `array`.
        """
        return self._map().data

    def close(self) -> None:
        """Close the file descriptors and let go of the mapping; views stay valid. Idempotent."""
        self._fds.close()
        self._mapping = self._bytes = None

    def _map(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self._fds.closed:
            raise BadState("the memory pool is closed; take views before closing it")
        if self._bytes is None:
            if not self._map_prot:
                raise InvalidArgument("the pool was made with prot 0: it can be passed on, but not looked at")
            # What can be written must be readable too: NumPy has no write-only arrays.
            self._mapping = Mapping(self.fds[0], self.offset, self.size, self._map_prot | PROT_READ)
            self._bytes = self._mapping.bytes()
        return self._bytes

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._fds.fds  # noqa: B018  closed: say so here, not in the child
        return Memory, (self._handle, self._fds, self._map_prot)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fds={list(self.fds)}"
        return f"Memory({self.kind!r}, size={self.size}, prot={self.prot}, offset={self.offset}, {state})"


def _size(size: int) -> int:
    length = operator.index(size)
    if not 0 < length <= _MAX_SIZE:
        raise InvalidArgument(f"size is {size}; a memory pool has at least one byte")
    return length


def _prot(prot: int) -> int:
    if prot & ~(PROT_READ | PROT_WRITE):
        raise InvalidArgument(f"prot is {prot}; PROT_READ (1) and PROT_WRITE (2) are the rights there are")
    return prot


def _checked(handle: MemoryHandle) -> MemoryHandle:
    """Refuse a handle that contradicts itself (facts sheet `memory.md` §2.1)."""
    if handle.kind not in _KINDS:
        raise InvalidArgument(f"memory kind {handle.kind!r} is unknown; {' or '.join(_KINDS)} is needed")
    _size(handle.size)
    _prot(handle.prot)
    if not 0 <= handle.offset <= _MAX_SIZE - handle.size:
        raise InvalidArgument(f"offset {handle.offset} is out of range")
    if handle.kind == "ashmem" and (handle.offset or handle.prot != PROT_READ | PROT_WRITE):
        raise InvalidArgument("ashmem memory is mapped whole, for reading and writing; use mmap_fd for a part")
    return handle


def _is_sealed(fd: int) -> bool:
    seals = check(lib.nnb_seals(fd), f"seals of fd {fd}")
    return seals & lib.NNB_SEALS_FIXED_SIZE == lib.NNB_SEALS_FIXED_SIZE


def _check_object(handle: MemoryHandle, fds: tuple[int, ...]) -> None:
    """Compare a peer's handle with the object that came with it."""
    if len(fds) != 1:
        raise InvalidArgument(f"{handle.kind} memory comes with 1 file descriptor, not {len(fds)}")
    if not _is_sealed(fds[0]):
        raise InvalidArgument("the memory object could be truncated while it is used; seal its size (seals 0x7)")
    actual = check(lib.nnb_fd_size(fds[0]), f"size of fd {fds[0]}")
    if handle.offset + handle.size > actual:
        raise InvalidArgument(f"{handle.size} bytes at {handle.offset} exceed the object of {actual} bytes")
