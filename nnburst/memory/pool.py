"""The common part of every kind of memory pool: its description, and how a device reaches its bytes."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core._nnburst import lib
from .._core.errno import check, system
from .._core.fds import FdSet
from .._core.file_system import check_file_system
from .._core.leaving import Closing
from ..errors import BadState, GeneralFailure, InvalidArgument
from ..model import Array
from .descriptor import MemoryObject, examine, read_into, sync_dma_buf, write_from
from .image import ImageLayout, format_of, gather, plane_views, scatter
from .kinds import PROT_READ, PROT_WRITE, MemoryHandle
from .mapping import MemoryMapping, private_bytes

if TYPE_CHECKING:
    import numpy.typing as npt


PAGES_GONE = "a memory object was truncated, or its file system is too full to hold what is written"


class Pool(Closing):
    """The part of `Memory` that devices use: they map what cannot be truncated, and copy the rest."""

    __slots__ = (
        "__weakref__",
        "_answers",
        "_fds",
        "_foreign",
        "_guarded",
        "_handle",
        "_identity",
        "_map_prot",
        "_mapping",
        "_object",
    )

    def __init__(self, handle: MemoryHandle, fds: FdSet, map_prot: int, foreign: bool = False) -> None:
        self._handle = handle
        self._fds = fds
        self._map_prot = map_prot
        self._foreign = foreign
        self._mapping: MemoryMapping | None = None
        self._guarded: MemoryMapping | None = None
        self._object: MemoryObject | None = None
        self._identity: tuple[int, int, int, int] | None = None
        self._answers = False

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """A key of `nnburst.memory.KINDS`."""
        return self._handle.kind

    @property
    def size(self) -> int:
        """Bytes that can be addressed; 0 for an image, which is used as a whole."""
        return self._handle.size

    @property
    def prot(self) -> int:
        """What the pool allows: PROT_READ and/or PROT_WRITE."""
        return self._handle.prot

    @property
    def offset(self) -> int:
        """First byte in the object."""
        return self._handle.offset if self._handle.image is None else self._handle.image.start

    @property
    def backing(self) -> str:
        """What a ``hardware_buffer_blob`` was made from, else empty."""
        return self._handle.backing

    @property
    def image(self) -> ImageLayout | None:
        """Layout of a ``hardware_buffer``, else None."""
        return self._handle.image

    @property
    def _contents_size(self) -> int:
        """Bytes of the contents; of an image, without what lies between its rows."""
        return self.size if self.image is None else self.image.tight_size

    @property
    def span(self) -> int:
        """Bytes of the object, from `offset` on, that belong to the pool."""
        return self._handle.image.span if self._handle.image is not None else self._handle.size

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
        if self._fds.closed:
            raise BadState(f"{self!r} is closed; keep a memory open as long as it is used")
        return self._fds.fds

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._fds.closed

    @property
    def sealed(self) -> bool:
        """Whether the size of the object can no longer change."""
        return all(
            check(lib.nnb_seals(fd), f"seals of fd {fd}") & lib.NNB_SEALS_FIXED_SIZE == lib.NNB_SEALS_FIXED_SIZE
            for fd in self.fds
        )

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """(device, inode, offset, span): equal for pools over the same bytes. Known after `close` if asked before."""
        if self._identity is None:
            status = system(os.fstat, self._file if self._foreign else self.fds[0])  # or another thread closes it
            self._identity = status.st_dev, status.st_ino, self.offset, self.span
        return self._identity

    @property
    def mappable(self) -> bool:
        """Whether a device maps the pool; otherwise it copies what a run needs.

        Raises:
            GeneralFailure: Neither is possible.
            BadState: The pool is closed.
        """
        return self._examined().fixed or (self._handle.direct and not self._foreign)

    @property
    def faults(self) -> int:
        """How many accesses of a device found that the object had lost pages. They saw zeros; their result is void."""
        return 0 if self._guarded is None else self._guarded.faults

    # -- doors for devices ---------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        """Look whether a device can use the pool, by mapping or copying. Touches none of its bytes.

        Raises:
            GeneralFailure: The descriptor names nothing that can be mapped, the object is shorter than the pool, its
                image format is unknown, or it is on a file system that could block for ever.
            BadState: The pool is closed.
        """
        if self.image is not None:
            format_of(self.image)
        found = self._examined()
        if self.offset + self.span > found.size:
            raise GeneralFailure(f"{self.span} bytes at {self.offset} exceed the object of {found.size} bytes")

    def _check_writable(self) -> None:
        """As `_check_usable`, and look whether the descriptor allows to write. Raises as it does."""
        self._check_usable()
        found = self._examined()
        if not found.writable:
            raise GeneralFailure(f"fd {self.fds[0]} is not open for reading and writing; outputs need both")
        if found.appends and not self.mappable:
            raise GeneralFailure(f"fd {self.fds[0]} is open for appending; outputs go to places of their own")

    def read(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return a private copy of part of the pool, whatever its kind. An image is read from offset 0, as a tensor.

        Args:
            dtype: Element type.
            shape: Lengths of the axes, elements.
            offset: First byte in the pool.

        Raises:
            InvalidArgument: The part exceeds the pool, or the pool does not allow to read it.
            GeneralFailure: The object cannot be read, or was truncated.
            BadState: The pool is closed.
        """
        element, lengths, nbytes = self._region(dtype, shape, offset, tensor=True)
        out = private_bytes(nbytes)
        self._copy_out(offset, out)
        return out.view(element).reshape(lengths)

    def write(self, values: npt.ArrayLike, offset: int = 0) -> None:
        """Copy an array into the pool, whatever its kind. An image is written whole, from an NHWC tensor.

        Args:
            values: Of any dtype that the pool's bytes are to be.
            offset: Where in the pool, in bytes.

        Raises:
            As `read`.
        """
        source = np.ascontiguousarray(values)
        self._region(source.dtype, source.shape, offset, tensor=True)
        self._copy_in(offset, source.reshape(-1).view(np.uint8))

    def _copy_out(self, offset: int, target: Array) -> None:
        """Fill an array of bytes from the pool (an image: with its whole tensor). Raises as `read`."""
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
        """Fill the pool (an image: its whole tensor) from an array of bytes. Raises as `read`."""
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
            raw = private_bytes(self.span)  # with what lies between the rows
            read_into(self.fds[0], self.offset, raw)
            scatter(self.image, plane_views(self.image, raw), self._tensor(source))
            write_from(self.fds[0], self.offset, raw)

    def _map_for(self, *, writable: bool) -> MemoryMapping:
        """Map the pool for a device, with no more rights than the uses so far need.

        Raises:
            GeneralFailure: It cannot be mapped, or must not: see `mappable`.
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
        """Let go of a guarded mapping that has lost pages. The next use maps the object anew."""
        if self._guarded is mapping:
            self._guarded = self._object = None

    @property
    def _fallible(self) -> bool:
        """Whether accesses to a mapping can fault. A device then has a guarded one of its own, and its `faults` decide
        about a run. In the views that the pool's maker takes, a fault is the SIGBUS of any program.
        """
        found = self._examined()
        return not found.fixed or found.can_fail

    @property
    def dma_buf(self) -> bool:
        """Whether the CPU must say when it uses the mapping: see `begin_access`."""
        return self._examined().dma_buf

    def begin_access(self, *, write: bool) -> None:
        """Say that the CPU will use the mapping of a dma-buf; nothing for other objects.

        Args:
            write: Whether it will write, too.
        """
        if self.dma_buf:
            sync_dma_buf(self.fds[0], write=write, end=False)

    def end_access(self, *, write: bool) -> None:
        """Say that the CPU has used the mapping of a dma-buf.

        Args:
            write: As at its beginning.
        """
        if self.dma_buf:
            sync_dma_buf(self.fds[0], write=write, end=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file descriptors and let go of the mapping; views stay valid. Idempotent."""
        self._fds.close()
        self._mapping = self._guarded = None

    def _region(
        self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int, *, tensor: bool = False
    ) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Check a part of the pool; of an image, only the whole tensor is one."""
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

    def _examined(self) -> MemoryObject:
        fd = self._file
        if self._object is None or not self._object.fixed:
            self._object = examine(fd)
        return self._object

    @property
    def _file(self) -> int:
        """The descriptor, once its file system is known to answer."""
        fd = self.fds[0]
        if not self._answers:
            try:
                check_file_system(fd)
            except OSError as error:
                raise GeneralFailure(f"fd {fd} cannot be used: {error.strerror}") from error
            self._answers = True
        return fd

    def _copy_mapped(self, offset: int, private: Array, *, writing: bool) -> None:
        """Copy between the mapping and a private array of bytes, and find out whether a fault spoilt it."""
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
