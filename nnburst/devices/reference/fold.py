"""Constant folding: what operations make of constants alone is computed once, when a model is compiled.

Models whose weights are stored in fewer bits than they are used with begin with a DEQUANTIZE of each; low-rank adapters
are a product of two matrices that is added to a third; transposed and reshaped weights are as common. Kernels then see
a constant, and arrange it as they like it best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...memory import Region
from ...model import (
    DataLocation,
    Lifetime,
    OperandDesc,
    OperationType,
    Request,
    RequestArgument,
    has_known_size,
    operand_info,
    operand_nbytes,
)
from .serial import Compiled

_MOST_GROWTH = 4
"""Results may have so many times the bytes of all constants: 8 bits become 32."""
_ALWAYS = 1 << 16
"""Bytes that they may have in any case."""

_RANDOM = (OperationType.RANDOM_MULTINOMIAL,)


def fold_constants(compiled: Compiled, run: Callable[[Compiled, Request], bool]) -> Compiled:
    """Return a model without the operations whose inputs are all constant; their results are constants of it.

    Args:
        compiled: Nothing was derived from its constants yet.
        run: Executes a model without inputs; False if that fails. Then nothing is folded: executions fail as before.
    """
    model, main = compiled.model, compiled.model.main
    sizes = {index: value.nbytes for index, value in compiled.constants.items()}
    most = max(_ALWAYS, _MOST_GROWTH * sum(sizes.values()))
    folded: list[int] = []
    for position, operation in enumerate(main.operations):
        if operation.type in _RANDOM:
            continue
        if not all(i in sizes or main.operands[i].lifetime is Lifetime.NO_VALUE for i in operation.inputs):
            continue
        results = {index: _fixed_size(main.operands[index]) for index in operation.outputs}
        if operation.inputs and all(results.values()) and sum(results.values()) <= most:
            folded.append(position)
            sizes |= results
    rest = [position for position in range(len(main.operations)) if position not in set(folded)]
    used = {index for position in rest for index in main.operations[position].inputs}
    made = {index: sizes[index] for position in folded for index in main.operations[position].outputs if index in used}
    if not folded or sum(made.values()) > most:
        return compiled
    pools = {index: Region(np.zeros(nbytes, np.uint8)) for index, nbytes in made.items()}
    part = replace(
        model,
        main=replace(
            main,
            operations=tuple(main.operations[position] for position in folded),
            input_indexes=(),
            output_indexes=tuple(made),
        ),
    )
    outputs = tuple(RequestArgument(False, DataLocation(i, 0, pool.size)) for i, pool in enumerate(pools.values()))
    alone = Compiled(part, compiled.constants, {}, tuple(compiled.matches[position] for position in folded))
    try:
        if not run(alone, Request((), outputs, tuple(pools.values()))):
            return compiled
    except Exception:  # executions fail as before
        return compiled
    constants = {index: value for index, value in compiled.constants.items() if index in used}
    for index, pool in pools.items():
        operand = main.operands[index]
        dtype: Any = operand_info(operand.type).dtype
        constants[index] = pool.array(dtype, operand.dimensions)
        constants[index].flags.writeable = False
    operands = tuple(
        replace(operand, lifetime=Lifetime.CONSTANT_COPY) if index in made else operand
        for index, operand in enumerate(main.operands)
    )
    remaining = replace(main, operands=operands, operations=tuple(main.operations[position] for position in rest))
    matches = tuple(compiled.matches[position] for position in rest)
    return Compiled(replace(model, main=remaining), constants, {}, matches)


def _fixed_size(operand: OperandDesc) -> int:
    """Bytes of a temporary whose size is known; 0 for anything else."""
    is_temporary = operand.lifetime is Lifetime.TEMPORARY_VARIABLE and not operand.is_scalar
    return operand_nbytes(operand.type, operand.dimensions) if is_temporary and has_known_size(operand) else 0
