"""Validation of requests."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgument
from .dimensions import check_dimensions, combine_dimensions
from .operand_types import OPERANDS, OperandInfo, is_extension, operand_nbytes, type_name
from .types import BufferId, DataLocation, Lifetime, Model, OperandDesc, Request, RequestArgument, Steps

_NOWHERE = DataLocation()
_READ, _WRITE = 1, 2


def validate_request(model: Model, request: Request, allow_unspecified_output: bool = True) -> None:
    """Check a request against its model before the run.

    Python's integers are unbounded, so sizes and offsets cannot overflow. An argument uses a strided image or a
    driver-managed buffer as a whole: its offset and length must be 0.

    Args:
        allow_unspecified_output: False if the request must give all output dimensions, as for a fenced execution.

    Raises:
        InvalidArgument: A rule is violated. The message names the argument and the remedy.
    """
    regions: list[_Region] = []
    steps = request.steps
    if steps is not None:
        _check_steps(model, request, steps)
    main = model.main
    states = (set(), set()) if steps is None else ({i for _, i in steps.state}, {o for o, _ in steps.state})
    for what, arguments, indexes, names, state in (
        ("input", request.inputs, main.input_indexes, model.input_names, states[0]),
        ("output", request.outputs, main.output_indexes, model.output_names, states[1]),
    ):
        if len(arguments) != len(indexes):
            raise InvalidArgument(f"the request has {len(arguments)} {what}s; the model has {len(indexes)}")
        written = what == "output"
        closed = steps is not None or (written and not allow_unspecified_output)
        for position, (argument, index) in enumerate(zip(arguments, indexes, strict=True)):
            place = f"{what} {position}" + (f" ({names[position]!r})" if names else "")
            case = _Case(
                place, written, model, main.operands[index], argument, request.pools, steps, position in state, closed
            )
            case.check()
            if not argument.has_no_value and not isinstance(case.pool, BufferId):  # The device checks buffers.
                regions.append(_region(case.pool, argument.location, place, written))
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
        pair = request.outputs[output], request.inputs[target]
        if any(argument.has_no_value for argument in pair):
            raise InvalidArgument(f"state {output} → {target} is omitted; it needs a buffer of the device at both ends")
        operands = main.operands[main.output_indexes[output]], main.operands[main.input_indexes[target]]
        dims = [combine_dimensions(each.dimensions, own.dimensions) for each, own in zip(operands, pair, strict=True)]
        if operands[0].meaning != operands[1].meaning or dims[0] != dims[1]:
            raise InvalidArgument(f"state {output} → {target}: type, shape or quantisation differ")


@dataclass
class _Case:
    """One argument during its check. `_dimensions` merges the model's and the request's dimensions into `dims`."""

    place: str
    written: bool
    model: Model
    operand: OperandDesc
    argument: RequestArgument
    pools: tuple[Any, ...]
    steps: Steps | None
    is_state: bool
    """True if `Steps.state` names the argument."""
    closed: bool
    """True if all dimensions must be known before the run."""
    dims: tuple[int, ...] = ()

    @property
    def info(self) -> OperandInfo | None:
        """The properties of the operand type; None for an extension type, which only the device knows."""
        return OPERANDS.get(self.operand.type)

    @property
    def location(self) -> DataLocation:
        return self.argument.location

    @property
    def pool(self) -> Any:
        return self.pools[self.location.pool_index]

    @property
    def whole(self) -> bool:
        return not getattr(self.pool, "size", 0)

    @property
    def may_be_empty(self) -> bool:
        """True if 0 can be a real size. In models with NNAPI operations, 0 is always an unknown size."""
        return not self.written and all(is_extension(operation.type) for operation in self.model.main.operations)

    @property
    def nbytes(self) -> int:
        return operand_nbytes(self.operand.type, self.dims)

    def refuse(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self.place} {why}")

    def check(self) -> None:
        if self.argument.has_no_value:
            self._check_no_value()
            return
        self._check_pool()
        self._inside_the_pool()
        self._check_rights()
        self._dimensions()
        self._known()
        self._length()
        self._fits_the_image()

    def _check_no_value(self) -> None:
        dims = self.argument.dimensions
        if self.location != _NOWHERE or (dims and not self.may_be_empty):
            raise self.refuse("is omitted (has_no_value) but has a location or dimensions")
        if dims:
            self._dimensions()
            if 0 not in dims:
                raise self.refuse(f"has no bytes, but {math.prod(dims)} elements of dimensions {list(dims)}")

    def _check_pool(self) -> None:
        if not 0 <= self.location.pool_index < len(self.pools):
            raise self.refuse(f"is in pool {self.location.pool_index}; the request has {len(self.pools)} pools")
        if isinstance(self.pool, Steps):
            raise self.refuse(f"is in pool {self.location.pool_index}, which is no memory but a number of steps")

    def _inside_the_pool(self) -> None:
        location = self.location
        if isinstance(self.pool, BufferId) and self.pool.id == 0:
            raise self.refuse("is in a buffer with id 0, which no buffer has")
        if self.steps is not None and self.is_state != isinstance(self.pool, BufferId):
            raise self.refuse("is a state of steps, or lies in a buffer, but not both; the two go together")
        if self.whole:
            if self.steps is not None and not self.is_state:
                raise self.refuse("is in an image, which has no room for several steps")
            if location.offset or location.length:
                raise self.refuse("is in a pool that is used as a whole; offset and length must be 0")
            return
        if location.offset < 0 or location.length < 0 or location.offset + location.length > self.pool.size:
            raise self.refuse(f"ends at byte {location.offset + location.length} of a pool of {self.pool.size} bytes")
        if location.length == 0:
            raise self.refuse("has no bytes; give its size, or at least 1 for an output of unknown size")

    def _check_rights(self) -> None:
        """Check the access rights to the memory. An access without them would crash the service."""
        granted, needed = getattr(self.pool, "prot", _READ | _WRITE), _READ | _WRITE if self.written else _READ
        if needed & ~granted:
            raise self.refuse(f"needs rights {needed} (1 read, 2 write), but its memory was shared with {granted}")

    def _dimensions(self) -> None:
        dims = self.argument.dimensions
        try:
            check_dimensions(dims)
        except InvalidArgument as error:
            raise self.refuse(f"cannot have its dimensions: {error}") from None
        if not self.written and not self.argument.has_no_value and 0 in dims:
            raise self.refuse(f"is given dimensions {list(dims)}; a request knows all of an input's")
        if self.info is None:
            return
        if self.info.is_scalar and dims:
            raise self.refuse(f"is a scalar but the request gives it dimensions {list(dims)}")
        try:
            self.dims = combine_dimensions(self.operand.dimensions, dims)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.place}: the request contradicts the model: {error}") from None

    def _known(self) -> None:
        if self.info is None or self.info.dtype is None or self.nbytes:
            return
        if self.closed:
            raise self.refuse(f"has dimensions {list(self.dims)}; this execution needs all of them known")
        if not self.written and not isinstance(self.pool, BufferId):  # A buffer has its own dimensions.
            raise self.refuse(f"has dimensions {list(self.dims)}, which are not all known; give them in the request")

    def _length(self) -> None:
        if self.whole:
            return
        count = 1 if self.steps is None else self.steps.count
        if self.location.length % count:
            raise self.refuse(f"has {self.location.length} bytes, which are no {count} equal parts, one for each step")
        if self.info is None or not self.nbytes:
            return
        if self.location.length != self.nbytes * count:
            raise self.refuse(
                f"has {self.location.length} bytes; {type_name(self.operand.type)} of dimensions {list(self.dims)} "
                f"needs {self.nbytes}" + (f" in each of {count} steps" if count > 1 else "")
            )

    def _fits_the_image(self) -> None:
        image = getattr(self.pool, "image", None)
        if image is None:
            return
        if self.info is None or self.info.dtype is None or self.nbytes == 0:
            raise self.refuse("is in an image, whose size is fixed; give all dimensions")
        if self.info.element_size != image.dtype.itemsize or self.nbytes != image.tight_size:
            raise self.refuse(
                f"has {self.nbytes} bytes in elements of {self.info.element_size}; its image is {list(image.shape)} of "
                f"{image.dtype.itemsize}"
            )


# -- overlap ---------------------------------------------------------------------------------------------------------


_Region = tuple[Hashable, int, int, str, bool]
"""The bytes of an argument: (memory, first byte, end, name for error messages, True if written)."""


def _region(pool: Any, location: DataLocation, place: str, written: bool) -> _Region:
    """Return a location as a region of the file that is behind the pool. Several pools can share a file."""
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
    """Check that no output overlaps another region. Inputs and constants can overlap each other.

    The regions are sorted by first byte. An output must not start before the largest end of all earlier regions. Any
    other region must not start before the largest end of all earlier outputs.
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
