"""Binding a model to arrays that nobody fills, to have operations make now what they make from constants."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import NNBurstError
from ...model import (
    DataLocation,
    MeasureTiming,
    Request,
    RequestArgument,
    is_extension,
    is_fully_specified,
    operand_info,
    operand_nbytes,
)
from .plan import Plan

if TYPE_CHECKING:
    from .prepared import ReferencePreparedModel

__all__ = ["bind_for_nothing"]

_MOST_BYTES = 1 << 30
"""Of arguments; what needs more is bound with its first request."""
_LARGE = 1 << 16
"""Bytes from which it matters whether a constant is kept."""


def _references(array: np.ndarray[Any, np.dtype[Any]]) -> int:
    """References to an array and to its bytes: a view of a view refers to whoever owns these, not to the view."""
    count, owner = sys.getrefcount(array), array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return count if owner is array else count + sys.getrefcount(owner)


class _Blank:
    """A pool that is there to be bound to."""

    kind = "blank"

    def __init__(self, size: int) -> None:
        self.size = size

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> np.ndarray[Any, np.dtype[Any]]:
        return np.empty(shape, dtype)


def bind_for_nothing(prepared: ReferencePreparedModel) -> frozenset[int]:
    """Bind all operations once, if the model leaves no dimension open, and let go of the result.

    Returns:
        Large constants that no operation looks at once it has made its own of them: nothing that was bound refers to
        their values. Operations that are bound later take what was made, and the constant only for its shape.
    """
    main = prepared.model.main
    arguments: list[list[RequestArgument]] = []
    pools: list[Any] = []
    for indexes in (main.input_indexes, main.output_indexes):
        arguments.append([])
        for index in indexes:
            operand = main.operands[index]
            if is_extension(operand.type) or operand_info(operand.type).dtype is None:
                return frozenset()
            known = operand_info(operand.type).is_scalar or (
                bool(operand.dimensions) and is_fully_specified(operand.dimensions)
            )
            if not known:
                return frozenset()
            nbytes = operand_nbytes(operand.type, operand.dimensions)
            arguments[-1].append(RequestArgument(False, DataLocation(len(pools), 0, nbytes)))
            pools.append(_Blank(nbytes))
    if sum(pool.size for pool in pools) > _MOST_BYTES:
        return frozenset()
    before = {index: _references(value) for index, value in prepared.constants.items()}
    try:
        plan = Plan(prepared, Request(tuple(arguments[0]), tuple(arguments[1]), tuple(pools)), MeasureTiming.NO)
    except (NNBurstError, MemoryError):
        return frozenset()  # the request that has the same fate says so
    if not plan.is_bound:
        return frozenset()
    unneeded = set()
    for index in prepared.constants:
        users = {position for position, operation in enumerate(main.operations) if index in operation.inputs}
        # The plan's table of arrays is one more reference; a step that uses the values would be another.
        unused = _references(prepared.constants[index]) == before[index] + 1
        if prepared.constants[index].nbytes >= _LARGE and unused and users <= prepared.who_made_their_own(index):
            unneeded.add(index)
    return frozenset(unneeded)
