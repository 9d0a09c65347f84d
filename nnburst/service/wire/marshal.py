"""Conversion of models, requests, pools and queues to and from their forms in a message."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import cast

from msgspec.structs import asdict, astuple

from ...devices.interfaces import CacheFiles
from ...errors import InvalidArgument
from ...fmq.descriptor import MQDescriptor
from ...memory.image import check_layout
from ...memory.kinds import MemoryHandle
from ...memory.memory import Memory
from ...model.types import BufferId, MemoryLike, Model, Named, Request, Steps
from .packets import FdBundle
from .protocol import WireGrantor, WireMemory, WireModel, WireQueue, WireRequest, referenced_from_wire


def pools_to_wire(pools: Iterable[MemoryLike | Named]) -> tuple[tuple[WireMemory, ...], list[int]]:
    """Return the handles of pools, and the pools' descriptors (borrowed, in the same order)."""
    handles: list[WireMemory] = []
    fds: list[int] = []
    for pool in pools:
        if isinstance(pool, BufferId):
            handles.append(WireMemory(kind="", size=0, prot=0, offset=0, n_fds=0, buffer=pool.id))
            continue
        if isinstance(pool, Steps):
            handles.append(WireMemory(kind="", size=0, prot=0, offset=0, n_fds=0, steps=pool))
            continue
        memory = cast(Memory, pool)
        handles.append(WireMemory(**asdict(memory.handle), n_fds=len(memory.fds)))
        fds += memory.fds
    return tuple(handles), fds


def memories_from_wire(handles: Sequence[WireMemory], fds: FdBundle, allow_direct: bool = False) -> tuple[Memory, ...]:
    """Build memories from handles. If a handle is malformed, close the memories that were built.

    Args:
        allow_direct: True if the peer may ask for a direct mapping of memory that it can truncate.

    Raises:
        InvalidArgument: A handle is malformed.
    """
    memories: list[Memory] = []
    try:
        for wire in handles:
            if wire.buffer:
                raise InvalidArgument("a driver-managed buffer cannot be used here; share memory instead")
            if wire.steps is not None:
                raise InvalidArgument("a number of steps is no memory; only requests have it")
            handle = MemoryHandle(*(getattr(wire, name) for name in MemoryHandle.__struct_fields__))
            memories.append(Memory.from_handle(handle, fds.take(wire.n_fds), allow_direct=allow_direct))
    except BaseException:
        close_all(memories)
        raise
    return tuple(memories)


def close_all(pools: Iterable[MemoryLike | Named]) -> None:
    """Close the memories of a message. Buffers, which a message only refers to by id, stay open."""
    for pool in pools:
        if isinstance(pool, Memory):
            pool.close()


def pools_from_wire(
    handles: Sequence[WireMemory], fds: FdBundle, owned: Container[int], allow_direct: bool
) -> tuple[Memory | Named, ...]:
    """Build the pools of a request. A pool is a memory, a buffer whose id is in `owned`, or a `Steps`.

    Raises:
        InvalidArgument: See `memories_from_wire`, or a buffer belongs to another connection.
    """
    for wire in handles:
        if wire.buffer and wire.buffer not in owned:
            raise InvalidArgument(f"no buffer of this connection has id {wire.buffer}")
    shared = [wire for wire in handles if not wire.buffer and wire.steps is None]
    memories = iter(memories_from_wire(shared, fds, allow_direct))
    return tuple(
        BufferId(wire.buffer) if wire.buffer else next(memories) if wire.steps is None else wire.steps
        for wire in handles
    )


def total_size(handles: Iterable[WireMemory]) -> int:
    """Return the total size of memories in bytes. Raises `InvalidArgument` for a malformed image layout."""
    return sum(_size(handle) for handle in handles)


def _size(handle: WireMemory) -> int:
    if handle.image is None:
        return handle.size
    check_layout(handle.image)  # it is checked before its numbers are used
    return handle.image.span


def model_to_wire(model: Model) -> tuple[WireModel, list[int]]:
    """Return a model with handles in place of pools, and the pools' descriptors (borrowed)."""
    handles, fds = pools_to_wire(model.pools)
    # Each subgraph is encoded in place; the reader gets it as `msgspec.Raw`.
    return WireModel(**asdict(model) | {"pools": handles}), fds


def model_from_wire(wire: WireModel, fds: FdBundle, allow_direct: bool = False) -> Model:
    """Build a model. The caller must close its pools. Raises the same errors as `memories_from_wire`."""
    referenced = referenced_from_wire(wire.referenced)
    return Model(
        **asdict(wire) | {"referenced": referenced, "pools": memories_from_wire(wire.pools, fds, allow_direct)}
    )


def request_to_wire(request: Request) -> tuple[WireRequest, list[int]]:
    """Return a request with handles in place of pools, and the pools' descriptors (borrowed)."""
    handles, fds = pools_to_wire(request.pools)
    return WireRequest(inputs=request.inputs, outputs=request.outputs, pools=handles), fds


def request_from_wire(wire: WireRequest, fds: FdBundle, owned: Container[int], allow_direct: bool) -> Request:
    """Build a request. The caller must close its pools. Raises the same errors as `pools_from_wire`."""
    pools = pools_from_wire(wire.pools, fds, owned, allow_direct)
    return Request(inputs=wire.inputs, outputs=wire.outputs, pools=pools)


def cache_to_wire(files: CacheFiles) -> tuple[CacheFiles, list[int]]:
    """Return cache files as indexes into a message's descriptors, and the descriptors (borrowed)."""
    fds = list(files.fds)
    return files.with_fds(range(len(fds))), fds


def cache_from_wire(wire: CacheFiles, fds: FdBundle) -> CacheFiles:
    """Return a message's cache files, whose descriptors the caller closes."""
    return wire.with_fds(fds.take(len(wire.fds)))


def queue_to_wire(queue: MQDescriptor) -> tuple[WireQueue, list[int]]:
    """Return a queue descriptor's fields and file descriptors (borrowed)."""
    fds = list(queue.fds)
    grantors = tuple(WireGrantor(*grantor) for grantor in queue.grantors)
    return WireQueue(grantors=grantors, quantum=queue.quantum, flags=int(queue.flags), n_fds=len(fds)), fds


def descriptor_from_wire(wire: WireQueue, fds: FdBundle) -> MQDescriptor:
    """Build a queue descriptor, which owns its file descriptors. Raises `InvalidArgument` if a field is malformed."""
    return MQDescriptor(map(astuple, wire.grantors), fds.take(wire.n_fds), wire.quantum, wire.flags)
