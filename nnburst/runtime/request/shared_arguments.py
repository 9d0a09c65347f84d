"""Arguments that lie in arrays which the service and the caller share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...devices.encoded import ROOM
from ...errors import GeneralFailure, InvalidArgument, OutputInsufficientSize
from ...model import Array, OutputShape, Steps, element_count
from ..compile.compilation import Compilation
from .arguments import UINT32, Arguments
from .external_buffers import ExternalBuffer
from .layout import ALIGNMENT, Argument
from .node_args import NodeArg, SharedArrays, SharedValues, Sizes
from .state import States

_FIRST_GUESS = 4096
"""Bytes for an output whose shape only a run tells, before the first run."""


class SharedArguments(Arguments):
    """Arguments that are states, lie in external buffers, or in arrays of their own.

    Args:
        sizes: Shapes of all arguments, of one step.
        buffers: Memory of the caller's, by the name of the argument that lies there.
        rooms: Bytes by name of an output of which only a run tells the shape, whatever the model says; 4096 for others
            whose shape is not known.
        steps: How many steps a run has; None: one, without a leading dimension.

    Attributes:
        inputs: Arrays by input name.
        outputs: Arrays by output name, flat bytes where the shape is not known.
        shown: Both, as callers have them.
        feeds: Of each input array: name, dtype, shape and itself; no dtype for what is not copied as it is.
        copies: What copies each output array; None if that takes the shapes that a run has told.

    Raises:
        InvalidArgument: A buffer is too small, or all arguments together are too large.
    """

    is_shared = True

    def __init__(
        self,
        compilation: Compilation,
        sizes: Sizes,
        states: States,
        buffers: Mapping[str, ExternalBuffer],
        rooms: Mapping[str, int],
        steps: Steps | None,
    ) -> None:
        super().__init__(compilation)
        self.states, self.steps = states, steps
        inputs, outputs = compilation.inputs, compilation.outputs
        told = zip(outputs, sizes.outputs, strict=True)
        self._unverified = {node.name for node, shape in told if shape is not None} & rooms.keys()
        known = (None if n.name in rooms else shape for n, shape in zip(outputs, sizes.outputs, strict=True))
        self._sizes = Sizes(sizes.inputs, tuple(known))
        for kind, nodes, shapes in (("input", inputs, self._sizes.inputs), ("output", outputs, self._sizes.outputs)):
            tokens = states.tokens(kind)
            for i, (node, shape) in enumerate(zip(nodes, shapes, strict=True)):
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
        self.inputs = SharedArrays(self._arrays("input", views))
        self.outputs = SharedArrays(self._arrays("output", views))
        held = {node.name: node for node in (*inputs, *outputs) if node.holds}
        self.shown: tuple[Mapping[str, Any], Mapping[str, Any]] = self.inputs, self.outputs
        if held:
            self.shown = SharedValues(self.inputs, held), SharedValues(self.outputs, held)
        self.feeds = tuple(
            (name, None if name in held else view.dtype, view.shape, view) for name, view in self.inputs.items()
        )
        self.copies: tuple[Callable[[], Array], ...] | None = None
        if not held and all(shape is not None and 0 not in shape for shape in self._sizes.outputs):
            self.copies = tuple(self.outputs[node.name].copy for node in outputs if node.name in self.outputs)

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
                buffer.view = buffer.look(node, whole, length)
        return argument

    def _check_total(self) -> None:
        arguments = self.all
        if sum(argument.room + ALIGNMENT for argument in arguments) > UINT32:
            nodes = (*self.compilation.inputs, *self.compilation.outputs)
            largest = max(range(len(nodes)), key=lambda i: arguments[i].room)
            shape = (*self._sizes.inputs, *self._sizes.outputs)[largest]
            raise InvalidArgument(
                f"{nodes[largest].name!r} of shape {shape} takes {arguments[largest].room} bytes; the "
                "arguments of a run have less than 4 GiB together"
            )

    def _arrays(self, kind: str, given: Mapping[str, Array | None]) -> dict[str, Array]:
        rows: tuple[Sequence[NodeArg], Sequence[tuple[int, ...] | None], Sequence[Array | None]]
        if kind == "input":
            rows = self.compilation.inputs, self._sizes.inputs, self.layout.inputs
        else:
            rows = self.compilation.outputs, self._sizes.outputs, self.layout.outputs
        states, arrays = self.states.tokens(kind), {}
        for node, shape, view in zip(*rows, strict=True):
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

    def copied(self, shapes: Sequence[OutputShape]) -> list[Array]:
        """Return copies of all outputs, of the shapes that the last run told."""
        return [self._copy(i, node, shapes) for i, node in enumerate(self.compilation.outputs)]

    def _copy(self, index: int, node: NodeArg, shapes: Sequence[OutputShape]) -> Array:
        view, known, room = self.outputs[node.name], self._sizes.outputs[index], self.layout.outputs[index]
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
        nodes = zip(self.compilation.outputs, self._sizes.outputs, error.output_shapes, strict=True)
        for node, known, shape in nodes:
            if not shape.is_sufficient:
                if known is not None and not node.may_be_empty:
                    raise error
                have = self.outputs[node.name].nbytes
                rooms[node.name] = max(math.prod(shape.dimensions) * node.dtype.itemsize, min(2 * have, UINT32))
        return rooms

    def _declared(self, node: NodeArg) -> Sequence[int | str | None] | None:
        """Return None, too, for a shape that the model's file declares but a run has contradicted."""
        return None if node.name in self._unverified else super()._declared(node)
