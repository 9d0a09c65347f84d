"""Where the arguments of an execution lie: in memory of its own, in memories that were given, or nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from ...memory import Memory
from ...model import Array, BufferToken, DataLocation, Named, Request, RequestArgument, Steps
from .device_memory import DeviceMemory

ALIGNMENT = 64
AnyMemory = Memory | DeviceMemory | BufferToken


class Argument(Struct, frozen=True):
    """One input or output of an execution. Without room and without memories it is omitted, or has no elements.

    Attributes:
        room: Bytes in the execution's own memory.
        memories: Where it lies otherwise: one memory, or two that take turns, run by run.
        offset: Of the region in that memory, in bytes.
        length: Of the region; 0 for the whole of a memory of a device.
        dimensions: As in a request: empty means "as in the model".
        array: Copied to the room before a run (input), or from it afterwards (output).
    """

    room: int = 0
    memories: tuple[AnyMemory, ...] = ()
    offset: int = 0
    length: int = 0
    dimensions: tuple[int, ...] = ()
    array: Array | None = None


class ArgumentLayout(Struct, frozen=True):
    """Arguments that have their places.

    Attributes:
        memory: The execution's own; None if nothing lies there.
        requests: One, or two that take turns.
        inputs: The bytes of each input in `memory`, None for the others.
        outputs: Likewise.
    """

    memory: Memory | None
    requests: tuple[Request, ...]
    inputs: tuple[Array | None, ...]
    outputs: tuple[Array | None, ...]


def lay_out(
    inputs: Sequence[Argument], outputs: Sequence[Argument], memory: Memory | None = None, steps: Steps | None = None
) -> ArgumentLayout:
    """Give each argument its place; those in the execution's own memory begin at multiples of 64 bytes.

    Args:
        memory: Of an earlier layout of as much room; None to make it.
        steps: If the requests have several.

    Raises:
        BadState: A memory of a device is closed.
    """
    offsets: list[int] = []
    total = 0
    for argument in (*inputs, *outputs):
        offsets.append(total)
        total += -(-argument.room // ALIGNMENT) * ALIGNMENT
    turns = max([1, *(len(argument.memories) for argument in (*inputs, *outputs))])
    made = Memory.ashmem(total) if total and memory is None else None
    memory = made if memory is None else memory
    try:
        requests = tuple(_request(inputs, outputs, memory, offsets, turn, steps) for turn in range(turns))
        views = [
            memory.array(np.uint8, (argument.room,), offset) if memory is not None and argument.room else None
            for argument, offset in zip((*inputs, *outputs), offsets, strict=True)
        ]
    except BaseException:
        if made is not None:
            made.close()
        raise
    return ArgumentLayout(memory, requests, tuple(views[: len(inputs)]), tuple(views[len(inputs) :]))


def _request(
    inputs: Sequence[Argument],
    outputs: Sequence[Argument],
    own: Memory | None,
    offsets: Sequence[int],
    turn: int,
    steps: Steps | None,
) -> Request:
    pools: dict[Memory | Named, int] = {} if own is None else {own: 0}
    arguments = []
    for argument, start in zip((*inputs, *outputs), offsets, strict=True):
        if argument.memories:
            place = argument.memories[turn % len(argument.memories)]
            pool = place.pool if isinstance(place, DeviceMemory) else place
            whole = pool.size if isinstance(place, DeviceMemory) and isinstance(pool, Memory) else argument.length
            where = DataLocation(pools.setdefault(pool, len(pools)), argument.offset, whole)
        else:
            where = DataLocation(0, start, argument.room)
        omitted = not argument.room and not argument.memories
        arguments.append(RequestArgument(omitted, DataLocation() if omitted else where, argument.dimensions))
    if steps is not None:
        pools[steps] = len(pools)
    return Request(tuple(arguments[: len(inputs)]), tuple(arguments[len(inputs) :]), tuple(pools))
