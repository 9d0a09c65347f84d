"""A prepared model: private copies of the constants, and plans made from it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from ...burst import ExecutionResult, PlanBurstExecutor
from ...cache import SaveResult, model_fingerprint
from ...errors import BadState, ErrorStatus, NNBurstError, OutputInsufficientSize, ResourceExhausted
from ...memory import BufferTracker, open_request, read_constant
from ...model import (
    NO_TIMING,
    HalVersion,
    Lifetime,
    MeasureTiming,
    Model,
    Operand,
    Request,
    RunOptions,
    operand_info,
    validate_request,
    view_operation,
)
from .._buffer_plan import BufferPlan
from .._buffers import bind_buffers, next_model_number
from .._common import InnerPlan, deadline_passed
from .._interfaces import PreparedModel
from .._staged_plan import StagedPlan
from .dry import bind_for_nothing
from .fold import fold_constants
from .plan import Plan
from .serial import Compiled, pack, unpack
from .stages import CountedPlan, LaterStage

__all__ = ["ReferencePreparedModel"]

Array = np.ndarray[Any, np.dtype[Any]]


class ReferencePreparedModel(PreparedModel):
    """Everything about a model that does not depend on a request.

    Constants are copied: the client may release or overwrite its pools once preparation returned. What kernels derive
    from constants (transposed filters, tables) is kept and shared by all plans.

    Attributes:
        model: The model.
        number: Of this prepared model, never used again; the roles of buffers refer to it.
        tracker: Buffers of the device.
        constants: Value of each constant operand, read-only.
        matches: Signature and matched inputs of each operation.
    """

    def __init__(self, compiled: Compiled, tracker: BufferTracker | None = None) -> None:
        """Use `compile` or `restore`."""
        self.model = compiled.model
        self.number = next_model_number()
        self.tracker = BufferTracker() if tracker is None else tracker
        self.constants = dict(compiled.constants)
        self.matches = compiled.matches
        self._derived: dict[Hashable, Any] = dict(compiled.derived)
        self._unneeded: frozenset[int] = frozenset()
        self._source = compiled
        self._result: SaveResult | None = None
        self._stage: LaterStage | None = None
        self._closed = False

    @classmethod
    def compile(
        cls, model: Model, tracker: BufferTracker | None = None, *, lower: bool = True
    ) -> ReferencePreparedModel:
        """Do everything about a valid model that can be done before a request is known.

        Constants are copied and operations matched with their signatures. Operations on constants alone are folded.
        If the model leaves no dimension open, the others are bound once for nothing, so that what they make from
        constants (transposed, decoded and centred weights, tables) is there.

        Args:
            model: Valid.
            tracker: Buffers of the device.
            lower: Whether to fold and bind now; else nothing is folded, and the rest is done with the first requests.
        """
        constants = {
            index: _constant(model, operand)
            for index, operand in enumerate(model.main.operands)
            if operand.lifetime in (Lifetime.CONSTANT_COPY, Lifetime.CONSTANT_REFERENCE)
        }
        matches = tuple(
            (view.row, view.match)
            for operation in model.main.operations
            if (view := view_operation(operation, model.main.operands, HalVersion.V1_3)) is not None
        )
        for pool in model.pools:
            getattr(pool, "identity", None)  # kept by the pool: requests are compared with it after it is closed
        compiled = Compiled(model, constants, {}, matches)
        prepared = cls(fold_constants(compiled, _run_once) if lower else compiled, tracker)
        prepared._source = compiled
        if lower:
            prepared._unneeded = bind_for_nothing(prepared)
        return prepared

    def lower(self) -> None:
        """Have operations make what they make from constants, if the first requests have not. Any thread."""
        bind_for_nothing(self)

    @property
    def is_lowered(self) -> bool:
        """Whether anything was made from constants."""
        return bool(self._derived)

    def continue_with(self, stage: LaterStage) -> None:
        """Count executions from now on; called by the device before anybody else has the model."""
        self._stage = stage

    @classmethod
    def restore(
        cls, model: memoryview, data: memoryview, tracker: BufferTracker | None = None
    ) -> ReferencePreparedModel:
        """Make a prepared model from verified cache files; arrays are views of them.

        Raises:
            CacheRejected: They hold something else.
        """
        return cls(unpack(model, data), tracker)

    def packed(self) -> tuple[tuple[bytes], tuple[bytes]] | None:
        """Return the contents of the model file and the data file, or None if this model cannot be cached."""
        files = pack(self.model, self.matches, self.constants, dict(self._derived), self._unneeded)
        return None if files is None else ((files[0],), (files[1],))

    def fingerprint(self) -> bytes:
        """Return the fingerprint of what was compiled; not of a restored model, which has no pools any more."""
        return model_fingerprint(self._source.model, copies=self._source.constants)

    def forget_source(self) -> None:
        """There will be no other stage: constants that were folded need not be kept."""
        self._source = Compiled(self.model, self.constants, {}, self.matches)

    def who_made_their_own(self, index: int) -> set[int]:
        """Operations that have an array of their own in place of a constant."""
        keys = (key for key in self._derived if isinstance(key, tuple) and isinstance(key[1], tuple))
        return {position for position, (_, of) in keys if of == index}

    @property
    def transformations(self) -> int:
        """How many arrays were made from constants."""
        return len(self._derived)

    @property
    def cache_result(self) -> SaveResult | None:
        """See `PreparedModel.cache_result`."""
        return self._result

    def note_saved(self, result: SaveResult) -> None:
        """Called by the device, also when a later stage was saved."""
        self._result = result

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for the key the first time. Two threads may both make it; one result is kept."""
        if key not in self._derived:
            return self._derived.setdefault(key, make())
        return self._derived[key]

    def bind(self, request: Request, measure: MeasureTiming) -> InnerPlan | BufferPlan:
        """Check a request, open its memory and bind it to arrays.

        Raises:
            InvalidArgument: The request does not fit the model.
            GeneralFailure: The operations do not fit together, or memory can be neither mapped nor copied.
            ResourceExhausted: There is no memory for what the operations need.
        """
        if self._closed:
            raise BadState("the prepared model is closed")
        validate_request(self.model, request)
        buffers = bind_buffers(self, request)
        if buffers is not None:
            return BufferPlan(buffers, lambda viewed: self._open(viewed, measure))
        return self._open(request, measure)

    def _open(self, request: Request, measure: MeasureTiming) -> InnerPlan:
        plan = self._opened(request, measure)
        return plan if self._stage is None else CountedPlan(plan, self._stage)

    def _opened(self, request: Request, measure: MeasureTiming) -> Plan | StagedPlan:
        try:
            opened = open_request(request)
            if opened.is_direct:
                return Plan(self, opened.request, measure)
            return StagedPlan(request, opened, lambda opened: Plan(self, opened.request, measure))
        except MemoryError as error:
            raise ResourceExhausted(f"no memory for this execution: {error}") from error

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        """Bind and run once; see `PreparedModel.execute_synchronously`."""
        try:
            plan = self.bind(request, options.measure)
        except BadState:
            raise
        except OutputInsufficientSize as error:
            return error.status, error.output_shapes, NO_TIMING
        except NNBurstError as error:
            return error.status, (), NO_TIMING
        if deadline_passed(options.deadline_ns):
            return ErrorStatus.MISSED_DEADLINE_TRANSIENT, (), NO_TIMING
        result = plan.run(options.deadline_ns)
        return (ErrorStatus.NONE, (), NO_TIMING) if result is None else result

    def burst_executor(self) -> PlanBurstExecutor:
        """Return an executor that keeps memories mapped and requests bound."""
        return PlanBurstExecutor(self.bind)

    def close(self) -> None:
        """Release the constants; plans that are bound stay usable. A later stage that has begun is finished first."""
        self._closed = True
        if self._stage is not None:
            self._stage.close()
        self.constants = {}
        self._derived = {}
        self.model = replace(self.model, pools=())
        self.forget_source()


def _run_once(compiled: Compiled, request: Request) -> bool:
    return Plan(ReferencePreparedModel(compiled), request, MeasureTiming.NO).run(0) is None


def _constant(model: Model, operand: Operand) -> Array:
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
