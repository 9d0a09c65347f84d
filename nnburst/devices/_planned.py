"""A prepared model that runs plans: what most devices need besides their own plan."""

from __future__ import annotations

import abc
from dataclasses import replace

from ..burst import BoundPlan, ExecutionResult, PlanBurstExecutor
from ..errors import BadState, ErrorStatus, NNBurstError, OutputInsufficientSize, ResourceExhausted
from ..memory import BufferTracker, OpenRequest, open_request
from ..model import NO_TIMING, MeasureTiming, Model, Request, RunOptions, validate_request
from ._buffer_plan import BufferPlan
from ._buffers import bind_buffers, next_model_number
from ._common import InnerPlan
from ._interfaces import PreparedModel
from ._staged_plan import StagedPlan

__all__ = ["PlannedModel"]


class PlannedModel(PreparedModel):
    """Checks requests, opens their memory, and has a plan made for each; a device implements `plan`.

    Memory that a client could truncate is copied in and out around each run, and driver-managed buffers are admitted
    and committed: a plan sees arrays only.

    Attributes:
        model: The model.
        number: Of this prepared model, never used again; the roles of buffers refer to it.
        tracker: Buffers of the device.
    """

    def __init__(self, model: Model, tracker: BufferTracker) -> None:
        self.model = model
        self.number = next_model_number()
        self.tracker = tracker
        self.closed = False
        for pool in model.pools:
            getattr(pool, "identity", None)  # kept by the pool: requests are compared with it after it is closed

    @abc.abstractmethod
    def plan(self, request: Request, measure: MeasureTiming) -> InnerPlan:
        """Bind a request.

        Args:
            request: Valid, and all of its pools give arrays that stay where they are.
            measure: Whether results carry the time on the device.

        Raises:
            NNBurstError: The request cannot run; the client receives the error's status.
        """

    def shortcut(self, plan: InnerPlan) -> BoundPlan:
        """Return what a burst calls for a plan on plain shared memory; by default the plan."""
        return plan

    def bind(self, request: Request, measure: MeasureTiming) -> BoundPlan:
        """Check a request, open its memory and bind it, for as many runs as there will be.

        Raises:
            InvalidArgument: The request does not fit the model.
            GeneralFailure: An argument is missing, or memory can be neither mapped nor copied.
            ResourceExhausted: There is no memory for the execution.
        """
        plan = self._bind(request, measure)
        return plan if isinstance(plan, BufferPlan | StagedPlan) else self.shortcut(plan)

    def _bind(self, request: Request, measure: MeasureTiming) -> InnerPlan | BufferPlan:
        if self.closed:
            raise BadState("the prepared model is closed")
        validate_request(self.model, request)
        buffers = bind_buffers(self, request)
        if buffers is not None:
            return BufferPlan(buffers, lambda viewed: self._open(viewed, measure))
        return self._open(request, measure)

    def _open(self, request: Request, measure: MeasureTiming) -> InnerPlan:
        def make(opened: OpenRequest) -> InnerPlan:
            return self.plan(opened.request, measure)

        try:
            opened = open_request(request)
            return make(opened) if opened.is_direct else StagedPlan(request, opened, make)
        except MemoryError as error:
            raise ResourceExhausted(f"no memory for this execution: {error}") from error

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        """Bind and run once; see `PreparedModel.execute_synchronously`."""
        try:
            result = self._bind(request, options.measure).run(options.deadline_ns)
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
        """Take no more requests; plans that are bound stay usable."""
        self.closed = True
        self.model = replace(self.model, pools=())
