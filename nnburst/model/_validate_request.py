"""Validation of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidArgument
from .dimensions import check_dimensions, combine_dimensions
from .operand_types import OPERANDS, OperandInfo, is_extension, operand_nbytes, type_name
from .types import BufferToken, DataLocation, Lifetime, Model, OperandDesc, Request, RequestArgument, Steps

_NOWHERE = DataLocation()
_READ, _WRITE = 1, 2


def validate_request(model: Model, request: Request, allow_unspecified_output: bool = True) -> None:
    """Check a request against its model before anything runs.

    Sizes and offsets are unbounded integers here: nothing wraps. A pool of size 0 (an image, a device's buffer) is
    used as a whole: offset and length are 0.

    Args:
        model: A valid model.
        request: The request with its pools.
        allow_unspecified_output: Whether outputs may leave dimensions open; a fenced execution may not, nor may one of
            several steps.

    Raises:
        InvalidArgument: A rule is violated; the message names the argument and the remedy.
    """
    regions: list[_Region] = []
    steps = request.steps
    if steps is not None:
        _check_steps(model, request, steps)
    states = {} if steps is None else {"input": {i for _, i in steps.state}, "output": {o for o, _ in steps.state}}
    for what, arguments, indexes in (
        ("input", request.inputs, model.main.input_indexes),
        ("output", request.outputs, model.main.output_indexes),
    ):
        if len(arguments) != len(indexes):
            raise InvalidArgument(f"the request has {len(arguments)} {what}s; the model has {len(indexes)}")
        names = model.input_names if what == "input" else model.output_names
        for position, (argument, index) in enumerate(zip(arguments, indexes, strict=True)):
            place = f"{what} {position}" + (f" ({names[position]!r})" if names else "")
            case = _Case(place, what == "output", model, model.main.operands[index], argument, request.pools)
            case.allow_unspecified = steps is None and (allow_unspecified_output or not case.written)
            case.steps = 1 if steps is None else steps.count
            case.is_state = None if steps is None else position in states[what]
            for rule in _OMITTED_RULES if argument.has_no_value else _RULES:
                rule(case)
            if not argument.has_no_value:
                if not isinstance(case.pool, BufferToken):  # the rules of buffers are those of their device
                    regions.append(_region(case.pool, argument.location, place, case.written))
    if request.outputs:
        regions += _constant_regions(model)
    _check_overlap(regions)


def _check_steps(model: Model, request: Request, steps: Steps) -> None:
    if sum(isinstance(pool, Steps) for pool in request.pools) > 1:
        raise InvalidArgument("the request says twice how many steps it has")
    seen: set[tuple[str, int]] = set()
    main = model.main
    for output, target in steps.state:
        counts = min(len(request.outputs), len(main.output_indexes)), min(len(request.inputs), len(main.input_indexes))
        if output >= counts[0] or target >= counts[1]:
            raise InvalidArgument(f"state {output} → {target}: there are {counts[0]} outputs and {counts[1]} inputs")
        ends = {("output", output), ("input", target)}
        if ends & seen:
            raise InvalidArgument(f"state {output} → {target}: an output and an input belong to one state only")
        seen |= ends
        given = request.outputs[output], request.inputs[target]
        if any(argument.has_no_value for argument in given):
            raise InvalidArgument(f"state {output} → {target} is omitted; it needs a buffer of the device at both ends")
        operands = main.operands[main.output_indexes[output]], main.operands[main.input_indexes[target]]
        dims = [combine_dimensions(each.dimensions, own.dimensions) for each, own in zip(operands, given, strict=True)]
        source, sink = ((each.type, each.scale, each.zero_point, each.extra_params) for each in operands)
        if source != sink or dims[0] != dims[1]:
            raise InvalidArgument(f"state {output} → {target}: type, shape or quantisation differ")


@dataclass
class _Case:
    """One argument that is being checked. `dims` is what model and request say together, once `_dimensions` ran."""

    place: str
    written: bool
    model: Model
    operand: OperandDesc
    argument: RequestArgument
    pools: tuple[Any, ...]
    allow_unspecified: bool = True
    steps: int = 1
    is_state: bool | None = None
    """Whether steps hand it on; None in a request of one step."""
    dims: tuple[int, ...] = ()
    info: OperandInfo | None = field(init=False)
    """None for an extension's type: the device knows its size."""

    def __post_init__(self) -> None:
        self.info = OPERANDS.get(self.operand.type)

    @property
    def location(self) -> DataLocation:
        return self.argument.location

    @property
    def pool(self) -> Any:
        return self.pools[self.location.pool_index]

    @property
    def whole(self) -> bool:
        """Whether the pool is used as a whole."""
        return not getattr(self.pool, "size", 0)

    @property
    def may_be_empty(self) -> bool:
        """Whether dimensions may say that it has no elements. To NNAPI's operations a 0 is always an unknown size."""
        return not self.written and all(is_extension(operation.type) for operation in self.model.main.operations)

    @property
    def nbytes(self) -> int:
        """Bytes of the argument, 0 if unknown."""
        return operand_nbytes(self.operand.type, self.dims)

    def refuse(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self.place} {why}")


# -- the rules, in the order in which they are applied ---------------------------------------------------------------


def _nothing_given(case: _Case) -> None:
    dims = case.argument.dimensions
    if case.location != _NOWHERE or (dims and not case.may_be_empty):
        raise case.refuse("is omitted (has_no_value) but has a location or dimensions")
    if dims:
        _dimensions(case)
        if 0 not in dims:
            raise case.refuse(f"has no bytes, but {math.prod(dims)} elements of dimensions {list(dims)}")


def _in_a_pool(case: _Case) -> None:
    if not 0 <= case.location.pool_index < len(case.pools):
        raise case.refuse(f"is in pool {case.location.pool_index}; the request has {len(case.pools)} pools")
    if isinstance(case.pool, Steps):
        raise case.refuse(f"is in pool {case.location.pool_index}, which is no memory but a number of steps")


def _inside_the_pool(case: _Case) -> None:
    location = case.location
    if isinstance(case.pool, BufferToken) and case.pool.token == 0:
        raise case.refuse("is in a buffer with token 0, which no buffer has")
    if case.is_state is not None and case.is_state != isinstance(case.pool, BufferToken):
        raise case.refuse("is a state of steps, or lies in a buffer, but not both; the two go together")
    if case.whole:
        if case.is_state is False:
            raise case.refuse("is in an image, which has no room for several steps")
        if location.offset or location.length:
            raise case.refuse("is in a pool that is used as a whole; offset and length must be 0")
        return
    if location.offset < 0 or location.length < 0 or location.offset + location.length > case.pool.size:
        raise case.refuse(f"ends at byte {location.offset + location.length} of a pool of {case.pool.size} bytes")
    if location.length == 0:
        raise case.refuse("has no bytes; give its size, or at least 1 for an output of unknown size")


def _with_the_rights(case: _Case) -> None:
    """Upstream would take a fault inside the service."""
    given, needed = getattr(case.pool, "prot", _READ | _WRITE), _READ | _WRITE if case.written else _READ
    if needed & ~given:
        raise case.refuse(f"needs rights {needed} (1 read, 2 write), but its memory was shared with {given}")


def _dimensions(case: _Case) -> None:
    dims = case.argument.dimensions
    try:
        check_dimensions(dims)
    except InvalidArgument as error:
        raise case.refuse(f"cannot have its dimensions: {error}") from None
    if not case.written and not case.argument.has_no_value and 0 in dims:
        raise case.refuse(f"is given dimensions {list(dims)}; a request knows all of an input's")
    if case.info is None:
        return
    if case.info.is_scalar and dims:
        raise case.refuse(f"is a scalar but the request gives it dimensions {list(dims)}")
    try:
        case.dims = combine_dimensions(case.operand.dimensions, dims)
    except InvalidArgument as error:
        raise InvalidArgument(f"{case.place}: the request contradicts the model: {error}") from None


def _known(case: _Case) -> None:
    if case.info is None or case.info.dtype is None or case.nbytes:
        return
    if not case.allow_unspecified:
        raise case.refuse(f"has dimensions {list(case.dims)}; this execution needs all of them known")
    if not case.written and not isinstance(case.pool, BufferToken):  # which knows the dimensions of its contents
        raise case.refuse(f"has dimensions {list(case.dims)}, which are not all known; give them in the request")


def _length(case: _Case) -> None:
    if case.whole:
        return
    if case.location.length % case.steps:
        raise case.refuse(f"has {case.location.length} bytes, which are no {case.steps} equal parts, one for each step")
    if case.info is None or not case.nbytes:
        return
    if case.location.length != case.nbytes * case.steps:
        raise case.refuse(
            f"has {case.location.length} bytes; {type_name(case.operand.type)} of dimensions {list(case.dims)} "
            f"needs {case.nbytes}" + (f" in each of {case.steps} steps" if case.steps > 1 else "")
        )


def _fits_the_image(case: _Case) -> None:
    image = getattr(case.pool, "image", None)
    if image is None:
        return
    if case.info is None or case.info.dtype is None or case.nbytes == 0:
        raise case.refuse("is in an image, whose size is fixed; give all dimensions")
    shape = getattr(image, "known_shape", None)
    if shape is None:  # a format that cannot be read: the execution fails, the request is well-formed
        return
    if case.info.element_size != image.dtype.itemsize or case.nbytes != image.tight_size:
        raise case.refuse(
            f"has {case.nbytes} bytes in elements of {case.info.element_size}; its image is {list(shape)} of "
            f"{image.dtype.itemsize}"
        )


_OMITTED_RULES: tuple[Callable[[_Case], None], ...] = (_nothing_given,)
_RULES: tuple[Callable[[_Case], None], ...] = (
    _in_a_pool,
    _inside_the_pool,
    _with_the_rights,
    _dimensions,
    _known,
    _length,
    _fits_the_image,
)


# -- overlap ---------------------------------------------------------------------------------------------------------


_Region = tuple[Hashable, int, int, str, bool]
"""(object, first byte, end, place, is written)."""


def _region(pool: Any, location: DataLocation, place: str, written: bool) -> _Region:
    """Locate bytes in the file behind a pool, so that two pools on one file are compared rightly."""
    identity: Any = getattr(pool, "identity", None)
    if identity is None:
        return id(pool), location.offset, location.offset + location.length, place, written
    device, inode, base, span = identity
    whole = not getattr(pool, "size", 0)
    start = base + location.offset
    return (device, inode), start, start + (span if whole else location.length), place, written


def _constant_regions(model: Model) -> Iterator[_Region]:
    if not model.pools:
        return
    for subgraph in (model.main, *model.referenced):
        for index, operand in enumerate(subgraph.operands):
            if operand.lifetime == Lifetime.CONSTANT_REFERENCE:
                pool = model.pools[operand.location.pool_index]
                yield _region(pool, operand.location, f"constant operand {index}", False)


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
