"""Operands of `ModelBuilder`: tensors and scalars of an unfinished model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ..errors import InvalidArgument
from .operand_types import OPERANDS, type_name
from .types import Array

if TYPE_CHECKING:
    from .builder import ModelBuilder


def _operators(name: str) -> tuple[Callable[[Operand, Value], Operand], Callable[[Operand, Value], Operand]]:
    """Return an operator's two methods: operand on the left, operand on the right. Both call the builder's `name`."""

    def left(self: Operand, other: Value) -> Operand:
        return getattr(self._builder, name)(self, other) if _is_value(other) else NotImplemented

    def right(self: Operand, other: Value) -> Operand:
        return getattr(self._builder, name)(other, self) if _is_value(other) else NotImplemented

    return left, right


class Operand:
    """A tensor or scalar of an unfinished model: an input, a constant or the result of an operation.

    Methods of a `ModelBuilder` return operands, and accept operands of the same builder. ``+ - * /`` and the unary
    ``-`` add ADD, SUB, MUL, DIV and NEG. One side can be an array, a list or a number, which becomes a constant of the
    operand's type. A quantised result needs a scale, which only a method can give: ``b.add(x, y, scale=0.5)``.

    Example:
        >>> b = nnburst.ModelBuilder()
        >>> x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (2, 3))
        >>> (x / 2 - 1).shape
        (2, 3)
    """

    __array_ufunc__ = None  # An array on the left leaves the operator to the operand.
    __slots__ = ("_builder", "_index")

    def __init__(self, builder: ModelBuilder, index: int) -> None:
        """Use `ModelBuilder.input` or another method of the builder instead."""
        self._builder = builder
        self._index = index

    @property
    def type(self) -> int:
        """The `OperandType`, or the code of an extension type."""
        return self._builder.describe(self._index).type

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, with 0 for an unknown size; ``()`` for a scalar or an unknown rank."""
        return self._builder.describe(self._index).dimensions

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The NumPy type of the stored values; None for a subgraph or an extension type."""
        info = OPERANDS.get(self.type)
        return None if info is None else info.dtype

    @property
    def scale(self) -> float:
        """The scale of a quantised type, else 0. The real value is (stored value - zero point) x scale."""
        return self._builder.describe(self._index).scale

    @property
    def zero_point(self) -> int:
        """The zero point of a quantised type; see `scale`."""
        return self._builder.describe(self._index).zero_point

    @property
    def index(self) -> int:
        """The operand's index in the builder's model."""
        return self._index

    def _index_in(self, builder: object) -> int:
        """Return the operand's index in a builder.

        Raises:
            InvalidArgument: The operand belongs to another builder.
        """
        if builder is not self._builder:
            raise InvalidArgument(
                f"{self!r} belongs to another ModelBuilder; an operand is used only where it was made: give its value"
                " to this model as an input or a constant"
            )
        return self._index

    def __repr__(self) -> str:
        return f"<Operand {self._index}: {type_name(self.type)} {list(self.shape)}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Operand):
            return NotImplemented
        return self._builder is other._builder and self._index == other._index

    def __hash__(self) -> int:
        return hash((id(self._builder), self._index))

    def __bool__(self) -> bool:
        raise TypeError("an Operand has no value while its model is built; branch() and select() choose in a run")

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")

    def __neg__(self) -> Operand:
        return self._builder.neg(self)


Value = Operand | Array | Sequence[Any] | float
"""An argument of an operation: an operand, or an array or number that becomes a constant."""


class Output(TypedDict, total=False):
    """Properties that the builder cannot infer for an output.

    A 0 in ``dimensions`` is an unknown size. ``scale`` and ``zero_point`` are for quantised types.
    """

    type: int | None
    dimensions: Sequence[int] | None
    scale: float | None
    zero_point: int | None


Outputs = Sequence[Output] | None
"""Properties of each output of an operation with several outputs."""


def _is_value(value: object) -> bool:
    kinds = (Operand, np.ndarray, np.number, list, tuple, int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)
