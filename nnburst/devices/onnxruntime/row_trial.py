"""Whether the rows of a graph's arguments have to do with each other: a trial with random rows, alone and together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import GeneralFailure, InvalidArgument
from .graph import Graph
from .importer import GraphArgument

Rows = np.ndarray[Any, Any]
_MOST = 5
"""Rows at a time, and 2."""
ROWS_KEPT = 5 * _MOST
"""At a time, about: random ones, what comes out alone and together, and what compares them."""
_MOST_VALUES = 65521
"""That are random; more are the same again, or rows of megabytes would take seconds. A prime, so that rows differ."""
_LARGE, _SMALL = 100, 2
"""Integers, which may be indexes, are less; if the graph fails with larger ones, 0 and 1."""
_TOLERANCE = {"<f2": 1e-2, "<f4": 1e-3, "<f8": 1e-6}
"""Of the largest value of a row: more than what another order of additions changes."""


def require_rows_apart(graph: Graph, shapes: Sequence[tuple[int, ...]], deadline_ns: int = 0) -> list[Rows]:
    """Check that the outputs of a row are what they are alone, whatever other rows there are; returns rows tried.

    What depends on values, such as a rule that holds for large ones only, may be missed.

    Args:
        graph: Each input and output has rows in its first dimension.
        shapes: The other dimensions of each input.
        deadline_ns: When the trial ends, between two nodes; 0 for no limit.

    Raises:
        InvalidArgument: They are not; names the output.
        GeneralFailure: The graph does not run with such rows.
        MissedDeadline: They could not be tried until then.
    """
    try:
        return _compare(graph, _random(graph, shapes, _LARGE), deadline_ns)
    except GeneralFailure:
        return _compare(graph, _random(graph, shapes, _SMALL), deadline_ns)


def _compare(graph: Graph, inputs: list[Rows], deadline_ns: int) -> list[Rows]:
    alone = [run_rows(graph, [rows[i : i + 1] for rows in inputs], deadline_ns) for i in range(_MOST)]
    for n in (1, 2, _MOST):
        together = run_rows(graph, [rows[:n] for rows in inputs], deadline_ns)
        for position, (node, rows) in enumerate(zip(graph.outputs, together, strict=True)):
            if rows.shape[:1] != (n,):
                raise InvalidArgument(f"{node.name!r} has the shape {list(rows.shape)} where its inputs have {n} rows")
            if not all(_is_like(node, rows[i : i + 1], alone[i][position]) for i in range(n)):
                raise InvalidArgument(f"a row of {node.name!r} has other values beside other rows than alone")
    return inputs


def _random(graph: Graph, shapes: Sequence[tuple[int, ...]], below: int) -> list[Rows]:
    """Return rows that differ in size, too: one large value must not change how the others are rounded."""
    rng = np.random.default_rng(1)
    sizes = 4.0 ** (np.arange(_MOST) % 3 - 1)
    inputs = []
    for node, inner in zip(graph.inputs, shapes, strict=True):
        dtype, shape = np.dtype(node.element.dtype), (_MOST, *inner)
        count, is_float = min(math.prod(shape), _MOST_VALUES), dtype.kind == "f"
        values = rng.normal(size=count) if is_float else rng.integers(0, 2 if dtype.kind == "b" else below, count)
        rows = np.resize(values.astype(dtype), shape)
        if is_float:
            rows *= sizes.astype(dtype).reshape(-1, *[1] * len(inner))
        inputs.append(rows)
    return inputs


def run_rows(graph: Graph, inputs: Sequence[Rows], deadline_ns: int = 0) -> list[Rows]:
    """Return the outputs of a run, as copies; raises what `BoundRun.failure` returns."""
    binding = graph.session.io_binding()
    for node, rows in zip(graph.inputs, inputs, strict=True):
        binding.bind_input(node.name, "cpu", 0, node.element.number, list(rows.shape), rows.ctypes.data)
    for node in graph.outputs:
        binding.bind_output(node.name, "cpu")
    run = graph.bound(binding, (), ())
    if status := run.run(deadline_ns):
        raise run.failure(status)
    values = [value.value() for value in binding.get_outputs()]
    return [
        np.frombuffer(v.data, node.element.dtype).reshape(v.shape)
        for v, node in zip(values, graph.outputs, strict=True)
    ]


def _is_like(node: GraphArgument, row: Rows, alone: Rows) -> bool:
    if row.shape != alone.shape:
        return False
    tolerance = _TOLERANCE.get(node.element.dtype)
    if tolerance is None:  # integers of 8 bits may be rounded numbers
        return bool((np.abs(row.astype(float) - alone) <= (node.element.itemsize == 1 and row.dtype.kind != "b")).all())
    size = float(np.abs(alone[np.isfinite(alone)], dtype=float).max(initial=0.0))
    return np.allclose(row, alone, tolerance, tolerance * size, equal_nan=True)
