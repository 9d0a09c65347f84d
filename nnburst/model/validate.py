"""Validation of models by rules V1 to V15."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter

from ..errors import InvalidArgument
from .control_flow import check_control_flow
from .dimensions import check_dimensions
from .operand_types import BASE_MAXIMUM, OPERANDS, HalVersion, OperandType, is_extension, operand_nbytes, type_name
from .operation_types import OperationType, operation_name, operation_since
from .operations import view_operation
from .types import (
    DataLocation,
    Lifetime,
    MemoryLike,
    Model,
    OperandDesc,
    Operation,
    Subgraph,
    SymmPerChannelQuantParams,
)

POOL_KINDS = {
    "ashmem": HalVersion.V1_0,
    "mmap_fd": HalVersion.V1_0,
    "posix_shm": HalVersion.V1_0,
    "hardware_buffer_blob": HalVersion.V1_2,
    "hardware_buffer": HalVersion.V1_2,
}
"""The first HAL version that allows each kind of pool (V14)."""

_CONSTANT = (Lifetime.CONSTANT_COPY, Lifetime.CONSTANT_REFERENCE)
_WRITTEN = (Lifetime.TEMPORARY_VARIABLE, Lifetime.SUBGRAPH_OUTPUT)
_EXEMPT = (OperandType.OEM, OperandType.TENSOR_OEM_BYTE)
_NOWHERE = DataLocation()


def validate_model(model: Model, version: HalVersion = HalVersion.V1_3) -> None:
    """Check a model. Each device checks a model before all other work on it.

    Args:
        version: HAL version of the model. A feature of a later version is an error (REQ-MODEL-044).

    Raises:
        InvalidArgument: A rule is violated. The message names the rule and the operand or operation.
    """
    if not model.main.operations or not model.main.operands:
        raise InvalidArgument("V1: the main subgraph has no operation or no operand")
    if model.referenced and version < HalVersion.V1_3:
        raise InvalidArgument(f"V5: referenced subgraphs need HAL 1.3, the model says {version.name}")
    _check_pools(model, version)
    _check_extensions(model, version)
    for name, subgraph in _subgraphs(model):
        _check_operands(model, subgraph, name, version)
        _check_operations(model, subgraph, name, version)
        _check_lists(subgraph, name)
        _check_data_flow(subgraph, name)
    _check_references(model)
    for name, subgraph in _subgraphs(model):
        for position, operation in enumerate(subgraph.operations):
            if operation.type in (OperationType.IF, OperationType.WHILE):
                with _prefix_errors(f"V16: operation {position} ({operation_name(operation.type)}) of {name}"):
                    check_control_flow(model, subgraph, operation)
    _check_names(model)


@contextlib.contextmanager
def _prefix_errors(place: str) -> Iterator[None]:
    """Put `place` in front of the message of an `InvalidArgument` from the with block."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{place}: {error}") from None


def _subgraphs(model: Model) -> Iterator[tuple[str, Subgraph]]:
    yield "the main subgraph", model.main
    for i, subgraph in enumerate(model.referenced):
        yield f"referenced subgraph {i}", subgraph


def _check_pools(model: Model, version: HalVersion) -> None:
    for i, pool in enumerate(model.pools):
        if not isinstance(pool, MemoryLike):
            raise InvalidArgument(f"V14: expected a Memory as pool {i}")
        since = POOL_KINDS.get(pool.kind)
        if since is None or version < since:
            raise InvalidArgument(f"V14: pool {i} has kind {pool.kind!r}, which a model may not use")


def _check_extensions(model: Model, version: HalVersion) -> None:
    prefixes = list(model.extension_name_to_prefix.values())
    if prefixes and version < HalVersion.V1_2:
        raise InvalidArgument("V2: extensions need HAL 1.2")
    if len(set(prefixes)) != len(prefixes) or any(not 0 < prefix <= BASE_MAXIMUM for prefix in prefixes):
        raise InvalidArgument(f"V2: extension prefixes {prefixes} must be different and in 1 … 65535")


def _check_names(model: Model) -> None:
    for what, names, indexes in (
        ("input", model.input_names, model.main.input_indexes),
        ("output", model.output_names, model.main.output_indexes),
    ):
        if names and len(names) != len(indexes):
            raise InvalidArgument(f"{what}_names has {len(names)} entries for {len(indexes)} {what}s")


def _check_extension_code(model: Model, code: int, version: HalVersion) -> None:
    if version < HalVersion.V1_2:
        raise InvalidArgument("extensions need HAL 1.2")
    if code >> 16 not in model.extension_name_to_prefix.values():
        raise InvalidArgument(f"no extension of the model has prefix {code >> 16}")


def _check_operands(model: Model, subgraph: Subgraph, name: str, version: HalVersion) -> None:
    consumers = [0] * len(subgraph.operands)
    for operation in subgraph.operations:
        for index in operation.inputs:
            if 0 <= index < len(consumers):
                consumers[index] += 1
    for index, operand in enumerate(subgraph.operands):
        place = f"operand {index} ({type_name(operand.type)}) of {name}"
        with _prefix_errors(f"V2: {place}"):
            if is_extension(operand.type):
                _check_extension_code(model, operand.type, version)
            check_operand(operand, version)
        with _prefix_errors(f"V3, V4: {place}"):
            _check_location(model, operand)
        if operand.number_of_consumers != consumers[index]:
            raise InvalidArgument(
                f"V13: {place} says {operand.number_of_consumers} consumers, but {consumers[index]} inputs use it"
            )


def check_operand(operand: OperandDesc, version: HalVersion = HalVersion.V1_3) -> None:
    """Check type, rank, size, scale, zero point and extra parameters of an operand (rule V2)."""
    check_dimensions(operand.dimensions)
    if is_extension(operand.type):
        if operand.scale != 0 or operand.zero_point != 0:
            raise InvalidArgument("an extension operand has scale 0 and zero point 0")
        if not isinstance(operand.extra_params, bytes | None):
            raise InvalidArgument("extra parameters of an extension operand are bytes or nothing")
        return
    info = OPERANDS.get(operand.type)
    if info is None or version < info.since:
        raise InvalidArgument(f"the type is not known in HAL {version.name}")
    if info.is_scalar and operand.dimensions:
        raise InvalidArgument(f"a scalar has no dimensions, not {list(operand.dimensions)}")
    if not info.is_scalar and not operand.dimensions and operand.lifetime not in (*_CONSTANT, Lifetime.NO_VALUE):
        if version < HalVersion.V1_2:
            raise InvalidArgument("an unknown rank needs HAL 1.2")
    operand_nbytes(operand.type, operand.dimensions)
    _check_quantisation(operand)


_SCALE_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "zero": (lambda scale: scale == 0, "0"),
    "non-negative": (lambda scale: scale >= 0, "0 or positive"),
    "positive": (lambda scale: scale > 0, "positive"),
    "any": (lambda scale: True, "anything"),
}


def _check_quantisation(operand: OperandDesc) -> None:
    info = OPERANDS[operand.type]
    allowed, wanted = _SCALE_RULES[info.scale]
    if not math.isfinite(operand.scale) or not allowed(operand.scale):
        raise InvalidArgument(f"scale is {operand.scale}; it must be {wanted}")
    if info.zero_points is not None and not info.zero_points[0] <= operand.zero_point <= info.zero_points[1]:
        least, most = info.zero_points
        raise InvalidArgument(f"zero point is {operand.zero_point}; it must be in {least} … {most}")
    if operand.type != OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        if operand.extra_params is not None:
            raise InvalidArgument("extra parameters are for per-channel and extension types only")
        return
    params = operand.extra_params
    if not isinstance(params, SymmPerChannelQuantParams):
        raise InvalidArgument("a per-channel operand needs SymmPerChannelQuantParams as extra parameters")
    dims = operand.dimensions
    if not 0 <= params.channel_dim < len(dims):
        raise InvalidArgument(f"channel dimension {params.channel_dim} is not below the rank, {len(dims)}")
    if len(params.scales) != dims[params.channel_dim] or not params.scales:
        raise InvalidArgument(f"{len(params.scales)} scales for {dims[params.channel_dim]} channels")
    if not all(scale > 0 and math.isfinite(scale) for scale in params.scales):
        raise InvalidArgument("every channel scale must be positive")


def _check_location(model: Model, operand: OperandDesc) -> None:
    location = operand.location
    if (operand.type == OperandType.SUBGRAPH) != (operand.lifetime == Lifetime.SUBGRAPH):
        raise InvalidArgument("V5: type SUBGRAPH and lifetime SUBGRAPH go together")
    if min(location.pool_index, location.offset, location.length) < 0:
        raise InvalidArgument(f"{location} has a negative number")
    if operand.lifetime in _CONSTANT:
        _check_constant(model, operand)
    elif operand.lifetime == Lifetime.SUBGRAPH:
        if location.pool_index or location.length or location.offset >= len(model.referenced):
            raise InvalidArgument(f"{location} must name one of {len(model.referenced)} subgraphs by its offset")
    elif operand.lifetime not in tuple(Lifetime):
        raise InvalidArgument(f"unknown lifetime {operand.lifetime}")
    elif location != _NOWHERE:
        raise InvalidArgument(f"{location} of an operand that is not a constant must be all 0")


def _check_constant(model: Model, operand: OperandDesc) -> None:
    location, copied = operand.location, operand.lifetime == Lifetime.CONSTANT_COPY
    pools = 1 if copied else len(model.pools)
    if location.pool_index >= pools:
        raise InvalidArgument(f"pool {location.pool_index} does not exist")
    available = len(model.operand_values) if copied else model.pools[location.pool_index].size
    if location.offset + location.length > available:
        raise InvalidArgument(f"{location} ends beyond the {available} bytes there are")
    if not copied and not getattr(model.pools[location.pool_index], "prot", 1) & 1:
        raise InvalidArgument(f"pool {location.pool_index} of constants was shared without the right to read it (1)")
    if is_extension(operand.type) or operand.type in _EXEMPT:
        return
    size = operand_nbytes(operand.type, operand.dimensions)
    if size == 0:
        raise InvalidArgument(f"a constant needs a rank and dimensions above 0, not {list(operand.dimensions)}")
    if location.length != size:
        raise InvalidArgument(f"its value has {location.length} bytes; type and dimensions need {size}")


def _check_operations(model: Model, subgraph: Subgraph, name: str, version: HalVersion) -> None:
    for position, operation in enumerate(subgraph.operations):
        place = f"operation {position} ({operation_name(operation.type)}) of {name}"
        with _prefix_errors(f"V6: {place}"):
            if is_extension(operation.type):
                _check_extension_code(model, operation.type, version)
            elif operation.type not in tuple(OperationType):
                raise InvalidArgument("there is no such operation")
            elif version < operation_since(OperationType(operation.type)):
                raise InvalidArgument(f"it is not known in HAL {version.name}")
        _check_indexes(operation, subgraph, place)
        with _prefix_errors(f"V8: {place}"):
            view = view_operation(operation, subgraph.operands, version)
            if view is not None:
                view.check()


def _check_indexes(operation: Operation, subgraph: Subgraph, place: str) -> None:
    for index in (*operation.inputs, *operation.outputs):
        if not 0 <= index < len(subgraph.operands):
            raise InvalidArgument(f"V7: {place} uses operand {index} of {len(subgraph.operands)}")
    for index in operation.outputs:
        if subgraph.operands[index].lifetime not in _WRITTEN:
            raise InvalidArgument(
                f"V9: {place} writes operand {index}, which is neither TEMPORARY_VARIABLE nor SUBGRAPH_OUTPUT"
            )


def _check_lists(subgraph: Subgraph, name: str) -> None:
    for what, indexes, lifetime in (
        ("input", subgraph.input_indexes, Lifetime.SUBGRAPH_INPUT),
        ("output", subgraph.output_indexes, Lifetime.SUBGRAPH_OUTPUT),
    ):
        if len(set(indexes)) != len(indexes):
            raise InvalidArgument(f"V10: the {what} list of {name} has duplicates")
        marked = {i for i, operand in enumerate(subgraph.operands) if operand.lifetime == lifetime}
        if wrong := marked.symmetric_difference(indexes):
            first = min(wrong)
            problem = "is not in the list" if first in marked else "has another lifetime or does not exist"
            raise InvalidArgument(
                f"V10: the {what} list of {name} must be exactly the operands with lifetime {lifetime.name}, but"
                f" operand {first} {problem}"
            )


def _check_data_flow(subgraph: Subgraph, name: str) -> None:
    written: set[int] = set()
    for position, operation in enumerate(subgraph.operations):
        place = f"operation {position} ({operation_name(operation.type)}) of {name}"
        for index in operation.inputs:
            if subgraph.operands[index].lifetime in _WRITTEN and index not in written:
                raise InvalidArgument(
                    f"V11: {place} reads operand {index} before an operation writes it; set a value or identify it as"
                    " an input, if none does"
                )
        for index in operation.outputs:
            if index in written:
                raise InvalidArgument(f"V12: {place} writes operand {index}, which is already written")
            written.add(index)
    for index, operand in enumerate(subgraph.operands):
        if operand.lifetime in _WRITTEN and index not in written:
            raise InvalidArgument(
                f"V12: operand {index} ({type_name(operand.type)}) of {name} has no value, is no input, and no"
                " operation writes it; set a value or identify it as an input"
            )


def _check_references(model: Model) -> None:
    """Check that no subgraph refers to itself, directly or not (rule V15)."""
    edges = {i: _referenced_by(subgraph) for i, subgraph in enumerate(model.referenced)}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError:
        raise InvalidArgument("V15: a referenced subgraph refers to itself, directly or through others") from None


def _referenced_by(subgraph: Subgraph) -> list[int]:
    return [operand.location.offset for operand in subgraph.operands if operand.lifetime == Lifetime.SUBGRAPH]
