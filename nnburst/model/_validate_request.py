"""Validation of requests (facts sheets `model.md` §3.3, `memory.md` §4.2)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ..errors import InvalidArgument
from ._dimensions import combine_dimensions
from ._memory_like import MemoryLike
from ._operand_types import OPERANDS, operand_nbytes, type_name
from ._types import DataLocation, Lifetime, Model, Operand, Request, RequestArgument

__all__ = ["validate_request"]

_NOWHERE = DataLocation()
_UINT32 = 2**32 - 1


def validate_request(model: Model, request: Request, allow_unspecified_output: bool = True) -> None:
    """Check a request against its model before anything runs.

    Args:
        model: A valid model.
        request: The request with its pools.
        allow_unspecified_output: Whether outputs may leave dimensions open; a fenced execution may not.

    Raises:
        InvalidArgument: A rule is violated; the message names the argument and the remedy.
    """
    regions: list[_Region] = []
    for what, arguments, indexes in (
        ("input", request.inputs, model.main.input_indexes),
        ("output", request.outputs, model.main.output_indexes),
    ):
        if len(arguments) != len(indexes):
            raise InvalidArgument(f"the request has {len(arguments)} {what}s; the model has {len(indexes)}")
        names = model.input_names if what == "input" else model.output_names
        for position, (argument, index) in enumerate(zip(arguments, indexes, strict=True)):
            place = f"{what} {position}" + (f" ({names[position]!r})" if names else "")
            operand = model.main.operands[index]
            _check_argument(operand, argument, request.pools, what, place, allow_unspecified_output)
            if not argument.has_no_value:
                pool = request.pools[argument.location.pool_index]
                regions.append(_region(pool, argument.location, place, what == "output"))
    if request.outputs:
        regions += _constant_regions(model)
    _check_overlap(regions)


def _check_argument(
    operand: Operand,
    argument: RequestArgument,
    pools: Sequence[MemoryLike],
    what: str,
    place: str,
    allow_unspecified_output: bool,
) -> None:
    location, dims = argument.location, argument.dimensions
    if argument.has_no_value:
        if location != _NOWHERE or dims:
            raise InvalidArgument(f"{place} is omitted (has_no_value) but has a location or dimensions")
        return
    if not 0 <= location.pool_index < len(pools):
        raise InvalidArgument(f"{place} is in pool {location.pool_index}; the request has {len(pools)} pools")
    pool = pools[location.pool_index]
    if location.offset < 0 or location.length < 0 or location.offset + location.length > pool.size:
        raise InvalidArgument(
            f"{place} ends at byte {location.offset + location.length} of a pool of {pool.size} bytes"
        )
    if any(not 0 <= size <= _UINT32 for size in dims):
        raise InvalidArgument(f"{place} has dimensions {list(dims)}, which do not fit in 32 bits")
    if what == "input" and 0 in dims:
        raise InvalidArgument(f"{place} is given dimensions {list(dims)}; a request knows all of an input's")
    info = OPERANDS.get(operand.type)
    if info is None:  # an extension's type: the device knows its size
        return
    if info.is_scalar and dims:
        raise InvalidArgument(f"{place} is a scalar but the request gives it dimensions {list(dims)}")
    try:
        combined = combine_dimensions(operand.dimensions, dims)
    except InvalidArgument as error:
        raise InvalidArgument(f"{place}: the request contradicts the model: {error}") from None
    _check_length(operand, location.length, combined, what, place, allow_unspecified_output)


def _check_length(
    operand: Operand, length: int, dims: tuple[int, ...], what: str, place: str, allow_unspecified_output: bool
) -> None:
    size = operand_nbytes(operand.type, dims)
    if size == 0 and OPERANDS[operand.type].dtype is not None:
        if what == "input":
            raise InvalidArgument(
                f"{place} has dimensions {list(dims)}, which are not all known; give them in the request"
            )
        if not allow_unspecified_output:
            raise InvalidArgument(f"{place} has dimensions {list(dims)}; this execution needs all of them known")
        if length == 0:
            raise InvalidArgument(f"{place} has no bytes; give the largest size that you expect, at least 1")
    elif length != size and size:
        raise InvalidArgument(
            f"{place} has {length} bytes; {type_name(operand.type)} of dimensions {list(dims)} needs {size}"
        )


_Region = tuple[Hashable, int, int, str, bool]
"""(object, first byte, end, place, is written)."""


def _region(pool: MemoryLike, location: DataLocation, place: str, written: bool) -> _Region:
    """Locate bytes in the file behind a pool, so that two pools on one file are compared rightly."""
    key, base = _base_of(pool)
    start = base + location.offset
    return key, start, start + location.length, place, written


def _base_of(pool: MemoryLike) -> tuple[Hashable, int]:
    identity: Any = getattr(pool, "identity", None)
    if identity is None:
        return id(pool), 0
    device, inode, offset, _size = identity
    return (device, inode), int(offset)


def _constant_regions(model: Model) -> list[_Region]:
    if not model.pools:
        return []
    return [
        _region(model.pools[operand.location.pool_index], operand.location, f"constant operand {index}", False)
        for index, operand in enumerate(model.main.operands)
        if operand.lifetime == Lifetime.CONSTANT_REFERENCE
    ]


def _check_overlap(regions: list[_Region]) -> None:
    """Outputs overlap nothing; inputs and constants may overlap each other.

    In the order of their first bytes, a region overlaps an earlier one if and only if it starts before the furthest
    end so far: of all regions for an output, of outputs for the others.
    """
    regions.sort(key=lambda region: (hash(region[0]), region[1]))
    reach: dict[Hashable, tuple[int, str]] = {}
    reach_written: dict[Hashable, tuple[int, str]] = {}
    for key, start, end, place, written in regions:
        rival = (reach if written else reach_written).get(key)
        if rival is not None and start < rival[0] and start < end:
            raise InvalidArgument(f"{place} overlaps {rival[1]}; an output needs memory of its own")
        for table in (reach, reach_written) if written else (reach,):
            if end > table.get(key, (0, ""))[0]:
                table[key] = (end, place)
