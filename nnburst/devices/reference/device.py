"""The device that runs NNAPI operations in NumPy."""

from __future__ import annotations

from collections.abc import Iterator

from ...cache.device_cache import VerifiedEntry
from ...cache.reasons import SaveResult
from ...model.operand_types import OperandType, is_extension
from ...model.operation_types import operation_name
from ...model.types import Model, Operation
from ..interfaces import CacheFiles
from ..local import LocalDevice, LocalModel
from .graph import CONTROL_FLOW
from .kernels import KERNELS
from .prepared import ReferencePreparedModel

RUNS = frozenset((*KERNELS, *CONTROL_FLOW))
"""The operations that the device runs."""


class ReferenceDevice(LocalDevice):
    """A device that runs NNAPI operations in NumPy, for correctness rather than speed."""

    name = "nnburst-reference"
    cache_format = 5

    def why_not(self, model: Model, operation: Operation) -> str:
        """Return why the device cannot run an operation, including its subgraphs; empty if the device can run it."""
        if is_extension(operation.type):
            names = {prefix: name for name, prefix in model.extension_name_to_prefix.items()}
            return f"the device does not have the extension {names.get(operation.type >> 16)}"
        if operation.type not in RUNS:
            return "it is not built"
        missing = {inner.type for inner in _reachable_operations(model, operation)} - RUNS
        return f"{', '.join(sorted(map(operation_name, missing)))} in a subgraph of it is not built" if missing else ""

    def compile(self, model: Model) -> ReferencePreparedModel:
        return ReferencePreparedModel(model, self._tracker)

    def save(self, prepared: LocalModel, files: CacheFiles) -> SaveResult:
        """Save the model and its constants; see `LocalDevice.save`."""
        assert isinstance(prepared, ReferencePreparedModel)
        return self._cache.save(files, prepared.pack, compiled=prepared.fingerprint)

    def restore(self, cache_key: bytes, entry: VerifiedEntry) -> ReferencePreparedModel:
        """Restore a model without validation; see `LocalDevice.restore`."""
        return ReferencePreparedModel.restore(entry.model[0], entry.data[0], self._tracker)


def _reachable_operations(model: Model, operation: Operation) -> Iterator[Operation]:
    seen, todo = set(), [(model.main, operation)]
    while todo:
        subgraph, outer = todo.pop()
        for operand in map(subgraph.operands.__getitem__, outer.inputs):
            target = operand.location.offset
            if operand.type == OperandType.SUBGRAPH and target not in seen:
                seen.add(target)
                yield from model.referenced[target].operations
                todo += [(model.referenced[target], inner) for inner in model.referenced[target].operations]
