"""What the arguments of a model look like to people, and where they lie in a pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidArgument
from ..memory import Memory
from ..model import DataLocation, Model, Operand, Request, RequestArgument, operand_info

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["NodeArg", "Placement", "model_arguments", "place"]

_ALIGNMENT = 64
_FIRST_GUESS = 4096


@dataclass(frozen=True, slots=True)
class NodeArg:
    """One input or output of a session.

    Attributes:
        name: As given by the builder, else ``input0``, ``output0`` …
        shape: Dimensions; None where the model leaves one open; None as a whole if it leaves the rank open.
        dtype: NumPy type of its elements.
        type: `OperandType` value.
        scale, zero_point: Quantisation: real value = (stored - zero_point) * scale.
    """

    name: str
    shape: tuple[int | None, ...] | None
    dtype: np.dtype[Any]
    type: int
    scale: float = 0.0
    zero_point: int = 0

    def check(self, value: npt.ArrayLike) -> np.ndarray[Any, np.dtype[Any]]:
        """Return `value` as an array that fits this argument.

        Raises:
            InvalidArgument: Its dtype or shape differs; the message names the operand and the remedy.
        """
        array = np.asarray(value)
        boolean = self.dtype == np.uint8 and array.dtype == np.bool_
        if array.dtype != self.dtype and not boolean:
            raise InvalidArgument(
                f"input {self.name!r} is {self.dtype}, got {array.dtype}; convert it with .astype({str(self.dtype)!r})"
            )
        fits = self.shape is None or (
            array.ndim == len(self.shape)
            and all(want in (None, have) for want, have in zip(self.shape, array.shape, strict=True))
        )
        if not fits:
            raise InvalidArgument(f"input {self.name!r} has shape {self.shape}, got {array.shape}; reshape it")
        if array.size == 0:
            raise InvalidArgument(f"input {self.name!r} is empty: shape {array.shape}")
        return array


def _argument(operand: Operand, name: str) -> NodeArg:
    info = operand_info(operand.type)
    if info.dtype is None:
        raise InvalidArgument(f"{name!r} has operand type {operand.type}, which has no NumPy type")
    shape: tuple[int | None, ...] | None = tuple(d or None for d in operand.dimensions)
    if not shape and not info.is_scalar:
        shape = None
    return NodeArg(name, shape, info.dtype, int(operand.type), operand.scale, operand.zero_point)


def model_arguments(model: Model) -> tuple[tuple[NodeArg, ...], tuple[NodeArg, ...]]:
    """Return (inputs, outputs) of a model's main subgraph."""

    def listed(indexes: Sequence[int], names: Sequence[str], kind: str) -> tuple[NodeArg, ...]:
        chosen = names or [f"{kind}{i}" for i in range(len(indexes))]
        return tuple(_argument(model.main.operands[i], name) for i, name in zip(indexes, chosen, strict=True))

    inputs = listed(model.main.input_indexes, model.input_names, "input")
    return inputs, listed(model.main.output_indexes, model.output_names, "output")


def full_shape(argument: NodeArg, given: Sequence[int] | None) -> tuple[int, ...] | None:
    """The shape to use for an argument: the model's, completed by what the caller gave; None if still unknown.

    Raises:
        InvalidArgument: The two contradict each other.
    """
    if given is None:
        known = argument.shape
        return None if known is None or None in known else tuple(d for d in known if d is not None)
    shape = tuple(int(d) for d in given)
    fits = argument.shape is None or (
        len(shape) == len(argument.shape)
        and all(want in (None, have) for want, have in zip(argument.shape, shape, strict=True))
    )
    if not fits or min(shape, default=1) < 1:
        raise InvalidArgument(f"{argument.name!r} has shape {argument.shape}, which does not admit {shape}")
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
