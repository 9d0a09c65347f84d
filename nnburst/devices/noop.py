"""A device whose executions do nothing: what remains of a call is the transport."""

from __future__ import annotations

from ..burst import BoundPlan, ExecutionResult, PlanBurstExecutor
from ..errors import ErrorStatus, InvalidArgument, NNBurstError
from ..memory import check_pools
from ..model import (
    NO_TIMING,
    BufferToken,
    Capabilities,
    MeasureTiming,
    Model,
    OutputShape,
    Request,
    RunOptions,
    Timing,
    combine_dimensions,
    is_fully_specified,
    operand_info,
    validate_model,
    validate_request,
)
from ._common import build_version, check_preparation, cpu_capabilities, deadline_passed, readable_operations
from ._interfaces import CompileJob, Device, PreparedModel

__all__ = ["NoopDevice", "NoopPreparedModel"]


class NoopDevice(Device):
    """Accepts every valid model; an execution checks its request, computes nothing and succeeds."""

    @property
    def name(self) -> str:
        """``nnburst-noop``."""
        return "nnburst-noop"

    @property
    def version_string(self) -> str:
        """Version of the package."""
        return build_version()

    @property
    def capabilities(self) -> Capabilities:
        """The CPU baseline."""
        return cpu_capabilities()

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        """Every operation of a valid model is supported, if its constants can be read."""
        validate_model(model)
        return readable_operations(model)

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> NoopPreparedModel:
        """Keep the model; see `Device.prepare_model`."""
        validate_model(model)
        check_preparation(job)
        check_pools(model.pools, "model")
        return NoopPreparedModel(model)


class NoopPreparedModel(PreparedModel):
    """A model that is checked against requests and otherwise ignored."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        """Check the request and succeed."""
        try:
            result = self.bind(request, options.measure)()
        except NNBurstError as error:
            return error.status, (), NO_TIMING
        if deadline_passed(options.deadline_ns):
            return ErrorStatus.MISSED_DEADLINE_TRANSIENT, (), NO_TIMING
        return (ErrorStatus.NONE, (), NO_TIMING) if result is None else result

    def burst_executor(self) -> PlanBurstExecutor:
        """Return an executor whose plans return at once."""
        return PlanBurstExecutor(self.bind)

    def bind(self, request: Request, measure: MeasureTiming) -> BoundPlan:
        """Check a request and return a callable that does nothing."""
        validate_request(self.model, request)
        if any(isinstance(pool, BufferToken) for pool in request.pools):
            raise InvalidArgument("nnburst-noop has no buffers, so no token is one of its own")
        check_pools(request.pools, "request")
        shapes = self._shapes(request)
        if not shapes and measure != MeasureTiming.YES:
            return _nothing
        result = (ErrorStatus.NONE, shapes, Timing(0) if measure == MeasureTiming.YES else NO_TIMING)
        return lambda: result

    def _shapes(self, request: Request) -> tuple[OutputShape, ...]:
        """Return shapes if one was left open; what nobody specified is 0, as nothing was written."""
        main, shapes, is_open = self.model.main, [], False
        for index, argument in zip(main.output_indexes, request.outputs, strict=True):
            operand = main.operands[index]
            dims = combine_dimensions(operand.dimensions, argument.dimensions)
            is_open |= not is_fully_specified(dims) and not _is_scalar(operand.type)
            shapes.append(OutputShape(dims))
        return tuple(shapes) if is_open else ()


def _is_scalar(code: int) -> bool:
    try:
        return operand_info(code).is_scalar
    except NNBurstError:
        return False


def _nothing() -> None:
    """An execution of a model that does nothing."""
