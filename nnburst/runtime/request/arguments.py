"""The arguments of one execution: checked as they are given, and laid out together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..._core.errno import is_real, whole
from ...errors import BadState, GeneralFailure, InvalidArgument
from ...memory import Memory
from ...model import (
    Array,
    OperandDesc,
    OutputShape,
    Request,
    Steps,
    combine_dimensions,
    element_count,
    is_fully_specified,
    operand_info,
    operand_nbytes,
)
from ..compile.compilation import Compilation
from .device_memory import DeviceMemory
from .layout import Argument, ArgumentLayout, lay_out
from .node_args import NodeArg
from .state import States

UINT32 = 2**32 - 1


def _sizes(what: str, dimensions: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(dimensions, Iterable):
        raise InvalidArgument(f"{what}: dimensions={dimensions!r}; give a list of sizes")
    return tuple(whole(size, f"{what}: a dimension") for size in dimensions)


class Arguments:
    """Arguments that are given one by one; those of `SharedArguments` are all there from the beginning.

    Attributes:
        compilation: Of which they are; another one with the same arguments when the model was compiled anew.
        steps: How many steps a run has, and how they are tied; None for one.
        states: None, unless the arguments are shared.
    """

    is_shared = False

    def __init__(self, compilation: Compilation) -> None:
        self.compilation = compilation
        self.steps: Steps | None = None
        self.states = States({})
        main = compilation.model.main
        self._operands = {
            "input": [main.operands[i] for i in main.input_indexes],
            "output": [main.operands[i] for i in main.output_indexes],
        }
        self._given: dict[str, dict[int, Argument]] = {"input": {}, "output": {}}
        self._layout: ArgumentLayout | None = None

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
    def all(self) -> list[Argument]:
        return [*self.in_order("input"), *self.in_order("output")]

    @property
    def layout(self) -> ArgumentLayout:
        """Where they lie."""
        if self._layout is None:
            self._layout = lay_out(self.in_order("input"), self.in_order("output"), None, self.steps)
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

    def put_states(self, states: States) -> None:
        """Let requests name other buffers; all else stays where it lies."""
        layout = self.layout
        for kind, nodes in (("input", self.compilation.inputs), ("output", self.compilation.outputs)):
            tokens = states.tokens(kind)
            for i, node in enumerate(nodes):
                if node.name in tokens:
                    self._given[kind][i] = Argument(memories=tokens[node.name])
        self._layout = lay_out(self.in_order("input"), self.in_order("output"), layout.memory, self.steps)
        self.states = states

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

    def note_burst(self, burst: Any) -> None:
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
            declared = argument.dimensions or self._declared(node)
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

    def _declared(self, node: NodeArg) -> Sequence[int | str | None] | None:
        """Return the dimensions that an output has for sure."""
        return None if node.may_be_empty and node.is_open else node.shape


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
