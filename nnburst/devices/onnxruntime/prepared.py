"""A prepared model: a graph, shared with others like it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...burst import Kernel
from ...errors import BadState
from ...memory import BufferTracker
from ...model import Model, Request, RunOptions, extension_prefix
from ..elements import open_operand
from ..local import LocalModel
from .graph import Bytes, Graph
from .importer import EXTENSION_NAME
from .kernel import BoundGraph
from .library import give_memory_back


class Source(Struct, frozen=True):
    """Private copies of a model's files.

    Attributes:
        data: The model file.
        files: Its external files by name, in the order of the operands.
        digest: Of all of them.
    """

    data: bytes
    files: dict[str, Bytes]
    digest: bytes

    def by_operand(self, model: Model) -> dict[int, Bytes]:
        """Return the contents of the constants of the model that refer to the files."""
        contents = (np.frombuffer(self.data, np.uint8), *self.files.values())
        return dict(zip(model.main.operations[0].inputs, contents, strict=False))


class OnnxPreparedModel(LocalModel):
    """A model with a GRAPH operation.

    Attributes:
        source: What it was compiled from, until the device needs it no more.
    """

    def __init__(self, model: Model, graph: Graph, tracker: BufferTracker, source: Source | None = None) -> None:
        super().__init__(model, tracker)
        self._graph: Graph | None = graph
        self.source = source

    @property
    def graph(self) -> Graph:
        """The session and what belongs to it.

        Raises:
            BadState: The model is closed.
        """
        if self._graph is None:
            raise BadState("the prepared model is closed")
        return self._graph

    def bind(self, request: Request, options: RunOptions) -> Kernel:
        """Bind the graph to the arrays of a request."""
        return BoundGraph(self.graph, self.model, request, self._leave_open).kernel

    def _leave_open(self, outputs: Collection[int]) -> None:
        """The file declares outputs with dimensions that they do not have: from now on, only runs tell."""
        main = self.model.main
        wrong = {main.output_indexes[position] for position in outputs}
        prefix = extension_prefix(self.model, EXTENSION_NAME)
        operands = tuple(
            open_operand(operand, prefix) if index in wrong else operand for index, operand in enumerate(main.operands)
        )
        self.model = replace(self.model, main=replace(main, operands=operands))

    def forget_source(self) -> None:
        """Let go of the copies of the files."""
        self.source = None
        give_memory_back(sum(pool.size for pool in self.model.pools))

    def close(self) -> None:
        """Let go of the graph; plans that are bound stay usable."""
        super().close()
        self._graph = None
