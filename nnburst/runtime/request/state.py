"""States: outputs that are inputs of the next run and stay in the device."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...devices.interfaces import Buffer
from ...errors import GeneralFailure, InvalidArgument
from ...memory.memory import Memory
from ...model.types import MOST_STEPS, Array, BufferDesc, BufferId, BufferRole, Steps
from .node_args import NodeArg, Sizes

if TYPE_CHECKING:
    from ..compile.compilation import Compilation

_ALIKE = ("holds", "dtype", "bits_of", "type", "scale", "zero_point")
"""Attributes that must be equal for the output and the input of a state."""


class State(Struct, frozen=True):
    """An output that is an input of the next run. A run reads one buffer and writes the other; then they are swapped.

    Attributes:
        source: The output.
        target: The input. Unless the state grows, the input's shape is `shape`.
        shape: Initial shape.
        buffers: The two device buffers. The turn, 0 or 1, is the index of the buffer that the next run reads.
        grows: True if the shape is known only after each run.
    """

    source: NodeArg
    target: NodeArg
    shape: tuple[int, ...]
    buffers: tuple[Buffer, Buffer]
    grows: bool

    @property
    def buffer_ids(self) -> tuple[BufferId, BufferId]:
        """Ids of the two buffers. The input reads them alternately, and the output writes the other buffer."""
        first, second = self.buffers
        return BufferId(first.id), BufferId(second.id)

    def write(self, turn: int, value: Array | None) -> None:
        """Set the contents that the next run reads from the buffer with index `turn`; None for zeros."""
        shape = self.shape if value is None else value.shape
        with self._memory(shape) as memory:
            memory.array(self.target.dtype, shape)[...] = self.target.zero_point if value is None else value
            self.buffers[turn].copy_from(memory, shape if self.grows else ())

    def read(self, turn: int, shape: tuple[int, ...]) -> Array:
        """Return a copy of the contents that the next run reads from the buffer with index `turn`, in this shape."""
        with self._memory(shape) as memory:
            self.buffers[turn].copy_to(memory)
            return memory.array(self.target.dtype, shape).copy()

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()

    def _memory(self, shape: tuple[int, ...]) -> Memory:
        return Memory.ashmem(math.prod(shape) * self.target.dtype.itemsize)


class States:
    """All values that an execution passes from run to run, by input name.

    Attributes:
        grown: Names of the inputs and outputs whose shapes change from run to run.
    """

    def __init__(self, states: Mapping[str, State]) -> None:
        self.all = states
        self.grown = {name for target, state in states.items() if state.grows for name in (target, state.source.name)}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def buffer_ids(self, kind: str) -> dict[str, tuple[BufferId, BufferId]]:
        """Return the ids of each state's buffers in the order of use, by name of its "input" or "output" (`kind`)."""
        if kind == "input":
            return {name: state.buffer_ids for name, state in self.all.items()}
        return {state.source.name: state.buffer_ids[::-1] for state in self.all.values()}

    def checked(self, values: object) -> dict[str, Array]:
        """Check arrays by input name, and return them for `write`. Raises `InvalidArgument` if one does not fit."""
        if not isinstance(values, Mapping | None):
            raise InvalidArgument(f"the values of a state are a dict of arrays, not {type(values).__name__}")
        arrays = dict(values or {})
        unknown = sorted(arrays.keys() - self.all.keys())
        if unknown:
            raise InvalidArgument(f"no state {unknown}; there is {list(self.all)}")
        return {name: state.target.check(arrays[name]) for name, state in self.all.items() if name in arrays}

    def write(self, turn: int, values: Mapping[str, Array]) -> None:
        """Set what the next run reads, in the buffers with index `turn`. A state without a value gets zeros."""
        for name, state in self.all.items():
            value = values.get(name)
            self._shapes[name] = state.shape if value is None else value.shape
            state.write(turn, value)

    def read(self, turn: int, last_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        """Return copies of the contents that the next run reads, by input name.

        Args:
            turn: Index of the buffers that the next run reads.
            last_shapes: Output shapes of the last run by name; empty if there was no run since the last `write`.
        """
        rows = self.all.items()
        return {name: state.read(turn, last_shapes.get(state.source.name, self._shapes[name])) for name, state in rows}

    def close(self) -> None:
        for state in self.all.values():
            state.close()


def check_states(
    compilation: Compilation, state: Mapping[str, str], sizes: Sizes, grow: Container[str] = frozenset()
) -> Sizes:
    """Check ``{output: input}``. Return a copy of `sizes` in which each such output has its input's shape.

    Args:
        grow: Inputs whose shape changes from run to run. The shapes of the outputs that become
            these inputs are known only after a run.
    """
    inputs = {row[0].name: row for row in zip(compilation.inputs, sizes.inputs, strict=True)}
    outputs = {row[0].name: row for row in zip(compilation.outputs, sizes.outputs, strict=True)}
    for output, target in state.items():
        _check(output, target, inputs, outputs, grows=target in grow)
    if len(set(state.values())) != len(state):
        raise InvalidArgument("two outputs cannot be the next value of one input")
    clash = sorted(state.keys() & set(state.values()))
    if clash:
        raise InvalidArgument(f"inputs and outputs of a state need names of their own, not {clash} for both")
    rows = zip(compilation.outputs, sizes.outputs, strict=True)
    shapes = (
        shape if node.name not in state else None if state[node.name] in grow else inputs[state[node.name]][1]
        for node, shape in rows
    )
    return replace(sizes, outputs=tuple(shapes))


def make_states(
    compilation: Compilation,
    state: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    grow: Container[str] = frozenset(),
) -> dict[str, State]:
    """Return newly allocated states by input name.

    Args:
        state: ``{output: input}``, checked by `check_states`.
        shapes: Shapes by input name.
        grow: See `check_states`.
    """
    inputs = {node.name: (i, node) for i, node in enumerate(compilation.inputs)}
    outputs = {node.name: (i, node) for i, node in enumerate(compilation.outputs)}
    states: dict[str, State] = {}
    made: list[Buffer] = []
    try:
        for output, target in state.items():
            (i, source), (j, node) = outputs[output], inputs[target]
            for _ in range(2):
                made.append(
                    compilation.device.allocate(
                        BufferDesc(() if target in grow else shapes[target]),
                        [compilation.prepared_model],
                        [BufferRole(0, j)],
                        [BufferRole(0, i)],
                    )
                )
                made[-1].timeout = None  # the callers of `copy_from` and `copy_to` set a limit
            fixed = node if target in grow else replace(node, shape=shapes[target])
            states[target] = State(source, fixed, shapes[target], (made[-2], made[-1]), target in grow)
    except BaseException:
        for buffer in made:
            buffer.close()
        raise
    return states


def check_steps(compilation: Compilation, count: object) -> None:
    """Check `count`, a number of steps per run, and that the device can run several steps of the model in one run."""
    whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not whole or not 1 <= count <= MOST_STEPS:  # type: ignore[operator]
        raise InvalidArgument(f"steps={count!r}; give a number from 1 to {MOST_STEPS}")
    if not compilation.prepared_model.takes_steps:
        raise GeneralFailure(
            f"{compilation.device.name} runs one step at a time (the service is older, the model is in parts, "
            "or the device is of another make); bind without steps= and run in a loop"
        )


def steps_of(
    compilation: Compilation, sizes: Sizes, states: Mapping[str, State], rooms: Container[str], count: int
) -> Steps:
    """Return the description of a request's steps.

    Args:
        rooms: Names of outputs whose shapes may differ from the shapes in the model.

    Raises:
        InvalidArgument: An output's shape is unknown before the run, or an input is not an array of numbers.
    """
    inputs = [node.name for node in compilation.inputs]
    outputs = [node.name for node in compilation.outputs]
    held = [node.name for node in compilation.inputs if node.holds]
    if held:
        raise InvalidArgument(f"inputs {held} are copied in each run; bind without steps= and run in a loop")
    for name, shape in zip(outputs, sizes.outputs, strict=True):
        if shape is None or 0 in shape or name in rooms:
            raise InvalidArgument(
                f"the elements of output {name!r} are not known before it is run, which they have to be with steps=; "
                "say its dimensions with shapes="
            )
    pairs = ((outputs.index(state.source.name), inputs.index(target)) for target, state in states.items())
    return Steps(int(count), tuple(pairs))


def _check(
    output: str,
    target: str,
    inputs: Mapping[str, tuple[NodeArg, tuple[int, ...] | None]],
    outputs: Mapping[str, tuple[NodeArg, tuple[int, ...] | None]],
    *,
    grows: bool,
) -> None:
    what = f"state {output!r} → {target!r}"
    if output not in outputs or not isinstance(target, str) or target not in inputs:
        raise InvalidArgument(
            f"{what}: give {{output: input}}; the model has outputs {list(outputs)} and inputs {list(inputs)}"
        )
    (source, left), (node, read) = outputs[output], inputs[target]
    assert read is not None  # the state makes the input present
    if node.shape is None or node.holds:
        raise InvalidArgument(f"{what}: input {target!r} is {node.holds or 'of any rank'}, which no state can be")
    pairs = [(part, getattr(source, part), getattr(node, part)) for part in _ALIKE]
    if differ := [f"{part} ({given} and {taken})" for part, given, taken in pairs if given != taken]:
        raise InvalidArgument(f"{what}: output and input differ in {', '.join(differ)}")
    if not grows and (not source.admits(read) or (left is not None and left != read)):
        raise InvalidArgument(f"{what}: an output of shape {left or source.shape} is no input of shape {read}")
    if 0 in read:
        raise InvalidArgument(f"{what}: a state has elements, not shape {read}")
