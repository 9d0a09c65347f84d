"""Binding a model to arrays that are never filled, to have operations derive arrays from constants now."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import NNBurstError
from ...memory import Region
from ...model import (
    DataLocation,
    Request,
    RequestArgument,
    has_known_size,
    operand_nbytes,
)
from .graph import PreparedSubgraph
from .program import Program

_MOST_BYTES = 1 << 30
"""Of arguments; what needs more is bound with its first request."""
_LARGE = 1 << 16
"""Bytes from which it matters whether a constant is kept."""


def bind_for_nothing(graph: PreparedSubgraph) -> frozenset[int]:
    """Bind all operations of a model's main subgraph once, if it leaves no dimension open, and let go of the result.

    Returns:
        Large constants whose stored values no operation needs: each has made its own of them, as its kernel declares
        (see `KernelCall`). Operations bound later take the derived array, and the constant only for its shape.
    """
    main = graph.subgraph
    arguments: list[list[RequestArgument]] = []
    pools: list[Any] = []
    for indexes in (main.input_indexes, main.output_indexes):
        arguments.append([])
        for index in indexes:
            operand = main.operands[index]
            if not has_known_size(operand):
                return frozenset()
            nbytes = operand_nbytes(operand.type, operand.dimensions)
            arguments[-1].append(RequestArgument(False, DataLocation(len(pools), 0, nbytes)))
            pools.append(Region(np.empty(nbytes, np.uint8)))
    if sum(pool.size for pool in pools) > _MOST_BYTES:
        return frozenset()
    try:
        program = Program(graph, Request(tuple(arguments[0]), tuple(arguments[1]), tuple(pools)))
    except (NNBurstError, MemoryError):
        return frozenset()  # the request that has the same fate says so
    if not program.is_bound:
        return frozenset()
    large = (index for index, value in graph.constants.items() if value.nbytes >= _LARGE)
    return frozenset(large) - program.reads
