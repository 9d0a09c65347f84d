"""The arguments of one execution: given one by one, or arrays that are shared with the service; and where they lie."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct

from ...devices.encoded import ROOM
from ...errors import GeneralFailure, InvalidArgument, OutputInsufficientSize
from ...memory import PROT_WRITE, Memory, locate_view
from ...model import (
    Array,
    BufferToken,
    DataLocation,
    Named,
    OutputShape,
    Request,
    RequestArgument,
    Steps,
    element_count,
)
from ..compile.compilation import Compilation
from .node_args import NodeArg, SharedArrays, SharedValues, Sizes
from .state import States

UINT32 = 2**32 - 1
_ALIGNMENT = 64
"""Arguments in memory of the execution's own begin at multiples of it."""
_FIRST_GUESS = 4096
"""Bytes for an output whose shape only a run tells, before the first run."""


class Argument(Struct, frozen=True):
    """One input or output of an execution. Without room and without memories it is omitted, or has no elements.

    Attributes:
        room: Bytes in the execution's own memory.
        memories: Where it lies otherwise: one memory, or two that take turns, run by run.
        offset: Of the region in that memory, in bytes.
        length: Of the region; 0 for the whole of a buffer of a device.
        dimensions: As in a request: empty means "as in the model".
    """

    room: int = 0
    memories: tuple[Memory | BufferToken, ...] = ()
    offset: int = 0
    length: int = 0
    dimensions: tuple[int, ...] = ()


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


def lay_out(inputs: Sequence[Argument], outputs: Sequence[Argument], steps: Steps | None) -> ArgumentLayout:
    """Give each argument its place; those in the execution's own memory begin at multiples of 64 bytes.

    Args:
        steps: If the requests have several.
    """
    offsets: list[int] = []
    total = 0
    for argument in (*inputs, *outputs):
        offsets.append(total)
        total += -(-argument.room // _ALIGNMENT) * _ALIGNMENT
    turns = max([1, *(len(argument.memories) for argument in (*inputs, *outputs))])
    memory = Memory.ashmem(total) if total else None
    try:
        requests = tuple(_request(inputs, outputs, memory, offsets, turn, steps) for turn in range(turns))
        views = [
            memory.array(np.uint8, (argument.room,), offset) if memory is not None and argument.room else None
            for argument, offset in zip((*inputs, *outputs), offsets, strict=True)
        ]
    except BaseException:
        if memory is not None:
            memory.close()
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
            pool = argument.memories[turn % len(argument.memories)]
            where = DataLocation(pools.setdefault(pool, len(pools)), argument.offset, argument.length)
        else:
            where = DataLocation(0, start, argument.room)
        omitted = not argument.room and not argument.memories
        arguments.append(RequestArgument(omitted, DataLocation() if omitted else where, argument.dimensions))
    if steps is not None:
        pools[steps] = len(pools)
    return Request(tuple(arguments[: len(inputs)]), tuple(arguments[len(inputs) :]), tuple(pools))


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


def given_shapes(
    shapes: Mapping[str, int | Sequence[int]], places: Mapping[str, ExternalBuffer], steps: int | None
) -> dict[str, int | Sequence[int]]:
    """Return the given shapes with those of views, without the leading dimension that these have for several steps.

    Raises:
        InvalidArgument: They differ for one argument, or a view has no such dimension.
    """
    found = dict(shapes)
    for name, place in places.items():
        if steps is not None and place.memory.image is not None:
            raise InvalidArgument(f"memory of {name!r} is an image, which has no room for {steps} steps")
        if place.shape is None:
            continue
        if steps is not None and place.shape[:1] != (steps,):
            raise InvalidArgument(f"memory of {name!r} has shape {place.shape}; with steps={steps} that comes first")
        viewed = place.shape if steps is None else place.shape[1:]
        given = shapes.get(name, viewed)
        if not isinstance(given, Sequence) or tuple(given) != viewed:
            raise InvalidArgument(f"shapes[{name!r}] is {given!r}, but its memory has shape {viewed}")
        found[name] = viewed
    return found


class Arguments:
    """The arguments of an execution: states, memory of the caller's, and arrays that are shared with the service.

    Args:
        compilation: Whose inputs and outputs they are.
        sizes: Shapes of all arguments, of one step.
        states: The inputs and outputs that are states.
        buffers: Memory of the caller's, by the name of the argument that lies there.
        rooms: Bytes by name of an output of which only a run tells the shape, whatever the model says; 4096 for others
            whose shape is not known.
        steps: How many steps a run has, and how they are tied; None: one, without a leading dimension.

    Attributes:
        compilation: Another one with the same arguments when the model was compiled anew.
        inputs: Arrays by input name.
        outputs: Arrays by output name, flat bytes where the shape is not known.
        shown: Both, as callers have them.
        feeds: Of each input array: name, dtype, shape and itself; no dtype for what is not copied as it is.
        copies: What copies each output array; None if that takes the shapes that a run has told.

    Raises:
        InvalidArgument: A buffer is too small, or all arguments together are too large.
    """

    def __init__(
        self,
        compilation: Compilation,
        sizes: Sizes,
        states: States,
        buffers: Mapping[str, ExternalBuffer] = MappingProxyType({}),
        rooms: Mapping[str, int] = MappingProxyType({}),
        steps: Steps | None = None,
    ) -> None:
        self.compilation = compilation
        self.states, self.steps = states, steps
        self._given: dict[str, list[Argument]] = {"input": [], "output": []}
        self._layout: ArgumentLayout | None = None
        self._known: dict[str, Sequence[tuple[int, ...] | None]] = {"input": (), "output": ()}
        self._unverified: Set[str] = frozenset()  # outputs whose shape a file declares and a run has contradicted
        self.inputs, self.outputs = SharedArrays(), SharedArrays()
        self.shown: tuple[Mapping[str, Any], Mapping[str, Any]] = self.inputs, self.outputs
        self.feeds: tuple[tuple[str, np.dtype[Any] | None, tuple[int, ...], Array], ...] = ()
        self.copies: tuple[Callable[[], Array], ...] | None = None
        self._share(sizes, buffers, rooms)

    def _share(self, sizes: Sizes, buffers: Mapping[str, ExternalBuffer], rooms: Mapping[str, int]) -> None:
        nodes = {"input": self.compilation.inputs, "output": self.compilation.outputs}
        told = list(zip(nodes["output"], sizes.outputs, strict=True))
        self._unverified = {node.name for node, shape in told if shape is not None} & rooms.keys()
        outputs = tuple(None if node.name in rooms else shape for node, shape in told)
        self._known = {"input": sizes.inputs, "output": outputs}
        for kind, known in self._known.items():
            tokens = self.states.tokens(kind)
            for node, shape in zip(nodes[kind], known, strict=True):
                if kind == "input" and shape is None:
                    argument = Argument()
                elif node.name in buffers:
                    argument = self._in_buffer(node, shape, buffers[node.name])
                elif node.name in tokens:
                    argument = Argument(memories=tokens[node.name], dimensions=shape if node.is_open and shape else ())
                else:
                    guess = ROOM if node.holds else _FIRST_GUESS
                    least = 0 if kind == "input" else rooms.get(node.name, guess) if shape is None else 1
                    argument = self._in_room(node, shape, least)
                self._given[kind].append(argument)
        self._check_total()
        views = {name: buffer.view for name, buffer in buffers.items()}
        self.inputs = SharedArrays(self._arrays("input", nodes["input"], self.layout.inputs, views))
        self.outputs = SharedArrays(self._arrays("output", nodes["output"], self.layout.outputs, views))
        held = {node.name: node for kind in nodes for node in nodes[kind] if node.holds}
        self.shown = self.inputs, self.outputs
        if held:
            self.shown = SharedValues(self.inputs, held), SharedValues(self.outputs, held)
        self.feeds = tuple(
            (name, None if name in held else view.dtype, view.shape, view) for name, view in self.inputs.items()
        )
        if not held and all(shape is not None and 0 not in shape for shape in outputs):
            self.copies = tuple(self.outputs[n.name].copy for n in nodes["output"] if n.name in self.outputs)

    def _stepped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.steps is None else (self.steps.count, *shape)

    def _in_room(self, node: NodeArg, shape: tuple[int, ...] | None, least: int) -> Argument:
        """An argument with room of its own; `least` is 0 for an input, which may be empty."""
        try:
            nbytes = 0 if shape is None else element_count(self._stepped(shape)) * node.dtype.itemsize
        except InvalidArgument as error:
            raise InvalidArgument(f"{node.name!r}: {error}") from None
        if least and not nbytes:
            return Argument(room=max(least, node.dtype.itemsize))
        is_room = least and node.holds  # and no shape, of an output
        return Argument(room=nbytes, dimensions=shape if node.is_open and shape and not is_room else ())

    def _in_buffer(self, node: NodeArg, shape: tuple[int, ...] | None, buffer: ExternalBuffer) -> Argument:
        whole, memory = None if shape is None else self._stepped(shape), buffer.memory
        length = buffer.nbytes if whole is None else math.prod(whole) * node.dtype.itemsize
        if memory.image is None:
            fits = 0 < length <= memory.size - buffer.offset
        else:
            fits = not buffer.offset and (whole is None or length == memory.image.tight_size)
        if not fits:
            raise InvalidArgument(f"{node.name!r} of shape {whole} takes {length} bytes of {memory!r}")
        if buffer.view is None:
            with contextlib.suppress(InvalidArgument, GeneralFailure):  # what this process may not look at
                buffer.view = memory.array(np.uint8, (length,)) if whole is None else memory.array(node.dtype, whole)
        length = length if memory.image is None else 0  # the whole
        dimensions = shape if node.is_open and shape else ()
        return Argument(memories=(memory,), offset=buffer.offset, length=length, dimensions=dimensions)

    def _check_total(self) -> None:
        arguments = self._all
        if sum(argument.room + _ALIGNMENT for argument in arguments) > UINT32:
            nodes = (*self.compilation.inputs, *self.compilation.outputs)
            largest = max(range(len(nodes)), key=lambda i: arguments[i].room)
            shapes = (*self._known["input"], *self._known["output"])
            fewer = "" if self.steps is None else "; bind fewer steps"
            raise InvalidArgument(
                f"{nodes[largest].name!r} of shape {shapes[largest]} takes {arguments[largest].room} bytes; the "
                f"arguments of a run have less than 4 GiB together{fewer}"
            )

    def _arrays(
        self, kind: str, nodes: Sequence[NodeArg], views: Sequence[Array | None], given: Mapping[str, Array | None]
    ) -> dict[str, Array]:
        states, arrays = self.states.tokens(kind), {}
        for node, shape, view in zip(nodes, self._known[kind], views, strict=True):
            if node.name in states or (kind == "input" and shape is None):
                continue
            if node.name in given:
                if (there := given[node.name]) is not None:
                    arrays[node.name] = there
            elif view is None:
                arrays[node.name] = np.empty(self._stepped(shape or ()), node.dtype)
            elif shape is None:
                arrays[node.name] = view
            else:
                nbytes = 0 if 0 in shape else view.nbytes
                arrays[node.name] = view[:nbytes].view(node.dtype).reshape(self._stepped(shape))
        return arrays

    @property
    def _all(self) -> list[Argument]:
        return [*self._given["input"], *self._given["output"]]

    @property
    def layout(self) -> ArgumentLayout:
        """Where they lie."""
        if self._layout is None:
            self._layout = lay_out(self._given["input"], self._given["output"], self.steps)
        return self._layout

    @property
    def memory(self) -> Memory | None:
        """Memory of their own, if there is some by now."""
        return None if self._layout is None else self._layout.memory

    def check_shapes(self, shapes: Sequence[OutputShape]) -> None:
        """Raise `GeneralFailure` if what a service told of its outputs contradicts the model or the request."""
        check_shapes(self.compilation.outputs, self._given["output"], shapes, self._unverified)

    def copied(self, shapes: Sequence[OutputShape]) -> list[Array]:
        """Return copies of all outputs, of the shapes that the last run told."""
        return [self._copy(i, node, shapes) for i, node in enumerate(self.compilation.outputs)]

    def _copy(self, index: int, node: NodeArg, shapes: Sequence[OutputShape]) -> Array:
        view, known, room = self.outputs[node.name], self._known["output"][index], self.layout.outputs[index]
        if node.holds:
            return node.decode(view)  # type: ignore[no-any-return]
        if known is not None and 0 not in known:
            return view.copy()
        view = view if room is None else room
        if not shapes:
            raise GeneralFailure(f"the service did not tell the shape of output {node.name!r}")
        shape = shapes[index].dimensions
        return view[: math.prod(shape) * node.dtype.itemsize].view(node.dtype).reshape(shape).copy()

    def needed_rooms(self, error: OutputInsufficientSize) -> dict[str, int]:
        """Return the bytes that each output needs which had too little room in the last run.

        Raises:
            OutputInsufficientSize: One of them cannot have more, since the model knows its shape. What a file says of
                shapes may be wrong.
        """
        rooms = {}
        nodes = zip(self.compilation.outputs, self._known["output"], error.output_shapes, strict=True)
        for node, known, shape in nodes:
            if not shape.is_sufficient:
                if known is not None and not node.may_be_empty:
                    raise error
                have = self.outputs[node.name].nbytes
                rooms[node.name] = max(math.prod(shape.dimensions) * node.dtype.itemsize, min(2 * have, UINT32))
        return rooms


def check_shapes(
    nodes: Sequence[NodeArg],
    outputs: Sequence[Argument],
    shapes: Sequence[OutputShape],
    unverified: Set[str] = frozenset(),
) -> None:
    """Raise `GeneralFailure` if what a service told of its outputs contradicts the model or the request.

    Args:
        outputs: As they were requested.
        unverified: Names of those of which the model may say wrong shapes.
    """
    if len(shapes) != len(nodes):
        raise GeneralFailure(f"the service told {len(shapes)} shapes for {len(nodes)} outputs")
    for node, argument, shape in zip(nodes, outputs, shapes, strict=True):
        dims, room = shape.dimensions, UINT32
        is_sure = node.name not in unverified and not (node.may_be_empty and node.is_open)
        declared = argument.dimensions or (node.shape if is_sure else None)
        try:
            fits = element_count(dims) >= 0
        except InvalidArgument:
            fits = False
        if shape.is_sufficient:
            room = argument.room or argument.length or UINT32
            fits = fits and (
                declared is None
                or (
                    len(dims) == len(declared)
                    and all(d == n or not isinstance(d, int) or not d for d, n in zip(declared, dims, strict=True))
                )
            )
        if not fits or math.prod(dims) * node.dtype.itemsize > room:
            raise GeneralFailure(
                f"the service told shape {dims} for output {node.name!r}, which is {declared} and has {room} bytes"
            )
