"""What local devices share: checks of arguments and the version that they report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NewType

import numpy as np

from .._version import VERSION
from ..errors import InvalidArgument, MissedDeadline
from ..memory import undecodable_pools
from ..model import (
    OPERANDS,
    Capabilities,
    ExecutionPreference,
    Extension,
    Lifetime,
    Model,
    OperandType,
    PerformanceInfo,
    Priority,
)
from .deadline import deadline_passed
from .interfaces import CompileJob, Device

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
