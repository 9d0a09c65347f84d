"""The arguments of one execution: memory and shapes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct

from ...devices.encoded import ROOM
from ...errors import GeneralFailure, InvalidArgument, OutputInsufficientSize, OutputShape
from ...memory.kinds import PROT_WRITE
from ...memory.memory import Memory, locate_view
from ...model.dimensions import HIGHEST_RANK, element_count
from ...model.types import Array, BufferId, DataLocation, Named, Request, RequestArgument, Steps
from ..compile.compilation import Compilation
from .node_args import NodeArg, SharedArrays, SharedValues, Sizes, as_array, complete_shapes, solve_shapes
from .state import States, check_states

UINT32 = 2**32 - 1
_ALIGNMENT = 64
"""Alignment in bytes of arguments in the execution's own memory."""
_FIRST_GUESS = 4096
"""Bytes for an output of unknown shape, before the first run."""


class Argument(Struct, frozen=True):
    """An input or output of an execution. Without `room` and `memories`, it is omitted or has no elements.

    Attributes:
        room: Bytes reserved for the argument in the execution's own memory.
        memories: Other memories that contain the argument: one, or two that runs use alternately.
        offset: First byte of the argument in `memories`.
        length: Bytes in use; 0 for a whole device buffer.
        dimensions: Dimensions of the argument; empty for the model's dimensions.
    """

    room: int = 0
    memories: tuple[Memory | BufferId, ...] = ()
    offset: int = 0
    length: int = 0
    dimensions: tuple[int, ...] = ()


class ArgumentLayout(Struct, frozen=True):
    """The places of arguments in memory.

    Attributes:
        memory: The execution's own memory; None if no argument needs it.
        offsets: First byte of each argument in `memory`.
        views: Bytes of each argument in `memory`; None for an argument in other memory.
    """

    memory: Memory | None
    offsets: tuple[int, ...]
    views: tuple[Array | None, ...]


def lay_out(arguments: Sequence[Argument]) -> ArgumentLayout:
    """Return places for arguments, at multiples of 64 bytes in new memory."""
    offsets: list[int] = []
    total = 0
    for argument in arguments:
        offsets.append(total)
        total += -(-argument.room // _ALIGNMENT) * _ALIGNMENT
    memory = Memory.ashmem(total) if total else None
    try:
        views = [
            memory.array(np.uint8, (argument.room,), offset) if memory is not None and argument.room else None
            for argument, offset in zip(arguments, offsets, strict=True)
        ]
    except BaseException:
        if memory is not None:
            memory.close()
        raise
    return ArgumentLayout(memory, tuple(offsets), tuple(views))


def requests_for(
    layout: ArgumentLayout, arguments: Sequence[Argument], inputs: int, steps: Steps | None = None
) -> tuple[Request, ...]:
    """Return the request for arguments. If some are in two memories alternately, return two requests.

    Args:
        inputs: Number of inputs among the arguments.
        steps: Steps of a run; None for a single step.
    """
    requests = []
    for turn in range(max([1, *(len(argument.memories) for argument in arguments)])):
        pools: dict[Memory | Named, int] = {} if layout.memory is None else {layout.memory: 0}
        made = []
        for argument, start in zip(arguments, layout.offsets, strict=True):
            if argument.memories:
                pool = argument.memories[turn % len(argument.memories)]
                where = DataLocation(pools.setdefault(pool, len(pools)), argument.offset, argument.length)
            else:
                where = DataLocation(0, start, argument.length)
            omitted = not argument.room and not argument.memories
            made.append(RequestArgument(omitted, DataLocation() if omitted else where, argument.dimensions))
        if steps is not None:
            pools[steps] = len(pools)
        requests.append(Request(tuple(made[:inputs]), tuple(made[inputs:]), tuple(pools)))
    return tuple(requests)


class ExternalBuffer(Struct, eq=False):
    """The caller's memory for one argument.

    Attributes:
        offset: First byte in the memory.
        nbytes: Bytes from `offset` to the end of the memory or view.
        shape: Shape of the view; None if a pool was given.
        view: NumPy view of the memory; None until the shape is known.
    """

    memory: Memory
    offset: int
    nbytes: int
    shape: tuple[int, ...] | None
    view: Array | None


def find_buffers(
    inputs: Sequence[NodeArg], outputs: Sequence[NodeArg], given: Mapping[str, Memory | Array], state: Mapping[str, str]
) -> dict[str, ExternalBuffer]:
    """Return the memories in the ``memory`` argument of `Burst.bind`, by argument name."""
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
    if hasattr(value, "__dlpack__"):
        value = as_array(value, f"memory of {node.name!r}")
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
    """Return the given shapes, and the shapes of the caller's views (with `steps`, without the views' first dimension).

    Raises:
        InvalidArgument: Two shapes of one argument differ, or the first dimension of a view is not `steps`.
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
        shape = shapes.get(name, viewed)
        if not isinstance(shape, Sequence) or tuple(shape) != viewed:
            raise InvalidArgument(f"shapes[{name!r}] is {shape!r}, but its memory has shape {viewed}")
        found[name] = viewed
    return found


class Arguments:
    """The arguments of an execution: states, memory of the caller, and arrays shared with the service.

    Args:
        sizes: Shapes of all arguments in one step.
        buffers: The caller's memory, by argument name.
        rooms: Bytes for outputs of unknown shape, by name; default 4096. If an output is named here, its shape in the
            model is ignored.
        steps: The steps of a run; None for a run without steps.
        least: Minimum bytes of arguments of known shapes, by name.

    Attributes:
        compilation: The compiled model, replaced when the model is compiled again.
        inputs: Arrays by input name.
        outputs: Arrays by output name; flat bytes for an unknown shape.
        user_views: Inputs and outputs as callers see them.
        feeds: (name, dtype, shape, array) by input name; dtype None for values that must be encoded.
        copies: Functions that copy the output arrays, by name; None if the copies need the shapes of a run.

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
        least: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.compilation = compilation
        self.states, self.steps = states, steps
        self._buffers, self._rooms = buffers, rooms
        self._nodes = (*compilation.inputs, *compilation.outputs)
        self._inputs = len(compilation.inputs)
        self.sizes, self._known = sizes, self._known_shapes(sizes)
        outputs = zip(compilation.outputs, sizes.outputs, strict=True)
        self._unverified = {node.name for node, shape in outputs if shape is not None} & rooms.keys()
        rows = enumerate(zip(self._nodes, self._known, strict=True))
        room = {name: max(least.get(name, 0), rooms.get(name, 0)) for name in least.keys() | rooms.keys()}
        self._all = [self._argument(i, node, shape, room.get(node.name, 0)) for i, (node, shape) in rows]
        self._check_total()
        self.layout = lay_out(self._all)
        self.inputs, self.outputs = SharedArrays(), SharedArrays()
        self.user_views: tuple[Mapping[str, Any], Mapping[str, Any]] = self.inputs, self.outputs
        self.feeds: dict[str, tuple[str, np.dtype[Any] | None, tuple[int, ...], Array]] = {}
        known = zip(compilation.outputs, self._known[self._inputs :], strict=True)
        is_sure = all(shape is not None and 0 not in shape and not node.holds for node, shape in known)
        self.copies: dict[str, Callable[[], Array]] | None = {} if is_sure else None
        held = {node.name: node for node in self._nodes if node.holds}
        if held:
            self.user_views = SharedValues(self.inputs, held), SharedValues(self.outputs, held)
        for i in range(len(self._all)):
            self._make_array(i)
        named = {size for node in compilation.inputs for size in node.shape or () if isinstance(size, str)}
        self._follow = any(not named.isdisjoint(node.shape or ()) for node in compilation.outputs)

    def _known_shapes(self, sizes: Sizes) -> list[tuple[int, ...] | None]:
        shapes, rooms = [*sizes.inputs, *sizes.outputs], self._rooms
        if not rooms:
            return shapes
        return [None if node.name in rooms else shape for node, shape in zip(self._nodes, shapes, strict=True)]

    def _argument(self, index: int, node: NodeArg, shape: tuple[int, ...] | None, room: int) -> Argument:
        """Return an argument of a shape, with at least `room` bytes if it is in the execution's own memory."""
        is_input = index < self._inputs
        if is_input and shape is None:
            return Argument()
        if node.name in self._buffers:
            return self._argument_in_buffer(node, shape, self._buffers[node.name])
        dimensions = shape if node.is_open and shape else ()
        if (ids := self.states.buffer_ids("input" if is_input else "output").get(node.name)) is not None:
            return Argument(memories=ids, dimensions=() if node.name in self.states.grown else dimensions)
        try:
            nbytes = 0 if shape is None else element_count(self._add_steps(shape)) * node.dtype.itemsize
        except InvalidArgument as error:
            raise InvalidArgument(f"{node.name!r}: {error}") from None
        if not is_input and not nbytes:
            guess = 0 if shape is not None else ROOM if node.holds else _FIRST_GUESS
            room = max(room or guess, node.dtype.itemsize)
            return Argument(room=room, length=room)
        if not is_input and node.holds:  # the shape is the size of the room
            dimensions = ()
        return Argument(room=max(room, nbytes) if nbytes else 0, length=nbytes, dimensions=dimensions)

    def _add_steps(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.steps is None else (self.steps.count, *shape)

    def _argument_in_buffer(self, node: NodeArg, shape: tuple[int, ...] | None, buffer: ExternalBuffer) -> Argument:
        whole, memory = None if shape is None else self._add_steps(shape), buffer.memory
        length = buffer.nbytes if whole is None else math.prod(whole) * node.dtype.itemsize
        if memory.image is None:
            fits = 0 < length <= memory.size - buffer.offset
        else:
            fits = not buffer.offset and (whole is None or length == memory.image.tight_size)
        if not fits:
            raise InvalidArgument(f"{node.name!r} of shape {whole} takes {length} bytes of {memory!r}")
        length = length if memory.image is None else 0  # 0 means the whole image
        dimensions = shape if node.is_open and shape else ()
        return Argument(memories=(memory,), offset=buffer.offset, length=length, dimensions=dimensions)

    def _check_total(self) -> None:
        arguments = self._all
        if sum(argument.room + _ALIGNMENT for argument in arguments) > UINT32:
            largest = max(range(len(arguments)), key=lambda i: arguments[i].room)
            fewer = "" if self.steps is None else "; bind fewer steps"
            raise InvalidArgument(
                f"{self._nodes[largest].name!r} of shape {self._known[largest]} takes {arguments[largest].room} bytes; "
                f"the arguments of a run have less than 4 GiB together{fewer}"
            )

    def _make_array(self, index: int) -> None:
        node, array = self._nodes[index], self._array(index)
        if array is None:
            return
        if index < self._inputs:
            dict.__setitem__(self.inputs, node.name, array)
            self.feeds[node.name] = (node.name, None if node.holds else node.dtype, array.shape, array)
        else:
            dict.__setitem__(self.outputs, node.name, array)
            if self.copies is not None:
                self.copies[node.name] = array.copy

    def _array(self, index: int) -> Array | None:
        """Return the array of an argument; None if it is omitted, lies in a device buffer, or is not readable here."""
        node, shape, room = self._nodes[index], self._known[index], self.layout.views[index]
        buffer, whole = self._buffers.get(node.name), None if shape is None else self._add_steps(shape)
        if buffer is not None:
            if buffer.shape is not None:
                return buffer.view
            with contextlib.suppress(InvalidArgument, GeneralFailure):  # the memory may be unreadable
                memory = buffer.memory
                return memory.array(np.uint8, (buffer.nbytes,)) if whole is None else memory.array(node.dtype, whole)
            return None
        if self._all[index].memories or whole is None:
            return room
        return np.ndarray(whole, node.dtype, room)

    @property
    def requests(self) -> tuple[Request, ...]:
        """One request for all runs, or two requests that the runs use alternately."""
        return requests_for(self.layout, self._all, self._inputs, self.steps)

    # ---- other shapes ----------------------------------------------------------------------------------------

    def solve(self, shapes: Mapping[str, int | Sequence[int]]) -> Sizes:
        """Return the shapes that all arguments get when the named ones get the given shapes.

        Raises the same errors as `solve_shapes` and `check_states`.
        """
        states = self.states.all
        given = {**{name: state.shape for name, state in states.items()}, **shapes}
        given = given_shapes(given, self._buffers, None if self.steps is None else self.steps.count)
        state = {each.source.name: name for name, each in states.items()}
        grow = {name for name, each in states.items() if each.grows}
        return solve_arguments(self.compilation, given, self._buffers, state, grow)

    def sizes_with(self, arrays: Mapping[str, Array]) -> Sizes:
        """Return the shapes of all arguments if inputs get the shapes of the arrays.

        Raises:
            InvalidArgument: A shape does not fit the model.
        """
        nodes, inputs = self.compilation.inputs, list(self.sizes.inputs)
        for i, node in enumerate(nodes):
            if (array := arrays.get(node.name)) is not None:
                if not node.admits(array.shape):
                    raise InvalidArgument(f"input {node.name!r} has shape {node.shape}, got {array.shape}")
                inputs[i] = array.shape
        if not self._follow:
            return Sizes(tuple(inputs), self.sizes.outputs)
        there = {node.name: shape for node, shape in zip(nodes, inputs, strict=True) if shape is not None}
        left_out = [node.name for node in nodes if node.name not in there]
        return complete_shapes(nodes, self.compilation.outputs, there, left_out=left_out)

    def changes_for(self, sizes: Sizes) -> dict[int, tuple[tuple[int, ...], Argument]]:
        """Return (new shape, new argument) for each argument that changes, by index.

        Raises:
            InvalidArgument: A shape does not fit the argument.
        """
        rows = enumerate(zip(self._known_shapes(sizes), self._known, strict=True))
        return {i: self._resized(i, shape) for i, (shape, before) in rows if shape != before}

    def _resized(self, index: int, shape: tuple[int, ...] | None) -> tuple[tuple[int, ...], Argument]:
        node, before, known = self._nodes[index], self._all[index], self._known[index]
        if shape is None or known is None or len(shape) != len(known) or (0 in shape) != (0 in known):
            raise InvalidArgument(
                f"{node.name!r} has shape {known} here, which cannot become {shape}: that it is there, and has "
                "elements, stays as it is, and so does the number of dimensions; bind another execution"
            )
        if node.name in self._buffers:
            return shape, self._argument_in_buffer(node, shape, self._buffers[node.name])
        if before.memories:
            raise InvalidArgument(f"{node.name!r} is a state, which keeps its shape {known}; bind another execution")
        nbytes = math.prod(self._add_steps(shape)) * node.dtype.itemsize
        if nbytes > before.room:
            raise InvalidArgument(
                f"{node.name!r} of shape {shape} takes {nbytes} bytes and has room for {before.room}; bind with "
                f"room={{{node.name!r}: …}}"
            )
        dimensions = shape if before.dimensions else ()
        return shape, Argument(room=before.room, length=nbytes or before.length, dimensions=dimensions)

    def packet_numbers(self, changed: Mapping[int, tuple[tuple[int, ...], Argument]]) -> list[int]:
        """Return the numbers for a packet: length and dimensions of each argument, after the changes in `changed`."""
        numbers: list[int] = []
        for i, argument in enumerate(self._all):
            now = changed[i][1] if i in changed else argument
            numbers.append(now.length)
            numbers += now.dimensions
        return numbers

    def resize(self, sizes: Sizes, changed: Mapping[int, tuple[tuple[int, ...], Argument]]) -> None:
        """Change the shapes of the arguments to `sizes`. `changed` is the result of `changes_for`."""
        for i, (shape, argument) in changed.items():
            self._known[i], self._all[i] = shape, argument
            self._make_array(i)
        self.sizes = sizes

    def room_for(self, sizes: Sizes) -> dict[str, int]:
        """Return the bytes for new shapes, by name: the current bytes if sufficient, else at least twice as many."""
        need, enough = nbytes_by_name(self.compilation, sizes), {}
        for node, argument in zip(self._nodes, self._all, strict=True):
            least = need.get(node.name, 0)
            enough[node.name] = argument.room if least <= argument.room else max(least, 2 * argument.room)
        return enough if sum(enough.values()) + len(enough) * _ALIGNMENT <= UINT32 else {}

    # ---- results ---------------------------------------------------------------------------------------------

    def check_shapes(self, shapes: Sequence[OutputShape]) -> None:
        """Raise `GeneralFailure` if output shapes from a service contradict the model or the request."""
        check_shapes(self.compilation.outputs, self._all[self._inputs :], shapes, self._unverified)

    def copy_outputs(self, shapes: Sequence[OutputShape]) -> list[Array]:
        """Return copies of all outputs, in the shapes of the last run."""
        return [self._copy(i, node, shapes) for i, node in enumerate(self.compilation.outputs)]

    def _copy(self, index: int, node: NodeArg, shapes: Sequence[OutputShape]) -> Array:
        view, known = self.outputs[node.name], self._known[self._inputs + index]
        if node.holds:
            return node.decode(view)  # type: ignore[no-any-return]
        if known is not None and 0 not in known:
            return view.copy()
        if not shapes:
            raise GeneralFailure(f"the service did not tell the shape of output {node.name!r}")
        room = self.layout.views[self._inputs + index]
        return np.ndarray(shapes[index].dimensions, node.dtype, view if room is None else room).copy()

    def needed_rooms(self, error: OutputInsufficientSize) -> dict[str, int]:
        """Return the bytes that too small outputs of the last run need, by name.

        Raises:
            OutputInsufficientSize: The model fixes the shape of such an output.
        """
        rooms = {}
        nodes = zip(self.compilation.outputs, self._known[self._inputs :], error.output_shapes, strict=True)
        for node, known, shape in nodes:
            if not shape.is_sufficient:
                if known is not None and not node.may_be_empty:
                    raise error
                have = self.outputs[node.name].nbytes
                rooms[node.name] = max(math.prod(shape.dimensions) * node.dtype.itemsize, min(2 * have, UINT32))
        return rooms


def solve_arguments(
    compilation: Compilation,
    given: Mapping[str, int | Sequence[int]],
    buffers: Mapping[str, ExternalBuffer],
    state: Mapping[str, str],
    grow: Container[str] = frozenset(),
) -> Sizes:
    """Return the shapes of all inputs and outputs, for `Burst.bind`.

    Args:
        given: Result of `given_shapes`.
        grow: See `check_states`.
    """
    sizes = solve_shapes(compilation.inputs, compilation.outputs, given, [*buffers, *state.values()])
    return check_states(compilation, state, sizes, grow)


def nbytes_by_name(compilation: Compilation, sizes: Sizes, steps: int = 1) -> dict[str, int]:
    """Return the sizes in bytes of arguments of known shapes."""
    nodes = (*compilation.inputs, *compilation.outputs)
    rows = zip(nodes, (*sizes.inputs, *sizes.outputs), strict=True)
    return {node.name: steps * math.prod(shape) * node.dtype.itemsize for node, shape in rows if shape is not None}


def check_shapes(
    nodes: Sequence[NodeArg],
    outputs: Sequence[Argument],
    shapes: Sequence[OutputShape],
    unverified: Set[str] = frozenset(),
) -> None:
    """Raise `GeneralFailure` if output shapes from a service contradict the model or the request.

    Args:
        outputs: The requested outputs.
        unverified: Names of outputs whose shapes in the model may be wrong.
    """
    if len(shapes) != len(nodes):
        raise GeneralFailure(f"the service told {len(shapes)} shapes for {len(nodes)} outputs")
    for node, argument, shape in zip(nodes, outputs, shapes, strict=True):
        dims, room = shape.dimensions, UINT32
        is_sure = node.name not in unverified and not (node.may_be_empty and node.is_open)
        declared = argument.dimensions or (node.shape if is_sure else None)
        nbytes = math.prod(dims) * node.dtype.itemsize if len(dims) <= HIGHEST_RANK else 0
        if declared is None and 0 < nbytes <= argument.length:
            continue  # this is the usual case
        try:
            fits = element_count(dims) >= 0
        except InvalidArgument:
            fits = False
        if shape.is_sufficient:
            room = argument.length or UINT32
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
