"""A prepared model: a graph, shared with others like it, and plans made from it."""

from __future__ import annotations

from dataclasses import replace

from ...burst import BoundPlan, ExecutionResult, PlanBurstExecutor
from ...errors import BadState, ErrorStatus, NNBurstError, OutputInsufficientSize, ResourceExhausted
from ...memory import BufferTracker, OpenRequest, open_request
from ...model import NO_TIMING, MeasureTiming, Model, Request, validate_request
from .._buffer_plan import BufferPlan
from .._buffers import bind_buffers, next_model_number
from .._common import InnerPlan
from .._interfaces import PreparedModel
from .._staged_plan import StagedPlan
from ._graph import Graph
from ._plan import OnnxPlan

__all__ = ["OnnxPreparedModel"]


class OnnxPreparedModel(PreparedModel):
    """A model with a GRAPH operation.

    Attributes:
        model: The model.
        number: Of this prepared model, never used again; the roles of buffers refer to it.
        tracker: Buffers of the device.
    """

    def __init__(self, model: Model, graph: Graph, tracker: BufferTracker) -> None:
        self.model = model
        self.number = next_model_number()
        self.tracker = tracker
        self._graph: Graph | None = graph
        for pool in model.pools:
            getattr(pool, "identity", None)  # kept by the pool: requests are compared with it after it is closed

    @property
    def graph(self) -> Graph:
        """The session and what belongs to it.

        Raises:
            BadState: The model is closed.
        """
        if self._graph is None:
            raise BadState("the prepared model is closed")
        return self._graph

    def bind(self, request: Request, measure: MeasureTiming) -> BoundPlan:
        """Check a request, open its memory and bind the graph to it.

        Raises:
            InvalidArgument: The request does not fit the model.
            GeneralFailure: An argument is missing, or memory can be neither mapped nor copied.
            ResourceExhausted: There is no memory for the execution.
        """
        plan = self._bind(request, measure)
        direct = plan.direct if isinstance(plan, OnnxPlan) else None
        return plan if direct is None else direct

    def _bind(self, request: Request, measure: MeasureTiming) -> InnerPlan | BufferPlan:
        self.graph  # noqa: B018  closed: say so before anything else
        validate_request(self.model, request)
        buffers = bind_buffers(self, request)
        if buffers is not None:
            return BufferPlan(buffers, lambda viewed: self._open(viewed, measure))
        return self._open(request, measure)

    def _open(self, request: Request, measure: MeasureTiming) -> InnerPlan:
        def make(opened: OpenRequest) -> InnerPlan:
            return OnnxPlan(self, opened.request, measure)

        try:
            opened = open_request(request)
            return make(opened) if opened.is_direct else StagedPlan(request, opened, make)
        except MemoryError as error:
            raise ResourceExhausted(f"no memory for this execution: {error}") from error

    def execute_synchronously(
        self,
        request: Request,
        measure: MeasureTiming = MeasureTiming.NO,
        deadline_ns: int = 0,
        loop_timeout_ns: int = 0,
    ) -> ExecutionResult:
        """Bind and run once; see `PreparedModel.execute_synchronously`."""
        try:
            result = self._bind(request, measure).run(deadline_ns)
        except BadState:
            raise
        except OutputInsufficientSize as error:
            return error.status, error.output_shapes, NO_TIMING
        except NNBurstError as error:
            return error.status, (), NO_TIMING
        return (ErrorStatus.NONE, (), NO_TIMING) if result is None else result

    def burst_executor(self) -> PlanBurstExecutor:
        """Return an executor that keeps memories mapped and requests bound."""
        return PlanBurstExecutor(self.bind)

    def close(self) -> None:
        """Let go of the graph; plans that are bound stay usable."""
        self._graph = None
        self.model = replace(self.model, pools=())
