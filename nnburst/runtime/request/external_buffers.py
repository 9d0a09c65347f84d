"""Memory of the caller's that arguments lie in: a view of a pool, or a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from ...errors import InvalidArgument
from ...memory import PROT_WRITE, Memory
from ...memory.interop import locate_view
from ...model import Array
from .node_args import NodeArg


class ExternalBuffer(Struct, eq=False):
    """Where one argument lies.

    Attributes:
        offset: First byte in it.
        nbytes: From there to the end, or of the view.
        shape: Of the view; None if a pool was given.
        view: NumPy view of it; None until its shape is known.
    """

    memory: Memory
    offset: int
    nbytes: int
    shape: tuple[int, ...] | None
    view: Array | None

    def look(self, node: NodeArg, shape: tuple[int, ...] | None, length: int) -> Array:
        """Return a view of it; flat bytes if the shape is not known. Raises as `Memory.array`."""
        return self.memory.array(np.uint8, (length,)) if shape is None else self.memory.array(node.dtype, shape)


def find_buffers(
    inputs: Sequence[NodeArg],
    outputs: Sequence[NodeArg],
    given: Mapping[str, Memory | Array],
    state: Mapping[str, str],
) -> dict[str, ExternalBuffer]:
    """Find the pools behind what `Burst.bind` was given."""
    nodes = {node.name: node for node in (*inputs, *outputs)}
    written = {node.name for node in outputs}
    places = {}
    for name, value in given.items():
        if name not in nodes:
            raise InvalidArgument(f"memory for unknown name {name!r}; the model has arguments {sorted(nodes)}")
        if name in state or name in state.values():
            raise InvalidArgument(f"{name!r} is a state, which lies in the device; give it no memory")
        place = _place(nodes[name], value)
        readable = place.view is None or place.view.flags.writeable
        if name in written and not (place.memory.prot & PROT_WRITE and readable):
            raise InvalidArgument(f"memory of output {name!r} is read-only; give one that the service may write")
        places[name] = place
    return places


def _place(node: NodeArg, value: Memory | Array) -> ExternalBuffer:
    if node.holds:
        raise InvalidArgument(f"{node.name!r} is of type {node.holds}, which is copied; give it no memory")
    if isinstance(value, Memory):
        return ExternalBuffer(value, 0, value.size, None, None)
    if not isinstance(value, np.ndarray):
        raise InvalidArgument(f"memory of {node.name!r}: expected a Memory or a view of one, got {value!r}")
    if value.dtype != node.dtype:
        raise InvalidArgument(
            f"memory of {node.name!r} holds {value.dtype}, the model takes {node.dtype}; give memory.array"
            f"({str(node.dtype)!r}, …) where the bytes are such numbers, else let session.run() copy"
        )
    if not value.nbytes:
        raise InvalidArgument(f"memory of {node.name!r} has no elements (shape {value.shape}); leave it out")
    if not value.flags.c_contiguous:
        raise InvalidArgument(
            f"memory of {node.name!r} has strides {value.strides} for shape {value.shape}: a model reads elements that "
            "follow each other. Give a dense view, have the producer write without gaps, or let session.run() copy"
        )
    try:
        memory, offset = locate_view(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"memory of {node.name!r}: {error}") from None
    return ExternalBuffer(memory, offset, value.nbytes, value.shape, value)


def merged(
    shapes: Mapping[str, int | Sequence[int]], viewed: Mapping[str, tuple[int, ...]]
) -> dict[str, int | Sequence[int]]:
    """Return the given shapes with those of views; `InvalidArgument` if they differ for one argument."""
    for name in shapes.keys() & viewed.keys():
        given = shapes[name]
        if not isinstance(given, Sequence) or tuple(given) != viewed[name]:
            raise InvalidArgument(f"shapes[{name!r}] is {given!r}, but its memory has shape {viewed[name]}")
    return {**shapes, **viewed}


def of_one_step(places: Mapping[str, ExternalBuffer], steps: int | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of views, without their leading dimension if they hold the arguments of several steps."""
    shapes = {}
    for name, place in places.items():
        if steps is not None and place.memory.image is not None:
            raise InvalidArgument(f"memory of {name!r} is an image, which has no room for {steps} steps")
        if place.shape is None:
            continue
        if steps is not None and place.shape[:1] != (steps,):
            raise InvalidArgument(f"memory of {name!r} has shape {place.shape}; with steps={steps} that comes first")
        shapes[name] = place.shape if steps is None else place.shape[1:]
    return shapes
