"""Rows of the operation table, and views of operations, which give access to inputs by the row's names.

Validation, the builder and devices ask the same questions ("dimensions of x", "value of stride_w") at different times;
the view answers with the values that are known at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from ..errors import InvalidArgument
from .operand_types import OPERANDS, HalVersion, OperandInfo, OperandType, operand_info
from .types import Array, Lifetime, OperandDesc, Operation, SymmPerChannelQuantParams


class UnknownYet(InvalidArgument):
    """The exception for an answer that depends on a value or shape that is not yet known."""


class OutputSpec(Struct, frozen=True):
    """An inferred output of an operation. If its quantisation is None, the output operand decides."""

    type: OperandType
    dimensions: tuple[int, ...]
    scale: float | None = None
    zero_point: int | None = None


class Param(Struct, frozen=True):
    """One input in an input list."""

    name: str
    kinds: tuple[tuple[str, HalVersion], ...]
    since: HalVersion = HalVersion.V1_0
    may_be_omitted: bool = False
    least: int = 1
    variadic: bool = False
    ranks: tuple[int, int] | None = None
    like: str | None = None


class Signature(Struct, frozen=True):
    """The inputs and results of an operation: one row of the operation table, made by `signature`.

    Attributes:
        forms: Every accepted list of inputs, one for each choice of optional inputs.
        types: Data types that the type variable T stands for, each with the first version that has it.
        outputs: Every accepted list of outputs, one for each choice of optional outputs.
        infer: Function from the inputs to the outputs; raises `InvalidArgument` when the inputs do not fit together.
        ranks: Smallest and largest rank of an input, by name; checked once the rank is known.
        output_quantisation: Quantisation of the first output: the name of an input that has the same, a mapping
            {type: (scale, zero point)}, or None for any.
        check: Further rules on the operands of a model, or None.
        zero_sized: True if 0 may be the size of an input's dimension, not only the sign that it is unspecified.
        measured: True if sizes of outputs depend on the values of inputs, so that only a run finds them.
    """

    forms: tuple[tuple[Param, ...], ...]
    types: Mapping[OperandType, HalVersion]
    outputs: tuple[tuple[Param, ...], ...]
    infer: Callable[[OperationView], tuple[OutputSpec, ...]]
    ranks: Mapping[str, tuple[int, int]]
    output_quantisation: str | Mapping[OperandType, tuple[float, int]] | None
    check: Callable[[OperationView], None] | None
    zero_sized: bool
    measured: bool


class Match(Struct, frozen=True):
    """An input list that an operation's inputs fit, with the positions in ``operation.inputs`` of each name."""

    data_type: OperandType
    positions: Mapping[str, tuple[int, ...]]
    omittable: frozenset[int]


class OperationView:
    """An operation that gives access to its operands by name.

    Attributes:
        match: The input list of the signature that the inputs fit.
        partial: True if a 0 in `dims` is an unknown dimension, False if it is a real size.
    """

    partial = True

    def __init__(
        self,
        operation: Operation,
        operands: Sequence[OperandDesc],
        row: Signature,
        match: Match,
        value_of: Callable[[int], Array | None] | None = None,
    ) -> None:
        self.operation = operation
        self.row = row
        self.match = match
        self._operands = operands
        self._known = value_of

    @property
    def data_type(self) -> OperandType:
        """The operand type for T of the signature."""
        return self.match.data_type

    @property
    def info(self) -> OperandInfo:
        return OPERANDS[self.match.data_type]

    def index(self, name: str, which: int = 0) -> int:
        return self.operation.inputs[self.match.positions[name][which]]

    def count(self, name: str) -> int:
        """Return the number of inputs with a name; 0 for an option that is not in the list."""
        return len(self.match.positions.get(name, ()))

    def operand(self, name: str, which: int = 0) -> OperandDesc:
        return self._operands[self.index(name, which)]

    def output(self, which: int = 0) -> OperandDesc:
        return self._operands[self.operation.outputs[which]]

    def given(self, name: str) -> bool:
        """Return True if the input is in the list and not omitted."""
        return self.count(name) > 0 and self.operand(name).lifetime != Lifetime.NO_VALUE

    def dims(self, name: str, which: int = 0) -> tuple[int, ...]:
        """Return the dimensions of an input. Raises `UnknownYet` if the rank is unknown."""
        operand = self.operand(name, which)
        dims = self._dims_of(self.index(name, which))
        if not dims and not operand.is_scalar:
            raise UnknownYet(f"the rank of {name} is not known")
        return dims

    def _dims_of(self, index: int) -> tuple[int, ...]:
        return self._operands[index].dimensions

    def _value_of(self, index: int) -> Array | None:
        return None if self._known is None else self._known(index)

    def value(self, name: str) -> Array:
        """Return the stored value of an input. Raises `UnknownYet` if only the request or a run has it."""
        value = self._value_of(self.index(name))
        if value is None:
            raise UnknownYet(f"the value of {name} is not known")
        return value

    def integer(self, name: str, default: int = 0, *, least: int | None = None) -> int:
        """Return an integer or boolean input, or its default. Raises `InvalidArgument` if it is below `least`."""
        number = int(self.value(name).reshape(-1)[0]) if self.count(name) else default
        if least is not None and number < least:
            raise InvalidArgument(f"{name} is {number}; it must be at least {least}")
        return number

    def integers(self, name: str) -> list[int]:
        return [int(number) for number in self.value(name).reshape(-1)]

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a floating point scalar input, or its default."""
        return float(self.value(name).reshape(-1)[0]) if self.count(name) else default

    def axes(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the axes in a tensor input: counted from the front, ascending, each once."""
        axes = self.integers(name)
        if any(not -rank <= axis < rank for axis in axes):
            raise InvalidArgument(f"{name} {axes} are not all axes of rank {rank}")
        return tuple(sorted({axis % rank for axis in axes}))

    def axis(self, name: str, rank: int) -> int:
        """Return an axis, counted from the front; the last axis by default."""
        axis = self.integer(name, -1)
        if not -rank <= axis < rank:
            raise InvalidArgument(f"{name} {axis} is not an axis of rank {rank}")
        return axis % rank

    def infer(self) -> tuple[OutputSpec, ...]:
        """Infer the outputs. Raises `UnknownYet` while a value that decides their shape is unknown."""
        specs, count = self.row.infer(self), len(self.operation.outputs)
        return specs[:count] if count else specs

    def check_ranks(self) -> None:
        """Check the known ranks of the inputs; `infer` relies on this check."""
        for name, (least, most) in self.row.ranks.items():
            for which in range(self.count(name)):
                rank = len(self.operand(name, which).dimensions)
                if rank and not least <= rank <= most:
                    wanted = str(least) if least == most else f"{least} to {most}"
                    raise InvalidArgument(f"{name} has rank {rank}; it must be {wanted}")

    def check(self) -> None:
        """Check ranks and quantisation: the part of rule V8 about operands."""
        self.check_ranks()
        self._check_output_quantisation()
        if self.row.check is not None:
            self.row.check(self)

    def _check_output_quantisation(self) -> None:
        scale, zero_point = self.output_quantisation()
        out = self.output()
        if scale is None or not operand_info(out.type).is_quantised:
            return
        # Either scale may have passed through float32.
        if np.float32(out.scale) != np.float32(scale) or out.zero_point != zero_point:
            raise InvalidArgument(
                f"the output has scale {out.scale:g} and zero point {out.zero_point}; "
                f"they must be {scale:g} and {zero_point}"
            )

    def output_quantisation(self) -> tuple[float | None, int | None]:
        """Return the prescribed (scale, zero point) of the output, or (None, None)."""
        rule = self.row.output_quantisation
        if not self.info.is_quantised:
            return None, None
        if isinstance(rule, str):
            source = self.operand(rule)
            return source.scale, source.zero_point
        return (None, None) if rule is None else rule.get(self.data_type, (None, None))

    def channel_scales(self, name: str) -> tuple[tuple[float, ...], int] | None:
        """Return (scales, channel dimension) of a per-channel operand, else None."""
        params = self.operand(name).extra_params
        return (params.scales, params.channel_dim) if isinstance(params, SymmPerChannelQuantParams) else None
