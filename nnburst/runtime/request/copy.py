"""Copies between memories of every sort: shared, in a device, described."""

from __future__ import annotations

import numpy as np

from ...errors import GeneralFailure, InvalidArgument
from ...memory import Memory
from .device_memory import DeviceMemory

_CHUNK = 4 << 20
"""Bytes that are on their way at a time where neither memory is mapped."""


def copy_memory(source: Memory | DeviceMemory, target: Memory | DeviceMemory) -> None:
    """Copy the whole contents of one memory to another. Copying a memory to itself does nothing.

    Whatever fails leaves a target that a `MemoryDesc` describes without contents. Between two buffers of one device no
    byte moves: they share until one of them is written.

    Args:
        source, target: Of the same size, dimensions, type and quantisation.

    Raises:
        InvalidArgument: An argument is no memory; the source has no contents; sizes, dimensions, types or
            quantisations do not fit; the target may not be written.
        GeneralFailure: The contents cannot be reached.
        ResourceExhausted: A buffer is in use.
        BadState: A memory is closed.
        DeadObject: The service that holds a buffer has ended.

    Example:
        >>> with nnburst.Memory.ashmem(4) as here, nnburst.Memory.ashmem(4) as there:
        ...     here.write(np.array([1, 2, 3, 4], np.uint8))
        ...     nnburst.copy_memory(here, there)
        ...     there.read(np.uint8, (4,))
        array([1, 2, 3, 4], dtype=uint8)
    """
    for what, memory in (("source", source), ("target", target)):
        if not isinstance(memory, Memory | DeviceMemory):
            raise InvalidArgument(f"the {what} is {type(memory).__name__}; give a Memory or a DeviceMemory")
    if source is target:
        return
    if not isinstance(target, DeviceMemory):
        _check_source(source)
        _require_size(source, target._contents_size)
        _move(source, target)
        return
    dimensions: tuple[int, ...] | None = None
    try:
        _check_source(source)
        wanted = source.dimensions if isinstance(source, DeviceMemory) else ()
        if isinstance(source, DeviceMemory):
            target._check_source(source)
        needed = target._nbytes_of(wanted)
        if not needed:
            raise InvalidArgument("the target's dimensions are open and the source does not know its own")
        _require_size(source, needed)
        target.pool  # noqa: B018  # raises if it is closed
        _to_device(source, target, wanted)
        dimensions = wanted
    finally:
        target._written(dimensions)


def _check_source(source: Memory | DeviceMemory) -> None:
    if isinstance(source, DeviceMemory):
        source.pool  # noqa: B018  # raises if it is closed
        if not source.initialised:
            raise InvalidArgument("the source has no contents; copy to it or run what writes it")


def _require_size(source: Memory | DeviceMemory, needed: int) -> None:
    size = source.size if isinstance(source, DeviceMemory) else source._contents_size
    if size != needed:
        raise InvalidArgument(f"the source has {size} bytes, the target takes {needed}")


def _move(source: Memory | DeviceMemory, target: Memory) -> None:
    if isinstance(source, DeviceMemory):
        if source.buffer is not None:
            source.buffer.copy_to(target)
            return
        assert source.memory is not None
        source = source.memory
    if source.image is not None or target.image is not None:
        whole = np.empty(source._contents_size, np.uint8)
        source._copy_out(0, whole)
        target._copy_in(0, whole)
        return
    buffer = np.empty(min(source.size, _CHUNK), np.uint8)
    for start in range(0, source.size, _CHUNK):
        part = buffer[: min(_CHUNK, source.size - start)]
        source._copy_out(start, part)
        target._copy_in(start, part)


def _to_device(source: Memory | DeviceMemory, target: DeviceMemory, dimensions: tuple[int, ...]) -> None:
    if target.memory is not None:
        _move(source, target.memory)
        return
    buffer = target.buffer
    assert buffer is not None
    if isinstance(source, Memory):
        buffer.copy_from(source)
    elif source.memory is not None:
        buffer.copy_from(source.memory, dimensions)
    else:
        assert source.buffer is not None
        try:  # within one device, else around it: only the device knows which buffers are its own
            buffer.copy_buffer(source.buffer)
        except (InvalidArgument, GeneralFailure):
            _through_shared_memory(source, target, dimensions)


def _through_shared_memory(source: DeviceMemory, target: DeviceMemory, dimensions: tuple[int, ...]) -> None:
    assert source.buffer is not None
    assert target.buffer is not None
    with Memory.hardware_buffer_blob(source.size) as between:
        source.buffer.copy_to(between)
        target.buffer.copy_from(between, dimensions)
