"""Making the memory of a new queue, and the words that callers choose its kind with."""

from __future__ import annotations

import errno
import fcntl

from .._core._nnburst import ffi, lib
from .._core.errno import check
from .._core.fds import FdSet
from ..errors import InvalidArgument
from .descriptor import Flavour, Grantor, Layout
from .elements import MAX_COUNT


def options(*, reset: bool, exclusive: bool, sealed: bool) -> int:
    """The option bits of ``nnb_mq_open``."""
    return (
        (lib.NNB_MQ_RESET if reset else 0)
        | (lib.NNB_MQ_EXCLUSIVE if exclusive else 0)
        | (lib.NNB_MQ_SEALED if sealed else 0)
    )


def create_memory(
    count: int, quantum: int, flavour: Flavour, layout: Layout, event_flag: bool, ring_fd: int | None
) -> tuple[tuple[Grantor, ...], FdSet]:
    """Draw the layout and make the memory for it."""
    regions, size = ffi.new("nnb_grantor[5]"), ffi.new("uint64_t *")
    # A ring elsewhere needs no room beside the counters.
    inner = 1 if ring_fd is not None else count
    n = lib.nnb_mq_layout(inner, quantum, flavour, layout, event_flag, regions, size)
    too_large = InvalidArgument(f"{count} elements of {quantum} bytes are more than a queue can hold (2 GiB)")
    check(n, f"a queue of {count} elements of {quantum} bytes", {errno.EOVERFLOW: too_large})
    grantors = [Grantor(g.flags, g.fd_index, g.offset, g.extent) for g in list(regions)[:n]]
    if ring_fd is None:
        return tuple(grantors), _new_memory(size[0], flavour)
    if count * quantum > MAX_COUNT:
        raise InvalidArgument(f"a queue of {count} elements of {quantum} bytes is larger than any memory")
    grantors[lib.NNB_GRANTOR_DATA] = Grantor(0, 1, 0, count * quantum)
    with_ring = FdSet.duplicate([ring_fd])
    own = _new_memory(size[0], flavour)
    return tuple(grantors), own.joined(with_ring)


def _new_memory(size: int, flavour: Flavour) -> FdSet:
    seals: int = lib.NNB_SEALS_FIXED_SIZE
    if flavour is Flavour.UNSYNCHRONIZED:
        seals &= ~fcntl.F_SEAL_SEAL  # `MQDescriptor.without_write_access` adds one
    what = f"shared memory of {size} bytes for a queue"
    return FdSet([check(lib.nnb_memfd_create(b"MessageQueue", size, seals), what)])
