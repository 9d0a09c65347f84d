"""The plain value that stands for a memory pool on the wire, and what makes one well-formed."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from msgspec import Struct

from .._core.errno import whole
from ..errors import InvalidArgument
from ..options import BackingName
from .image import ImageLayout, check_layout

PROT_READ = 1
PROT_WRITE = 2

_MAX_SIZE = (1 << 63) - 1
_BACKINGS = ("", *get_args(BackingName))


class MemoryHandle(Struct, frozen=True):
    """A memory pool without its file descriptors.

    Attributes:
        kind: A key of `KINDS`.
        size: Bytes; 0 for a ``"hardware_buffer"``, whose bytes are not addressed one by one.
        prot: PROT_READ and/or PROT_WRITE.
        offset: First byte in the object.
        direct: The owner asks to have the pool mapped although it could be truncated.
        backing: What a ``"hardware_buffer_blob"`` was made from; for people.
        image: Layout of a ``"hardware_buffer"``.
    """

    kind: str
    size: int
    prot: int = PROT_READ | PROT_WRITE
    offset: int = 0
    direct: bool = False
    backing: str = ""
    image: ImageLayout | None = None


def _check_whole(handle: MemoryHandle) -> None:
    if handle.offset or handle.prot != PROT_READ | PROT_WRITE:
        raise InvalidArgument(f"{handle.kind} memory is mapped whole, for reading and writing; use mmap_fd for a part")


def _check_range(handle: MemoryHandle) -> None:
    check_size(handle.size)
    check_prot(handle.prot)
    if not 0 <= whole(handle.offset, "offset", " of bytes") <= _MAX_SIZE - handle.size:
        raise InvalidArgument(f"offset {handle.offset} is out of range")


def _check_bytes(handle: MemoryHandle) -> None:
    check_size(handle.size)
    _check_whole(handle)


def _check_named(handle: MemoryHandle) -> None:
    _check_range(handle)
    if handle.offset:
        raise InvalidArgument(f"offset is {handle.offset}; {handle.kind} memory begins at 0, use mmap_fd for a part")


def _check_image(handle: MemoryHandle) -> None:
    check_prot(handle.prot)
    if handle.size or handle.offset:
        raise InvalidArgument("size and offset of a hardware_buffer are 0; its layout tells the rest")
    if handle.image is None:
        raise InvalidArgument("hardware_buffer memory needs a layout")
    check_layout(handle.image)


KINDS: dict[str, Callable[[MemoryHandle], None]] = {
    "ashmem": _check_bytes,
    "mmap_fd": _check_range,
    "posix_shm": _check_named,
    "hardware_buffer_blob": _check_bytes,
    "hardware_buffer": _check_image,
}
"""The kinds of memory, and what checks the numbers of each."""


def check_handle(handle: MemoryHandle) -> MemoryHandle:
    """Refuse a handle that contradicts itself, with `InvalidArgument`."""
    if not isinstance(handle, MemoryHandle):
        raise InvalidArgument(f"expected a MemoryHandle, got {handle!r}")
    check = KINDS.get(handle.kind)
    if check is None:
        raise InvalidArgument(f"memory kind {handle.kind!r} is unknown; {', '.join(KINDS)} are the kinds there are")
    check(handle)
    if handle.image is not None and handle.kind != "hardware_buffer":
        raise InvalidArgument(f"{handle.kind} memory has no image layout")
    if handle.backing not in (_BACKINGS if handle.kind == "hardware_buffer_blob" else ("",)):
        raise InvalidArgument(f"{handle.kind} memory cannot be backed by {handle.backing!r}")
    return handle


def check_fd_count(handle: MemoryHandle, count: int) -> None:
    """Refuse anything but the one descriptor that every kind has."""
    if count != 1:
        raise InvalidArgument(f"{handle.kind} memory comes with 1 file descriptor, not {count}")


def check_size(size: int) -> int:
    """Return a size as an integer; refuse what no pool has."""
    length = whole(size, "size", " of bytes")
    if not 0 < length <= _MAX_SIZE:
        raise InvalidArgument(f"size is {size}; a memory pool has at least one byte")
    return length


def check_prot(prot: int) -> int:
    """Refuse rights that do not exist."""
    if whole(prot, "prot") & ~(PROT_READ | PROT_WRITE):
        raise InvalidArgument(f"prot is {prot}; PROT_READ (1) and PROT_WRITE (2) are the rights there are")
    return prot
