"""Memory pools: how they are made, and how their maker looks at them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from .._core._nnburst import lib
from .._core.errno import check
from .._core.fds import FdSet
from ..errors import BadState, GeneralFailure, InvalidArgument
from ..model import Array
from ..options import BackingName, ImageFormat
from . import backings, interop, named
from .image import ImageLayout, new_layout, plane_layout, plane_views
from .kinds import PROT_READ, PROT_WRITE, MemoryHandle, check_fd_count, check_handle, check_prot, check_size
from .mapping import MemoryMapping
from .pool import Pool

if TYPE_CHECKING:
    import mmap
    from multiprocessing.shared_memory import SharedMemory

    import numpy.typing as npt


class Memory(Pool):
    """A pool of shared memory. It is mapped when it is first looked at; views keep the mapping alive.

    Made by `ashmem`, `mmap_fd`, `posix_shm`, `hardware_buffer_blob`, `hardware_buffer`, `from_shared_memory`,
    `from_mmap`, `from_dlpack` or `from_handle`. Usable in forked children.

    The maker of a pool may look at it with `array`, `buffer` and the like. A device uses `read`, `write` and what
    `nnburst.memory.open_request` gives: they map what cannot be truncated, and copy the rest (`docs/memory.md`).

    Example:
        >>> with nnburst.Memory.ashmem(16) as memory:
        ...     memory.array(np.int32, (4,))[:] = [1, 2, 3, 4]
        ...     memory.read(np.int32, (2,), offset=8)
        array([3, 4], dtype=int32)
    """

    __slots__ = ()

    def __init__(self, handle: MemoryHandle, fds: FdSet, map_prot: int, foreign: bool = False) -> None:
        """Use `ashmem` and its like."""
        super().__init__(handle, fds, map_prot, foreign)
        interop.register(self)

    # -- making ----------------------------------------------------------------------------------------------------

    @classmethod
    def ashmem(cls, size: int, name: str = "nnburst") -> Memory:
        """Return new, zeroed shared memory of a size that cannot change.

        Args:
            size: Bytes, at least 1.
            name: For debugging; seen in ``/proc/<pid>/maps``.

        Raises:
            InvalidArgument: `size` is not positive, or `name` is no text.
            ResourceExhausted: Out of memory or file descriptors.
        """
        length = check_size(size)
        if not isinstance(name, str):
            raise InvalidArgument(f"the name of a memory is text, not {type(name).__name__}")
        fd = check(
            lib.nnb_memfd_create(name.encode(errors="replace")[:200], length, lib.NNB_SEALS_FIXED_SIZE),
            f"shared memory of {length} bytes",
        )
        return cls(MemoryHandle("ashmem", length), FdSet([fd]), PROT_READ | PROT_WRITE)

    @classmethod
    def mmap_fd(
        cls, fd: int, size: int, *, prot: int = PROT_READ | PROT_WRITE, offset: int = 0, direct: bool = False
    ) -> Memory:
        """Return a range of an existing file or other object. Whether it can be mapped turns out at the first look.

        Args:
            fd: The object; duplicated.
            size: Bytes, at least 1.
            prot: PROT_READ and/or PROT_WRITE; without PROT_WRITE all views are read-only.
            offset: First byte; need not be page-aligned.
            direct: Ask devices to map the object even if it could be truncated, instead of copying. Followed by
                services of the same user. A run during which it is truncated fails.

        Raises:
            InvalidArgument: A number is out of range, or `fd` is not open.
        """
        handle = check_handle(MemoryHandle("mmap_fd", check_size(size), prot, offset, direct))
        return cls(handle, FdSet.duplicate([fd]), prot)

    @classmethod
    def posix_shm(cls, name: str, size: int | None = None, *, direct: bool = False) -> Memory:
        """Return new or existing shared memory that other programs find by its name.

        It cannot be sealed: devices copy it, or map it behind a guard if `direct` is set and they run as the same user.
        New memory has its pages from the beginning, and exists until `unlink_posix_shm`.

        Args:
            name: Without slashes, except at the beginning.
            size: Bytes of a new object; None to attach to one that exists.
            direct: As in `mmap_fd`.

        Raises:
            InvalidArgument: The name or size is impossible, the name is taken, or there is no such object.
            ResourceExhausted: ``/dev/shm`` has no room for it.
            GeneralFailure: The object cannot be opened.
        """
        fd, length = named.open_shared(name, None if size is None else check_size(size))
        handle = MemoryHandle("posix_shm", length, direct=direct)
        return cls(handle, FdSet([fd]), PROT_READ | PROT_WRITE)

    @staticmethod
    def unlink_posix_shm(name: str) -> None:
        """Remove a name; processes that have the memory open keep it.

        Args:
            name: As for `posix_shm`.

        Raises:
            InvalidArgument: There is no such object.
        """
        named.unlink_shared(name)

    @classmethod
    def hardware_buffer_blob(cls, size: int, *, backing: BackingName | None = None) -> Memory:
        """Return new memory that a driver could share: a dma-buf where there are any, else huge pages, else a memfd.

        Args:
            size: Bytes, at least 1.
            backing: ``"dma-heap"``, ``"udmabuf"``, ``"hugetlb"`` or ``"memfd"``; None for the first that works.

        Raises:
            InvalidArgument: `size` or `backing` is impossible.
            GeneralFailure: This machine has no such backing.
        """
        length = check_size(size)
        fd, used = backings.allocate(length, backing)
        handle = MemoryHandle("hardware_buffer_blob", length, backing=used)
        return cls(handle, FdSet([fd]), PROT_READ | PROT_WRITE)

    @classmethod
    def hardware_buffer(
        cls, width: int, height: int, format: ImageFormat, *, layers: int = 1, pitch: int = 0
    ) -> Memory:
        """Return a new strided image, to be an input or output as a whole.

        Args:
            width: Pixels.
            height: Pixels.
            format: A key of `nnburst.memory.FORMATS`.
            layers: Number of images; the N of the NHWC tensor.
            pitch: Bytes from row to row of the first plane, from which V4L2 derives the others (half as many for U and
                V of I420); 0 for rows on 64-byte boundaries.

        Raises:
            InvalidArgument: The format is unknown or a number is out of range.
        """
        layout = new_layout(width, height, format, layers, pitch)
        fd = check(
            lib.nnb_memfd_create(b"nnburst-image", layout.span, lib.NNB_SEALS_FIXED_SIZE),
            f"image of {layout.span} bytes",
        )
        handle = check_handle(MemoryHandle("hardware_buffer", 0, image=layout))
        return cls(handle, FdSet([fd]), PROT_READ | PROT_WRITE)

    @classmethod
    def from_image(cls, fd: int, layout: ImageLayout, *, prot: int = PROT_READ | PROT_WRITE) -> Memory:
        """Return an image that something else made, e.g. a camera's dma-buf.

        Args:
            fd: The object; duplicated.
            layout: Where its pixels lie.
            prot: PROT_READ for a descriptor that was exported for reading: the image is no output.

        Raises:
            InvalidArgument: The layout contradicts itself, or `fd` is not open.
        """
        handle = check_handle(MemoryHandle("hardware_buffer", 0, prot, image=layout))
        return cls(handle, FdSet.duplicate([fd]), prot)

    @classmethod
    def from_shared_memory(cls, shared: SharedMemory, *, direct: bool = False) -> Memory:
        """Return the memory of a ``multiprocessing.shared_memory.SharedMemory``, without a copy.

        Args:
            shared: Stays with the caller, which also unlinks it.
            direct: As in `mmap_fd`.

        Raises:
            InvalidArgument: It is closed.
        """
        fd = interop.fd_of_shared_memory(shared)
        try:
            handle = check_handle(MemoryHandle("posix_shm", check_size(shared.size), direct=direct))
            return cls(handle, FdSet.duplicate([fd]), PROT_READ | PROT_WRITE)
        finally:
            os.close(fd)

    @classmethod
    def from_mmap(cls, mapped: mmap.mmap, *, direct: bool = False) -> Memory:
        """Return the memory behind a ``mmap.mmap`` of a file or memfd, without a copy and with its rights.

        Args:
            mapped: Stays with the caller.
            direct: As in `mmap_fd`.

        Raises:
            InvalidArgument: It is closed, private to this process (ACCESS_COPY, MAP_PRIVATE), anonymous, or its
                descriptor was closed: make a `mmap_fd` of the file instead.
        """
        fd, offset, prot = interop.locate_mmap(mapped)
        return cls.mmap_fd(fd, len(mapped), prot=prot, offset=offset, direct=direct)

    @classmethod
    def from_dlpack(cls, exporter: Any) -> Memory:
        """Return the memory of an array that lies in an open pool of this process, without a copy.

        Args:
            exporter: Something with ``__dlpack__`` (an array of NumPy, PyTorch, JAX, ...), dense.

        Raises:
            InvalidArgument: The array is not dense, or not in shared memory that a pool knows: copy it into
                ``Memory.ashmem(nbytes).array(...)``, or pass its source to `from_shared_memory` or `from_mmap`.
        """
        owner, offset, nbytes, prot = interop.locate_array(exporter)
        return cls.mmap_fd(owner.fds[0], nbytes, prot=prot, offset=owner.offset + offset, direct=owner.handle.direct)

    @classmethod
    def from_handle(
        cls, handle: MemoryHandle, fds: Iterable[int], *, prot: int | None = None, allow_direct: bool = False
    ) -> Memory:
        """Return a pool that a peer sent, which is taken over, trusting nothing that it says.

        The file behind the descriptor is checked when the pool is used.

        Args:
            handle: The handle that the peer sent.
            fds: What came with it; owned by the pool from now on, closed if it is refused.
            prot: Use with these rights only; None for those of the handle.
            allow_direct: Follow the handle's wish to be mapped although the peer could truncate the object.

        Raises:
            InvalidArgument: The handle contradicts itself, its descriptors or `prot`.
        """
        given = tuple(fds) if isinstance(fds, Iterable) else (fds,)
        owned = FdSet(fd for fd in given if type(fd) is int and 0 <= fd < 1 << 31)
        try:
            if len(owned.fds) != len(given):
                raise InvalidArgument(f"expected file descriptors, got {fds!r}")
            check_handle(handle)
            rights = handle.prot if prot is None else check_prot(prot)
            if rights & ~handle.prot:
                raise InvalidArgument(f"prot {rights} asks for more than the pool's {handle.prot}")
            check_fd_count(handle, len(owned.fds))
        except BaseException:
            owned.close()
            raise
        return cls(handle, owned, rights, foreign=not (allow_direct and handle.direct))

    # -- for its maker -------------------------------------------------------------------------------------------------

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0) -> Array:
        """View part of the pool as an array, without a copy.

        Args:
            dtype: Element type without object fields.
            shape: Lengths of the axes, elements.
            offset: First byte in the pool.

        Returns:
            A C-contiguous view, read-only if the pool is. It stays valid after `close`.

        Raises:
            InvalidArgument: The view exceeds the pool, or the pool cannot be read.
            GeneralFailure: The object cannot be mapped, or a peer could truncate it (use `read` and `write`).
            BadState: The pool is closed.
        """
        element, lengths, nbytes = self._region(dtype, shape, offset)
        return self._all()[offset : offset + nbytes].view(element).reshape(lengths)

    def planes(self) -> tuple[Array, ...]:
        """Return views of the planes of an image: (layers, rows, samples, channels), channels as in memory.

        Raises:
            InvalidArgument: The pool is no image.
            GeneralFailure: The format is not supported, or as `array`.
        """
        return plane_views(self._layout(), self._all(image=True))

    def plane_memory(self, index: int) -> Memory:
        """Use one plane of an image as an input or output of its own, without a copy where its rows have no gaps.

        Args:
            index: 0 is Y; 1 is U and V, or one of them.

        Returns:
            An image of one plane over the same bytes, to be closed like any memory. Its channels are in the order that
            they have in memory: V comes first in NV21.

        Raises:
            InvalidArgument: The pool is no image, or has no such plane.
            GeneralFailure: The format is not supported.
            BadState: The pool is closed.
        """
        handle = replace(self._handle, image=plane_layout(self._layout(), index))
        return Memory(handle, FdSet.duplicate(self.fds), self._map_prot, self._foreign)

    @property
    def buffer(self) -> memoryview:
        """The whole pool as bytes, without a copy; read-only if the pool is.

        Raises:
            As `array`.
        """
        return self._all().data

    def __buffer__(self, flags: int) -> memoryview:  # CPython >= 3.12 asks; before, there is `buffer`
        view = self.buffer
        if flags & 1 and view.readonly:
            raise BufferError("the memory pool is read-only")
        return view

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """The whole pool as uint8, for ``np.asarray(memory)``."""
        return interop.as_array(self._all(), dtype, copy)

    def __dlpack__(self, **wishes: Any) -> Any:
        """The whole pool as uint8. A read-only pool needs a consumer of DLPack 1.0 or later, else BufferError."""
        return interop.to_dlpack(self._all(), wishes)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(kDLCPU, 0)."""
        return (1, 0)

    def _all(self, *, image: bool = False) -> Array:
        """Map everything for the pool's maker, with all rights of the pool."""
        if self._fds.closed:
            raise BadState("the memory pool is closed; take views before closing it")
        if self.image is not None and not image:
            raise InvalidArgument("an image is not one row of bytes; use planes(), read() or write()")
        if not self._map_prot:
            raise InvalidArgument("the pool was made with prot 0: it can be passed on, but not looked at")
        if self._foreign and not self.mappable:
            raise GeneralFailure("the sender of this memory could truncate it; use read() and write(), which copy")
        writable = bool(self._map_prot & PROT_WRITE)
        if self._mapping is None or self._mapping.writable != writable:
            # What can be written must be readable too: NumPy has no write-only arrays.
            rights = self._map_prot | PROT_READ
            self._mapping = MemoryMapping(self.fds[0], self.offset, self.span, rights, guarded=False)
        return self._mapping.bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        self._fds.fds  # noqa: B018  closed: say so here, not in the child
        return Memory, (self._handle, self._fds, self._map_prot, self._foreign)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fds={list(self.fds)}"
        return f"Memory({self.kind!r}, size={self.size}, prot={self.prot}, offset={self.offset}, {state})"
