"""The description of a memory pool that is sent to another process, and the checks of this description."""

from __future__ import annotations

from msgspec import Struct

from .._core.errno import as_int
from ..errors import InvalidArgument
from .image import ImageLayout, check_layout

PROT_READ = 1
PROT_WRITE = 2

_MAX_SIZE = (1 << 63) - 1


class MemoryHandle(Struct, frozen=True):
    """A memory pool without its file descriptors.

    Attributes:
        kind: One of `KINDS`.
        size: Bytes; 0 for a ``"hardware_buffer"``, which is used as a whole.
        prot: PROT_READ and/or PROT_WRITE.
        offset: First byte in the object.
        direct: True to ask devices to map the pool although it could be truncated.
        image: Layout of a ``"hardware_buffer"``.

    Example:
        >>> with nnburst.Memory.ashmem(4096) as memory:
        ...     memory.handle
        MemoryHandle(kind='ashmem', size=4096, prot=3, offset=0, direct=False, image=None)
    """

    kind: str
    size: int
    prot: int = PROT_READ | PROT_WRITE
    offset: int = 0
    direct: bool = False
    image: ImageLayout | None = None


KINDS = ("ashmem", "mmap_fd", "posix_shm", "hardware_buffer_blob", "hardware_buffer")


def check_handle(handle: MemoryHandle) -> MemoryHandle:
    """Check a handle and return it. Raises `InvalidArgument` if a field is invalid or contradicts another."""
    if not isinstance(handle, MemoryHandle):
        raise InvalidArgument(f"expected a MemoryHandle, got {handle!r}")
    kind = handle.kind
    if kind not in KINDS:
        raise InvalidArgument(f"memory kind {kind!r} is unknown; {', '.join(KINDS)} are the kinds there are")
    check_prot(handle.prot)
    if kind == "hardware_buffer":
        if handle.size or handle.offset:
            raise InvalidArgument("size and offset of a hardware_buffer are 0; its layout tells the rest")
        if handle.image is None:
            raise InvalidArgument("hardware_buffer memory needs a layout")
        check_layout(handle.image)
    else:
        check_size(handle.size)
        if not 0 <= as_int(handle.offset, "offset", " of bytes") <= _MAX_SIZE - handle.size:
            raise InvalidArgument(f"offset {handle.offset} is out of range")
        if handle.offset and kind != "mmap_fd":
            raise InvalidArgument(f"offset is {handle.offset}; {kind} memory begins at 0, use mmap_fd for a part")
        if handle.prot != PROT_READ | PROT_WRITE and kind in ("ashmem", "hardware_buffer_blob"):
            raise InvalidArgument(f"{kind} memory is mapped for reading and writing; use mmap_fd for less")
        if handle.image is not None:
            raise InvalidArgument(f"{kind} memory has no image layout")
    return handle


def check_size(size: int) -> int:
    """Check a size in bytes and return it. Raises `InvalidArgument` if the size is not positive, or is too large."""
    length = as_int(size, "size", " of bytes")
    if not 0 < length <= _MAX_SIZE:
        raise InvalidArgument(f"size is {size}; a memory pool has at least one byte")
    return length


def check_prot(prot: int) -> int:
    """Check access rights and return them. Raises `InvalidArgument` for bits other than PROT_READ and PROT_WRITE."""
    if as_int(prot, "prot") & ~(PROT_READ | PROT_WRITE):
        raise InvalidArgument(f"prot is {prot}; PROT_READ (1) and PROT_WRITE (2) are the rights there are")
    return prot
