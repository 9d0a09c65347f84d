"""IF and WHILE: subgraphs that are bound and run when the values that they depend on are there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import MissedDeadline
from ...model import Operation, combine_dimensions
from .graph import Binding, RunLimits

Array = np.ndarray[Any, np.dtype[Any]]
_Value = Array | None
"""None for a value that is omitted."""


def run_if(outer: Binding, operation: Operation, limits: RunLimits) -> None:
    """Run one of two subgraphs on the values after them."""
    condition, then, otherwise, *values = operation.inputs
    chosen = then if _is_true(outer.arrays[condition]) else otherwise
    results, nbytes = _run_subgraph(outer, chosen, [_value(outer, index) for index in values], limits)
    _give(outer, operation, results)
    outer.budget.drop_results(nbytes)


def run_while(outer: Binding, operation: Operation, limits: RunLimits) -> None:
    """Run a body as long as a condition holds; its results are the first of its next inputs.

    Raises:
        MissedDeadline: The loop took longer than it may.
    """
    condition, body, *indexes = operation.inputs
    values = [_value(outer, index) for index in indexes]
    spent = {} if limits.spent is None else limits.spent
    begin = time.monotonic_ns() - spent.get(id(operation), 0)
    held = 0  # in the budget, by the values
    while _holds(outer, condition, values, limits):
        if time.monotonic_ns() >= begin + limits.loop_ns:
            remedy = "raise the loop timeout" + ("" if limits.spent is None else ", or run fewer steps at once")
            raise MissedDeadline(f"a WHILE ran for more than {limits.loop_ns / 1e9:g} s; {remedy}")
        results, nbytes = _run_subgraph(outer, body, values, limits)
        values[: len(results)] = results
        outer.budget.drop_results(held)
        held = nbytes
    spent[id(operation)] = time.monotonic_ns() - begin
    _give(outer, operation, values)
    outer.budget.drop_results(held)


def _holds(outer: Binding, condition: int, values: Sequence[_Value], limits: RunLimits) -> bool:
    results, nbytes = _run_subgraph(outer, condition, values, limits)
    outer.budget.drop_results(nbytes)
    return _is_true(results[0])


def _is_true(condition: Array) -> bool:
    return bool(condition.reshape(-1)[0])


def _value(outer: Binding, index: int) -> _Value:
    return None if index in outer.omitted else outer.arrays[index]


def _run_subgraph(
    outer: Binding, reference: int, values: Sequence[_Value], limits: RunLimits
) -> tuple[list[Array], int]:
    """Run the subgraph that an operand refers to; return its outputs, and what they count in the budget."""
    referenced = outer.graph.referenced
    graph = referenced[outer.graph.subgraph.operands[reference].location.offset]
    inner = Binding(graph, outer.budget)
    for index, value in zip(graph.subgraph.input_indexes, values, strict=True):
        if value is None:
            inner.omitted.add(index)
        else:
            combine_dimensions(graph.subgraph.operands[index].dimensions, value.shape)
            inner.arrays[index] = value
    inner.run(0, limits)
    outputs = graph.subgraph.output_indexes
    return [inner.arrays[index] for index in outputs], inner.hand_over(outputs)


def _give(outer: Binding, operation: Operation, results: Sequence[_Value]) -> None:
    """Copy results to the outputs of an operation."""
    for index, result in zip(operation.outputs, results, strict=False):
        assert result is not None  # an output of a body is a value
        outer.place(index, result.shape)
        outer.arrays[index][...] = result
