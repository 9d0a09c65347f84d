"""Functions that local devices share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NewType, TypeVar

import numpy as np
from msgspec.structs import replace

from .._version import VERSION
from ..errors import DeviceUnavailable, GeneralFailure, InvalidArgument, MissedDeadline
from ..memory.staging import undecodable_pools
from ..model.extensions import Extension, ExtensionOperandType, extension_code
from ..model.operand_types import OPERANDS, OperandType, operand_info
from ..model.operation_types import FusedActivation
from ..model.types import (
    Array,
    Capabilities,
    DataLocation,
    ExecutionPreference,
    Lifetime,
    Model,
    OperandDesc,
    Operation,
    PerformanceInfo,
    Priority,
    Subgraph,
)
from .deadline import deadline_passed
from .interfaces import CompileJob, Device

T = TypeVar("T")
OwnBytes = NewType("OwnBytes", bytes)
"""Bytes of a model that this process has parsed and serialised again. A runtime gets only such bytes.

Two parsers may understand one file differently. If the runtime got the file itself, it could run a model that the
importer has not checked. So the importer drops unknown fields, and tells the runtime the format, which the runtime
would otherwise guess.
"""


@cache
def build_version() -> str:
    """Return the version of the built-in devices. It includes NumPy's version, since results depend on NumPy."""
    return f"{VERSION}+numpy{np.__version__}"


def check_preparation(job: CompileJob) -> None:
    """Raise `InvalidArgument` if the preference or priority is unknown, and `MissedDeadline` after the deadline."""
    if job.preference not in tuple(ExecutionPreference):
        raise InvalidArgument(f"preference {job.preference} is none of {[int(p) for p in ExecutionPreference]}")
    if job.priority not in tuple(Priority):
        raise InvalidArgument(f"priority {job.priority} is none of {[int(p) for p in Priority]}")
    if deadline_passed(job.deadline_ns):
        raise MissedDeadline("the deadline of the preparation has passed; give it more time")


def all_extensions(devices: Sequence[Device]) -> tuple[Extension, ...]:
    found = {extension.name: extension for device in devices for extension in device.get_supported_extensions()}
    return tuple(found.values())


def readable_operations(model: Model) -> tuple[bool, ...]:
    """Return, for each operation of the main subgraph, True if its constants can be read."""
    bad = undecodable_pools(model.pools)

    def lost(index: int) -> bool:
        operand = model.main.operands[index]
        return operand.lifetime == Lifetime.CONSTANT_REFERENCE and operand.location.pool_index in bad

    return tuple(not bad or not any(map(lost, operation.inputs)) for operation in model.main.operations)


@cache
def capabilities_of(exec_time: float = 1.0, operation_time: float = 0.0) -> Capabilities:
    """Return capabilities with the same cost for all operand types but SUBGRAPH; see `Capabilities` for the units."""
    each = PerformanceInfo(exec_time)
    types = sorted(code for code in OPERANDS if code != OperandType.SUBGRAPH)
    return Capabilities(each, each, tuple((code, each) for code in types), operation_time=operation_time)


def one_operation(
    code: int,
    constants: Sequence[OperandDesc],
    inputs: Sequence[OperandDesc],
    outputs: Sequence[OperandDesc],
    **rest: Any,
) -> Model:
    """Return a model of one operation. The operation's inputs are the constants, then the model's inputs.

    Args:
        constants: Constant operands; this function sets their number of consumers to 1.
        inputs, outputs: Operands that become the model's inputs and outputs; this function sets their lifetime.
        rest: Other fields of the `Model`.
    """
    operands = (
        *(replace(each, number_of_consumers=1) for each in constants),
        *(replace(each, number_of_consumers=1, lifetime=Lifetime.SUBGRAPH_INPUT) for each in inputs),
        *(replace(each, number_of_consumers=0, lifetime=Lifetime.SUBGRAPH_OUTPUT) for each in outputs),
    )
    reads = tuple(range(len(constants) + len(inputs)))
    writes = tuple(range(len(reads), len(operands)))
    return Model(Subgraph(operands, (Operation(code, reads, writes),), reads[len(constants) :], writes), **rest)


def device_of(devices: Iterable[Device], name: str) -> Device:
    """Return the device of that name. Raises `DeviceUnavailable` if there is none."""
    devices = tuple(devices)
    for device in devices:
        if device.name == name:
            return device
    known = ", ".join(device.name for device in devices)
    raise DeviceUnavailable(f"no device {name!r} in this service; it has: {known}")


def call_by_name(
    name: str, prefix: int, inputs: Sequence[OperandDesc], outputs: Sequence[OperandDesc], **rest: Any
) -> Model:
    """Return a model of one operation, number 0 of an extension. The operation's first input is the text `name`.

    Args:
        prefix: The model's prefix for the extension.
    """
    code, encoded = extension_code(prefix, 0), name.encode()
    named = OperandDesc(code, lifetime=Lifetime.CONSTANT_COPY, location=DataLocation(0, 0, len(encoded)))
    return one_operation(code, [named], inputs, outputs, operand_values=encoded, **rest)


def extension_of_names(name: str, *types: ExtensionOperandType) -> Extension:
    return Extension(name, (ExtensionOperandType(0, is_tensor=False, byte_size=0), *types))


def find_named(table: Mapping[str, T], source: str, device: str, what: str) -> T:
    """Return the entry of `table` that `source` names. `source` is ``"name:"`` and the entry's name.

    Args:
        device: The device's name, for error messages.
        what: Word for the entries in error messages, in the plural.
    """
    kind, _, name = source.partition(":")
    if kind != "name":
        raise GeneralFailure(f"{device} has {what} by name; it does not import {source!r}")
    if name not in table:
        raise InvalidArgument(f"{device} has only the {what} {sorted(table)}")
    return table[name]


_LIMITS: dict[int, tuple[float | None, float | None]] = {
    FusedActivation.NONE: (None, None),
    FusedActivation.RELU: (0.0, None),
    FusedActivation.RELU1: (-1.0, 1.0),
    FusedActivation.RELU6: (0.0, 6.0),
}


def round_half_away(values: Array) -> Array:
    rounded: Array = np.trunc(values + np.copysign(0.5, values))
    return rounded


def activation_limits(operand: OperandDesc, code: int) -> tuple[Any, Any]:
    """Return the (lowest, highest) stored value that a fused activation allows; None for no limit.

    A quantised limit is zero point + round(limit / scale), clipped to the range of the type.
    """
    info, (low, high) = operand_info(operand.type), _LIMITS[code]
    if info.dtype is None or not info.is_quantised:
        kind = np.float32 if info.is_float else np.int32
        return (None if low is None else kind(low), None if high is None else kind(high))
    bounds = np.iinfo(info.dtype)

    def stored(limit: float | None, otherwise: int) -> float:
        if limit is None:
            return float(otherwise)
        steps = float(round_half_away(np.array(limit / operand.scale)))
        return float(min(max(operand.zero_point + steps, bounds.min), bounds.max))

    return stored(low, bounds.min), stored(high, bounds.max)
