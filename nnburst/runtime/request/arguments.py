"""The arguments of one execution: given one by one, or arrays that are shared with the service; and where they lie."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct

from ..._core.errno import is_real, whole
from ...burst import ExecutionBurstController
from ...devices.encoded import ROOM
from ...errors import BadState, GeneralFailure, InvalidArgument, OutputInsufficientSize
from ...memory import PROT_WRITE, Memory, locate_view
from ...model import (
    Array,
    BufferToken,
    DataLocation,
    Named,
    OperandDesc,
    OutputShape,
    Request,
    RequestArgument,
    Steps,
    combine_dimensions,
    element_count,
    is_fully_specified,
    operand_info,
    operand_nbytes,
)
from ..compile.compilation import Compilation
from .device_memory import DeviceMemory
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
        length: Of the region; 0 for the whole of a memory of a device.
        dimensions: As in a request: empty means "as in the model".
        array: Copied to the room before a run (input), or from it afterwards (output).
    """

    room: int = 0
    memories: tuple[Memory | DeviceMemory | BufferToken, ...] = ()
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


def lay_out(inputs: Sequence[Argument], outputs: Sequence[Argument], steps: Steps | None) -> ArgumentLayout:
    """Give each argument its place; those in the execution's own memory begin at multiples of 64 bytes.

    Args:
        steps: If the requests have several.

    Raises:
        BadState: A memory of a device is closed.
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
    """The arguments of an execution.

    Either `put` takes them one by one, or all are there from the beginning: states, memory of the caller's, and arrays
    that are shared with the service.

    Args:
        compilation: Whose inputs and outputs they are.
        sizes: Shapes of all arguments, of one step; None: they are given one by one.
        states: The inputs and outputs that are states.
        buffers: Memory of the caller's, by the name of the argument that lies there.
        rooms: Bytes by name of an output of which only a run tells the shape, whatever the model says; 4096 for others
            whose shape is not known.
        steps: How many steps a run has, and how they are tied; None: one, without a leading dimension.

    Attributes:
        compilation: Another one with the same arguments when the model was compiled anew.
        is_shared: Whether they are all there.
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
        sizes: Sizes | None = None,
        states: States | None = None,
        buffers: Mapping[str, ExternalBuffer] = MappingProxyType({}),
        rooms: Mapping[str, int] = MappingProxyType({}),
        steps: Steps | None = None,
    ) -> None:
        self.compilation = compilation
        self.is_shared = sizes is not None
        self.states, self.steps = states or States({}), steps
        main = compilation.model.main
        self._operands = {
            "input": [main.operands[i] for i in main.input_indexes],
            "output": [main.operands[i] for i in main.output_indexes],
        }
        self._given: dict[str, dict[int, Argument]] = {"input": {}, "output": {}}
        self._layout: ArgumentLayout | None = None
        self._known: dict[str, Sequence[tuple[int, ...] | None]] = {"input": (), "output": ()}
        self._unverified: Set[str] = frozenset()  # outputs whose shape a file declares and a run has contradicted
        self.inputs, self.outputs = SharedArrays(), SharedArrays()
        self.shown: tuple[Mapping[str, Any], Mapping[str, Any]] = self.inputs, self.outputs
        self.feeds: tuple[tuple[str, np.dtype[Any] | None, tuple[int, ...], Array], ...] = ()
        self.copies: tuple[Callable[[], Array], ...] | None = None
        if sizes is not None:
            self._share(sizes, buffers, rooms)

    # ---- all at once -----------------------------------------------------------------------------------------

    def _share(self, sizes: Sizes, buffers: Mapping[str, ExternalBuffer], rooms: Mapping[str, int]) -> None:
        nodes = {"input": self.compilation.inputs, "output": self.compilation.outputs}
        told = list(zip(nodes["output"], sizes.outputs, strict=True))
        self._unverified = {node.name for node, shape in told if shape is not None} & rooms.keys()
        outputs = tuple(None if node.name in rooms else shape for node, shape in told)
        self._known = {"input": sizes.inputs, "output": outputs}
        for kind, known in self._known.items():
            tokens = self.states.tokens(kind)
            for i, (node, shape) in enumerate(zip(nodes[kind], known, strict=True)):
                if kind == "input" and shape is None:
                    argument = Argument()
                elif node.name in buffers:
                    argument = self._in_buffer(kind, i, node, shape, buffers[node.name])
                elif node.name in tokens:
                    argument = Argument(memories=tokens[node.name], dimensions=shape if node.is_open and shape else ())
                else:
                    guess = ROOM if node.holds else _FIRST_GUESS
                    least = 0 if kind == "input" else rooms.get(node.name, guess) if shape is None else 1
                    argument = self._in_room(node, shape, least)
                self.put(kind, i, argument)
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

    def _in_buffer(
        self, kind: str, index: int, node: NodeArg, shape: tuple[int, ...] | None, buffer: ExternalBuffer
    ) -> Argument:
        whole, memory, length = None if shape is None else self._stepped(shape), buffer.memory, 0
        if memory.image is None:
            length = buffer.nbytes if whole is None else math.prod(whole) * node.dtype.itemsize
            if buffer.offset + length > memory.size:
                raise InvalidArgument(f"{node.name!r} of shape {whole} takes {length} bytes of {memory!r}")
        given = shape if node.is_open and shape else ()
        argument = Argument(memories=(memory,), offset=buffer.offset, length=length, dimensions=given)
        if self.steps is None:
            argument = self.of_memory(kind, index, memory, (buffer.offset, length), given)
        if buffer.view is None:
            with contextlib.suppress(InvalidArgument, GeneralFailure):  # what this process may not look at
                buffer.view = memory.array(np.uint8, (length,)) if whole is None else memory.array(node.dtype, whole)
        return argument

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

    # ---- one by one ------------------------------------------------------------------------------------------

    def operand(self, kind: str, index: int) -> OperandDesc:
        """Return the operand of an argument; `InvalidArgument` if there is none of that index."""
        operands = self._operands[kind]
        if not is_real(index) or not 0 <= index < len(operands):
            raise InvalidArgument(f"{kind} {index!r}: the model has {len(operands)} {kind}s")
        return operands[index]

    def of_array(self, kind: str, index: int, array: Array | None, dimensions: Sequence[int] | None) -> Argument:
        """Return what `Execution.set_input` and `set_output` give, if it can be an argument; raises as these."""
        operand, what = self.operand(kind, index), f"{kind} {index}"
        if array is None:
            return Argument()
        if not isinstance(array, np.ndarray):
            raise InvalidArgument(f"{what}: give a NumPy array, not {type(array).__name__}")
        if kind == "output" and not (array.flags.c_contiguous and array.flags.writeable):
            raise InvalidArgument(f"{what}: the array must be C-contiguous and writable")
        info = operand_info(operand.type)
        if array.dtype != info.dtype:
            raise InvalidArgument(f"{what} is {info.dtype}, got {array.dtype}; convert it with .astype('{info.dtype}')")
        is_open = not is_fully_specified(operand.dimensions) and (bool(operand.dimensions) or not info.is_scalar)
        given: tuple[int, ...] = ()
        if dimensions is not None:
            given = _sizes(what, dimensions)
        elif kind == "input" and is_open:
            given = array.shape
        if kind == "input" and 0 in array.shape and self.compilation.inputs[index].may_be_empty:
            _combined(what, operand, given)
            return Argument(dimensions=given)
        _check_length(kind, what, operand, given, array.nbytes)
        return Argument(room=array.nbytes, dimensions=given, array=array)

    def of_memory(
        self,
        kind: str,
        index: int,
        memory: Memory | DeviceMemory,
        region: tuple[int, int],
        dimensions: Sequence[int],
    ) -> Argument:
        """As `of_array`, for a region (offset, length) of a memory."""
        operand, what = self.operand(kind, index), f"{kind} {index}"
        given = _sizes(what, dimensions)
        offset, length = (whole(n, f"{what}: {name}") for n, name in zip(region, ("offset", "length"), strict=True))
        if isinstance(memory, DeviceMemory):
            combined = _combined(what, operand, given)
            memory._check_use(self.compilation, kind, index, (offset, length), combined)
        elif not isinstance(memory, Memory):
            raise InvalidArgument(f"{what}: give a Memory, not {type(memory).__name__}")
        elif memory.image is not None:
            if offset or length:
                raise InvalidArgument(f"{what}: an image is used whole; offset and length must be 0")
            _check_length(kind, what, operand, given, memory.image.tight_size)
        else:
            if offset < 0 or length <= 0 or offset + length > memory.size:
                raise InvalidArgument(
                    f"{what}: bytes {offset}..{offset + length} of a memory with {memory.size}; give a region in it"
                )
            _check_length(kind, what, operand, given, length)
        return Argument(memories=(memory,), offset=offset, length=length, dimensions=given)

    def put(self, kind: str, index: int, argument: Argument) -> None:
        """Take an argument; `BadState` if there is one already."""
        if index in self._given[kind]:
            raise BadState(f"{kind} {index} has a value already; make another execution")
        self._given[kind][index] = argument

    def check_complete(self) -> None:
        """Omit optional inputs that are missing; `InvalidArgument` if another argument is."""
        for index, node in enumerate(self.compilation.inputs):
            if node.is_optional:
                self._given["input"].setdefault(index, Argument())
        for kind, operands in self._operands.items():
            missing = sorted(set(range(len(operands))) - self._given[kind].keys())
            if missing:
                raise InvalidArgument(f"{kind}s {missing} are not set; None omits an optional one")

    def check_outputs_are_known(self) -> None:
        """Check that the model says all dimensions of the outputs, as an execution that waits for fences needs."""
        for index, operand in enumerate(self._operands["output"]):
            if not operand.is_scalar and not is_fully_specified(operand.dimensions):
                raise InvalidArgument(
                    f"output {index} has dimensions {list(operand.dimensions)}: an execution that waits for fences "
                    "needs a model that says them; use compute()"
                )

    # ---- together --------------------------------------------------------------------------------------------

    def in_order(self, kind: str) -> list[Argument]:
        """Return all inputs or all outputs."""
        return [self._given[kind][i] for i in range(len(self._given[kind]))]

    @property
    def _all(self) -> list[Argument]:
        return [*self.in_order("input"), *self.in_order("output")]

    @property
    def layout(self) -> ArgumentLayout:
        """Where they lie."""
        if self._layout is None:
            self._layout = lay_out(self.in_order("input"), self.in_order("output"), self.steps)
        return self._layout

    @property
    def memory(self) -> Memory | None:
        """Memory of their own, if there is some by now."""
        return None if self._layout is None else self._layout.memory

    def request(self, turn: int) -> Request:
        return self.layout.requests[turn]

    def drop_layout(self) -> Memory | None:
        """Forget where they lie; return the memory of their own, if there is one."""
        memory, self._layout = self.memory, None
        return memory

    # ---- a run -----------------------------------------------------------------------------------------------

    def copy_in(self) -> None:
        """Copy the arrays of inputs to where the service reads them; device memories must have their contents."""
        for index, memory in self._device_memories("input"):
            memory._check_readable(index, self.known_dimensions("input", index))
        for argument, view in zip(self.in_order("input"), self.layout.inputs, strict=True):
            if argument.array is not None and view is not None:
                view[:] = np.ascontiguousarray(argument.array).reshape(-1).view(np.uint8)

    def copy_out(self) -> None:
        for argument, view in zip(self.in_order("output"), self.layout.outputs, strict=True):
            if argument.array is not None and view is not None:
                argument.array.reshape(-1).view(np.uint8)[:] = view

    def note_outputs(self, shapes: tuple[OutputShape, ...] | None) -> None:
        """Tell the device memories among the outputs their contents now; None: none."""
        for index, memory in self._device_memories("output"):
            known = shapes and shapes[index].dimensions
            memory._written(None if shapes is None else known or self.known_dimensions("output", index))

    def note_burst(self, burst: ExecutionBurstController) -> None:
        """Tell the device memories that a burst has slots for them."""
        for kind in ("input", "output"):
            for _, memory in self._device_memories(kind):
                memory._seen_by(burst)

    def _device_memories(self, kind: str) -> Iterator[tuple[int, DeviceMemory]]:
        for index, argument in self._given[kind].items():
            for memory in argument.memories:
                if isinstance(memory, DeviceMemory):
                    yield index, memory

    def known_dimensions(self, kind: str, index: int) -> tuple[int, ...]:
        """Return what the model and the caller say of the dimensions of an argument."""
        return combine_dimensions(self.operand(kind, index).dimensions, self._given[kind][index].dimensions)

    def check_shapes(self, shapes: Sequence[OutputShape]) -> None:
        """Raise `GeneralFailure` if what a service told of its outputs contradicts the model or the request."""
        nodes = self.compilation.outputs
        if len(shapes) != len(nodes):
            raise GeneralFailure(f"the service told {len(shapes)} shapes for {len(nodes)} outputs")
        for node, argument, shape in zip(nodes, self.in_order("output"), shapes, strict=True):
            dims, room = shape.dimensions, UINT32
            is_sure = node.name not in self._unverified and not (node.may_be_empty and node.is_open)
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


def _sizes(what: str, dimensions: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(dimensions, Iterable):
        raise InvalidArgument(f"{what}: dimensions={dimensions!r}; give a list of sizes")
    return tuple(whole(size, f"{what}: a dimension") for size in dimensions)


def _combined(what: str, operand: OperandDesc, given: tuple[int, ...]) -> tuple[int, ...]:
    if operand.is_scalar and given:
        raise InvalidArgument(f"{what}: a scalar has no dimensions")
    if any(not 0 <= size <= UINT32 for size in given):
        raise InvalidArgument(f"{what}: dimensions {list(given)} do not fit in 32 bits")
    try:
        combined = combine_dimensions(operand.dimensions, given)
    except InvalidArgument as error:
        raise InvalidArgument(f"{what}: {error}") from None
    if math.prod(size for size in combined if size) * operand_info(operand.type).element_size > UINT32:
        raise InvalidArgument(f"{what}: dimensions {list(combined)} are larger than a tensor can be")
    return combined


def _check_length(kind: str, what: str, operand: OperandDesc, given: tuple[int, ...], nbytes: int) -> None:
    combined = _combined(what, operand, given)
    known = operand.is_scalar or is_fully_specified(combined)
    if kind == "input" and not known:
        raise InvalidArgument(f"{what}: dimensions {combined} are open; give them with dimensions=")
    if known and operand_nbytes(operand.type, combined) != nbytes:
        need = operand_nbytes(operand.type, combined)
        raise InvalidArgument(f"{what}: {nbytes} bytes, but shape {combined} takes {need}")
