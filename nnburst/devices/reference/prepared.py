"""Prepared models of the reference device, and their contents in cache files."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace

from ...burst.kernel import Kernel
from ...cache.names import model_fingerprint
from ...cache.reasons import CacheReason, CacheRejected
from ...memory.managed import BufferTracker
from ...memory.staging import read_constant
from ...model.operand_types import HalVersion, operand_info
from ...model.operation_view import Match, Signature
from ...model.operations import view_operation
from ...model.running import RunOptions
from ...model.types import Array, DataLocation, Lifetime, Model, OperandDesc, Request, Subgraph
from ..local import LocalModel
from .graph import PreparedSubgraph
from .program import Program

_ALIGNMENT = 64
_decoder = msgspec.msgpack.Decoder(Model)


class ReferencePreparedModel(LocalModel):
    """A prepared model, with all results that do not depend on a request.

    Constants are private copies. Arrays derived from constants, such as transposed filters, are made for the first
    request and shared by all requests.

    Attributes:
        graph: The prepared main subgraph.
    """

    def __init__(self, model: Model, tracker: BufferTracker | None = None) -> None:
        super().__init__(model, BufferTracker() if tracker is None else tracker)
        referenced: list[PreparedSubgraph] = []
        self.graph, *rest = (
            PreparedSubgraph(subgraph, _constants(model, subgraph), _matches(subgraph), {}, referenced)
            for subgraph in (model.main, *model.referenced)
        )
        referenced += rest

    @classmethod
    def restore(
        cls, text: memoryview, data: memoryview, tracker: BufferTracker | None = None
    ) -> ReferencePreparedModel:
        """Restore a model, whose constants use the memory of `data`. Raises `CacheRejected` if `text` is malformed."""
        try:
            model = _decoder.decode(text)
            prepared = cls(replace(model, operand_values=data), tracker)
        except (msgspec.MsgspecError, ValueError) as error:
            raise CacheRejected(CacheReason.BAD_CONTENT, f"not a compiled model: {error}") from error
        prepared.model = model
        return prepared

    def pack(self) -> tuple[tuple[bytes], tuple[bytes]] | None:
        """Return the contents of the model file (MessagePack) and of the data file (constants).

        Return None for a model with several subgraphs, which is not cached.
        """
        if self.model.referenced:
            return None
        main, data = self.model.main, bytearray()
        operands = list(main.operands)
        for index, value in self.graph.constants.items():
            data += bytes(-len(data) % _ALIGNMENT)
            location = DataLocation(0, len(data), value.nbytes)
            operands[index] = replace(operands[index], lifetime=Lifetime.CONSTANT_COPY, location=location)
            data += np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        main = replace(main, operands=tuple(operands))
        model = replace(self.model, main=main, operand_values=b"", pools=())
        return (msgspec.msgpack.encode(model),), (bytes(data),)

    def fingerprint(self) -> bytes:
        """Return the fingerprint of the model and its constants. Not for restored models, which lack constants."""
        return model_fingerprint(self.model, copies=self.graph.constants)

    def bind(self, request: Request, options: RunOptions) -> Kernel:
        return Program(self.graph, request, options)

    def close(self) -> None:
        super().close()
        self.graph = replace(self.graph, constants={}, derived={})


def _constants(model: Model, subgraph: Subgraph) -> dict[int, Array]:
    return {
        index: _constant(model, operand)
        for index, operand in enumerate(subgraph.operands)
        if operand.lifetime in (Lifetime.CONSTANT_COPY, Lifetime.CONSTANT_REFERENCE)
    }


def _constant(model: Model, operand: OperandDesc) -> Array:
    """Return a constant as a read-only array, copied if it is in a pool."""
    location, dtype = operand.location, operand_info(operand.type).dtype
    if operand.lifetime == Lifetime.CONSTANT_COPY:
        raw = model.operand_values[location.offset : location.offset + location.length]
        value = np.frombuffer(raw, dtype).reshape(operand.dimensions)
    else:
        pool = model.pools[location.pool_index]
        value = read_constant(pool, np.uint8 if dtype is None else dtype, operand.dimensions, location.offset)
    value.flags.writeable = False
    return value


def _matches(subgraph: Subgraph) -> tuple[tuple[Signature, Match], ...]:
    views = (view_operation(operation, subgraph.operands, HalVersion.V1_3) for operation in subgraph.operations)
    return tuple((view.row, view.match) for view in views if view is not None)
