"""The device itself: what it supports and how it prepares."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import GeneralFailure, MissedDeadline
from ...memory import BufferTracker, check_pools
from ...model import (
    BufferDesc,
    BufferRole,
    Capabilities,
    ExecutionPreference,
    Model,
    Operation,
    Priority,
    operation_name,
    validate_model,
)
from .._buffers import LocalBuffer, allocate_buffer
from .._common import build_version, check_preparation, cpu_capabilities, deadline_passed, readable_operations
from .._interfaces import Device, PreparedModel
from .kernels import KERNELS
from .prepared import ReferencePreparedModel

__all__ = ["ReferenceDevice"]


class ReferenceDevice(Device):
    """NNAPI operations in NumPy. Nothing is faster on purpose than it is right."""

    def __init__(self) -> None:
        self._tracker = BufferTracker()

    @property
    def name(self) -> str:
        """``nnburst-reference``."""
        return "nnburst-reference"

    @property
    def version_string(self) -> str:
        """Version of the package and of NumPy, which decides the last bits of results."""
        return build_version()

    @property
    def capabilities(self) -> Capabilities:
        """The CPU baseline."""
        return cpu_capabilities()

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See `Device.get_supported_operations`."""
        validate_model(model)
        readable = readable_operations(model)
        return tuple(
            _is_supported(operation) and can_read
            for operation, can_read in zip(model.main.operations, readable, strict=True)
        )

    def prepare_model(
        self,
        model: Model,
        preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int = 0,
        model_cache: Sequence[int] = (),
        data_cache: Sequence[int] = (),
        token: bytes = b"",
    ) -> ReferencePreparedModel:
        """Copy the constants and keep the graph; see `Device.prepare_model`."""
        validate_model(model)
        check_preparation(preference, priority, deadline_ns)
        check_pools(model.pools, "model")
        for position, operation in enumerate(model.main.operations):
            if not _is_supported(operation):
                raise GeneralFailure(
                    f"operation {position} ({operation_name(operation.type)}) is not built in {self.name};"
                    " ask get_supported_operations first"
                )
        prepared = ReferencePreparedModel(model, self._tracker)
        if deadline_passed(deadline_ns):
            raise MissedDeadline("the preparation finished after its deadline")
        return prepared

    def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> LocalBuffer:
        """Any base type, also with open dimensions; see `Device.allocate`."""
        return allocate_buffer(self._tracker, desc, prepared_models, input_roles, output_roles)


def _is_supported(operation: Operation) -> bool:
    return operation.type in KERNELS
