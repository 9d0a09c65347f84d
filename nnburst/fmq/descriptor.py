"""Descriptors, with which peers attach to queues."""

from __future__ import annotations

import enum
import fcntl
import operator
import os
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .._core._nnburst import lib
from .._core.errno import one_of
from .._core.fds import FdSet
from .._core.leaving import Closing
from ..errors import InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt


class Flavour(enum.IntEnum):
    """The flavour of a queue, which decides its number of readers and whether a write can fail."""

    SYNCHRONIZED = lib.NNB_SYNCHRONIZED
    """One writer, one reader; a write that does not fit fails."""
    UNSYNCHRONIZED = lib.NNB_UNSYNCHRONIZED
    """One writer, many readers; a write always succeeds, and a slow reader loses overwritten elements."""


class Layout(enum.IntEnum):
    """The placement of a new queue's counters. `MessageQueue.attach` accepts any layout."""

    LINES = lib.NNB_LAYOUT_LINES
    """128 bytes for each counter and for the event word, to avoid false sharing."""
    COMPAT = lib.NNB_LAYOUT_COMPAT
    """The 16-byte header of libfmq."""
    STAMPED = lib.NNB_LAYOUT_STAMPED
    """Like LINES, with space for a packet's time beside the write counter; for synchronized queues."""


class Grantor(NamedTuple):
    """A region of a queue. The first four regions are read counter, write counter, data and event word.

    Attributes:
        flags: Always 0.
        fd_index: Index among the queue's descriptors.
        offset: Bytes from the beginning of the file.
        extent: Length in bytes.

    Example:
        >>> from nnburst.fmq import Grantor
        >>> Grantor(flags=0, fd_index=0, offset=0, extent=8).extent
        8
    """

    flags: int
    fd_index: int
    offset: int
    extent: int


Dialect = Literal["hidl", "aidl"]
_FORMATS = {"hidl": "<IIIxxxxQ", "aidl": "<iiq"}


_F_SEAL_FUTURE_WRITE = 0x10  # Python 3.13 has it in the module `fcntl`.
_LIMITS = (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


def _grantor(index: int, parts: Sequence[int]) -> Grantor:
    if len(parts) != len(_LIMITS):
        raise InvalidArgument(f"grantor {index} has {len(parts)} fields; flags, fd_index, offset, extent are needed")
    for field, value, limit in zip(Grantor._fields, parts, _LIMITS, strict=True):
        if not 0 <= operator.index(value) <= limit:
            raise InvalidArgument(f"grantor {index}: {field} is {value}, outside 0..{limit}")
    return Grantor(*parts)


class MQDescriptor(Closing):
    """A description with which a peer attaches to a queue. It owns its file descriptors.

    ``multiprocessing`` can pickle it for children. Other processes need its attributes and, over SCM_RIGHTS, its file
    descriptors.

    Args:
        grantors: At least three `Grantor` or (flags, fd_index, offset, extent).
        fds: File descriptors, owned by this object from now on, even after an error.
        quantum: Size of an element in bytes.
        flags: Flavour of the queue: 1 synchronized, 2 unsynchronized.
        dtype: Default type for `MessageQueue.attach`, if known.

    Raises:
        InvalidArgument: A number is negative or too large for the format.

    Example:
        >>> from nnburst.fmq import MessageQueue
        >>> with MessageQueue(np.float32, 8) as queue, queue.descriptor as descriptor:
        ...     descriptor.quantum, len(descriptor.grantors)
        (4, 4)
    """

    __slots__ = ("_fds", "dtype", "flags", "grantors", "quantum")

    def __init__(
        self,
        grantors: Iterable[Sequence[int]],
        fds: Iterable[int] | FdSet,
        quantum: int,
        flags: int,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        self._fds = fds if isinstance(fds, FdSet) else FdSet(fds)
        try:
            self.grantors = tuple(_grantor(i, parts) for i, parts in enumerate(grantors))
            for name, value in (("quantum", quantum), ("flags", flags)):
                if not 0 <= operator.index(value) <= 0x7FFFFFFF:
                    raise InvalidArgument(f"{name} is {value}, outside 0..{0x7FFFFFFF}")
        except BaseException:
            self._fds.close()
            raise
        self.quantum = quantum
        self.flags = flags
        self.dtype = None if dtype is None else np.dtype(dtype)

    @property
    def fds(self) -> tuple[int, ...]:
        """The file descriptors, still owned by this object.

        Raises:
            BadState: The descriptor is closed.
        """
        return self._fds.fds

    def duplicate(self) -> MQDescriptor:
        """Return a copy with duplicated file descriptors."""
        return MQDescriptor(self.grantors, self._fds.copy(), self.quantum, self.flags, dtype=self.dtype)

    def without_write_access(self) -> MQDescriptor:
        """Return a copy with which readers of an unsynchronized queue can map the memory only for reading.

        Memory that the queue has made is sealed: existing mappings stay writable, but new mappings cannot be writable.
        Other memory, such as that of ``ring_fd=``, is opened for reading only. Then a reader of the same user can
        still reopen the memory for writing, and a reader that uses libfmq cannot attach.
        """
        copies = FdSet(_without_write_access(fd) for fd in self.fds)
        return MQDescriptor(self.grantors, copies, self.quantum, self.flags, dtype=self.dtype)

    def pack_grantors(self, dialect: Dialect) -> bytes:
        """Return the grantors in a binary form of libfmq.

        Args:
            dialect: ``"hidl"``: unsigned flags, fdIndex, offset and extent, 24 bytes. ``"aidl"``: signed fdIndex,
                offset and extent, no flags, 16 bytes.

        Raises:
            InvalidArgument: A number does not fit the dialect (AIDL is signed: offsets end at 2**31 - 1).
        """
        form = _FORMATS[one_of(dialect, "dialect", _FORMATS)]
        try:
            return b"".join(struct.pack(form, *(g if dialect == "hidl" else g[1:])) for g in self.grantors)
        except struct.error as error:
            raise InvalidArgument(f"the queue is too large for {dialect} descriptors: {error}") from error

    @staticmethod
    def unpack_grantors(data: bytes, dialect: Dialect) -> tuple[Grantor, ...]:
        """Return grantors from their binary form, the reverse of `pack_grantors`.

        Args:
            data: Grantors, one after the other.
            dialect: Their binary form.

        Raises:
            InvalidArgument: The length is not a multiple of a grantor's size, or a field is negative.
        """
        form = _FORMATS[one_of(dialect, "dialect", _FORMATS)]
        size = struct.calcsize(form)
        if len(data) % size:
            raise InvalidArgument(f"{len(data)} bytes are not a whole number of {size}-byte {dialect} grantors")
        rows = struct.iter_unpack(form, data)
        return tuple(_grantor(i, row if dialect == "hidl" else (0, *row)) for i, row in enumerate(rows))

    def close(self) -> None:
        """Close the file descriptors. Attached queues stay attached. Idempotent."""
        self._fds.close()

    def __reduce__(self) -> tuple[Any, ...]:
        parts = tuple(map(tuple, self.grantors)), self._fds, self.quantum, int(self.flags)
        return partial(MQDescriptor, dtype=self.dtype), parts


def _without_write_access(fd: int) -> int:
    """Return a descriptor that cannot map its file for writing. An attempt fails with EPERM, which libfmq expects, or
    with EACCES if the file cannot be sealed.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    except OSError:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
