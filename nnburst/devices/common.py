"""What local devices share: checks of arguments and the version that they report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NewType, TypeVar

import numpy as np
from msgspec.structs import replace

from .._version import VERSION
from ..errors import GeneralFailure, InvalidArgument, MissedDeadline
from ..memory import undecodable_pools
from ..model import (
    OPERANDS,
    Capabilities,
    DataLocation,
    ExecutionPreference,
    Extension,
    ExtensionOperandType,
    Lifetime,
    Model,
    OperandDesc,
    OperandType,
    Operation,
    PerformanceInfo,
    Priority,
    Subgraph,
    extension_code,
)
from .deadline import deadline_passed
from .interfaces import CompileJob, Device

T = TypeVar("T")
OwnBytes = NewType("OwnBytes", bytes)
"""A model that this process wrote from what it had parsed: the only bytes that an importer gives to a runtime.

Two parsers may read one file as two models, so the file itself is never handed on: what was analysed and what runs
would not be the same. The importer parses once, drops what it does not know, and names the format to the runtime.
"""


@cache
def build_version() -> str:
    """Return what tells one build of the built-in devices from another; results depend on NumPy's too."""
    return f"{VERSION}+numpy{np.__version__}"


def check_preparation(job: CompileJob) -> None:
    """Check what every preparation is asked for.

    Raises:
        InvalidArgument: Preference or priority is unknown.
        MissedDeadline: The deadline has passed.
    """
    if job.preference not in tuple(ExecutionPreference):
        raise InvalidArgument(f"preference {job.preference} is none of {[int(p) for p in ExecutionPreference]}")
    if job.priority not in tuple(Priority):
        raise InvalidArgument(f"priority {job.priority} is none of {[int(p) for p in Priority]}")
    if deadline_passed(job.deadline_ns):
        raise MissedDeadline("the deadline of the preparation has passed; give it more time")


def all_extensions(devices: Sequence[Device]) -> tuple[Extension, ...]:
    """Return the extensions of several devices, each once."""
    found = {extension.name: extension for device in devices for extension in device.get_supported_extensions()}
    return tuple(found.values())


def readable_operations(model: Model) -> tuple[bool, ...]:
    """Say for each operation of the main subgraph whether its constants can be read."""
    bad = undecodable_pools(model.pools)

    def lost(index: int) -> bool:
        operand = model.main.operands[index]
        return operand.lifetime == Lifetime.CONSTANT_REFERENCE and operand.location.pool_index in bad

    return tuple(not bad or not any(map(lost, operation.inputs)) for operation in model.main.operations)


@cache
def cpu_capabilities() -> Capabilities:
    """Return capabilities of the CPU baseline: 1 for every type, sorted, without SUBGRAPH."""
    types = sorted(code for code in OPERANDS if code != OperandType.SUBGRAPH)
    return Capabilities(operand_performance=tuple((code, PerformanceInfo()) for code in types))


def one_operation(
    code: int,
    constants: Sequence[OperandDesc],
    inputs: Sequence[OperandDesc],
    outputs: Sequence[OperandDesc],
    **rest: Any,
) -> Model:
    """Return a model of one operation, which takes constants and then the inputs.

    Args:
        code: Of the operation.
        constants: As they are, each for one consumer.
        inputs: Of the model; what they are there for is said here.
        outputs: Likewise.
        rest: Other fields of the model.
    """
    operands = (
        *(replace(each, number_of_consumers=1) for each in constants),
        *(replace(each, number_of_consumers=1, lifetime=Lifetime.SUBGRAPH_INPUT) for each in inputs),
        *(replace(each, number_of_consumers=0, lifetime=Lifetime.SUBGRAPH_OUTPUT) for each in outputs),
    )
    taken = tuple(range(len(constants) + len(inputs)))
    given = tuple(range(len(taken), len(operands)))
    return Model(Subgraph(operands, (Operation(code, taken, given),), taken[len(constants) :], given), **rest)


def call_by_name(
    name: str, prefix: int, inputs: Sequence[OperandDesc], outputs: Sequence[OperandDesc], **rest: Any
) -> Model:
    """Return a model that calls what an extension has under a name: operation 0, whose first operand has type 0."""
    code, encoded = extension_code(prefix, 0), name.encode()
    named = OperandDesc(code, lifetime=Lifetime.CONSTANT_COPY, location=DataLocation(0, 0, len(encoded)))
    return one_operation(code, [named], inputs, outputs, operand_values=encoded, **rest)


def extension_of_names(name: str, *types: ExtensionOperandType) -> Extension:
    """Return the description of an extension whose models are made by `call_by_name`."""
    return Extension(name, (ExtensionOperandType(0, is_tensor=False, byte_size=0), *types))


def named_in(table: Mapping[str, T], source: str, device: str, what: str) -> T:
    """Return what a device has under a name that `Device.import_model` is asked for.

    Raises:
        InvalidArgument: Nothing.
        GeneralFailure: The source is no name.
    """
    kind, _, name = source.partition(":")
    if kind != "name":
        raise GeneralFailure(f"{device} has {what} by name; it does not import {source!r}")
    if name not in table:
        raise InvalidArgument(f"{device} has the {what} {sorted(table)}, not {name!r}")
    return table[name]
