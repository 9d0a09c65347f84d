"""A prepared model: a graph, shared with others like it, and plans made from it."""

from __future__ import annotations

from ...burst import BoundPlan
from ...cache import SaveResult
from ...errors import BadState
from ...memory import BufferTracker
from ...model import MeasureTiming, Model, Request
from .._common import InnerPlan
from .._planned import PlannedModel
from ._graph import Graph
from ._plan import OnnxPlan

__all__ = ["OnnxPreparedModel"]


class OnnxPreparedModel(PlannedModel):
    """A model with a GRAPH operation."""

    def __init__(self, model: Model, graph: Graph, tracker: BufferTracker) -> None:
        super().__init__(model, tracker)
        self._graph: Graph | None = graph
        self._result: SaveResult | None = None

    @property
    def cache_result(self) -> SaveResult | None:
        """See `PreparedModel.cache_result`."""
        return self._result

    def note_saved(self, result: SaveResult) -> None:
        """Called by the device once, before anybody else has the model."""
        self._result = result

    @property
    def graph(self) -> Graph:
        """The session and what belongs to it.

        Raises:
            BadState: The model is closed.
        """
        if self._graph is None:
            raise BadState("the prepared model is closed")
        return self._graph

    def plan(self, request: Request, measure: MeasureTiming) -> OnnxPlan:
        """Bind the graph to a request; see `PlannedModel.plan`."""
        return OnnxPlan(self, request, measure)

    def shortcut(self, plan: InnerPlan) -> BoundPlan:
        """The call into ONNX Runtime alone, if there is nothing before or after it."""
        direct = plan.direct if isinstance(plan, OnnxPlan) else None
        return plan if direct is None else direct

    def close(self) -> None:
        """Let go of the graph; plans that are bound stay usable."""
        super().close()
        self._graph = None
