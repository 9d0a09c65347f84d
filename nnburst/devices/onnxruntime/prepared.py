"""Prepared models that run ONNX graphs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ...burst.kernel import Kernel
from ...errors import BadState
from ...memory.managed import BufferTracker
from ...model.extensions import extension_prefix
from ...model.running import RunOptions
from ...model.types import Array, Model, Request
from ..elements import open_operand
from ..encoded import Bytes
from ..local import LocalModel
from .batch import Batches
from .capi import InferenceSession
from .graph import Graph
from .importer import EXTENSION_NAME
from .kernel import BoundGraph
from .library import give_memory_back


class Source(Struct, frozen=True):
    """Private copies of a model's files.

    Attributes:
        files: External files by name, in the order of the operands.
        copies: Contents of the model's constants, keyed by operand.
    """

    data: bytes
    files: dict[str, Bytes]
    copies: Mapping[int, Array]


class OnnxPreparedModel(LocalModel):
    """A prepared model that runs a graph.

    Attributes:
        source: The model's files; None after `forget_source`.
    """

    def __init__(self, model: Model, graph: Graph, tracker: BufferTracker, source: Source | None = None) -> None:
        super().__init__(model, tracker)
        self._graph: Graph | None = graph
        self.source = source
        self._batches: Batches | None = None

    @property
    def graph(self) -> Graph:
        """The graph. Raises `BadState` if the model is closed."""
        if self._graph is None:
            raise BadState("the prepared model is closed")
        return self._graph

    def bind(self, request: Request, options: RunOptions) -> Kernel:
        if not self.graph.outputs:  # Nothing uses the results of this part of a model.
            return lambda: None
        return BoundGraph(self.graph, self.model, request, self._ignore_dimensions, self._batches)

    def run_together(self, most: int) -> None:
        """Run requests in batches. Needs the C library, and an unknown first dimension of each argument."""
        if not isinstance(self.graph.session, InferenceSession):
            super().run_together(most)
        self._batches = Batches(self.graph, most)

    def _ignore_dimensions(self, outputs: Collection[int]) -> None:
        """Ignore the dimensions that the file declares for some outputs, after a run has shown that they are wrong."""
        main = self.model.main
        wrong = {main.output_indexes[position] for position in outputs}
        prefix = extension_prefix(self.model, EXTENSION_NAME)
        operands = tuple(
            open_operand(operand, prefix) if index in wrong else operand for index, operand in enumerate(main.operands)
        )
        self.model = replace(self.model, main=replace(main, operands=operands))

    def forget_source(self) -> None:
        self.source = None
        give_memory_back(sum(pool.size for pool in self.model.pools))

    def close(self) -> None:
        super().close()
        self._graph = self._batches = None
