"""Types of the operation table's rows, and views that give access to an operation's inputs by name.

Validation, the builder and devices use these views. Some views know more dimensions and values than others: a device
knows all of them during a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from ..errors import InvalidArgument
from .operand_types import OPERANDS, HalVersion, OperandInfo, OperandType, operand_info
from .types import Array, Lifetime, OperandDesc, Operation, SymmPerChannelQuantParams


class UnknownYet(InvalidArgument):
    """The exception for a result that depends on a value or shape that is not known yet."""


class OutputSpec(Struct, frozen=True):
    """An inferred output of an operation. If `scale` or `zero_point` is None, the output operand determines it."""

    type: OperandType
    dimensions: tuple[int, ...]
    scale: float | None = None
    zero_point: int | None = None


class Param(Struct, frozen=True):
    """An input or output in a list of a `Signature`."""

    name: str
    kinds: tuple[tuple[str, HalVersion], ...]
    since: HalVersion = HalVersion.V1_0
    may_be_omitted: bool = False
    least: int = 1
    variadic: bool = False
    ranks: tuple[int, int] | None = None
    like: str | None = None


class Signature(Struct, frozen=True):
    """A row of the operation table: the inputs and outputs of an operation. `signature` makes rows.

    Attributes:
        forms: Every accepted list of inputs, one for each choice of optional inputs.
        types: Data types of the operation (``T`` in a list), each with its first HAL version.
        outputs: Every accepted list of outputs, one for each choice of optional outputs.
        infer: Function that infers the outputs; raises `InvalidArgument` if the inputs do not fit together.
        ranks: (smallest rank, largest rank), by the name of the input. Unknown ranks are not checked.
        output_quantisation: Quantisation of the first output: the name of an input with equal quantisation, a mapping
            {type: (scale, zero point)}, or None if all are allowed.
        check: Function that checks further rules on the operands, or None.
        zero_sized: True if inputs can have a size of 0 in a run.
        measured: True if output sizes depend on input values, so that only a run finds them.
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
    """The input list that fits an operation. `positions` are indexes into ``operation.inputs``, by name."""

    data_type: OperandType
    positions: Mapping[str, tuple[int, ...]]
    omittable: frozenset[int]


class OperationView:
    """An operation that gives access to its operands by name.

    Attributes:
        match: The input list that fits the operation.
        partial: True if 0 in `dims` is an unknown size, False if it is a real size.
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
        return self.match.data_type

    @property
    def info(self) -> OperandInfo:
        return OPERANDS[self.match.data_type]

    def index(self, name: str, which: int = 0) -> int:
        return self.operation.inputs[self.match.positions[name][which]]

    def count(self, name: str) -> int:
        """Return the number of inputs called `name`; 0 if the operation has no such input."""
        return len(self.match.positions.get(name, ()))

    def operand(self, name: str, which: int = 0) -> OperandDesc:
        return self._operands[self.index(name, which)]

    def output(self, which: int = 0) -> OperandDesc:
        return self._operands[self.operation.outputs[which]]

    def is_given(self, name: str) -> bool:
        """Return True if the operation has the input, and the input has a value."""
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
        """Return an input's stored value. Raises `UnknownYet` if the value is not known yet."""
        value = self._value_of(self.index(name))
        if value is None:
            raise UnknownYet(f"the value of {name} is not known")
        return value

    def integer(self, name: str, default: int = 0, *, least: int | None = None) -> int:
        """Return an integer or boolean input; `default` if missing. Raises `InvalidArgument` for less than `least`."""
        number = int(self.value(name).reshape(-1)[0]) if self.count(name) else default
        if least is not None and number < least:
            raise InvalidArgument(f"{name} is {number}; it must be at least {least}")
        return number

    def integers(self, name: str) -> list[int]:
        return [int(number) for number in self.value(name).reshape(-1)]

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self.value(name).reshape(-1)[0]) if self.count(name) else default

    def axes(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the axes that a tensor input contains: counted from the front, ascending, without duplicates."""
        axes = self.integers(name)
        if any(not -rank <= axis < rank for axis in axes):
            raise InvalidArgument(f"{name} {axes} are not all axes of rank {rank}")
        return tuple(sorted({axis % rank for axis in axes}))

    def axis(self, name: str, rank: int) -> int:
        """Return the axis in a scalar input, counted from the front. Without the input, it is the last axis."""
        axis = self.integer(name, -1)
        if not -rank <= axis < rank:
            raise InvalidArgument(f"{name} {axis} is not an axis of rank {rank}")
        return axis % rank

    def infer(self) -> tuple[OutputSpec, ...]:
        """Infer the outputs. Raises `UnknownYet` if a value that determines a shape is not known yet."""
        specs, count = self.row.infer(self), len(self.operation.outputs)
        return specs[:count] if count else specs

    def check_ranks(self) -> None:
        """Check the known ranks of the inputs. Call this before `infer`."""
        for name, (least, most) in self.row.ranks.items():
            for which in range(self.count(name)):
                rank = len(self.operand(name, which).dimensions)
                if rank and not least <= rank <= most:
                    wanted = str(least) if least == most else f"{least} to {most}"
                    raise InvalidArgument(f"{name} has rank {rank}; it must be {wanted}")

    def check(self) -> None:
        """Check ranks and quantisation of the operands (rule V8)."""
        self.check_ranks()
        self._check_output_quantisation()
        if self.row.check is not None:
            self.row.check(self)

    def _check_output_quantisation(self) -> None:
        scale, zero_point = self.output_quantisation()
        out = self.output()
        if scale is None or not operand_info(out.type).is_quantised:
            return
        # Either scale may have been rounded to float32.
        if np.float32(out.scale) != np.float32(scale) or out.zero_point != zero_point:
            raise InvalidArgument(
                f"the output has scale {out.scale:g} and zero point {out.zero_point}; "
                f"they must be {scale:g} and {zero_point}"
            )

    def output_quantisation(self) -> tuple[float | None, int | None]:
        """Return the required (scale, zero point) of the output; (None, None) if all are allowed."""
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
