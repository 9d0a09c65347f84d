"""What the arguments of a model look like to people, and where they lie in a pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..burst import CHANNEL_LENGTH
from ..errors import InvalidArgument
from ..memory import Memory
from ..model import (
    DataLocation,
    Extension,
    ImportedModel,
    Model,
    OpenShape,
    Request,
    RequestArgument,
    extension_operand_type,
    is_extension,
    operand_info,
)

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["NodeArg", "Placement", "answer_length", "imported_arguments", "model_arguments", "place"]

_ALIGNMENT = 64
_BITS = {"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}
"""Types that NumPy knows through a library only; their arrays are taken for what they are: the bits of numbers."""
_FIRST_GUESS = 4096
_HIGHEST_RANK = 64
_MOST_DATUMS = 1 << 16
"""Of a channel."""


@dataclass(frozen=True, slots=True)
class NodeArg:
    """One input or output of a session.

    Attributes:
        name: As given by the builder, else ``input0``, ``output0`` …
        shape: Dimensions; where the model leaves one open, its symbolic name or None; None as a whole if it leaves
            the rank open.
        dtype: NumPy type of its elements.
        type: `OperandType` value.
        scale, zero_point: Quantisation: real value = (stored - zero_point) * scale.
        may_be_empty: Whether an array without elements may be passed; its open dimensions must then be 0.
    """

    name: str
    shape: OpenShape
    dtype: np.dtype[Any]
    type: int
    scale: float = 0.0
    zero_point: int = 0
    may_be_empty: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the model does not say the shape, or says that there are no elements."""
        return self.shape is None or any(not isinstance(size, int) or size == 0 for size in self.shape)

    def admits(self, shape: Sequence[int]) -> bool:
        """Whether arrays of this shape fit."""
        return self.shape is None or (
            len(shape) == len(self.shape)
            and all(want == have or not isinstance(want, int) for want, have in zip(self.shape, shape, strict=True))
        )

    def is_empty(self, shape: Sequence[int]) -> bool:
        """Whether arrays of a shape that fits have no elements, and may be passed so.

        Raises:
            InvalidArgument: They have none, and may not.
        """
        if 0 not in shape:
            return False
        implied = self.shape is not None and all(
            isinstance(want, int) or have == 0 for want, have in zip(self.shape, shape, strict=True)
        )
        if not (self.may_be_empty and implied):
            raise InvalidArgument(f"{self.name!r} would be empty: shape {tuple(shape)} for {self.shape}")
        return True

    def check(self, value: npt.ArrayLike) -> np.ndarray[Any, np.dtype[Any]]:
        """Return `value` as an array that fits this argument.

        Raises:
            InvalidArgument: Its dtype or shape differs; the message names the operand and the remedy.
        """
        if type(value) is np.ndarray and value.shape == self.shape and value.dtype == self.dtype:
            return value  # the usual case
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"input {self.name!r} cannot be made an array: {error}") from None
        boolean = self.dtype == np.uint8 and array.dtype == np.bool_
        if array.dtype.name in _BITS and array.dtype.itemsize == self.dtype.itemsize:
            array = array.view(self.dtype)
        elif array.dtype != self.dtype and not boolean:
            raise InvalidArgument(
                f"input {self.name!r} is {self.dtype}, got {array.dtype}; convert it with .astype({str(self.dtype)!r})"
            )
        if not self.admits(array.shape):
            raise InvalidArgument(f"input {self.name!r} has shape {self.shape}, got {array.shape}; reshape it")
        self.is_empty(array.shape)
        return array


def _argument(model: Model, index: int, name: str, extensions: Sequence[Extension]) -> NodeArg:
    operand = model.main.operands[index]
    if is_extension(operand.type):
        described = extension_operand_type(model, operand.type, extensions)
        dtype, is_scalar = described.element(), not described.is_tensor
    else:
        info = operand_info(operand.type)
        if info.dtype is None:
            raise InvalidArgument(f"{name!r} has operand type {operand.type}, which has no NumPy type")
        dtype, is_scalar = info.dtype, info.is_scalar
    shape: OpenShape = tuple(d or None for d in operand.dimensions)
    if not shape and not is_scalar:
        shape = None
    return NodeArg(name, shape, dtype, int(operand.type), operand.scale, operand.zero_point)


def model_arguments(
    model: Model, extensions: Sequence[Extension] = ()
) -> tuple[tuple[NodeArg, ...], tuple[NodeArg, ...]]:
    """Return (inputs, outputs) of a model's main subgraph.

    Args:
        model: The model.
        extensions: Those of the device, if the model uses some.

    Raises:
        InvalidArgument: An argument's type has no NumPy type.
    """

    def listed(indexes: Sequence[int], names: Sequence[str], kind: str) -> tuple[NodeArg, ...]:
        chosen = names or [f"{kind}{i}" for i in range(len(indexes))]
        return tuple(_argument(model, i, name, extensions) for i, name in zip(indexes, chosen, strict=True))

    inputs = listed(model.main.input_indexes, model.input_names, "input")
    return inputs, listed(model.main.output_indexes, model.output_names, "output")


def imported_arguments(
    imported: ImportedModel, extensions: Sequence[Extension]
) -> tuple[tuple[NodeArg, ...], tuple[NodeArg, ...]]:
    """As `model_arguments`, with the symbolic dimensions that the file has."""

    def completed(arguments: Sequence[NodeArg], shapes: Sequence[OpenShape]) -> tuple[NodeArg, ...]:
        rows = zip(arguments, shapes, strict=True)
        return tuple(replace(argument, shape=shape, may_be_empty=True) for argument, shape in rows)

    inputs, outputs = model_arguments(imported.model, extensions)
    return completed(inputs, imported.input_shapes), completed(outputs, imported.output_shapes)


def answer_length(outputs: Sequence[NodeArg]) -> int:
    """Return how many datums the result channel of a burst needs, so that the dimensions of all outputs fit.

    An answer has two datums, and, where an output's shape is known only after a run, one for each output and one for
    each dimension (facts sheet `burst.md` §3).
    """
    if not any(argument.is_open for argument in outputs):
        return CHANNEL_LENGTH
    ranks = (_HIGHEST_RANK if argument.shape is None else len(argument.shape) for argument in outputs)
    return max(CHANNEL_LENGTH, min(2 + len(outputs) + sum(ranks), _MOST_DATUMS))


def full_shape(argument: NodeArg, given: Sequence[int] | None) -> tuple[int, ...] | None:
    """The shape to use for an argument: the model's, completed by what the caller gave; None if still unknown.

    Raises:
        InvalidArgument: The two contradict each other.
    """
    if given is None:
        return None if argument.is_open else tuple(d for d in argument.shape or () if isinstance(d, int))
    shape = tuple(int(d) for d in given)
    if not argument.admits(shape) or min(shape, default=1) < 0:
        raise InvalidArgument(f"{argument.name!r} has shape {argument.shape}, which does not admit {shape}")
    argument.is_empty(shape)
    return shape


@dataclass(frozen=True, slots=True)
class Placement:
    """All arguments of one request in one pool.

    Attributes:
        memory: The pool; owned by whoever asked for the placement.
        request: Its request.
        inputs: NumPy views by name.
        outputs: Views by name; flat bytes for outputs whose shape is not known before the run.
    """

    memory: Memory
    request: Request
    inputs: dict[str, np.ndarray[Any, np.dtype[Any]]]
    outputs: dict[str, np.ndarray[Any, np.dtype[Any]]]


def place(
    inputs: Sequence[NodeArg],
    outputs: Sequence[NodeArg],
    shapes: Mapping[str, Sequence[int]],
    output_bytes: Mapping[str, int],
    elsewhere: Mapping[str, int] | None = None,
) -> Placement:
    """Lay out every argument in a new pool, each at a multiple of 64 bytes.

    Args:
        inputs: Arguments; those with open dimensions need an entry in `shapes`.
        outputs: Arguments; where the shape stays open, room for `output_bytes` (default 4096) is made.
        shapes: Complete shapes by name.
        output_bytes: Room in bytes by name.
        elsewhere: Arguments that are whole pools of their own: index of the pool by name. They get no array.

    Raises:
        InvalidArgument: A shape is missing or contradicts the model.
    """
    names = {a.name for a in (*inputs, *outputs)}
    unknown = sorted(set(shapes) - names)
    if unknown:
        raise InvalidArgument(f"shapes for unknown arguments {unknown}; the model has {sorted(names)}")
    offset = 0
    rows: list[tuple[NodeArg, tuple[int, ...] | None, int, int]] = []
    pools = elsewhere or {}
    for i, argument in enumerate((*inputs, *outputs)):
        if argument.name in pools:
            rows.append((argument, None, 0, 0))
            continue
        shape = full_shape(argument, shapes.get(argument.name))
        if shape is None:
            if i < len(inputs):
                raise InvalidArgument(
                    f"input {argument.name!r} has open dimensions {argument.shape}; say them with "
                    f"bind(shapes={{{argument.name!r}: …}})"
                )
            size = max(output_bytes.get(argument.name, _FIRST_GUESS), argument.dtype.itemsize)
        else:
            size = math.prod(shape) * argument.dtype.itemsize
            if size == 0 and i >= len(inputs):
                shape, size = None, argument.dtype.itemsize
        rows.append((argument, shape, offset, size))
        offset = -(-(offset + size) // _ALIGNMENT) * _ALIGNMENT
    memory = Memory.ashmem(max(offset, 1))
    views: list[np.ndarray[Any, np.dtype[Any]] | None] = []
    arguments: list[RequestArgument] = []
    for argument, shape, start, size in rows:
        if argument.name in pools:
            arguments.append(RequestArgument(False, DataLocation(pools[argument.name], 0, 0)))
            views.append(None)
            continue
        if shape is not None and size == 0:
            arguments.append(RequestArgument(has_no_value=True))
            views.append(np.empty(shape, argument.dtype))
            continue
        given = shape if shape is not None and argument.name in shapes else ()
        arguments.append(RequestArgument(False, DataLocation(0, start, size), given))
        views.append(
            memory.array(np.uint8, (size,), start) if shape is None else memory.array(argument.dtype, shape, start)
        )
    n = len(inputs)
    request = Request(tuple(arguments[:n]), tuple(arguments[n:]), (memory,))
    return Placement(
        memory,
        request,
        {row[0].name: view for row, view in zip(rows[:n], views[:n], strict=True) if view is not None},
        {row[0].name: view for row, view in zip(rows[n:], views[n:], strict=True) if view is not None},
    )
