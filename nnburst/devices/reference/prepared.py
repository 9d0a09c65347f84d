"""A prepared model: private copies of the constants, and plans made from it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ...burst import Kernel
from ...cache import model_fingerprint
from ...memory import BufferTracker, read_constant
from ...model import (
    Array,
    HalVersion,
    Lifetime,
    Match,
    Model,
    OperandDesc,
    Request,
    RunOptions,
    Signature,
    Subgraph,
    operand_info,
    view_operation,
)
from ..local import LocalModel
from .graph import PreparedSubgraph
from .program import Program
from .serial import Compiled, pack, unpack

_M = TypeVar("_M", bound="ReferencePreparedModel")


class ReferencePreparedModel(LocalModel):
    """Everything about a model that does not depend on a request.

    Constants are copied: the client may release or overwrite its pools once preparation returned. What kernels derive
    from constants (transposed filters, tables) is kept and shared by all plans.
    """

    def __init__(self, compiled: Compiled, tracker: BufferTracker | None = None) -> None:
        """Use `compile` or `restore`."""
        super().__init__(compiled.model, BufferTracker() if tracker is None else tracker)
        self.constants = dict(compiled.constants)
        self.matches = compiled.matches
        self._derived: dict[Hashable, Any] = dict(compiled.derived)
        self._referenced: list[PreparedSubgraph] = []
        for subgraph in self.model.referenced:
            kept: dict[Hashable, Any] = {}
            constants, matches = _constants(self.model, subgraph), _matches(subgraph)
            self._referenced.append(
                PreparedSubgraph(subgraph, constants, matches, partial(_kept, kept), self._referenced)
            )

    @classmethod
    def compile(cls: type[_M], model: Model, tracker: BufferTracker | None = None) -> _M:
        """Do everything about a valid model that can be done before a request is known.

        Constants are copied and operations matched with their signatures. What operations make from constants
        (transposed, decoded and centred weights, tables) is made with the first request, and kept.
        """
        return cls(Compiled(model, _constants(model, model.main), {}, _matches(model.main)), tracker)

    @classmethod
    def restore(cls: type[_M], model: memoryview, data: memoryview, tracker: BufferTracker | None = None) -> _M:
        """Make a prepared model from verified cache files (else `CacheRejected`); arrays are views of them."""
        return cls(unpack(model, data), tracker)

    def packed(self) -> tuple[tuple[bytes], tuple[bytes]] | None:
        """Return the contents of the model file and the data file, or None if this model cannot be cached."""
        files = pack(self.model, self.matches, self.constants, dict(self._derived))
        return None if files is None else ((files[0],), (files[1],))

    def fingerprint(self) -> bytes:
        """Return the fingerprint of the compiled contents; not of a restored model, which has no pools any more."""
        return model_fingerprint(self.model, copies=self.constants)

    @property
    def transformations(self) -> int:
        """How many arrays were made from constants."""
        return len(self._derived)

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for the key the first time. Two threads may both make it; one result is kept."""
        return _kept(self._derived, key, make)

    @property
    def graph(self) -> PreparedSubgraph:
        """The main subgraph, to be bound."""
        return PreparedSubgraph(self.model.main, self.constants, self.matches, self.derived, self._referenced)

    def bind(self, request: Request, options: RunOptions) -> Kernel:
        return Program(self.graph, request, options)

    def close(self) -> None:
        super().close()
        self.constants = {}
        self._derived = {}


def _kept(kept: dict[Hashable, Any], key: Hashable, make: Callable[[], Any]) -> Any:
    """Return the value of a key, made if it is not there. Two threads may both make it; one result is kept."""
    return kept[key] if key in kept else kept.setdefault(key, make())


def _constants(model: Model, subgraph: Subgraph) -> dict[int, Array]:
    return {
        index: _constant(model, operand)
        for index, operand in enumerate(subgraph.operands)
        if operand.lifetime in (Lifetime.CONSTANT_COPY, Lifetime.CONSTANT_REFERENCE)
    }


def _matches(subgraph: Subgraph) -> tuple[tuple[Signature, Match], ...]:
    views = (view_operation(operation, subgraph.operands, HalVersion.V1_3) for operation in subgraph.operations)
    return tuple((view.row, view.match) for view in views if view is not None)


def _constant(model: Model, operand: OperandDesc) -> Array:
    """Return a private, read-only copy of a constant's value."""
    location, dtype = operand.location, operand_info(operand.type).dtype
    if operand.lifetime == Lifetime.CONSTANT_COPY:
        raw = model.operand_values[location.offset : location.offset + location.length]
        value = np.frombuffer(raw, dtype).reshape(operand.dimensions).copy()
    else:
        pool = model.pools[location.pool_index]
        value = read_constant(pool, np.uint8 if dtype is None else dtype, operand.dimensions, location.offset)
    value.flags.writeable = False
    return value
