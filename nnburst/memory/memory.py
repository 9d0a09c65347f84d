"""Memory pools, and views of them."""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from .._core._nnburst import lib
from .._core.errno import as_error, check, meaning, system
from .._core.fds import FdSet
from .._core.file_system import check_file_system
from .._core.leaving import Closing
from .._options import ImageFormat
from ..errors import BadState, GeneralFailure, InvalidArgument
from ..model.types import Array
from . import named
from .descriptor import MemoryMapping, MemoryObject, examine, private_bytes, read_into, sync_dma_buf, write_from
from .image import ImageLayout, gather, new_layout, plane_layout, plane_views, scatter
from .kinds import PROT_READ, PROT_WRITE, MemoryHandle, check_handle, check_prot, check_size

if TYPE_CHECKING:
    import numpy.typing as npt

_pools: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
PAGES_GONE = "a memory object was truncated, or its file system is too full to hold what is written"


class Memory(Closing):
    """A pool of shared memory. It is mapped at its first use; views keep the mapping alive.

    The program that makes a pool, and its forked children, may use `array`, `buffer` and `planes`. Devices map memory
    that cannot be truncated, and copy other memory (`docs/memory.md`).

    Example:
        >>> with nnburst.Memory.ashmem(16) as memory:
        ...     memory.array(np.int32, (4,))[:] = [1, 2, 3, 4]
        ...     memory.read(np.int32, (2,), offset=8)
        array([3, 4], dtype=int32)
    """

    def __init__(self, handle: MemoryHandle, fds: FdSet, map_prot: int, foreign: bool = False) -> None:
        """Use `ashmem` or another class method instead."""
        self._handle = handle
        self._fds = fds
        self._map_prot = map_prot
        self._foreign = foreign
        self._mapping: MemoryMapping | None = None
        self._guarded: MemoryMapping | None = None
        self._object: MemoryObject | None = None
        self._identity: tuple[int, int, int, int] | None = None
        self._answers = False
        _pools[id(self)] = self

    # -- making ----------------------------------------------------------------------------------------------------

    @classmethod
    def ashmem(cls, size: int, name: str = "nnburst") -> Memory:
        """Return new, zeroed shared memory of a size that cannot change.

        Args:
            size: Bytes, at least 1.
            name: Name for debugging, as in ``/proc/<pid>/maps``.

        Raises:
            InvalidArgument: `size` is not positive, or `name` is not text.
            ResourceExhausted: Out of memory or file descriptors.
        """
        length = check_size(size)
        if not isinstance(name, str):
            raise InvalidArgument(f"the name of a memory is text, not {type(name).__name__}")
        return cls(MemoryHandle("ashmem", length), _make_sealed(name, length), PROT_READ | PROT_WRITE)

    @classmethod
    def mmap_fd(
        cls, fd: int, size: int, *, prot: int = PROT_READ | PROT_WRITE, offset: int = 0, direct: bool = False
    ) -> Memory:
        """Return a pool over part of an existing file or memory object.

        Args:
            fd: Descriptor of the object, which the pool duplicates.
            size: Bytes, at least 1.
            prot: PROT_READ and/or PROT_WRITE; without PROT_WRITE all views are read-only.
            offset: First byte; need not be page-aligned.
            direct: True to ask devices to map the object instead of copying it, even if it could be truncated. Only
                services of the same user then map the object. If it is truncated during a run, the run fails.

        Raises:
            InvalidArgument: A number is out of range, or `fd` is not open.
        """
        handle = check_handle(MemoryHandle("mmap_fd", check_size(size), prot, offset, direct))
        return cls(handle, FdSet.duplicate([fd]), prot)

    @classmethod
    def posix_shm(cls, name: str, size: int | None = None, *, direct: bool = False) -> Memory:
        """Return new or existing shared memory that other programs find by its name.

        Devices copy the memory, because it could be truncated; see `direct`. The pages of new memory are allocated at
        once. The memory exists until `unlink_posix_shm`.

        Args:
            name: Name without slashes, except at the beginning.
            size: Bytes of a new object; None to attach to an existing one.
            direct: See `mmap_fd`.

        Raises:
            InvalidArgument: The name or size is invalid, the name is taken, or no existing object has the name.
            ResourceExhausted: ``/dev/shm`` has too little space.
            GeneralFailure: The object cannot be opened.
        """
        fd, length = named.open_shared(name, None if size is None else check_size(size))
        handle = MemoryHandle("posix_shm", length, direct=direct)
        return cls(handle, FdSet([fd]), PROT_READ | PROT_WRITE)

    @staticmethod
    def unlink_posix_shm(name: str) -> None:
        """Remove a name. Processes that have opened the memory keep it.

        Args:
            name: See `posix_shm`.

        Raises:
            InvalidArgument: There is no such object.
        """
        named.unlink_shared(name)

    @classmethod
    def hardware_buffer_blob(cls, size: int) -> Memory:
        """Return new memory like `ashmem`, of the kind that NNAPI calls a hardware buffer blob.

        Args:
            size: Bytes, at least 1.

        Raises:
            InvalidArgument: `size` is not positive.
            ResourceExhausted: Out of memory or file descriptors.
        """
        handle = MemoryHandle("hardware_buffer_blob", check_size(size))
        return cls(handle, _make_sealed("nnburst-blob", handle.size), PROT_READ | PROT_WRITE)

    @classmethod
    def hardware_buffer(
        cls, width: int, height: int, format: ImageFormat, *, layers: int = 1, pitch: int = 0
    ) -> Memory:
        """Return a new strided image. An input or output uses it as a whole.

        Args:
            width: Pixels.
            height: Pixels.
            format: A key of `nnburst.memory.FORMATS`.
            layers: Number of images; the N of the NHWC tensor.
            pitch: Bytes from row to row of the first plane; 0 for rows on 64-byte boundaries. The pitches of
                other planes are derived from it as in V4L2: the planes U and V of I420 have half this pitch.

        Raises:
            InvalidArgument: The format is unknown or a number is out of range.
        """
        layout = new_layout(width, height, format, layers, pitch)
        handle = check_handle(MemoryHandle("hardware_buffer", 0, image=layout))
        return cls(handle, _make_sealed("nnburst-image", layout.span), PROT_READ | PROT_WRITE)

    @classmethod
    def from_image(cls, fd: int, layout: ImageLayout, *, prot: int = PROT_READ | PROT_WRITE) -> Memory:
        """Return a pool over an existing image, for example a camera's dma-buf.

        Args:
            fd: Descriptor of the image, which the pool duplicates.
            layout: Layout of the pixels.
            prot: PROT_READ for a read-only descriptor, whose image cannot be an output.

        Raises:
            InvalidArgument: The layout contradicts itself, or `fd` is not open.
        """
        handle = check_handle(MemoryHandle("hardware_buffer", 0, prot, image=layout))
        return cls(handle, FdSet.duplicate([fd]), prot)

    @classmethod
    def from_handle(
        cls, handle: MemoryHandle, fds: Iterable[int], *, prot: int | None = None, allow_direct: bool = False
    ) -> Memory:
        """Return a pool that an untrusted peer sent. The memory object is checked when the pool is used.

        Args:
            handle: The handle that the peer sent.
            fds: Descriptors that came with the handle; the pool owns them from now on, even if the call fails.
            prot: Rights of this pool; None for the rights in the handle.
            allow_direct: True to map the object if the handle sets `direct`, although the peer could truncate it.

        Raises:
            InvalidArgument: The handle contradicts itself, its descriptors or `prot`.
        """
        values = tuple(fds) if isinstance(fds, Iterable) else (fds,)
        owned = FdSet(fd for fd in values if type(fd) is int and 0 <= fd < 1 << 31)
        try:
            if len(owned.fds) != len(values):
                raise InvalidArgument(f"expected file descriptors, got {fds!r}")
            check_handle(handle)
            rights = handle.prot if prot is None else check_prot(prot)
            if rights & ~handle.prot:
                raise InvalidArgument(f"prot {rights} asks for more than the pool's {handle.prot}")
            if len(owned.fds) != 1:
                raise InvalidArgument(f"{handle.kind} memory comes with 1 file descriptor, not {len(owned.fds)}")
        except BaseException:
            owned.close()
            raise
        return cls(handle, owned, rights, foreign=not (allow_direct and handle.direct))

    # -- properties ------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """One of `nnburst.memory.kinds.KINDS`."""
        return self._handle.kind

    @property
    def size(self) -> int:
        """Size in bytes; 0 for an image, which is used as a whole."""
        return self._handle.size

    @property
    def prot(self) -> int:
        """Rights of the pool, PROT_READ and/or PROT_WRITE."""
        return self._handle.prot

    @property
    def offset(self) -> int:
        """Position of the pool in the memory object behind its descriptor, in bytes."""
        return self._handle.offset if self._handle.image is None else self._handle.image.start

    @property
    def image(self) -> ImageLayout | None:
        """Layout of a ``hardware_buffer``, else None."""
        return self._handle.image

    @property
    def _contents_size(self) -> int:
        """Bytes of the contents; for an image, without the gaps between rows."""
        return self.size if self.image is None else self.image.tight_size

    @property
    def span(self) -> int:
        """Number of bytes that belong to the pool, counted from `offset`."""
        return self._handle.image.span if self._handle.image is not None else self._handle.size

    @property
    def handle(self) -> MemoryHandle:
        """The description that a peer needs, together with `fds`, to make the same pool."""
        return self._handle

    @property
    def fds(self) -> tuple[int, ...]:
        """The file descriptors, still owned by the pool.

        Raises:
            BadState: The pool is closed.
        """
        if self._fds.closed:
            raise BadState(f"{self!r} is closed; keep a memory open as long as it is used")
        return self._fds.fds

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._fds.closed

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """The tuple (device, inode, offset, span), equal for pools of the same bytes.

        After `close`, the value is available only if it was read before.
        """
        if self._identity is None:
            status = system(
                os.fstat, self._file if self._foreign else self.fds[0]
            )  # Another thread may close the pool meanwhile.
            self._identity = status.st_dev, status.st_ino, self.offset, self.span
        return self._identity

    @property
    def mappable(self) -> bool:
        """True if a device maps the pool; otherwise the device copies the bytes that a run needs.

        Raises:
            GeneralFailure: The pool can be neither mapped nor copied.
            BadState: The pool is closed.
        """
        return self._examine().fixed or (self._handle.direct and not self._foreign)

    @property
    def faults(self) -> int:
        """Number of accesses by devices to pages that a truncation removed. Results of such accesses are invalid."""
        return 0 if self._guarded is None else self._guarded.faults

    # -- the maker's views -----------------------------------------------------------------------------------------

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return a view of part of the pool as an array, without a copy.

        Args:
            dtype: Element type without object fields.
            shape: Elements along each axis.
            offset: First byte in the pool.

        Returns:
            A C-contiguous view, read-only if the pool is. The view stays valid after `close`.

        Raises:
            InvalidArgument: The view exceeds the pool, or the pool cannot be read.
            GeneralFailure: The object cannot be mapped, or a peer could truncate it (use `read` and `write`).
            BadState: The pool is closed.
        """
        element, lengths, nbytes = self._region(dtype, shape, offset)
        return self._all()[offset : offset + nbytes].view(element).reshape(lengths)

    def planes(self) -> tuple[Array, ...]:
        """Return a view (layers, rows, samples, channels) of each plane of an image; channels are in memory order.

        Raises:
            InvalidArgument: The pool is not an image.
            GeneralFailure: See `array`.
        """
        return plane_views(self._layout(), self._all(image=True))

    def plane_memory(self, index: int) -> Memory:
        """Return one plane of an image, for use as an input or output. A plane whose rows have no gaps is not copied.

        Args:
            index: Number of the plane. Y is plane 0. The colours of NV12, NV21 and P010 are plane 1; those of I420 and
                YV12 are planes 1 and 2.

        Returns:
            An image of one plane over the same bytes, to be closed separately. Its channels are in memory order: V
            comes first in NV21.

        Raises:
            InvalidArgument: The pool is not an image, or has no such plane.
            BadState: The pool is closed.
        """
        handle = replace(self._handle, image=plane_layout(self._layout(), index))
        return Memory(handle, FdSet.duplicate(self.fds), self._map_prot, self._foreign)

    @property
    def buffer(self) -> memoryview:
        """The whole pool as bytes, without a copy; read-only if the pool is.

        Raises:
            NNBurstError: See `array`.
        """
        return self._all().data

    def __buffer__(self, flags: int) -> memoryview:  # CPython calls it from 3.12 on; older versions have `buffer`.
        view = self.buffer
        if flags & 1 and view.readonly:
            raise BufferError("the memory pool is read-only")
        return view

    def _all(self, *, image: bool = False) -> Array:
        """Return the whole pool, mapped with all its rights."""
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
            # Writable memory must be readable, too: NumPy has no write-only arrays.
            rights = self._map_prot | PROT_READ
            self._mapping = MemoryMapping(self.fds[0], self.offset, self.span, rights, guarded=False)
        return self._mapping.bytes()

    # -- access by devices -----------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        """Check that a device can map or copy the pool.

        Raises:
            GeneralFailure: The object is unusable, shorter than the pool, or on a file system that could block.
            BadState: The pool is closed.
        """
        found = self._examine()
        if self.offset + self.span > found.size:
            raise GeneralFailure(f"{self.span} bytes at {self.offset} exceed the object of {found.size} bytes")

    def _check_writable(self) -> None:
        """Check that a device can map or copy the pool, and that the pool's descriptor allows writing."""
        self._check_usable()
        found = self._examine()
        if not found.writable:
            raise GeneralFailure(f"fd {self.fds[0]} is not open for reading and writing; outputs need both")
        if found.appends and not self.mappable:
            raise GeneralFailure(f"fd {self.fds[0]} is open for appending; outputs go to places of their own")

    def read(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return a private copy of part of the pool. An image is read whole, as an NHWC tensor.

        Args:
            dtype, shape, offset: See `array`.

        Raises:
            InvalidArgument: The part exceeds the pool, or the pool is not readable.
            GeneralFailure: The object cannot be read, or was truncated.
            BadState: The pool is closed.
        """
        element, lengths, nbytes = self._region(dtype, shape, offset, tensor=True)
        out = private_bytes(nbytes)
        self._copy_out(offset, out)
        return out.view(element).reshape(lengths)

    def write(self, values: npt.ArrayLike, offset: int = 0) -> None:
        """Copy an array into the pool. An image is written whole, from an NHWC tensor.

        Args:
            values: Array of any dtype; its bytes are written.
            offset: First byte in the pool.

        Raises:
            NNBurstError: See `read`.
        """
        source = np.ascontiguousarray(values)
        self._region(source.dtype, source.shape, offset, tensor=True)
        self._copy_in(offset, source.reshape(-1).view(np.uint8))

    def _copy_out(self, offset: int, target: Array) -> None:
        """Copy bytes of the pool to an array, or an image to a whole tensor. Raises the same errors as `read`."""
        if not self._map_prot & PROT_READ:
            raise InvalidArgument(f"the pool was shared with prot {self._map_prot}; reading needs PROT_READ (1)")
        self._check_usable()
        if self.mappable:
            self._copy_mapped(offset, target, writing=False)
        elif self.image is None:
            read_into(self.fds[0], self.offset + offset, target)
        else:
            raw = private_bytes(self.span)
            read_into(self.fds[0], self.offset, raw)
            gather(self.image, plane_views(self.image, raw), self._tensor(target))

    def _copy_in(self, offset: int, source: Array) -> None:
        """Copy an array of bytes to the pool. For an image, these are a whole tensor. Raises like `read`."""
        if self._map_prot != PROT_READ | PROT_WRITE:
            raise InvalidArgument(
                f"the pool was shared with prot {self._map_prot}; writing needs PROT_READ | PROT_WRITE"
            )
        self._check_writable()
        if self.mappable:
            self._copy_mapped(offset, source, writing=True)
        elif self.image is None:
            write_from(self.fds[0], self.offset + offset, source)
        else:
            raw = private_bytes(self.span)  # The span includes the gaps between rows.
            read_into(self.fds[0], self.offset, raw)
            scatter(self.image, plane_views(self.image, raw), self._tensor(source))
            write_from(self.fds[0], self.offset, raw)

    def _map_for(self, *, writable: bool) -> MemoryMapping:
        """Return a mapping of the pool for a device. The mapping may be an existing one with more rights than needed.

        Raises:
            GeneralFailure: The pool must not be mapped (see `mappable`).
        """
        if not self.mappable:
            raise GeneralFailure("a peer could truncate this memory; a device copies it (read, write)")
        guarded = self._fallible
        mapping = self._guarded if guarded else self._mapping
        if mapping is None or (writable and not mapping.writable):
            rights = PROT_READ | PROT_WRITE if writable else PROT_READ
            mapping = MemoryMapping(self.fds[0], self.offset, self.span, rights, guarded=guarded)
            if guarded:
                self._guarded = mapping
            else:
                self._mapping = mapping
        return mapping

    def _evict(self, mapping: MemoryMapping) -> None:
        """Drop a guarded mapping that has lost pages. The next use maps the object anew."""
        if self._guarded is mapping:
            self._guarded = self._object = None

    @property
    def _fallible(self) -> bool:
        """True if accesses to a mapping can fault. A device's mapping is then guarded, and a run with faults fails."""
        found = self._examine()
        return not found.fixed or found.can_fail

    @property
    def dma_buf(self) -> bool:
        """True if CPU access to the mapping needs `begin_access` and `end_access`."""
        return self._examine().dma_buf

    def begin_access(self, *, write: bool) -> None:
        """Begin CPU access to a dma-buf; do nothing for other objects.

        Args:
            write: True if the CPU will write, too.
        """
        if self.dma_buf:
            sync_dma_buf(self.fds[0], write=write, end=False)

    def end_access(self, *, write: bool) -> None:
        """End CPU access to a dma-buf.

        Args:
            write: See `begin_access`.
        """
        if self.dma_buf:
            sync_dma_buf(self.fds[0], write=write, end=True)

    # -- internals -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file descriptors. The memory is unmapped when its last view is dropped. Idempotent."""
        self._fds.close()
        self._mapping = self._guarded = None

    def _region(
        self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int, *, tensor: bool = False
    ) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Check a range of the pool, and return (dtype, shape, bytes). The only range of an image is the whole."""
        try:
            element = np.dtype(dtype)
            lengths = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
            operator.index(offset)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"dtype {dtype!r}, shape {shape!r}, offset {offset!r}: {error}") from None
        if element.hasobject or not element.itemsize:
            raise InvalidArgument(f"{element} cannot live in shared memory; use a dtype of numbers")
        if any(length < 0 for length in lengths):
            raise InvalidArgument(f"shape {lengths} has a negative length")
        nbytes = math.prod(lengths) * element.itemsize
        if self.image is not None:
            if not tensor or offset or nbytes != self.image.tight_size:
                raise InvalidArgument(
                    f"an image is used whole, as a tensor of {self.image.tight_size} bytes; see planes()"
                )
        elif offset < 0 or offset + nbytes > self.size:
            raise InvalidArgument(f"{nbytes} bytes at offset {offset} exceed a pool of {self.size} bytes")
        return element, lengths, nbytes

    def _layout(self) -> ImageLayout:
        if self.image is None:
            raise InvalidArgument(f"expected an image, got {self.kind} memory")
        return self.image

    def _tensor(self, raw: Array) -> Array:
        layout = self._layout()
        return raw.view(layout.dtype).reshape(layout.shape)

    def _examine(self) -> MemoryObject:
        fd = self._file
        if self._object is None or not self._object.fixed:
            self._object = examine(fd)
        return self._object

    @property
    def _file(self) -> int:
        """Return the descriptor after a check of its file system."""
        fd = self.fds[0]
        if not self._answers:
            try:
                check_file_system(fd)
            except OSError as error:
                raise type(as_error(os.open, error))(f"fd {fd} cannot be used: {meaning(error.errno or 0)}") from error
            self._answers = True
        return fd

    def _copy_mapped(self, offset: int, private: Array, *, writing: bool) -> None:
        """Copy between the mapping and a private array of bytes. Raises `GeneralFailure` after a fault."""
        mapping = self._map_for(writable=writing)
        self.begin_access(write=writing)
        try:
            raw = mapping.bytes()
            if self.image is not None:
                (scatter if writing else gather)(self.image, plane_views(self.image, raw), self._tensor(private))
            elif writing:
                raw[offset : offset + private.nbytes] = private
            else:
                private[:] = raw[offset : offset + private.nbytes]
        finally:
            self.end_access(write=writing)
        if mapping.faults:
            self._evict(mapping)
            raise GeneralFailure(f"{PAGES_GONE}; the copy is void")

    def __reduce__(self) -> tuple[Any, ...]:
        self._fds.fds  # noqa: B018  A closed pool raises here, not in the child.
        return Memory, (self._handle, self._fds, self._map_prot, self._foreign)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fds={list(self.fds)}"
        return f"Memory({self.kind!r}, size={self.size}, prot={self.prot}, offset={self.offset}, {state})"


def _make_sealed(name: str, size: int) -> FdSet:
    fds = FdSet.create(lib.nnb_memfd_create, name.encode(errors="replace")[:200], size, lib.NNB_SEALS_FIXED_SIZE)
    check(fds.fds[0], f"shared memory of {size} bytes")
    return fds


def locate_view(array: Array) -> tuple[Memory, int]:
    """Return the open `Memory` that contains a dense array, and the array's offset in it.

    Raises:
        InvalidArgument: No open memory contains the array.
    """
    start = array.__array_interface__["data"][0]
    for memory in filter(None, (ref() for ref in _pools.valuerefs())):
        mapping = memory._mapping
        if mapping is None or memory.closed or memory.image is not None:
            continue
        if mapping.address <= start and start + array.nbytes <= mapping.address + mapping.size:
            return memory, start - mapping.address
    raise InvalidArgument(
        "the array is not in shared memory that an open pool of this process knows; copy it into "
        "Memory.ashmem(nbytes).array(...), or give its source to posix_shm or mmap_fd"
    )
